"""Decisions of a rollout, single ones and over the days of a simulated pool."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    NEWER,
    OLD,
    decide_rollout,
    failed,
    image,
    node,
    on_its_way,
    pool,
    proceed,
)
from tests.controllers.rollout.simulation import all_have, fleet
from treenail.controllers.pools.maintenance_windows import DAYS
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.os_image import GateBlocked, GateWaiting
from treenail.controllers.pools.pool_status import PoolProblem
from treenail.controllers.pools.rollout_record import NodeFailure, RolloutRecord
from treenail.controllers.rollout.decide import RolloutDecision

HOUR = 3600.0


def decide(
    found: object, nodes: list[NodeFacts], record: RolloutRecord | None = None, **context: Any
) -> RolloutDecision:
    return decide_rollout(found, nodes, proceed(), record, now=1000.0, **context)


def names(count: int) -> list[NodeFacts]:
    return [node(f"n{number}") for number in range(count)]


def test_max_unavailable_limits_assigned_nodes() -> None:
    assert decide(pool(maxUnavailable=2), names(4)).nodes_to_assign == ("n0", "n1")
    busy = [on_its_way("a"), *names(4)]
    assert decide(pool(maxUnavailable=2), busy).nodes_to_assign == ("n0",)


def test_updated_pool_assigns_no_node() -> None:
    found = decide(pool(), [node("a", NEW)])
    assert found == RolloutDecision(target=NEW, record=RolloutRecord(NEW))


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([on_its_way("a")], "a (updating)"),
        ([on_its_way("a", is_healthy=False)], "a (not ready)"),
        ([failed("a", unschedulable=True)], "a (degraded)"),
        ([failed("a")], "a (degraded)"),
        ([node("a", unschedulable=True)], "a (cordoned by a user)"),
        (
            [on_its_way(name) for name in "abcde"],
            "a (updating), b (updating), c (updating) and 2 more",
        ),
    ],
)
def test_waiting_reason_names_nodes_that_use_max_unavailable(
    nodes: list[NodeFacts], reason: str
) -> None:
    limit = len(nodes)
    decision = decide(pool(maxUnavailable=limit), [*nodes, node("z")])
    assert decision.nodes_to_assign == ()
    assert decision.waiting_reason == f"waiting: maxUnavailable ({limit}) reached by {reason}"


def test_waiting_reason_below_max_unavailable_names_nodes_that_cannot_be_assigned() -> None:
    nodes = [node("a", NEW), node("b", unschedulable=True), node("c", is_healthy=False)]
    decision = decide(pool(maxUnavailable=3), nodes)
    assert decision.nodes_to_assign == ()
    assert decision.waiting_reason == "waiting for b (cordoned by a user), c (not ready)"


def test_paused_pool_assigns_no_node() -> None:
    assert decide(pool(paused=True), names(3)).nodes_to_assign == ()


@pytest.mark.parametrize(
    "verdict", [GateWaiting("the image is being built"), GateBlocked("it failed")]
)
def test_closed_gate_assigns_no_node(verdict: GateWaiting | GateBlocked) -> None:
    for found in (
        decide_rollout(pool(), names(3), verdict, None, now=0.0),
        decide_rollout(pool(), names(3), proceed(), None, now=0.0, gate_verdicts=[verdict]),
    ):
        assert found.nodes_to_assign == ()
        if isinstance(verdict, GateWaiting):
            assert found.waiting_reason == "the image is being built"
        else:
            assert found.problem == PoolProblem("Blocked", "it failed")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (pool(maxUnavailable="50"), "spec.maxUnavailable of pool worker is '50', which is neither"),
    ],
)
def test_invalid_pool_assigns_no_node_and_reports_the_error(found: object, sentence: str) -> None:
    record = RolloutRecord(NEW)
    result = decide(found, names(3), record)
    assert (result.nodes_to_assign, result.record) == ((), record)
    assert result.problem.reason == "InvalidConfiguration"
    assert result.problem.message.startswith(sentence)


def test_last_node_is_assigned_last() -> None:
    found = decide_rollout(pool(), names(3), proceed(), None, now=0.0, last_node="n0")
    assert found.nodes_to_assign == ("n1",)
    alone = decide_rollout(
        pool(), [node("n0"), node("n1", NEW)], proceed(), None, now=0.0, last_node="n0"
    )
    assert alone.nodes_to_assign == ("n0",)


def test_failing_node_gets_new_target_first() -> None:
    nodes = [*names(3), failed("z")]
    found = decide_rollout(pool(), nodes, proceed(NEWER), None, now=0.0)
    assert found.nodes_to_assign == ("z",)


def test_failed_cordoned_node_gets_new_target() -> None:
    # It holds the only place; waiting for it to come back would be waiting for ever.
    nodes = [*names(3), failed("z", unschedulable=True)]
    found = decide_rollout(pool(), nodes, proceed(NEWER), None, now=0.0)
    assert found.nodes_to_assign == ("z",)


def test_degraded_state_of_previous_target_counts_after_grace_period() -> None:
    given = failed("a", OLD).with_target(NEW, 990.0)
    found = decide(pool({}), [given, node("b")])
    assert found.problem is None
    assert found.requeue_after_s == 50.0
    later = decide_rollout(pool({}), [given, node("b")], proceed(), found.record, now=1051.0)
    assert later.problem.reason == "Halted"


def test_canary_soaks_before_next_wave() -> None:
    careful = pool({"canary": {"soak": "10m"}}, maxUnavailable=3)
    nodes = names(4)
    first = decide(careful, nodes)
    assert first.nodes_to_assign == ("n0",)
    nodes[0] = on_its_way("n0")
    assert decide(careful, nodes, first.record).waiting_reason == ("wave 1 of 2 is in progress")
    nodes[0] = node("n0", NEW)
    soaking = decide(careful, nodes, first.record)
    assert (soaking.nodes_to_assign, soaking.requeue_after_s) == ((), 600.0)
    assert soaking.waiting_reason == "wave 1 of 2 is soaking; the next wave starts in 10 min"
    after = decide_rollout(careful, nodes, proceed(), soaking.record, now=1600.0)
    assert after.nodes_to_assign == ("n1", "n2", "n3")


def test_estimate_counts_only_the_rest_of_a_soak() -> None:
    careful = pool({"canary": {"soak": "30m"}}, maxUnavailable=3)
    nodes = [node("n0", NEW), node("n1"), node("n2")]
    soaking = decide(careful, nodes, decide(careful, nodes).record)
    assert "about 40 min left" in soaking.progress_message
    later = decide_rollout(careful, nodes, proceed(), soaking.record, now=1000.0 + 1200.0)
    assert "about 20 min left" in later.progress_message


def test_canary_not_ready_during_soak_restarts_the_soak() -> None:
    careful = pool({"canary": {"soak": "10m"}})
    nodes = [node("n0", NEW), node("n1")]
    soaking = decide(careful, nodes)
    gone = decide_rollout(
        careful,
        [node("n0", NEW, is_healthy=False), node("n1")],
        proceed(),
        soaking.record,
        now=1300.0,
    )
    assert gone.record == RolloutRecord(NEW, blocked_since=1300.0)
    back = decide_rollout(careful, nodes, proceed(), gone.record, now=1700.0)
    assert (back.nodes_to_assign, back.requeue_after_s) == ((), 600.0)


def test_canary_is_selected_by_labels() -> None:
    careful = pool({"canary": {"nodeSelector": {"matchLabels": {"canary": ""}}}})
    assert decide(careful, [node("a"), node("b", labels={"canary": ""})]).nodes_to_assign == ("b",)


def test_canary_without_nodes_stops_rollout_with_a_problem() -> None:
    careful = pool({"canary": {"nodeSelector": {"matchLabels": {"canary": ""}}}})
    found = decide(careful, names(2))
    assert found.nodes_to_assign == ()
    assert found.problem == PoolProblem(
        "EmptyWave",
        "no node of the pool matches the nodeSelector of wave 1: label a node, or correct the "
        "selector in the rollout policy",
    )


def test_failure_halts_rollout_and_names_the_remedy() -> None:
    nodes = [failed("b", started_at=20.0), failed("a", started_at=10.0, reason="disk"), node("c")]
    found = decide(pool({}, maxUnavailable=3), nodes)
    assert found.nodes_to_assign == ()
    assert found.record == RolloutRecord(NEW, halted_by=NodeFailure("a", "disk"))
    assert found.problem == PoolProblem(
        "Halted",
        "The rollout of MachineConfig new is halted: node a failed first: disk; set another "
        "target, or resume: kubectl patch rolloutpolicy {} --type merge "
        """-p '{"spec": {"resume": {"worker": "1"}}}'""",
    )


def test_halt_ends_only_by_resume_field() -> None:
    halted = RolloutRecord(NEW, halted_by=NodeFailure("a", "disk"))
    healed = [node("a", NEW), node("c")]
    found = decide(pool({}), healed, halted)
    assert found.nodes_to_assign == ()
    assert (
        "is halted: node a failed and has recovered since; its failure was: disk; set another"
        in found.problem.message
    )
    resumed = decide(pool({"resume": {"worker": "today"}}), healed, halted)
    assert resumed.nodes_to_assign == ("c",)
    assert resumed.record == RolloutRecord(NEW, resume_value="today")


def test_halt_names_a_value_that_resumes() -> None:
    nodes = [failed("a"), node("b")]
    found = decide(pool({"resume": {"worker": "4"}}), nodes)
    assert '{"spec": {"resume": {"worker": "5"}}}' in found.problem.message


def test_resume_of_another_pool_does_not_end_the_halt() -> None:
    halted = RolloutRecord(NEW, halted_by=NodeFailure("a", "disk"))
    other = pool({"resume": {"infra": "1"}})
    assert decide(other, [node("a", NEW), node("c")], halted).nodes_to_assign == ()


def test_halt_ends_without_policy() -> None:
    halted = RolloutRecord(NEW, halted_by=NodeFailure("a", "disk"))
    assert decide(pool(), [node("a", NEW), node("c")], halted).nodes_to_assign == ("c",)


def test_resume_acknowledges_only_present_failures() -> None:
    halted = RolloutRecord(NEW, halted_by=NodeFailure("a", "disk"))
    word = pool({"resume": {"worker": "1"}}, maxUnavailable=3)
    nodes = [failed("a"), node("b"), node("c")]
    resumed = decide(word, nodes, halted)
    assert resumed.nodes_to_assign == ("b", "c")
    assert resumed.record == RolloutRecord(NEW, resume_value="1", acknowledged=("a",))
    again = decide(word, [failed("a"), failed("b"), node("c")], resumed.record)
    assert again.record.halted_by == NodeFailure("b", "no space left")


def test_acknowledged_node_that_recovered_halts_again_when_it_fails() -> None:
    word = pool({"resume": {"worker": "1"}}, maxUnavailable=3)
    record = RolloutRecord(NEW, resume_value="1", acknowledged=("a",))
    for state in (failed("a"), on_its_way("a"), failed("a", reason="no route to host")):
        found = decide(word, [state, node("b")], record)
        assert (found.record, found.nodes_to_assign) == (record, ("b",))
    recovered = decide(word, [node("a", NEW), node("b")], record)
    assert recovered.record == RolloutRecord(NEW, resume_value="1")
    found = decide(word, [failed("a", reason="no route to host"), node("b")], recovered.record)
    assert found.record.halted_by == NodeFailure("a", "no route to host")


def test_acknowledged_node_that_was_deleted_halts_again_when_it_fails() -> None:
    word = pool({"resume": {"worker": "1"}}, maxUnavailable=3)
    record = RolloutRecord(NEW, resume_value="1", acknowledged=("a",))
    found = decide(word, [node("b")], record)
    assert found.record == RolloutRecord(NEW, resume_value="1")


def test_max_failures_tolerates_that_many_failed_nodes() -> None:
    lenient = pool({"maxFailures": 1}, maxUnavailable=3)
    assert decide(lenient, [failed("a"), node("b"), node("c")]).nodes_to_assign == ("b", "c")
    assert decide(lenient, [failed("a"), failed("b"), node("c")]).nodes_to_assign == ()


def test_node_not_ready_after_reboot_timeout_has_failed() -> None:
    careful = pool({"rebootTimeout": "10m"}, maxUnavailable=2)
    gone = on_its_way("a", is_healthy=False, started_at=100.0, ready_changed_at=500.0)
    found = decide(careful, [gone, node("b")])
    assert (found.nodes_to_assign, found.requeue_after_s) == (("b",), 100.0)
    late = decide_rollout(careful, [gone, node("b")], proceed(), found.record, now=1101.0)
    assert late.record.halted_by == NodeFailure(
        "a", "it has not been ready for 10 min (rebootTimeout: 10 min)"
    )


def test_pressure_of_a_ready_node_fails_it_after_reboot_timeout_under_its_own_name() -> None:
    careful = pool({"rebootTimeout": "10m"}, maxUnavailable=2)
    conditions = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:02:00Z"},
        {"type": "DiskPressure", "status": "True", "lastTransitionTime": "1970-01-01T02:00:00Z"},
    ]
    document = {"metadata": {"name": "a"}, "status": {"conditions": conditions}}
    observed = NodeFacts.from_json(document)
    full = replace(
        node("a", NEW, started_at=100.0, ready_changed_at=120.0, is_healthy=False),
        pressure=observed.pressure,
        pressure_changed_at=observed.pressure_changed_at,
    )
    early = decide_rollout(careful, [full, node("b")], proceed(), None, now=7200.0)
    assert (early.nodes_to_assign, early.requeue_after_s) == (("b",), 600.0)
    late = decide_rollout(careful, [full, node("b")], proceed(), early.record, now=7801.0)
    assert late.record.halted_by == NodeFailure(
        "a", "DiskPressure is True for 10 min (rebootTimeout: 10 min)"
    )


def test_new_target_starts_new_rollout() -> None:
    halted = RolloutRecord(NEW, wave=1, halted_by=NodeFailure("a", "disk"), acknowledged=("x",))
    found = decide_rollout(pool({}), [failed("a"), node("b")], proceed(NEWER), halted, now=0.0)
    assert (found.nodes_to_assign, found.record) == (("a",), RolloutRecord(NEWER))


def test_closed_window_assigns_no_node_and_reports_its_opening() -> None:
    window = {"days": ["Sat"], "start": "01:00", "duration": "2h", "timeZone": "UTC"}
    careful = pool({"windows": [window]})
    friday = datetime(2026, 1, 2, 23, tzinfo=UTC).timestamp()
    closed = decide_rollout(careful, names(2), proceed(), None, now=friday)
    assert (closed.nodes_to_assign, closed.requeue_after_s) == ((), 2 * HOUR)
    assert closed.waiting_reason == "waiting: the maintenance window opens at 2026-01-03 01:00 UTC"
    assert decide_rollout(
        careful, names(2), proceed(), None, now=friday + 2 * HOUR
    ).nodes_to_assign == ("n0",)
    late = decide_rollout(careful, names(2), proceed(), None, now=friday + 4 * HOUR - 300)
    assert (late.nodes_to_assign, late.requeue_after_s) == ((), 300.0)
    assert late.waiting_reason == (
        "waiting: a node takes about 10 min, but the maintenance window closes in 5 min"
    )


def test_remaining_time_is_estimated_from_updated_nodes() -> None:
    through = [
        node(f"d{took}", NEW, started_at=100.0, ready_changed_at=100.0 + took)
        for took in (240, 300, 900)
    ]
    found = decide(pool(), [*through, *names(5)])
    assert found.progress_message == "3 of 8 nodes are updated, about 38 min left"


# Over days, with everything that a pool's nodes do.


def test_bad_image_reaches_only_the_canary() -> None:
    fleet_ = fleet(500)
    bad, good = image("new", "b"), image("new", "c")
    fleet_.bad = [bad]
    careful = pool({"canary": {"soak": "10m"}, "waves": ["10%"]}, maxUnavailable="10%")
    last = fleet_.run(careful, bad, until=24 * HOUR)
    assert fleet_.ever_given[bad] == {"n000"}
    assert "node n000 failed first: the image does not boot" in last.problem.message
    fleet_.run(careful, good, until=72 * HOUR)
    assert all_have(fleet_, good)


@pytest.mark.parametrize("stays_cordoned", [True, False])
@pytest.mark.parametrize("bad", [image("old", "b"), NEWER])
def test_good_target_repairs_nodes_of_a_bad_one_without_policy(
    bad: object, stays_cordoned: bool
) -> None:
    fleet_ = fleet(5)
    fleet_.bad = [bad]  # type: ignore[list-item]  # a target
    fleet_.stays_cordoned = stays_cordoned
    fleet_.run(pool(), bad, until=4 * HOUR)  # type: ignore[arg-type]  # a target
    assert fleet_.most_unavailable == 1
    assert not all_have(fleet_, bad)  # type: ignore[arg-type]  # a target
    fleet_.run(pool(), NEW, until=24 * HOUR)
    assert all_have(fleet_, NEW)
    assert fleet_.most_unavailable == 1


def test_500_nodes_update_only_inside_the_windows() -> None:
    window = {
        "days": list(DAYS),
        "start": "01:00",
        "duration": "2h",
        "timeZone": "Europe/Berlin",
    }
    careful = pool({"windows": [window], "order": "spread"}, maxUnavailable="10%")
    fleet_ = fleet(500)
    fleet_.now = started = datetime(2026, 3, 27, 12, tzinfo=UTC).timestamp()
    fleet_.run(careful, NEW, until=started + 72 * HOUR, step_s=30.0)
    assert all_have(fleet_, NEW)
    assert fleet_.most_unavailable == 50
    night = datetime(2026, 3, 28, tzinfo=UTC).timestamp()  # 01:00 in Berlin
    times = [each.started_at or 0.0 for each in fleet_.nodes.values()]
    assert min(times) >= night
    assert max(times) + fleet_.takes_s <= night + 2 * HOUR


def test_each_wave_soaks_before_the_next_larger_one() -> None:
    careful = pool({"canary": {}, "waves": ["10%", "50%"], "soak": "1h"}, maxUnavailable=100)
    fleet_ = fleet(100)
    fleet_.run(careful, NEW, until=24 * HOUR)
    assert all_have(fleet_, NEW)
    given = sorted(each.started_at or 0.0 for each in fleet_.nodes.values())
    starts = [given[0], given[1], given[10], given[50]]
    assert [given.count(at) for at in starts] == [1, 9, 40, 50]
    for before, after in pairwise(starts):
        assert after - before >= fleet_.takes_s + HOUR


def test_member_that_is_down_in_another_pool_is_waited_for() -> None:
    label = {"node-role.kubernetes.io/control-plane": ""}
    masters = [node(name, labels=label) for name in "ab"]
    canary = node("c", labels=label, unschedulable=True)
    found = decide(pool(maxUnavailable=2), masters, etcd_members=[*masters, canary])
    assert found.nodes_to_assign == ()
    assert found.waiting_reason == (
        "waiting: maxUnavailable (0) for the quorum of etcd reached by c (cordoned by a user) in "
        "all pools"
    )


def test_limit_of_control_plane_pool_is_explained() -> None:
    label = {"node-role.kubernetes.io/control-plane": ""}
    masters = [node(name, labels=label) for name in "abc"]
    found = decide(pool(maxUnavailable=2), masters)
    assert found.nodes_to_assign == ("a",)
    assert found.progress_message.startswith(
        "maxUnavailable (2) is limited to 1, so that etcd keeps the quorum of its members; "
    )


@pytest.mark.parametrize(("limit", "is_explained"), [(0, True), ("0%", True), (1, False)])
def test_limit_of_zero_is_explained(limit: int | str, is_explained: bool) -> None:
    found = decide(pool(maxUnavailable=limit), [node("a"), node("b")])
    assert found.nodes_to_assign == ("a",)
    note = f"maxUnavailable ({limit}) acts as 1, pause the pool to stop its rollout; "
    assert found.progress_message.startswith(note) == is_explained
