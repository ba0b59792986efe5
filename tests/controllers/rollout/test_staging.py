"""Staging on the nodes before the first is drained: who is asked, and what it holds up."""

from dataclasses import replace

import pytest

from tests.controllers.rollout.builders import failed, image, node, on_its_way, pool, proceed
from tests.controllers.rollout.world import World, build_reconciler
from treenail.api import annotations as key
from treenail.controllers.rollout.decide import decide_rollout
from treenail.controllers.rollout.gates.os_image import OS_IMAGE
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.policy import RolloutPolicy
from treenail.controllers.rollout.prestage import PrestageRequests, decide_prestage_requests

OLD, NEW = image("old", "a"), image("new", "b")
TWO = RolloutPolicy(prestage_max_parallel=2)
IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
OTHER = f"registry.example.com/os@sha256:{'2' * 64}"


def at_rest(name: str, **more: object) -> NodeFacts:
    return node(name, OLD, **more)


def asked(name: str, target: RolloutTarget = NEW, **more: object) -> NodeFacts:
    return at_rest(name, prestage_target=target, **more)


def staged(name: str, target: RolloutTarget = NEW) -> NodeFacts:
    return asked(name, target, prestaged_image=target.image)


def told(
    *nodes: NodeFacts, policy: RolloutPolicy = TWO, target: RolloutTarget = NEW
) -> PrestageRequests:
    return decide_prestage_requests(policy, nodes, target, is_stopped=False)


def test_no_more_nodes_are_asked_than_may_pull_at_the_same_time() -> None:
    nodes = [at_rest(name) for name in "abcd"]
    assert told(*nodes) == PrestageRequests(
        ("a", "b"), waiting_reason="waiting: 0 of 4 nodes have prestaged the image"
    )
    assert told(staged("a"), asked("b"), at_rest("c"), at_rest("d")) == PrestageRequests(
        ("c",), waiting_reason="waiting: 1 of 4 nodes have prestaged the image"
    )
    assert told(asked("a"), asked("b"), at_rest("c")).nodes_to_request == ()


def test_the_first_node_may_be_drained_once_all_that_can_have_staged() -> None:
    ill = at_rest("c", is_healthy=False)
    assert told(staged("a"), staged("b"), ill) == PrestageRequests()
    # A node whose agent says why it can't holds up nobody, and no slot.
    assert told(staged("a"), asked("b", prestage_error="disk full")) == PrestageRequests()
    assert told(
        asked("a", prestage_error="x"), asked("b"), at_rest("c"), at_rest("d")
    ).nodes_to_request == ("c",)


@pytest.mark.parametrize(
    "other",
    [
        node("x", RolloutTarget("old", NEW.image)),
        on_its_way("x", NEW),
        failed("x", image("bad", "c")),
        NodeFacts("x"),
    ],
    ids=["has the image", "was given the target", "fails", "was never asked for anything"],
)
def test_a_node_that_has_nothing_to_stage_is_not_asked(other: NodeFacts) -> None:
    assert told(other, staged("b")) == PrestageRequests()


def test_a_node_that_joins_later_holds_up_nobody() -> None:
    assert told(on_its_way("a", NEW), at_rest("b")) == PrestageRequests(("b",))


def test_a_node_that_joins_later_is_given_the_target_once_it_has_staged() -> None:
    careful = pool({"staging": {"maxParallel": 2}}, maxUnavailable=3)
    done = node("a", NEW)

    def given(*nodes: NodeFacts) -> tuple[str, ...]:
        return decide_rollout(
            careful, [done, *nodes], proceed(NEW), None, now=1000.0
        ).nodes_to_assign

    assert given(at_rest("b"), asked("c")) == ()
    assert given(at_rest("b"), staged("c")) == ("c",)


def test_another_target_is_asked_for_in_place_of_the_one_before() -> None:
    newer = image("newer", "c")
    nodes = [staged("a"), asked("b"), asked("c"), at_rest("d")]
    found = told(*nodes, target=newer)
    assert (found.nodes_to_request, found.nodes_to_withdraw) == (("a", "b"), ("c",))


def test_the_same_image_of_another_config_is_not_pulled_anew() -> None:
    same = RolloutTarget("newer", NEW.image)
    nodes = [staged("a"), staged("b"), staged("c")]
    found = told(*nodes, target=same)
    assert (found.nodes_to_request, found.nodes_to_withdraw) == (("a", "b", "c"), ())


@pytest.mark.parametrize("stopped", [True, False])
def test_what_was_asked_is_taken_back_when_it_is_stopped(*, stopped: bool) -> None:
    policy = TWO if stopped else RolloutPolicy()
    nodes = [asked("a"), staged("b"), at_rest("c")]
    assert decide_prestage_requests(policy, nodes, NEW, is_stopped=stopped) == PrestageRequests(
        nodes_to_withdraw=("a", "b")
    )


def test_a_config_without_an_image_has_nothing_to_stage() -> None:
    assert told(asked("a"), at_rest("b"), target=RolloutTarget("new")) == PrestageRequests(
        nodes_to_withdraw=("a",)
    )


class Staged:
    """A pool whose nodes stage ahead, one turn after the other."""

    def __init__(self, *, nodes: int = 5, policy: str = "{staging: {maxParallel: 2}}") -> None:
        self.world = World()
        for number in range(nodes):
            self.world.add_node(f"n{number}", "old")
        self.policy = policy
        self.change()
        self.controller = build_reconciler(self.world)

    def change(self, pull_spec: str = IMAGE, **spec: object) -> None:
        notes = {OS_IMAGE: pull_spec}
        self.world.set_pool("worker", "new", self.policy, annotations=notes, **spec)

    def turn(self, seconds: float = 0.0) -> None:
        self.world.pass_time(seconds)
        self.world.deliver()
        self.controller.sync_pool("worker")

    @property
    def nodes(self) -> list[NodeFacts]:
        return list(self.world.truth.values())

    def count(self, what: str) -> int:
        """How many nodes are asked to stage, have staged, or were given the target."""
        match what:
            case "asked":
                return sum(each.prestage_target is not None for each in self.nodes)
            case "staged":
                return sum(bool(each.prestaged_image) for each in self.nodes)
            case _:
                return sum(each.desired_config == "new" for each in self.nodes)


def test_all_nodes_stage_before_the_first_is_given_the_target() -> None:
    found = Staged()
    for asked_for in (2, 4, 5):
        found.turn(10.0)
        assert (found.count("asked"), found.count("given")) == (asked_for, 0)
        assert found.world.said()["Updating"]["reason"] == "Waiting"
    found.turn(10.0)
    assert (found.count("staged"), found.count("given")) == (5, 1)
    given = next(each for each in found.nodes if each.desired_config == "new")
    assert given.prestage_target is None
    while found.count("given") < 5 or not all(each.is_done for each in found.nodes):
        found.turn(60.0)
    assert found.count("asked") == 0
    # One to stage, one to go.
    assert len([1 for plural, _, _ in found.world.writes if plural == "nodes"]) == 10


def test_a_pool_that_is_paused_takes_back_what_it_asked_for() -> None:
    found = Staged()
    found.turn()
    assert found.count("asked") == 2
    found.change(paused=True)
    found.turn()
    assert (found.count("asked"), found.count("given")) == (0, 0)
    found.turn(10.0)
    assert found.count("staged") == 0


def test_an_image_that_is_not_there_halts_before_any_node_is_drained() -> None:
    found = Staged(policy="{staging: {maxParallel: 2}, maxFailures: 0}")
    found.world.not_there = {IMAGE}
    found.turn()
    found.turn(10.0)
    said = found.world.said()["Degraded"]
    assert said["reason"] == "Halted"
    assert "node n0 failed first: prestaging failed: manifest unknown" in said["message"]
    found.turn(10.0)
    assert (found.count("asked"), found.count("given")) == (2, 0)
    found.change(OTHER)
    for _ in range(6):
        found.turn(10.0)
    assert (found.count("staged"), found.count("given")) == (5, 1)
    assert found.world.said()["Degraded"]["status"] == "False"


def test_staging_goes_on_outside_the_maintenance_window() -> None:
    window = '{start: "00:00", duration: 1m, timeZone: UTC}'
    found = Staged(policy=f"{{staging: {{maxParallel: 9}}, windows: [{window}]}}")
    found.turn()
    found.turn(10.0)
    found.turn()
    assert (found.count("staged"), found.count("given")) == (5, 0)
    assert "the maintenance window opens at" in found.world.said()["Updating"]["message"]


def test_a_node_is_written_once_however_late_the_cache_is() -> None:
    found = Staged()
    found.world.deliver()
    for _ in range(3):
        found.controller.sync_pool("worker")
    writes = [name for plural, name, _ in found.world.writes if plural == "nodes"]
    assert writes == ["n0", "n1"]


def test_a_write_whose_answer_was_lost_is_repeated() -> None:
    found = Staged(nodes=1)
    found.world.deliver()
    found.world.fault_on, found.world.next_fault = "nodes", "lost"
    with pytest.raises(Exception, match="the answer got lost"):
        found.controller.sync_pool("worker")
    found.controller.sync_pool("worker")
    (seen,) = found.nodes
    assert seen.prestage_target == RolloutTarget("new", IMAGE)
    assert replace(seen, prestage_target=None).prestage_target is None


@pytest.mark.parametrize("text", ["{staging: {maxParallel: 0}}", "{staging: {maxParallel: x}}"])
def test_staging_of_no_node_is_refused(text: str) -> None:
    found = Staged(policy=text)
    found.turn()
    said = found.world.said()["Degraded"]
    assert "staging.maxParallel" in said["message"]
    assert key.PRESTAGE_IMAGE not in str(found.world.objects["nodes"])
