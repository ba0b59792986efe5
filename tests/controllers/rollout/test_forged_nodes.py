"""A compromised node writes what it wants into its Node; at most it stops itself.

`FIELDS` has each field of a Node that a controller, a server or a command reads. A new annotation
must be classified here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.controllers.rollout.world import World
from treenail.api import annotations as key
from treenail.clocks import format_rfc3339
from treenail.controllers.drain.decide import DrainNode
from treenail.controllers.pools import node_facts, node_selection
from treenail.controllers.pools.node_facts import RolloutTarget
from treenail.controllers.pools.rollout_policy import LockServer
from treenail.controllers.rollout.locks import LockHolder
from treenail.controllers.rollout.machineconfignodes import RequestedNode
from treenail.controllers.status.status_table import build_rows, build_status_document

Json = dict[str, Any]
EVIL, HONEST = "z-evil", ("n0", "n1", "n2")
IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
LOCKS = LockServer("http://locks.example.com", "workers")
HUGE = "\x1b[2J" + "x" * 200_000
MAX_STATUS = 70_000
"""Bytes of the status of a pool of four nodes, of which one writes as much as it can."""

OWN = "taken from the pool, its policy or the record of the controller"
BOUNDED = "about this node only, and bounded when it is read"
SERVER = "set by the API server or kept by NodeRestriction"
UNREAD = "no controller reads it"

FIELDS: dict[str, str] = {
    **dict.fromkeys(
        (
            *(key.DESIRED_CONFIG, key.DESIRED_OS_IMAGE, key.DESIRED_OS_IMAGE_ALTERNATE),
            *(key.DESIRED_IMAGE, key.CURRENT_CONFIG, key.CURRENT_OS_IMAGE),
            *(key.CURRENT_OS_IMAGE_ALTERNATE, key.CURRENT_IMAGE, key.STATE, key.REASON),
            *(key.POST_CONFIG_ACTION, key.DESIRED_DRAIN, key.LAST_APPLIED_DRAIN, key.DRAIN),
            *(key.DRAIN_BLOCKED, key.LAST_OUTAGE, key.PROGRESS, key.PRESTAGE_CONFIG),
            *(key.PRESTAGE_IMAGE, key.PRESTAGED, key.PRESTAGE_ERROR, key.IMAGE_FILES),
            *(key.HEALTH_MODE, key.POOL_RETRY, key.BOOTSTRAP_REGISTRY),
            *(key.REMOVE_BOOTSTRAP_REGISTRY, key.PINNED_IMAGE_SETS),
        ),
        BOUNDED,
    ),
    node_facts.STARTED_AT: OWN,
    node_facts.LOCKED_BY: OWN,
    key.CONTROL_PLANE_TOPOLOGY: OWN,
    **dict.fromkeys((key.FIRST_PIVOT_CONFIG, key.RETRY, key.BOOTED_DIGEST), UNREAD),
    "metadata.name, uid, creationTimestamp, resourceVersion": SERVER,
    "label node-role.kubernetes.io/, node-restriction.kubernetes.io/": SERVER,
    "label topology.kubernetes.io/zone, kubernetes.io/os": BOUNDED,
    "spec.unschedulable": BOUNDED,
    "status.conditions Ready, DiskPressure, NetworkUnavailable": BOUNDED,
    "status.conditions lastTransitionTime": OWN,
    "status.nodeInfo.architecture, osImage": BOUNDED,
    "status.addresses": BOUNDED,
}
NOT_ON_NODES = {
    *(key.RELEASE_VERSION, key.CURRENT_BUILD, key.REBUILD, key.PRE_BUILT_IMAGE),
    *(key.BUILD_SEES_CONFIG, key.BUILD_CONTEXT, key.BUILD_DEADLINE, key.BASE_IMAGE),
    *(key.REBUILD_SCHEDULE, key.RESOLVED_BASE, key.JOB_UID, key.CONTENT_KEY, key.BUILD_REPORT),
    *(key.SYSTEM_IMAGE, key.PUSHED_IMAGES, key.SYSTEMS, key.BUILD_ARCHITECTURES, key.REBUILD_OF),
    *(key.PREVIOUS_FAILURE, key.ADOPTED_DATA, key.WRITTEN_BY, key.TARGET_POOL),
    *(key.RENDERED_CONFIG, key.IMAGE_CONFIG, key.IMAGE_BUILD, key.EPHEMERAL_BUILD_OBJECT),
    *(key.BUILD_KEY, key.BUILD_ATTEMPT, key.BUILD_ARCHITECTURE),
    *(key.GENERATED_FROM, key.CONFIG_NAME_SUFFIX, key.BUILT_IN_POOL),
}
ANNOTATIONS = [name for name in FIELDS if name.startswith((key.PREFIX, key.OWN_PREFIX))]


def test_every_annotation_of_a_node_is_classified() -> None:
    prefixes = (key.PREFIX, key.OWN_PREFIX)
    known = {
        value
        for value in vars(key).values()
        if isinstance(value, str) and value.startswith(prefixes) and value not in prefixes
    }
    assert known - NOT_ON_NODES == set(ANNOTATIONS) - {
        node_facts.STARTED_AT,
        node_facts.LOCKED_BY,
    }


@dataclass
class Servers:
    """Lock servers that grant every lock, and record who was asked."""

    asked: set[LockServer] = field(default_factory=set)

    def check_alerts(self, alerts: object) -> None:
        return None

    def acquire_lock(self, server: LockServer, _holder: LockHolder) -> None:
        self.asked.add(server)

    release_lock = acquire_lock


def annotate(**notes: str | None) -> Json:
    """Annotations of the API by the names of their constants."""
    return {"metadata": {"annotations": {getattr(key, name): text for name, text in notes.items()}}}


def claim_target(**more: str) -> Json:
    """The node assigned the new target to itself."""
    return annotate(DESIRED_CONFIG="new", DESIRED_OS_IMAGE=IMAGE, **more)


def claim_update(began: str, ended: str) -> Json:
    """The node was the first to be updated, at these times."""
    done = claim_target(CURRENT_CONFIG="new", CURRENT_OS_IMAGE=IMAGE, STATE="Done")
    done["metadata"]["annotations"][node_facts.STARTED_AT] = began
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": ended}
    return done | {"status": {"conditions": [ready]}}


def condition(kind: str, status: str) -> Json:
    changed = "2099-01-01T00:00:00Z"
    return {
        "status": {"conditions": [{"type": kind, "status": status, "lastTransitionTime": changed}]}
    }


def undo_assignment() -> Json:
    """The node is idle and without the target whenever the controller looks."""
    images = {"DESIRED_OS_IMAGE": None, "CURRENT_OS_IMAGE": None}
    idle = annotate(DESIRED_CONFIG="old", CURRENT_CONFIG="old", STATE="Done", **images)
    idle["metadata"]["labels"] = {node_facts.ZONE_LABEL: "a"}
    return idle | {"spec": {"unschedulable": False}}


STRICT = "{canary: {nodes: 1, soak: 1m}, maxFailures: 0, rebootTimeout: 5m, progressDeadline: 10m}"
WINDOW = """{maxFailures: 0, windows: [
    {days: [Sun], start: "00:00", duration: 4h, timeZone: UTC}]}"""  # 2001-09-09 is a Sunday
PRESTAGE = "{maxFailures: 0, prestage: {maxParallel: 1}, progressDeadline: 10m}"
LOCKED = "{fleetLock: {url: 'http://locks.example.com', group: workers}}"

ATTACKS: dict[str, tuple[str, Json]] = {
    **{f"{name} is huge": (STRICT, {"metadata": {"annotations": {name: HUGE}}})
       for name in ANNOTATIONS},
    **{f"{name} is huge, and the node is degraded": (
        STRICT, claim_target(STATE="Degraded", REASON=HUGE, **{name: HUGE}))
       for name in ("DRAIN_BLOCKED", "PRESTAGE_ERROR", "PROGRESS")},
    "degraded on a target of its own": (STRICT, claim_target(STATE="Degraded", REASON=HUGE)),
    "unreconcilable without a reason": (STRICT, claim_target(STATE="Unreconcilable")),
    "claims an update": (STRICT, claim_target(CURRENT_CONFIG="new", CURRENT_OS_IMAGE=IMAGE)),
    "never reacts": (STRICT, annotate(STATE="Working")),
    "state of nonsense": (STRICT, annotate(STATE=HUGE)),
    "undoes its assignment": ("{maxFailures: 0}", undo_assignment()),
    "undoes its assignment as another": (
        "{maxFailures: 0}", undo_assignment() | annotate(DESIRED_CONFIG="x", STATE="Working")),
    "update of 25 years": (WINDOW, claim_update("1976-01-01T00:00:00Z", "2099-01-01T00:00:00Z")),
    "update of no time": (WINDOW, claim_update("2001-09-09T00:00:00Z", "2001-09-09T00:00:01Z")),
    "not ready since 2099": (STRICT, condition("Ready", "False")),
    "pressure of any kind": (STRICT, condition("DiskPressure", HUGE)),
    "cordoned": (STRICT, {"spec": {"unschedulable": True}}),
    "names of nodeInfo": (
        STRICT, {"status": {"nodeInfo": {"architecture": HUGE, "osImage": HUGE}}}),
    "zone that comes first": (
        "{maxFailures: 0}", {"metadata": {"labels": {node_facts.ZONE_LABEL: "a"}}}),
    "leaves its pool": (
        "{maxFailures: 0}", {"metadata": {"labels": {"kubernetes.io/os": "windows"}}}),
    "lock of another server": (
        LOCKED, {"metadata": {"annotations": {node_facts.LOCKED_BY: "a http://127.0.0.1:1/x"}}}),
    "lock of the same server in another group": (
        LOCKED, {"metadata": {"annotations": {node_facts.LOCKED_BY: f"other {LOCKS.url}"}}}),
    "never prestages": (PRESTAGE, annotate(PRESTAGED="", PRESTAGE_ERROR=None)),
    "requests its prestaging itself": (
        PRESTAGE, annotate(PRESTAGE_CONFIG="new", PRESTAGE_IMAGE=IMAGE, PRESTAGED="")),
    "fails to prestage what it requested itself": (PRESTAGE, annotate(
        PRESTAGE_CONFIG="new", PRESTAGE_IMAGE=IMAGE, PRESTAGED="", PRESTAGE_ERROR=f"{IMAGE}: no")),
    "removes the request to prestage": (
        PRESTAGE, annotate(PRESTAGE_CONFIG=None, PRESTAGE_IMAGE=None, PRESTAGED="")),
    "drain of its own": (STRICT, annotate(
        STATE="Working", DESIRED_DRAIN="drain-" + HUGE, DRAIN_BLOCKED=json.dumps(
            [{"pod": HUGE, "reason": HUGE, "message": HUGE, "budgets": [{"name": HUGE}]}] * 99))),
}  # fmt: skip
SERVING = {"undoes its assignment", "zone that comes first", "leaves its pool"}


@pytest.mark.parametrize("attack", ATTACKS)
def test_pool_is_updated_beside_a_node_that_lies(attack: str) -> None:
    policy, forged = ATTACKS[attack]
    # A node that is out of service takes a place, and one that serves takes none.
    limit = 1 if attack in SERVING else 2
    world, servers = World(takes_s=60.0), Servers()
    for name in (*HONEST, EVIL):
        world.add_node(name, "old")
    world.set_pool("worker", "old", policy, maxUnavailable=limit)
    world.start(servers).turn()
    world.set_pool("worker", "new", policy, maxUnavailable=limit, osImage=IMAGE)
    for _ in range(40):
        world.pass_time(61.0)
        for _ in range(2):
            world.change("nodes", EVIL, forged)
            world.deliver()
            world.reconciler.sync_pool("worker")
        if all(world.truth[name].current_config == "new" for name in HONEST):
            break
    status = world.status()
    assert {name for name in HONEST if world.truth[name].current_config != "new"} == set(), status
    assert "halted" not in status["rollout"]
    assert servers.asked <= {LOCKS}
    assert len(json.dumps(status)) < MAX_STATUS
    assert all(text.isprintable() for text in (c["message"] for c in status["conditions"]))
    document = build_status_document(
        build_rows(world.list_pools(), world.list_nodes(), world.list_policies(), now=world.now()),
        now=world.now(),
    )
    assert len(json.dumps(document)) < MAX_STATUS
    assert max([len(message) for _, _, message in world.warnings], default=0) < MAX_STATUS


def test_node_that_updated_itself_is_no_canary() -> None:
    world = World(takes_s=60.0)
    for name in (*HONEST, EVIL):
        world.add_node(name, "old")
    world.bad = {RolloutTarget("new", IMAGE)}
    world.set_pool("worker", "new", STRICT, maxUnavailable=2, osImage=IMAGE)
    lie = claim_target(CURRENT_CONFIG="new", CURRENT_OS_IMAGE=IMAGE, STATE="Done")
    for _ in range(20):
        world.change("nodes", EVIL, lie)
        world.turn(61.0)
    assert len(set(world.find_assigned()) - {EVIL}) == 1
    assert world.status()["rollout"]["halted"]["node"] in HONEST


def test_only_nodes_that_the_controller_assigned_can_halt() -> None:
    world = World(takes_s=60.0)
    for name in (*HONEST, EVIL):
        world.add_node(name, "old")
    world.set_pool("worker", "old", STRICT, maxUnavailable=2)
    world.start().turn()
    world.set_pool("worker", "new", STRICT, maxUnavailable=2)
    world.turn()
    (canary,) = world.find_assigned()
    assert world.status()["rollout"]["assigned"] == {canary: int(world.seconds)}
    world.change("nodes", EVIL, annotate(DESIRED_CONFIG="new", STATE="Degraded", REASON="no"))
    world.turn(5.0)
    assert "halted" not in world.status()["rollout"]
    world.bad = {RolloutTarget("new")}
    world.turn(60.0)
    assert world.status()["rollout"]["halted"] == {"node": canary, "reason": "it does not boot"}


def test_restarted_controller_knows_whom_it_assigned() -> None:
    world = World(takes_s=600.0)
    world.add_node("n0", "old")
    world.set_pool("worker", "new", "{maxFailures: 0, rebootTimeout: 5m}")
    world.start().turn()
    # The node says that it was assigned in a thousand years.
    late = {node_facts.STARTED_AT: format_rfc3339(world.seconds + 3e10)}
    world.change("nodes", "n0", {"metadata": {"annotations": late}})
    world.flap("n0", healthy=False)
    world.start().turn(301.0)
    assert world.status()["rollout"]["halted"]["node"] == "n0"


PARSERS: dict[str, Callable[[Json], object]] = {
    "rollout": node_facts.NodeFacts.from_json,
    "drain": DrainNode.from_json,
    "machineconfignodes": lambda node: RequestedNode.from_json(node, image_key=key.DESIRED_IMAGE),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_facts_of_a_node_are_bounded(parser: str) -> None:
    notes = dict.fromkeys(ANNOTATIONS, HUGE)
    info = {"architecture": HUGE, "osImage": HUGE}
    node = {"metadata": {"name": "n", "annotations": notes}, "status": {"nodeInfo": info}}
    facts = repr(PARSERS[parser](node))
    assert len(facts) < 80_000
    assert "\x1b" not in facts


@pytest.mark.parametrize(
    ("label", "is_open"),
    [
        ("canary", True),
        ("example.com/canary", True),
        ("kubernetes.io/hostname", True),
        ("topology.kubernetes.io/zone", True),
        ("node.kubernetes.io/instance-type", True),
        ("a.kubelet.kubernetes.io/x", True),
        ("node-role.kubernetes.io/canary", False),
        ("node-restriction.kubernetes.io/canary", False),
        ("a.node-restriction.kubernetes.io/canary", False),
        ("kubernetes.io/canary", False),
        ("example.k8s.io/canary", False),
    ],
)
def test_labels_that_a_node_can_set(label: str, *, is_open: bool) -> None:
    assert node_selection.can_node_set_label(label) is is_open


def test_canary_selector_that_nodes_can_join_is_named_until_it_is_closed() -> None:
    world = World()
    world.add_node("n0", "old", labels={"canary": ""})
    canary = "{canary: {nodeSelector: {matchLabels: {%s: ''}}}}"
    world.set_pool("worker", "new", canary % "canary")
    world.turn()
    assert world.find_assigned() == ["n0"]
    warning = world.conditions()["OpenWaveSelector"]
    assert warning["status"] == "True"
    assert "worker uses canary, which each node can set on itself" in warning["message"]
    assert world.conditions()["Degraded"]["status"] == "False"
    world.set_pool("worker", "new", canary % "node-restriction.kubernetes.io/canary")
    world.turn(60.0)
    assert world.conditions()["OpenWaveSelector"]["status"] == "False"


def test_name_that_no_object_has_is_no_desired_config() -> None:
    node = {"metadata": {"name": "n", "annotations": {key.DESIRED_CONFIG: "No Name"}}}
    assert RequestedNode.from_json(node, image_key=key.DESIRED_IMAGE).config == ""
