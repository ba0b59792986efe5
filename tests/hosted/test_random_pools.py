"""The check of a rollout's order notices each thing that a rollout must not do."""

import pytest

from tests.hosted import conductor, random_pools
from tests.hosted.daemons import UPGRADER, NodeChange, NodeState
from treenail.api import annotations as key

OLD, NEW, LATER = "0a0a0a0a", "1b1b1b1b", "2c2c2c2c"


def make_node(name: str, current: str = "", desired: str = "", **more: str) -> NodeState:
    """A Node that was updated to ``current``, or never."""
    drain = f"uncordon-{current}" if current else ""
    notes = {
        key.CURRENT_CONFIG: current,
        key.DESIRED_CONFIG: desired or current,
        key.STATE: more.get("state", "Done" if current else ""),
        key.DESIRED_DRAIN: drain,
        key.LAST_APPLIED_DRAIN: drain,
    }
    by = more.get("by", conductor.FIELD_MANAGER)
    return NodeState(name, notes, is_cordoned=more.get("cordoned") == "yes", desired_by=by)


def follow(*states: NodeState) -> list[NodeChange]:
    """Return the changes of Nodes a, b and c, which were never updated, to these states."""
    known: dict[str, NodeState] = {}
    changes = []
    for state in (*(make_node(name) for name in "abc"), *states):
        changes.append(NodeChange(known.get(state.name), state))
        known[state.name] = state
    return changes


def make_plan(limit: int = 1, **spec: object) -> random_pools.PoolPlan:
    zones = dict.fromkeys("abc", "z")
    return random_pools.PoolPlan("p", zones, limit, spec, (NEW, LATER), frozenset())


def select(name: str, target: str = NEW, **more: str) -> NodeState:
    return make_node(name, more.pop("current", ""), target, **more)


def finish(name: str, target: str = NEW) -> NodeState:
    return make_node(name, target)


def test_rollout_in_order_has_no_problem() -> None:
    states = [
        state for name in "bac" for state in (select(name), finish(name))
    ]  # one after the other
    assert random_pools.find_problems(make_plan(canary={"nodes": 1}), follow(*states)) == []


def test_node_that_hypershift_moves_while_updating_is_no_problem() -> None:
    moved = select("a", LATER, by=UPGRADER)
    states = [select("a"), moved, finish("a", LATER), select("b", LATER), finish("b", LATER)]
    assert random_pools.find_problems(make_plan(), follow(*states)) == []


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        ([select("a", by=UPGRADER)], f"written by {UPGRADER}"),
        ([select("a", "ffffffff")], "expected one of"),
        ([select("a"), select("b")], r"\['a'\] are unavailable"),
        ([select("a"), select("a", state="Degraded"), select("b")], r"\['a'\] failed"),
        ([make_node("a", cordoned="yes")], "a changed without a selection"),
        ([make_node("a", state="Working")], "a changed without a selection"),
        ([select("a"), select("a", LATER)], "moved it while updating"),
    ],
)
def test_problem_is_noticed(states: list[NodeState], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        assert random_pools.find_problems(make_plan(), follow(*states)) == []


def test_second_node_before_the_canary_is_done_is_noticed() -> None:
    problems = random_pools.find_problems(
        make_plan(limit=2, canary={"nodes": 1}), follow(select("a"), select("b"))
    )
    assert len(problems) == 1
    assert problems[0].endswith("number 2, 0 of 1 are done")


@pytest.mark.parametrize("applied", [[], [NEW], [LATER, LATER], [LATER, NEW]])
def test_node_without_the_last_target_once_is_noticed(applied: list[str]) -> None:
    found = random_pools.find_repeated(make_plan(), {"a": applied, "b": [LATER], "c": [NEW, LATER]})
    assert found == [f"a: {applied}"]
