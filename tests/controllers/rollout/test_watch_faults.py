"""maxUnavailable holds while watches are held, late or cut, leaders change and processes pause.

Two controller processes share a cluster in virtual time. Each has its own watches and competes for
one Lease. The invariants are checked in the cluster itself, at each write:

* limit: the rollout takes at most ``maxUnavailable`` nodes out of service;
* blind: no process writes a node while its watches are disconnected or silent for too long;
* leader: no process writes while another process holds the Lease.

Planted defects check that each invariant detects the defect that it exists for.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.controllers.rollout.world import ROLE, Json, World, build_reconciler, count_taken
from tests.daemon.walk_budget import seeds, walk
from tests.kube.cluster import Cluster
from treenail.api import annotations as key
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.errors import ClusterError, NotLeaderError
from treenail.kube.api_client import Client
from treenail.kube.lease import LeaderElectionConfig, LeaderElector
from treenail.kube.resources import Resource
from treenail.kube.watch import STALE_AFTER_S

NAMES = [f"n{number}" for number in range(5)]
KINDS = ("nodes", "machineconfigpools")
LEASE = "/apis/coordination.k8s.io/v1/namespaces/mco/leases/rollout"
EVENTS = {
    "wait": 16, "target": 2, "away": 2, "back": 3, "cordon": 1, "uncordon": 2, "heartbeat": 2,
    "hold": 3, "release": 4, "cut": 2, "connect": 3, "late": 4, "pause": 4, "restart": 1,
}  # fmt: skip
WAITS_S = (1, 2, 5, 10, 20, 60, 100, 500)


class Broken(AssertionError):
    """An invariant does not hold; the message begins with its keyword."""


class Shared(World):
    """The cluster, whose watches deliver to each process separately."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = Cluster()
        self.processes: list[Process] = []

    def _store(self, plural: str, name: str, document: Json) -> Json:
        stored = super()._store(plural, name, document)
        for process in self.processes:
            process.late[plural].append((name, stored)) if plural in KINDS else None
        return stored


class Process:
    """One controller process: its watches, its Lease, its reconciler and its pauses."""

    lists_after_election = True
    is_fenced = True
    sees_staleness = True

    def __init__(self, world: Shared, name: str) -> None:
        self.world = world
        self.name = name
        self.runs = 0
        self.pause: Callable[[], None] | None = None
        self.start()

    def start(self) -> None:
        """A new process lists all objects and has no memory."""
        self.runs += 1
        self.held: set[str] = set()
        self.cut: set[str] = set()
        self.has_lost = False
        self.was_elected = False
        self.caches: dict[str, dict[str, Json]] = {}
        self.late: dict[str, list[tuple[str, Json]]] = {}
        self.contact_at: dict[str, float] = {}
        self.list_all()
        self.elector = LeaderElector(
            Client(self.world.lease),
            LeaderElectionConfig("mco", "rollout", f"{self.name}-{self.runs}"),
            self.world,
            on_started_leading=lambda: None,
            on_stopped_leading=self._lose,
            jitter=lambda: 0.0,
        )
        # Each process updates its own node last, so the two choose nodes in another order.
        settings = RolloutSettings(own_node=NAMES[0] if self.name == "b" else NAMES[-1])
        self.reconciler = build_reconciler(self, settings=settings)

    def list_all(self) -> None:
        for plural in KINDS:
            self.caches[plural] = dict(self.world.objects.get(plural, {}))
            self.late[plural] = []
            self.contact_at[plural] = self.world.now()

    def deliver(self, plural: str, count: int | None = None) -> None:
        """Deliver events, all or the first ones; with all, a bookmark follows."""
        if plural in self.held | self.cut:
            return
        waiting = self.late[plural]
        taken = waiting[:count]
        self.late[plural] = waiting[len(taken) :]
        for name, document in taken:
            self.caches[plural][name] = document
        if taken or not self.late[plural]:
            self.contact_at[plural] = self.world.now()

    def step(self) -> None:
        """Renew or acquire the Lease, and sync with the lead."""
        self.elector.try_acquire_or_renew()
        if self.has_lost:
            self.start()
        elif self.elector.is_leader:
            if not self.was_elected and self.lists_after_election:
                self.list_all()
            self.was_elected = True
            try:
                self.reconciler.sync_pool("worker")
            except ClusterError:
                return

    def _lose(self) -> None:
        self.has_lost = True

    # What the reconciler sees of the cluster.

    @property
    def stale_reason(self) -> str:
        return self.blind_reason if self.sees_staleness else ""

    @property
    def blind_reason(self) -> str:
        """As `ResourceWatch.stale_reason`."""
        for plural in KINDS:
            if plural in self.cut:
                return f"the watch of {plural} is disconnected"
            if self.world.now() - self.contact_at[plural] > STALE_AFTER_S:
                return f"the watch of {plural} is silent"
        return ""

    def list_pools(self) -> Mapping[str, ObservedPool]:
        found = self.caches["machineconfigpools"]
        return {name: ObservedPool.from_json(document) for name, document in found.items()}

    def list_nodes(self) -> Mapping[str, NodeFacts]:
        return {name: self.world.facts(found) for name, found in self.caches["nodes"].items()}

    def list_policies(self) -> Mapping[str, ObservedPolicy]:
        return {}

    def now(self) -> float:
        return self.world.now()

    def monotonic(self) -> float:
        return self.world.monotonic()

    def get(self, resource: Resource, name: str) -> Json:
        return self.world.get(resource, name)

    def patch(self, resource: Resource, name: str, body: Json, *kind: Any, **more: Any) -> Json:
        pause, self.pause = self.pause, None
        blind_reason = self.blind_reason
        if pause is not None:
            pause()
        # As `LeaderTransport.send`.
        if self.is_fenced and not self.elector.is_leader:
            raise NotLeaderError("not sent")
        self.check_write(resource.plural, name, body, blind_reason)
        return self.world.patch(resource, name, body, *kind, **more)

    def record_warning(self, *event: Any) -> None:
        self.world.record_warning(*event)

    def check_write(self, plural: str, name: str, body: Json, blind_reason: str) -> None:
        """Check a write just before it takes effect."""
        lease: Any = self.world.lease.objects[LEASE]
        if lease["spec"]["holderIdentity"] != f"{self.name}-{self.runs}":
            raise Broken(f"leader: {self.name} writes {plural} {name}")
        notes = body["metadata"].get("annotations", {})
        if plural != "nodes" or key.DESIRED_CONFIG not in notes:
            return
        found = self.world.objects["nodes"][name]["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != found:
            return  # The API server rejects it.
        if blind_reason:
            raise Broken(f"blind: {self.name} assigns {name}, but {blind_reason}")
        nodes = {each: node for each, node in self.world.truth.items() if ROLE in node.labels}
        target = RolloutTarget(notes[key.DESIRED_CONFIG], notes[key.DESIRED_OS_IMAGE])
        after = {**nodes, name: nodes[name].with_target(target, self.world.now())}
        limit = max(self.world.limit, count_taken(nodes))  # type: ignore[attr-defined]  # the walk's
        if count_taken(after) > limit:
            raise Broken(f"limit: {count_taken(after)} nodes are out of service, not {limit}")


class Walk:
    """Random events, one after the other."""

    def __init__(self, seed: int, process: type[Process] = Process) -> None:
        self.chance = random.Random(seed)
        self.world = Shared()
        self.world.limit = 1 + seed % 2  # type: ignore[attr-defined]  # read by check_write
        for name in NAMES:
            self.world.add_node(name, "old")
        self.target = 0
        self.ask()
        self.processes = [process(self.world, name) for name in ("a", "b")]
        self.world.processes = self.processes

    def ask(self) -> None:
        self.target += 1
        limit: int = self.world.limit  # type: ignore[attr-defined]  # as above
        self.world.set_pool("worker", f"new-{self.target}", maxUnavailable=limit)

    def happen(self, event: str) -> None:
        chance, world = self.chance, self.world
        name, process = chance.choice(NAMES), chance.choice(self.processes)
        plural = chance.choice(KINDS)
        match event:
            case "wait":
                self.pass_time(float(chance.choice(WAITS_S)))
            case "target":
                self.ask()
            case "away" | "back":
                world.flap(name, healthy=event == "back")
            case "cordon" | "uncordon":
                world.cordon(name, on=event == "cordon")
            case "heartbeat":
                world.touch("nodes", name)
            case "hold":
                process.held.add(plural)
            case "release":
                process.held.discard(plural)
            case "cut":
                process.cut.add(plural)
            case "connect":
                process.cut.discard(plural)
                process.deliver(plural)
            case "late":
                process.deliver(plural, chance.choice([1, 2]))
                return
            case "pause":
                process.pause = lambda: self.pause(process, float(chance.choice(WAITS_S)))
            case "restart":
                process.start()
        for each in self.processes:
            for kind in KINDS:
                if chance.random() < 0.7:
                    each.deliver(kind)

    def pause(self, paused: Process, seconds: float) -> None:
        """The process stands still between its decision and its write; the other one runs."""
        (other,) = (each for each in self.processes if each is not paused)
        other.pause = None
        for _ in range(4):
            self.pass_time(seconds / 4)
            for plural in KINDS:
                other.deliver(plural)
            other.step()

    def pass_time(self, seconds: float) -> None:
        """Let the agents react step by step."""
        self.world.pass_time(min(seconds, 5.0))
        self.world.pass_time(max(seconds - 5.0, 0.0))

    def run(self, events: int = 80) -> None:
        for event in self.chance.choices(list(EVENTS), weights=list(EVENTS.values()), k=events):
            self.happen(event)
            for process in self.chance.sample(self.processes, 2):
                process.step()
        self.end()

    def end(self) -> None:
        """With watches and a leader again, all nodes get the target."""
        for process in self.processes:
            process.held, process.cut, process.pause = set(), set(), None
        for name in NAMES:
            self.world.flap(name, healthy=True)
            self.world.cordon(name, on=False)
        for _ in range(300):
            self.world.pass_time(20.0)
            for process in self.processes:
                for plural in KINDS:
                    process.deliver(plural)
                process.step()
            target = RolloutTarget(f"new-{self.target}")
            if all(node.is_updated_to(target) for node in self.world.truth.values()):
                return
        raise Broken(f"progress: stuck with {self.world.conditions()}")


@walk
def test_max_unavailable_holds_with_faulty_watches_and_leader_changes(part: int) -> None:
    for seed in seeds(part):
        try:
            Walk(seed).run()
        except Broken as error:
            raise AssertionError(f"walk {seed}: {error}") from error


def take_over_blindly(process: type[Process]) -> None:
    """The leader assigns a node and dies; the watch of the other process does not show it."""
    walk = Walk(0, process)
    first, second = walk.processes
    second.held.add("nodes")
    first.step()
    first.step()
    walk.pass_time(16.0)
    second.deliver("machineconfigpools")
    second.step()


def test_new_leader_knows_the_last_assignments_of_the_previous_one() -> None:
    take_over_blindly(Process)


class TakesOverBlindly(Process):
    """Takes over with what its watches have shown."""

    lists_after_election = False


class WritesWithoutLead(Process):
    """Does not check the lead before a write."""

    is_fenced = False


class IgnoresStaleness(Process):
    """Decides from caches of any age."""

    sees_staleness = False


@pytest.mark.parametrize(
    ("process", "keyword"),
    [(TakesOverBlindly, "limit"), (WritesWithoutLead, "leader"), (IgnoresStaleness, "blind")],
)
def test_planted_defect_violates_its_invariant(process: type[Process], keyword: str) -> None:
    found = set()
    stories = [partial(take_over_blindly, process)]
    stories += [Walk(seed, process).run for seed in range(30)]
    for story in stories:
        try:
            story()
        except Broken as error:
            found.add(str(error).partition(":")[0])
        if keyword in found:
            return
    raise AssertionError(f"found only {found}")
