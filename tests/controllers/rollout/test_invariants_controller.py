"""Invariants of the controller's writes in walks of random events.

The invariants, checked in the cluster itself and never in a cache:

* limit: no write takes more nodes out of service than ``maxUnavailable``;
* progress: with a current cache, no sync leaves capacity unused; at the end all nodes are updated;
* retarget: a failing node gets a better target, another config or another image;
* status: every sync leaves conditions with a CamelCase reason, a Degraded with a message, and at
  the end the true counts;
* owner: the controller writes only its own fields, and only to nodes of the pool; a user's cordon
  and another controller's condition stay;
* canary: a bad target reaches only the canary, through any restart;
* quiet: when nothing changes, nothing is written.

Planted defects check that each invariant detects the defect that it exists for.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.controllers.rollout.world import ROLE, Json, Killed, World, build_reconciler, count_taken
from tests.daemon.walk_budget import exhaustive, sample
from treenail.api import annotations as key
from treenail.clocks import format_rfc3339
from treenail.controllers.pools.node_facts import (
    STARTED_AT,
    ZONE_LABEL,
    NodeFacts,
    RolloutTarget,
)
from treenail.controllers.pools.os_image import GateOpen
from treenail.controllers.pools.pool_status import RENDER_DEGRADED as RENDERED
from treenail.controllers.pools.rollout_policy import RolloutPolicy
from treenail.controllers.pools.rollout_record import ROLLOUT_STATUS
from treenail.controllers.rollout.decide import is_prestage_done
from treenail.controllers.rollout.reconcile import RolloutReconciler, RolloutSettings
from treenail.errors import ClusterError, TooManyRequestsError, UnreachableError

NAMES = [f"n{number}" for number in range(6)]
STAGES = {key.PRESTAGE_CONFIG, key.PRESTAGE_IMAGE}
OWNED = {key.DESIRED_CONFIG, key.DESIRED_OS_IMAGE, STARTED_AT} | STAGES


def image(digit: str) -> str:
    return f"registry.example.com/os@sha256:{digit * 64}"


TARGETS = [
    RolloutTarget("a", image("1")),
    RolloutTarget("a", image("2")),
    RolloutTarget("b", image("2")),
    RolloutTarget("c"),
    RolloutTarget("d"),
]
BAD = {TARGETS[1], TARGETS[3]}
GOOD = TARGETS[4]
CANARY = "{canary: {}, soak: 5m}"
POLICIES = [None, CANARY, "{canary: {}, waves: [50%], maxFailures: 1, order: spread}", None]

STAGED = "{canary: {}, soak: 5m, prestage: {maxParallel: 2}}"
STAGED_FROM = 300
"""Walks from this number on prestage."""

EVENTS = {
    "wait": 14, "target": 2, "away": 2, "back": 3, "heartbeat": 3, "cordon": 1, "uncordon": 2,
    "leave": 1, "join": 2, "zone": 2, "render": 1, "lag": 5, "deliver": 8, "restart": 2,
    "resume": 1, "unreachable": 2, "lost": 3, "conflict": 2, "kill before": 2, "kill after": 3,
}  # fmt: skip
STALE = {"wait": 8, "target": 6, "zone": 10, "lag": 6, "deliver": 16, "lost": 4, "unreachable": 2}
"""Events that reveal decisions on a stale cache: the order of nodes changes all the time."""
WAITS_S = [1, 2, 30, 200, 500, 600, 4000]

Build = Callable[[World], RolloutReconciler]


def sound(world: World) -> RolloutReconciler:
    return build_reconciler(world)


class Broken(AssertionError):
    """An invariant does not hold; the message begins with its keyword."""


class Walk:
    """A world, its controller, and the checks of both."""

    def __init__(self, seed: int, build: Build = sound) -> None:
        self.chance = random.Random(seed)
        self.stale = seed % 4 == 3
        self.policy = STAGED if seed >= STAGED_FROM else POLICIES[seed % len(POLICIES)]
        self.limit = 1 + seed % 3
        self.build = build
        self.world = World()
        self.world.bad = set(BAD)
        self.world.not_there = {image("1")} if seed % 2 else set()
        self.world.stays_cordoned = seed % 5 > 1
        self.world.on_write = self.check_write
        self.target = TARGETS[0]
        self.word = ""
        self.lags = False
        self.moved = False
        self.unanswered = False
        for name in NAMES:
            self.world.add_node(name, "old" if seed % 7 else "")
        self.ask(self.target)
        self.world.deliver()
        self.controller = build(self.world)

    def ask(self, target: RolloutTarget) -> None:
        self.target = target
        policy = self.policy
        if policy is not None and self.word:
            policy = f"{policy.removesuffix('}')}, resume: {{worker: {self.word!r}}}}}"
        image = {} if target.image is None else {"osImage": target.image}
        self.world.set_pool("worker", target.config, policy, maxUnavailable=self.limit, **image)

    def happen(self, event: str) -> None:
        world, name = self.world, self.chance.choice(NAMES)
        match event:
            case "wait":
                world.pass_time(float(self.chance.choice(WAITS_S)))
            case "target":
                self.ask(self.chance.choice(TARGETS))
            case "away" | "back":
                world.flap(name, healthy=event == "back")
            case "heartbeat":
                world.touch("nodes", name)
            case "cordon" | "uncordon":
                world.cordon(name, on=event == "cordon")
            case "leave":
                self.moved = True
                world.change("nodes", name, {"metadata": {"labels": {ROLE: None}}})
            case "join":
                world.change("nodes", name, {"metadata": {"labels": {ROLE: ""}}})
            case "zone":
                zone = self.chance.choice(["a", "b", "c"])
                world.change("nodes", name, {"metadata": {"labels": {ZONE_LABEL: zone}}})
            case "render":
                self.render()
            case "lag":
                self.lags = True
            case "deliver":
                plural = self.chance.choice(["nodes", "nodes", "machineconfigpools"])
                world.deliver(plural, self.chance.choice([1, 1, 2, 4]))
            case "restart":
                self.restart()
            case "resume":
                self.word += "x"
                self.ask(self.target)
            case fault:
                self.unanswered |= fault in ("unreachable", "lost")
                world.next_fault = fault
                world.fault_on = self.chance.choice(["", "nodes"])
        if not self.lags:
            world.deliver()
        elif self.chance.random() < (0.05 if self.stale else 0.2):
            self.lags = False

    def render(self) -> None:
        """Another controller writes its condition."""
        status = self.chance.choice(["True", "False"])
        others = [each for each in self.world.conditions().values() if each["type"] != RENDERED]
        mine = {"type": RENDERED, "status": status, "reason": "Rendered", "message": "rendered"}
        conditions = [*others, {**mine, "lastTransitionTime": format_rfc3339(self.world.now())}]
        self.world.change("machineconfigpools", "worker", {"status": {"conditions": conditions}})

    def restart(self) -> None:
        """A new process lists all objects and has no memory."""
        self.world.deliver()
        self.controller = self.build(self.world)

    def step(self) -> float | None:
        """One sync, and the checks after it."""
        world = self.world
        current = not any(world.backlog.values())
        written = len(world.writes)
        try:
            again_s = self.controller.sync_pool("worker")
        except Killed:
            self.restart()
            return None
        except ClusterError:
            return 1.0
        self.check_conditions()
        gave = any(plural == "nodes" for plural, _, _ in world.writes[written:])
        if current and not gave and self.policy is None and (again_s is None or again_s > 1.0):
            self.check_room()
        return again_s

    def check_write(self, plural: str, name: str, body: Json) -> None:
        """Check a write before it happens."""
        notes = set(body["metadata"].get("annotations", {}))
        if plural == "rolloutpolicies":
            owned = set(body) <= {"metadata", "status"}
        elif plural == "machineconfigpools":
            owned = not notes and set(body) <= {"metadata", "status"}
            if conditions := body.get("status", {}).get("conditions"):
                theirs = [each for each in conditions if each["type"] == RENDERED]
                owned &= theirs == [
                    x for x in self.world.conditions().values() if x["type"] == RENDERED
                ]
        else:
            owned = notes <= OWNED and set(body) == {"metadata"} and name in self.members()
        if not owned:
            raise Broken(f"owner: {body} is not the controller's to write")
        if plural != "nodes":
            return
        before = self.members()
        wanted = body["metadata"]["annotations"]
        if notes <= STAGES:
            self.check_stage(before, name, wanted)
            return
        target = RolloutTarget(wanted[key.DESIRED_CONFIG], wanted[key.DESIRED_OS_IMAGE])
        after = {**before, name: before[name].with_target(target, self.world.now())}
        if count_taken(after) > max(self.limit, count_taken(before)):
            raise Broken(
                f"limit: {count_taken(after)} nodes are out of service, the limit is {self.limit}"
            )
        if before[name].is_updated_to(target):
            raise Broken(f"limit: {name} already has the target")
        # A node whose last write got no response counts as updating, and is redirected.
        if (
            self.policy == STAGED
            and not self.unanswered
            and (target.image and not is_prestage_done(before[name], target))
        ):
            raise Broken(f"prestage: {name} did not prestage {target}")

    def check_stage(self, nodes: dict[str, NodeFacts], name: str, wanted: Json) -> None:
        image = wanted[key.PRESTAGE_IMAGE]
        # The limit protects the registry. A stale cache may exceed it, and so may an image that is
        # pulled for another config already.
        known = nodes[name].prestage_target
        late = any(self.world.backlog.values())
        if image is None or late or (known is not None and known.image == image):
            return
        pulling = [node.name for node in nodes.values() if node.name != name and pulls(node, image)]
        if len(pulling) > 1:
            raise Broken(f"prestage: {name} as well as {pulling}")

    def members(self) -> dict[str, NodeFacts]:
        return {name: node for name, node in self.world.truth.items() if ROLE in node.labels}

    def check_room(self) -> None:
        nodes = self.members().values()
        out = sum(
            node.is_unavailable or (node.is_failing and node.is_assigned(self.target))
            for node in nodes
        )
        able = [node for node in nodes if node.is_in_service and not node.is_assigned(self.target)]
        if out < self.limit and able:
            raise Broken(f"progress: {able[0].name} was not assigned, {out} are out of service")

    def check_conditions(self) -> None:
        for condition in self.world.conditions().values():
            if not re.fullmatch("[A-Z][A-Za-z]+", condition["reason"]):
                raise Broken(f"status: {condition['reason']!r} is not CamelCase")
        degraded = self.world.conditions().get("Degraded")
        if degraded is not None and degraded["status"] == "True" and not degraded["message"]:
            raise Broken("status: Degraded has no message")

    def check_canary(self) -> None:
        """Check the canary, unless a node left the pool: then it is no longer the canary."""
        for bad in BAD:
            found = [name for name, node in self.members().items() if node.is_assigned(bad)]
            if len(found) > 1 and not self.moved:
                raise Broken(f"canary: {bad} was assigned to {found}")

    def end(self) -> None:
        """At the end all nodes are ready, the target is good, and the user resumed."""
        world = self.world
        self.lags, world.next_fault = False, ""
        self.word += "x"
        self.ask(GOOD)
        for name in NAMES:
            world.flap(name, healthy=True)
            world.cordon(name, on=False)
            world.change("nodes", name, {"metadata": {"labels": {ROLE: ""}}})
        for _ in range(200):
            world.deliver()
            again_s = self.step()
            if again_s is None and all(node.is_updated_to(GOOD) for node in world.truth.values()):
                break
            world.pass_time(100.0)
        if not all(node.is_updated_to(GOOD) for node in world.truth.values()):
            raise Broken(f"progress: stuck with {world.conditions()}")
        world.pass_time(10.0)
        world.deliver()
        self.step()
        world.deliver()
        self.check_end()

    def check_end(self) -> None:
        status = self.world.status()
        counts = [status.get("updatedMachineCount"), status.get("unavailableMachineCount")]
        if counts != [len(NAMES), 0] or self.world.conditions()["Updated"]["status"] != "True":
            raise Broken(f"status: {status} at the end")
        written = len(self.world.writes)
        for _ in range(3):
            self.world.pass_time(100.0)
            self.world.deliver()
            self.step()
        if len(self.world.writes) != written:
            raise Broken(f"quiet: {self.world.writes[written:]}")


def pulls(node: NodeFacts, image: str) -> bool:
    """The node serves and pulls the image."""
    return (
        node.prestage_target is not None
        and node.prestage_target.image == image
        and node.is_done
        and node.is_healthy
        and node.prestaged_image != image
        and not node.prestage_error
    )


def walked(seed: int, build: Build = sound, events: int = 60) -> Walk:
    walk = Walk(seed, build)
    walk.step()
    found = STALE if walk.stale else EVENTS
    for event in walk.chance.choices(list(found), weights=list(found.values()), k=events):
        walk.happen(event)
        walk.step()
        if walk.policy == CANARY and not walk.word:
            walk.check_canary()
    walk.end()
    return walk


def led_astray(build: Build = sound) -> None:
    """The cache lags, a response is lost, and then another node comes first."""
    walk = Walk(0, build)
    world = walk.world
    walk.limit = 1
    walk.ask(GOOD)
    world.deliver()
    world.change("nodes", "n3", {"metadata": {"labels": {ZONE_LABEL: "a"}}})
    # The cache does not show this change and everything after it.
    world.next_fault, world.fault_on = "lost", "nodes"
    walk.step()
    world.deliver("nodes", 1)
    walk.step()
    walk.end()


def test_invariants_hold_with_stale_cache() -> None:
    led_astray()


@pytest.mark.parametrize("start", range(0, 500, 50))
@exhaustive
def test_invariants_hold_in_random_walks(start: int) -> None:
    for seed in sample(range(start, start + 50)):
        try:
            walked(seed)
        except Broken as error:
            raise AssertionError(f"walk {seed}: {error}") from error


# Planted defects: each is the controller with one defect in its surroundings.


class Around:
    """Proxy between a controller and the world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def controller(self, settings: RolloutSettings | None = None) -> RolloutReconciler:
        return build_reconciler(self, settings=settings)


class ForgetsOwnWrites(Around):
    """Treats every read of a node as newer than the last write."""

    def list_nodes(self) -> Mapping[str, NodeFacts]:
        self.looks = getattr(self, "looks", 0) + 1
        return {
            name: replace(node, resource_version=f"{node.resource_version}.{self.looks}")
            for name, node in self.world.list_nodes().items()
        }

    def patch(self, resource: Any, name: str, body: Json, *patch_type: Any, **more: Any) -> Json:
        version = body["metadata"].get("resourceVersion", "").partition(".")[0]
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}
        return self.world.patch(resource, name, body, *patch_type, **more)


class WritesUnconditionally(Around):
    """Writes without a condition on the version."""

    def patch(self, resource: Any, name: str, body: Json, *patch_type: Any, **more: Any) -> Json:
        metadata = {each: value for each, value in body["metadata"].items()
                    if each != "resourceVersion"}  # fmt: skip
        return self.world.patch(resource, name, {**body, "metadata": metadata}, *patch_type, **more)


class ForgetsUnansweredWrites(Around):
    """Treats a write without a response as failed."""

    def patch(self, resource: Any, name: str, body: Json, *patch_type: Any, **more: Any) -> Json:
        try:
            return self.world.patch(resource, name, body, *patch_type, **more)
        except UnreachableError as error:
            raise TooManyRequestsError("no answer") from error


class DropsRecordWrites(Around):
    """Does not write the record."""

    def patch(self, resource: Any, name: str, body: Json, *patch_type: Any, **more: Any) -> Json:
        if ROLLOUT_STATUS in body.get("status", {}):
            return self.world.get(resource, name)
        return self.world.patch(resource, name, body, *patch_type, **more)


class IgnoresPolicy(Around):
    """Does not see the rollout policy of the pool."""

    def list_policies(self) -> Any:
        found = self.world.list_policies()
        return {name: replace(seen, policy=RolloutPolicy()) for name, seen in found.items()}


class DropsDegradedMessage(Around):
    """Writes Degraded without a message."""

    def patch(self, resource: Any, name: str, body: Json, *patch_type: Any, **more: Any) -> Json:
        for condition in body.get("status", {}).get("conditions", ()):
            if condition["type"] == "Degraded":
                condition["message"] = ""
        return self.world.patch(resource, name, body, *patch_type, **more)


class RemovesCordons(Around):
    """Removes a cordon together with the assignment."""

    def patch(self, resource: Any, name: str, body: Json, *patch_type: Any, **more: Any) -> Json:
        if resource.plural == "nodes":
            body = {**body, "spec": {"unschedulable": False}}
        return self.world.patch(resource, name, body, *patch_type, **more)


class WritesUnchangedStatus(Around):
    """Writes the status although nothing differs."""

    def list_pools(self) -> Any:
        return {
            name: replace(seen, pool=replace(seen.pool, conditions=()))
            for name, seen in self.world.list_pools().items()
        }


class SkipsUnconfirmedWrites(RolloutReconciler):
    """Never repeats a write without a response."""

    def _find_unconfirmed(self, sync: Any, target: RolloutTarget) -> tuple[NodeFacts, ...]:
        return ()


DEFECTS: dict[str, tuple[str, Build]] = {
    "own writes are forgotten": ("limit", lambda world: ForgetsOwnWrites(world).controller()),
    "writes are unconditional": ("owner", lambda world: WritesUnconditionally(world).controller()),
    "missing response counts as failure": (
        "limit", lambda world: ForgetsUnansweredWrites(world).controller(),
    ),
    "record is not written": (
        "canary", lambda world: DropsRecordWrites(world).controller(),
    ),
    "policy is ignored": (
        "canary", lambda world: IgnoresPolicy(world).controller(),
    ),
    "Degraded has no message": (
        "status", lambda world: DropsDegradedMessage(world).controller(),
    ),
    "cordon of a user is removed": (
        "owner", lambda world: RemovesCordons(world).controller(),
    ),
    "unchanged status is written": (
        "quiet", lambda world: WritesUnchangedStatus(world).controller(),
    ),
    "unconfirmed writes are not repeated": (
        "progress",
        lambda world: build_reconciler(world, reconciler=SkipsUnconfirmedWrites),
    ),
    "image is requested too late": (
        "progress",
        lambda world: Around(world).controller(RolloutSettings(image_gate=images_too_late)),
    ),
}  # fmt: skip


def images_too_late(pool: Any, _build: Any) -> GateOpen:
    """A target that lags behind the pool."""
    return GateOpen(RolloutTarget(pool.status_configuration.name or pool.configuration.name), "")


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defect_violates_its_invariant(defect: str) -> None:
    word, build = DEFECTS[defect]
    assert word in broken(build)


def broken(build: Build) -> Iterator[str]:
    """The keywords of the invariants that some walk violates."""
    walks: list[Callable[[], object]] = [partial(led_astray, build)]
    walks += [partial(walked, seed, build) for seed in range(200)]
    for walk in walks:
        try:
            walk()
        except Broken as error:
            yield str(error).partition(":")[0]
