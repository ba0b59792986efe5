"""Prestaging: which nodes get requests, and when the rollout waits for them."""

from dataclasses import replace

import pytest

from tests.controllers.rollout.builders import (
    decide_rollout,
    failed,
    image,
    node,
    on_its_way,
    pool,
    proceed,
)
from tests.controllers.rollout.world import World, build_reconciler
from treenail.api import annotations as key
from treenail.controllers.pools.node_facts import NodeFacts, RolloutTarget
from treenail.controllers.pools.rollout_policy import RolloutPolicy
from treenail.controllers.pools.rollout_record import RolloutRecord
from treenail.controllers.rollout.decide import PrestageRequests, decide_prestage_requests

OLD, NEW = image("old", "a"), image("new", "b")
TWO = RolloutPolicy(prestage_max_parallel=2)
IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
OTHER = f"registry.example.com/os@sha256:{'2' * 64}"


def idle(name: str, **more: object) -> NodeFacts:
    return node(name, OLD, **more)


def requested(name: str, target: RolloutTarget = NEW, **more: object) -> NodeFacts:
    return idle(name, prestage_target=target, **more)


def staged(name: str, target: RolloutTarget = NEW) -> NodeFacts:
    return requested(name, target, prestaged_image=target.image)


def decide(
    *nodes: NodeFacts, policy: RolloutPolicy = TWO, target: RolloutTarget = NEW
) -> PrestageRequests:
    record = RolloutRecord(target)
    return decide_prestage_requests(policy, nodes, record, now=0.0, is_stopped=False)


def test_max_parallel_limits_prestage_requests() -> None:
    nodes = [idle(name) for name in "abcd"]
    assert decide(*nodes) == PrestageRequests(
        ("a", "b"), waiting_reason="waiting: 0 of 4 nodes have prestaged the image"
    )
    assert decide(staged("a"), requested("b"), idle("c"), idle("d")) == PrestageRequests(
        ("c",), waiting_reason="waiting: 1 of 4 nodes have prestaged the image"
    )
    assert decide(requested("a"), requested("b"), idle("c")).nodes_to_request == ()


def test_rollout_waits_only_for_nodes_that_can_prestage() -> None:
    ill = idle("c", is_healthy=False)
    assert decide(staged("a"), staged("b"), ill) == PrestageRequests()
    # A node that reports an error delays no other node and uses no slot.
    assert decide(staged("a"), requested("b", prestage_error="disk full")) == PrestageRequests()
    assert decide(
        requested("a", prestage_error="x"), requested("b"), idle("c"), idle("d")
    ).nodes_to_request == ("c",)


@pytest.mark.parametrize(
    "other",
    [
        node("x", RolloutTarget("old", NEW.image)),
        on_its_way("x", NEW),
        failed("x", image("bad", "c")),
        NodeFacts("x"),
    ],
    ids=["has the image", "target is assigned", "fails", "is unassigned"],
)
def test_node_with_nothing_to_prestage_gets_no_request(other: NodeFacts) -> None:
    assert decide(other, staged("b")) == PrestageRequests()


def test_joining_node_does_not_delay_others() -> None:
    assert decide(on_its_way("a", NEW), idle("b")) == PrestageRequests(("b",))


def test_joining_node_is_assigned_after_prestaging() -> None:
    careful = pool({"prestage": {"maxParallel": 2}}, maxUnavailable=3)
    done = node("a", NEW)

    def given(*nodes: NodeFacts) -> tuple[str, ...]:
        return decide_rollout(
            careful, [done, *nodes], proceed(NEW), None, now=1000.0
        ).nodes_to_assign

    assert given(idle("b"), requested("c")) == ()
    assert given(idle("b"), staged("c")) == ("c",)


def test_new_target_replaces_prestage_request() -> None:
    newer = image("newer", "c")
    nodes = [staged("a"), requested("b"), requested("c"), idle("d")]
    found = decide(*nodes, target=newer)
    assert (found.nodes_to_request, found.nodes_to_withdraw) == (("a", "b"), ("c",))


def test_same_image_of_another_config_does_not_count_as_new_pull() -> None:
    same = RolloutTarget("newer", NEW.image)
    nodes = [staged("a"), staged("b"), staged("c")]
    found = decide(*nodes, target=same)
    assert (found.nodes_to_request, found.nodes_to_withdraw) == (("a", "b", "c"), ())


@pytest.mark.parametrize("stopped", [True, False])
def test_stopped_pool_withdraws_prestage_requests(*, stopped: bool) -> None:
    policy = TWO if stopped else RolloutPolicy()
    nodes = [requested("a"), staged("b"), idle("c")]
    found = decide_prestage_requests(policy, nodes, RolloutRecord(NEW), now=0.0, is_stopped=stopped)
    assert found == PrestageRequests(nodes_to_withdraw=("a", "b"))


def test_config_without_image_needs_no_prestaging() -> None:
    assert decide(requested("a"), idle("b"), target=RolloutTarget("new")) == PrestageRequests(
        nodes_to_withdraw=("a",)
    )


class Staged:
    """A pool whose nodes prestage, one sync after the other."""

    def __init__(self, *, nodes: int = 5, policy: str = "{prestage: {maxParallel: 2}}") -> None:
        self.world = World()
        for number in range(nodes):
            self.world.add_node(f"n{number}", "old")
        self.policy = policy
        self.change()
        self.controller = build_reconciler(self.world)

    def change(self, pull_spec: str = IMAGE, **spec: object) -> None:
        self.world.set_pool("worker", "new", self.policy, osImage=pull_spec, **spec)

    def turn(self, seconds: float = 0.0) -> None:
        self.world.pass_time(seconds)
        self.world.deliver()
        self.controller.sync_pool("worker")

    @property
    def nodes(self) -> list[NodeFacts]:
        return list(self.world.truth.values())

    def count(self, what: str) -> int:
        """Count nodes with a request, with the prestaged image, and with the target."""
        match what:
            case "requested":
                return sum(each.prestage_target is not None for each in self.nodes)
            case "staged":
                return sum(bool(each.prestaged_image) for each in self.nodes)
            case _:
                return sum(each.desired_config == "new" for each in self.nodes)


def test_all_nodes_prestage_before_first_assignment() -> None:
    found = Staged()
    for requested_count in (2, 4, 5):
        found.turn(10.0)
        assert (found.count("requested"), found.count("assigned")) == (requested_count, 0)
        assert found.world.conditions()["Updating"]["reason"] == "Waiting"
    found.turn(10.0)
    assert (found.count("staged"), found.count("assigned")) == (5, 1)
    given = next(each for each in found.nodes if each.desired_config == "new")
    assert given.prestage_target is None
    while found.count("assigned") < 5 or not all(each.is_done for each in found.nodes):
        found.turn(60.0)
    assert found.count("requested") == 0
    # One to stage, one to go.
    assert len([1 for plural, _, _ in found.world.writes if plural == "nodes"]) == 10


def test_paused_pool_withdraws_prestage_requests() -> None:
    found = Staged()
    found.turn()
    assert found.count("requested") == 2
    found.change(paused=True)
    found.turn()
    assert (found.count("requested"), found.count("assigned")) == (0, 0)
    found.turn(10.0)
    assert found.count("staged") == 0


def test_missing_image_halts_rollout_before_first_drain() -> None:
    found = Staged(policy="{prestage: {maxParallel: 2}, maxFailures: 0}")
    found.world.not_there = {IMAGE}
    found.turn()
    found.turn(10.0)
    degraded = found.world.conditions()["Degraded"]
    assert degraded["reason"] == "Halted"
    assert "node n0 failed first: prestaging failed: manifest unknown" in degraded["message"]
    found.turn(10.0)
    assert (found.count("requested"), found.count("assigned")) == (2, 0)
    found.change(OTHER)
    for _ in range(6):
        found.turn(10.0)
    assert (found.count("staged"), found.count("assigned")) == (5, 1)
    assert found.world.conditions()["Degraded"]["status"] == "False"


def test_prestaging_continues_outside_the_window() -> None:
    window = '{days: [Mon], start: "00:00", duration: 1m, timeZone: UTC}'
    found = Staged(policy=f"{{prestage: {{maxParallel: 9}}, windows: [{window}]}}")
    found.turn()
    found.turn(10.0)
    found.turn()
    assert (found.count("staged"), found.count("assigned")) == (5, 0)
    assert "the maintenance window opens at" in found.world.conditions()["Updating"]["message"]


def test_prestage_request_is_written_once_with_stale_cache() -> None:
    found = Staged()
    found.world.deliver()
    for _ in range(3):
        found.controller.sync_pool("worker")
    writes = [name for plural, name, _ in found.world.writes if plural == "nodes"]
    assert writes == ["n0", "n1"]


def test_prestage_request_without_response_is_repeated() -> None:
    found = Staged(nodes=1)
    found.world.deliver()
    found.world.fault_on, found.world.next_fault = "nodes", "lost"
    with pytest.raises(Exception, match="the response got lost"):
        found.controller.sync_pool("worker")
    found.controller.sync_pool("worker")
    (seen,) = found.nodes
    assert seen.prestage_target == RolloutTarget("new", IMAGE)
    assert replace(seen, prestage_target=None).prestage_target is None


@pytest.mark.parametrize("text", ["{prestage: {maxParallel: 0}}", "{prestage: {maxParallel: x}}"])
def test_max_parallel_below_one_is_rejected(text: str) -> None:
    found = Staged(policy=text)
    found.turn()
    degraded = found.world.conditions()["Degraded"]
    assert "prestage.maxParallel" in degraded["message"]
    assert key.PRESTAGE_IMAGE not in str(found.world.objects["nodes"])
