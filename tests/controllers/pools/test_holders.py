"""A rollout that does not move names the nodes that hold it up, and becomes stalled."""

import json
from dataclasses import replace

import pytest

from tests.controllers.rollout.builders import NEW, failed, node, on_its_way, pool, proceed
from tests.controllers.rollout.world import World, build_reconciler
from treenail.api import annotations as key
from treenail.controllers.pools.holders import describe_holder
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_status import PoolStatusInput, compute_status
from treenail.controllers.pools.rollout_policy import PoolShare, RolloutPolicy, Wave
from treenail.controllers.pools.rollout_record import RolloutRecord
from treenail.controllers.rollout.decide import RolloutContext, RolloutDecision, decide_rollout

START = 1_000_000.0
HOUR = 3600.0
BUDGET = "PodDisruptionBudget shop/web of pod shop/web-1"


def decide(
    nodes: list[NodeFacts],
    *,
    after_s: float,
    record: RolloutRecord | None = None,
    policy: RolloutPolicy = RolloutPolicy(),  # noqa: B008  # immutable
) -> RolloutDecision:
    return decide_rollout(
        pool(),
        nodes,
        proceed(),
        record,
        now=START + after_s,
        context=RolloutContext(policy=policy),
    )


def updating(name: str, **more: object) -> NodeFacts:
    return on_its_way(name, **{"started_at": START, **more})


def test_drain_blocked_by_a_budget_is_named_and_stalls_after_the_deadline() -> None:
    nodes = [updating("n0", drain_blocker=BUDGET, unschedulable=True), node("n1")]
    early = decide(nodes, after_s=HOUR - 60)
    named = f"n0 (drain blocked by {BUDGET})"
    assert early.waiting_reason == f"waiting: maxUnavailable (1) reached by {named}"
    assert early.stalled_message == ""
    assert early.requeue_after_s == 60.0

    late = decide(nodes, after_s=HOUR)
    assert late.stalled_message == (f"no progress for more than 60 min (progressDeadline): {named}")
    assert late.progress_message == "0 of 2 nodes are updated"


def test_agent_that_never_responded_is_named() -> None:
    silent = updating("n0", state="Done")
    assert decide([silent, node("n1")], after_s=100).waiting_reason.endswith("n0 (updating)")
    late = decide([silent, node("n1")], after_s=121)
    reason = "no agent has responded since the assignment at 1970-01-12T13:46:40Z"
    assert late.waiting_reason.endswith(f"n0 ({reason})")


def test_cordon_of_a_user_stalls_the_rollout_and_survives_a_restart() -> None:
    nodes = [node("n0", unschedulable=True), node("n1")]
    first = decide(nodes, after_s=0.0)
    assert first.record == RolloutRecord(NEW, blocked_since=START)
    assert first.requeue_after_s == HOUR
    # An estimate would promise an end.
    assert first.progress_message == "0 of 2 nodes are updated"
    stored = RolloutRecord.from_json(json.loads(json.dumps(first.record.to_json())))
    late = decide(nodes, after_s=HOUR, record=stored)
    assert late.record == stored
    assert late.stalled_message.endswith("(progressDeadline): n0 (cordoned by a user)")

    moved = decide([node("n0"), node("n1")], after_s=HOUR + 1, record=late.record)
    assert moved.nodes_to_assign == ("n0",)
    assert moved.stalled_message == ""
    assert moved.record == RolloutRecord(NEW)


def test_last_node_is_named_when_all_are_assigned() -> None:
    nodes = [node("n0", NEW), updating("n1", drain_blocker=BUDGET)]
    found = decide(nodes, after_s=60)
    assert found.waiting_reason == ""
    assert found.progress_message.startswith(f"waiting for n1 (drain blocked by {BUDGET}); 1 of 2")


def test_node_that_holds_a_wave_is_named() -> None:
    policy = RolloutPolicy(waves=(Wave(PoolShare(count=1)),))
    nodes = [updating("n0", drain_blocker=BUDGET), node("n1"), node("n2")]
    found = decide(nodes, after_s=60, policy=policy)
    assert found.waiting_reason == (
        f"wave 1 of 2 is in progress; waiting for n0 (drain blocked by {BUDGET})"
    )


@pytest.mark.parametrize(
    ("nodes", "deadline_s"),
    [
        pytest.param([updating("n0"), node("n1")], 0.0, id="disabled"),
        pytest.param([updating("n0", started_at=START + HOUR), node("n1")], HOUR, id="recent"),
        pytest.param([node("n0", NEW), node("n1", NEW)], HOUR, id="complete"),
    ],
)
def test_rollout_that_moves_is_not_stalled(nodes: list[NodeFacts], deadline_s: float) -> None:
    policy = RolloutPolicy(progress_deadline_s=deadline_s)
    found = decide(nodes, after_s=2 * HOUR - 1, policy=policy)
    assert found.stalled_message == ""


def test_one_late_node_stalls_but_the_others_keep_their_estimate() -> None:
    nodes = [updating("n0"), updating("n1", started_at=START + HOUR), node("n2")]
    found = decide_rollout(pool(maxUnavailable=2), nodes, proceed(), None, now=START + HOUR + 60)
    assert found.stalled_message.endswith("(progressDeadline): n0 (updating)")
    assert "left" in found.progress_message


def test_stalled_pool_is_not_reconciling() -> None:
    nodes = [updating("n0"), node("n1")]
    decision = decide(nodes, after_s=HOUR)
    status = compute_status(
        PoolStatusInput(
            pool(),
            NEW,
            nodes,
            waiting_reason=decision.waiting_reason,
            stalled_message=decision.stalled_message,
        ),
        now="2026-01-01T00:00:00Z",
    )
    found = {each.type: each for each in status.conditions}
    assert found["Stalled"].status == "True"
    assert found["Stalled"].reason == "ProgressDeadlineExceeded"
    assert found["Stalled"].message == decision.stalled_message
    assert (found["Reconciling"].status, found["Degraded"].status) == ("False", "False")
    # As in the MCO, a pool is updating until all nodes have the target.
    assert (found["Updating"].status, found["Updating"].reason) == ("True", "Stalled")


def test_pressure_is_named_instead_of_a_ready_condition_that_is_true() -> None:
    conditions = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:02:00Z"},
        {"type": "DiskPressure", "status": "Unknown"},
    ]
    document = {"metadata": {"name": "n0"}, "status": {"conditions": conditions}}
    assert describe_holder(NodeFacts.from_json(document), 0.0).reason == "DiskPressure is Unknown"
    conditions[0]["status"] = "False"
    found = describe_holder(NodeFacts.from_json(document), 0.0)
    assert found.reason == "not ready since 1970-01-01T00:02:00Z"


def test_degraded_nodes_are_named_with_the_unexpected_first() -> None:
    nodes = [updating("a"), failed("b"), replace(node("c"), unschedulable=True)]
    found = decide_rollout(pool(maxUnavailable=3), [*nodes, node("d")], proceed(), None, now=START)
    assert found.waiting_reason.endswith(
        "reached by b (degraded), c (cordoned by a user), a (updating)"
    )


def node_with(blocked: str, **annotations: str) -> NodeFacts:
    notes = {key.DESIRED_DRAIN: "drain-x", key.DRAIN_BLOCKED: blocked, **annotations}
    return NodeFacts.from_json({"metadata": {"name": "n", "annotations": notes}})


@pytest.mark.parametrize(
    ("blocked", "expected"),
    [
        ([{"pod": "shop/web-1", "message": "m", "budgets": [{"name": "web"}]}], BUDGET),
        ([{"pod": "shop/web-1", "message": "a webhook"}], "pod shop/web-1: a webhook"),
        (
            [{"pod": "a/b", "message": "m"}, {"pod": "a/c", "message": "n"}],
            "pod a/b and 1 more: m",
        ),
        ([], ""),
        ({"no": "list"}, "pods"),
    ],
)
def test_drain_blocker_is_read_from_the_node(blocked: object, expected: str) -> None:
    assert node_with(json.dumps(blocked)).drain_blocker == expected


def test_blocker_of_a_finished_drain_is_ignored() -> None:
    blocked = json.dumps([{"pod": "a/b", "message": "m"}])
    assert node_with(blocked, **{key.LAST_APPLIED_DRAIN: "drain-x"}).drain_blocker == ""


def test_stalled_pool_is_reported_in_the_cluster_and_recovers() -> None:
    world = World(takes_s=2 * HOUR)
    for name in ("n0", "n1"):
        world.add_node(name, "old")
    world.set_policy("careful", {})
    world.set_pool("worker", "new", rolloutPolicy="careful")
    controlled = build_reconciler(world)
    for wait_s in (0.0, 10.0, HOUR):
        world.pass_time(wait_s)
        world.deliver()
        controlled.sync_pool("worker")
    stalled = world.conditions()["Stalled"]
    message = "no progress for more than 60 min (progressDeadline): n0 (updating)"
    assert (stalled["status"], stalled["message"]) == ("True", message)
    assert world.warnings == [("worker", "ProgressDeadlineExceeded", message)]
    (entry,) = world.objects["rolloutpolicies"]["careful"]["status"]["pools"]
    assert entry["state"] == "Stalled"

    world.pass_time(HOUR)
    world.deliver()
    controlled.sync_pool("worker")
    assert world.conditions()["Stalled"]["status"] == "False"
    assert world.truth["n1"].desired_config == "new"
