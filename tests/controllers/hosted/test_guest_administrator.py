"""Attempts of the administrator of a hosted cluster, and their results.

A row is one attempt during an update of `OwnWorld`: m0 has the target, m1 and m2 wait. After each
of them treenail has written nothing but to its own objects, read no Secret but that of
the target, and given a target to no node but those of the pool. What else follows is in the row.
Attempts on a node's agent are in tests/integration/test_hosted_agent.py, on the Ignition server in
tests/provisioning/test_hosted_tokens.py.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.controllers.hosted.conduct.world import FULL_NAME, OLD, POOL, Api
from tests.controllers.hosted.in_place.world import (
    CONFIG_MAP,
    HASHES,
    NAMESPACE,
    GuestApi,
    OwnWorld,
)
from tests.fixtures import hosted
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    UnreachableError,
)
from treenail.kube import resources
from treenail.kube.resources import Resource

Json = dict[str, Any]
A, B = HASHES[:2]
TOKEN = f"token-{POOL}-{A}"
HUGE = "x\x1b[31m\n" * 40_000
TEXT_LIMIT = 4096


class StrictGuestApi(GuestApi):
    """A guest with admission rules of its administrator, and with immutable ConfigMaps."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.admit: Callable[[str, str, Json], Json] = lambda _verb, _plural, body: body
        """Called for writes of treenail; returns the object that is stored, or raises."""
        self.answer: Callable[[str, str, Json], Any] = lambda _plural, _name, found: found
        """Called for reads of treenail; returns what the server answers instead, or raises."""
        self.attempts = 0

    def find(self, resource: Resource, name: str, *, namespace: str = "") -> Json | None:
        found = super().find(resource, name, namespace=namespace)
        return found and self.answer(resource.plural, name, found)

    def create(self, resource: Resource, body: Json, *, namespace: str = "") -> Json:
        self.attempts += 1
        body = self.admit("create", resource.plural, copy.deepcopy(body))
        return super().create(resource, body, namespace=namespace)

    def update(self, resource: Resource, name: str, body: Json, *, namespace: str = "") -> Json:
        self.attempts += 1
        body = self.admit("update", resource.plural, copy.deepcopy(body))
        found = self.objects.get((resource.plural, name), {})
        if "resourceVersion" not in body["metadata"]:
            raise ConflictError(f"{name} changed")
        if found.get("immutable") and found["data"] != body["data"]:
            raise InvalidError("data: field is immutable when `immutable` is set")
        return super().update(resource, name, body, namespace=namespace)

    def patch(self, resource: Resource, name: str, body: Json, **place: Any) -> Json:
        self.attempts += 1
        body = self.admit("patch", resource.plural, copy.deepcopy(body))
        return super().patch(resource, name, body, **place)


class ReadingApi(Api):
    """The management cluster; it notes which Secrets are read."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.read: set[str] = set()

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json:
        if resource.plural == "secrets":
            self.read.add(name)
        return super().get(resource, name, namespace=namespace)


class AttackedWorld(OwnWorld):
    """m0 to m2 are of the pool; other-0 is a node of another pool of the same cluster."""

    def __init__(self) -> None:
        super().__init__(3)
        self.is_stuck = {"m0", "m1", "m2"}
        self.add_node("other-0")
        self.api = cast("StrictGuestApi", self.guest)
        self.set_config(A)

    def make_apis(self) -> tuple[Api, Api]:
        return ReadingApi(self.now), StrictGuestApi(self.now)

    def read_objects(self) -> dict[tuple[str, str], Json]:
        """The objects of treenail as they are stored, without their metadata."""
        return {
            place: {
                name: value
                for name, value in document.items()
                if name not in ("metadata", "apiVersion", "kind")
            }
            for place, document in self.guest.objects.items()
            if place[0] in ("configmaps", "roles", "rolebindings", "namespaces")
        }

    def list_texts(self) -> list[str]:
        """All texts for users."""
        conditions = [str(each["message"]) for each in self.conditions().values()]
        return [*conditions, *(message for _, _, message in self.warnings)]


@dataclass(frozen=True)
class Attempt:
    """An attempt and its expected result."""

    attack: Callable[[AttackedWorld], object]
    is_first: bool = False
    """Before treenail has written anything; else while m0 works."""
    is_restored: bool = True
    """The objects are then as they were before."""
    says: str = ""
    """Text of a condition or Event; without it the update goes on, and ends."""


def annotate(name: str, **notes: str | None) -> Callable[[AttackedWorld], None]:
    names = {"desired": key.DESIRED_CONFIG, "current": key.CURRENT_CONFIG, "state": key.STATE,
             "reason": key.REASON, "image": key.DESIRED_OS_IMAGE, "lock": "treenail.io/fleet-lock",
             "drain": key.DESIRED_DRAIN, "record": key.DRAIN}  # fmt: skip
    found = {names.get(each, each): text for each, text in notes.items()}
    return lambda world: world._annotate(name, found)


def change(plural: str, name: str, **body: Any) -> Callable[[AttackedWorld], object]:
    return lambda world: world.guest.change(plural, name, body)


def delete(plural: str, name: str) -> Callable[[AttackedWorld], object]:
    return lambda world: world.guest.objects.pop((plural, name))


def admit(plural: str, mutate: Callable[[AttackedWorld, Json], None]) -> Any:
    """A mutating webhook for a kind."""

    def attack(world: AttackedWorld) -> None:
        def run(_verb: str, kind: str, body: Json) -> Json:
            if kind == plural:
                mutate(world, body)
            return body

        world.api.admit = run

    return attack


def deny(plural: str) -> Any:
    def attack(world: AttackedWorld) -> None:
        def run(_verb: str, kind: str, body: Json) -> Json:
            if kind == plural:
                raise ForbiddenError(f"{plural}: admission webhook evil denied the request")
            return body

        world.api.admit = run

    return attack


def answer(plural: str, value: Any) -> Any:
    def attack(world: AttackedWorld) -> None:
        def run(kind: str, _name: str, found: Json) -> Any:
            if isinstance(value, Exception) and kind == plural:
                raise value
            return value if kind == plural else found

        world.api.answer = run

    return attack


def forge_nodes(world: AttackedWorld) -> None:
    """Nodes with names of Machines elsewhere, all of which claim the target."""
    for number in range(300):
        world.add_node(f"forged-{number}", A)
        world._annotate(f"forged-{number}", {key.DESIRED_CONFIG: A})


def take_name(world: AttackedWorld) -> None:
    """A Node of another machine takes the name of a node of the pool."""
    del world.guest.objects["nodes", "m1"]
    world.add_node("m1", "bogus")


def put_pod(world: AttackedWorld) -> None:
    spec = {"nodeName": "m0", "containers": [{"image": "quay.io/evil/agent:1"}]}
    metadata = {"name": "treenail-installer-m0", "namespace": NAMESPACE}
    world.guest.put(resources.PODS, {"metadata": metadata, "spec": spec})


def put_namespace(**notes: str) -> Callable[[AttackedWorld], None]:
    def attack(world: AttackedWorld) -> None:
        metadata = {"name": NAMESPACE, "annotations": notes}
        world.guest.put(resources.NAMESPACES, {"metadata": metadata})

    return attack


def spoil_config(_world: AttackedWorld, body: Json) -> None:
    body.setdefault("data", {})["config"] = "evil"


def spoil_target(world: AttackedWorld, body: Json) -> None:
    """Another value each time, so that each write is a change."""
    body["metadata"]["annotations"][key.DESIRED_CONFIG] = f"evil-{world.api.attempts}"


def spoil_targets(world: AttackedWorld) -> None:
    admit("nodes", spoil_target)(world)
    world._annotate("m0", {key.DESIRED_CONFIG: "x"})


ATTEMPTS = {
    # Redirect an update.
    "target of another node": Attempt(annotate("m2", desired=A), says="TargetRestored"),
    "unknown target": Attempt(annotate("m2", desired="bogus"), says="TargetRestored"),
    "other target of the node": Attempt(annotate("m0", desired="bogus"), says="TargetRestored"),
    "old target of the node": Attempt(annotate("m0", desired=OLD), says="TargetRestored"),
    "target removed": Attempt(annotate("m0", desired=None), says="TargetRestored"),
    "another image": Attempt(annotate("m1", image="quay.io/evil/os@sha256:" + "6" * 64)),
    "other config, same hash": Attempt(change("configmaps", CONFIG_MAP, data={"config": "evil"})),
    "other hash": Attempt(change("configmaps", CONFIG_MAP, data={"hash": "evil"})),
    "refresh": Attempt(change("configmaps", CONFIG_MAP, data={"mode": "refresh"})),
    "one more key": Attempt(change("configmaps", CONFIG_MAP, data={"other": HUGE})),
    "immutable config": Attempt(
        change("configmaps", CONFIG_MAP, data={"config": "evil"}, immutable=True)
    ),
    "config of a webhook": Attempt(
        admit("configmaps", spoil_config), is_first=True, is_restored=False,
        says="another program changes ConfigMap",
    ),
    "target of a webhook": Attempt(spoil_targets, is_restored=False, says="TargetRestored"),
    "config deleted": Attempt(delete("configmaps", CONFIG_MAP)),
    # Read more, or let others read.
    "readers": Attempt(change("rolebindings", CONFIG_MAP, subjects=[{"kind": "Group"}])),
    "another role": Attempt(change("rolebindings", CONFIG_MAP, roleRef={"name": "cluster-admin"})),
    "more verbs": Attempt(change("roles", CONFIG_MAP, rules=[{"verbs": ["*"]}])),
    # Another pool, or another hosted cluster.
    "node of another pool": Attempt(annotate("other-0", desired=A)),
    "node of another pool degraded": Attempt(annotate("other-0", desired=A, state="Degraded")),
    "300 forged nodes": Attempt(forge_nodes),
    "node of another machine": Attempt(take_name, is_restored=True),
    "namespace of another pool": Attempt(
        put_namespace(**{hosted_key.NODE_POOL: "clusters/other"}), is_first=True,
        is_restored=False, says=f"kubectl delete namespace {NAMESPACE}",
    ),
    "namespace given to another pool": Attempt(
        change("namespaces", NAMESPACE,
               metadata={"annotations": {hosted_key.NODE_POOL: "clusters/other"}}),
        is_restored=False, says=f"kubectl delete namespace {NAMESPACE}",
    ),
    "namespace of this pool": Attempt(
        put_namespace(**{hosted_key.NODE_POOL: FULL_NAME}), is_first=True
    ),
    # Stop or mislead the controller.
    "namespace terminating": Attempt(
        change("namespaces", NAMESPACE, metadata={"deletionTimestamp": hosted.SINCE}),
        says=f"Namespace {NAMESPACE} is being deleted",
    ),
    "level of the namespace": Attempt(
        change("namespaces", NAMESPACE,
               metadata={"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}),
    ),
    "config denied": Attempt(
        deny("configmaps"), is_first=True, is_restored=False, says="the hosted cluster refuses"
    ),
    "namespace denied": Attempt(
        deny("namespaces"), is_first=True, is_restored=False, says="the hosted cluster refuses"
    ),
    "huge reason": Attempt(annotate("m1", reason=HUGE, state="Degraded")),
    "huge failure": Attempt(annotate("m0", reason=HUGE, state="Degraded"), says="is degraded with"),
    "huge annotations": Attempt(annotate("m1", current=HUGE, lock=HUGE, record=HUGE)),
    "invalid drain record": Attempt(annotate("m1", record='{"request": 5}', drain="x" * 5000)),
    "node deleted": Attempt(delete("nodes", "m2")),
    "pod of the same name": Attempt(put_pod),
    "empty answers": Attempt(answer("configmaps", {}), is_restored=False),
    "answers of another form": Attempt(
        answer("configmaps", {"metadata": [], "data": 5}), is_restored=False
    ),
    "no answers": Attempt(
        answer("configmaps", UnreachableError("read: no response within 10 s")),
        says="no response within 10 s",
    ),
}  # fmt: skip


@pytest.fixture
def world() -> AttackedWorld:
    return AttackedWorld()


def attack(world: AttackedWorld, attempt: Attempt) -> dict[tuple[str, str], Json]:
    """Attack, and let time pass; return the objects from before."""
    if not attempt.is_first:
        world.turn(2)
        assert world.list_assigned(A) == ["m0"]
    before = world.read_objects()
    attempt.attack(world)
    world.turn(4)
    return before


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt_redirects_no_update_and_reaches_nothing_else(
    world: AttackedWorld, name: str
) -> None:
    attempt = ATTEMPTS[name]
    before = attack(world, attempt)
    reading = cast("ReadingApi", world.management)
    assert reading.read <= {TOKEN}
    assert {(kind, name) for _, kind, name, _ in reading.writes} <= {
        ("machinesets", POOL), ("configmaps", "treenail-rollouts"),
    }  # fmt: skip
    written = {(kind, name) for _, kind, name, _ in world.guest.writes}
    assert {name for kind, name in written if kind == "nodes"} <= {"m0", "m1", "m2"}
    assert {name for kind, name in written if kind not in ("nodes", "pods")} <= {
        NAMESPACE, CONFIG_MAP,
    }  # fmt: skip
    # A degraded node is out of service already, and gets the next target first.
    allowed = {"m0", "m1"} if name == "huge reason" else {"m0"}
    assert set(world.list_assigned(A)) <= allowed, "the limit holds"
    if attempt.is_first and attempt.says:
        assert world.list_assigned(A) == []
    if attempt.is_restored and not attempt.is_first and "terminating" not in name:
        assert world.read_objects() == before
    texts = world.list_texts()
    assert max(map(len, texts)) < TEXT_LIMIT
    assert not any("\x1b" in text for text in texts)
    if attempt.says:
        reasons = [reason for _, reason, _ in world.warnings]
        assert any(attempt.says in text for text in (*texts, *reasons)), texts


IS_OVER = [name for name, each in ATTEMPTS.items() if each.is_restored and not each.says]


@pytest.mark.parametrize("name", IS_OVER)
def test_update_ends_after_the_attempt(world: AttackedWorld, name: str) -> None:
    attack(world, ATTEMPTS[name])
    stop = StrictGuestApi(world.now)
    world.api.admit, world.api.answer = stop.admit, stop.answer
    if ("nodes", "m2") not in world.guest.objects:
        world.add_node("m2")
    for node in ("m1",):
        world._annotate(node, {key.CURRENT_CONFIG: OLD, key.DESIRED_CONFIG: OLD, key.STATE: "Done"})
    for place in [
        place for place in world.guest.objects if place[1].startswith(("forged", "other"))
    ]:
        del world.guest.objects[place]
    world.is_stuck = set()
    world.run(A)


def test_changes_of_a_guest_cause_few_writes(world: AttackedWorld) -> None:
    """A webhook that changes each target again must not keep the controller busy."""
    attack(world, ATTEMPTS["target of a webhook"])
    before = world.api.attempts
    for _ in range(100):
        with suppress(ClusterError):  # The process waits before it tries again.
            world.turn(after_s=0.1)
    assert world.api.attempts - before <= 4
