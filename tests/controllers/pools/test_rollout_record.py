"""The record of a rollout in JSON, failures, and the time of the next check."""

from dataclasses import replace

import pytest

from tests.controllers.rollout.builders import (
    NEW,
    failed,
    image,
    node,
    on_its_way,
    pool,
    read_policy,
)
from treenail.controllers.pools.node_facts import RolloutTarget
from treenail.controllers.pools.rollout_policy import RolloutPolicy
from treenail.controllers.pools.rollout_record import (
    NodeFailure,
    PastOutcome,
    RolloutRecord,
    advance_record,
    compute_next_check_s,
    find_failures,
    record_assignment,
)
from treenail.errors import ConfigError


@pytest.mark.parametrize(
    "record",
    [
        RolloutRecord(NEW),
        RolloutRecord(
            image("new", "1"), wave=2, settled_at=1234.0, resume_value="x", acknowledged=("a", "b")
        ),
        RolloutRecord(NEW, halted_by=NodeFailure("a", 'it said "no"\nand more')),
    ],
)
def test_record_survives_round_trip(record: RolloutRecord) -> None:
    assert RolloutRecord.from_json(record.to_json()) == record


def test_new_record_has_only_the_config() -> None:
    assert RolloutRecord(NEW).to_json() == {"config": "new"}


@pytest.mark.parametrize("found", ["", [], {"wave": "1"}, {"halted": 1}])
def test_invalid_record_is_rejected(found: object) -> None:
    with pytest.raises(ConfigError):
        RolloutRecord.from_json(found)


def test_waves_without_soak_advance_at_once() -> None:
    careful = read_policy(pool({"canary": {}, "waves": [2, 3]}))
    nodes = [node(name, NEW) for name in "abc"] + [node("d")]
    assert advance_record(None, careful, nodes, NEW, now=0.0).wave == 3


def test_failures_are_sorted_by_assignment() -> None:
    nodes = [
        failed("c", started_at=30.0),
        failed("a", started_at=10.0, reason=""),
        failed("b", started_at=20.0, reason="x" * 1000),
        node("d", NEW),
        on_its_way("e"),
    ]
    assert find_failures(nodes, NEW, RolloutPolicy(), now=1000.0) == (
        NodeFailure("a", "it is Degraded without a reason"),
        NodeFailure("b", "x" * 400),
        NodeFailure("c", "no space left"),
    )


def test_only_previously_degraded_node_has_grace_period() -> None:
    nodes = [
        failed("a", started_at=100.0),
        failed("b", started_at=failed("b").compute_start(100.0)),
    ]
    failures = (NodeFailure("a", "no space left"), NodeFailure("b", "no space left"))
    assert find_failures(nodes, NEW, RolloutPolicy(), now=101.0) == failures[:1]
    assert find_failures(nodes, NEW, RolloutPolicy(), now=160.0) == failures


def test_node_without_assignment_cannot_fail() -> None:
    careful = read_policy(pool({"rebootTimeout": "1m"}))
    ill = node("a", NEW, is_healthy=False, ready_changed_at=10.0, started_at=None)
    assert find_failures([ill], NEW, careful, now=1e6) == ()
    assert compute_next_check_s(RolloutRecord(NEW), careful, [ill], NEW, now=20.0) is None


def test_next_check_is_the_earliest_deadline() -> None:
    careful = read_policy(pool({"canary": {"soak": "10m"}, "rebootTimeout": "20m"}))
    nodes = [
        on_its_way("a", is_healthy=False, started_at=100.0, ready_changed_at=400.0),
        failed("b", started_at=620.0),
    ]
    record = RolloutRecord(NEW, settled_at=500.0)
    assert compute_next_check_s(record, careful, nodes, NEW, now=600.0) == 20.0
    assert compute_next_check_s(record, careful, nodes, NEW, now=630.0) == 470.0
    assert compute_next_check_s(RolloutRecord(NEW), careful, nodes, NEW, now=630.0) == 970.0
    assert compute_next_check_s(RolloutRecord(NEW), careful, [node("a")], NEW, now=630.0) is None


def test_last_five_rollouts_are_kept_with_their_outcome() -> None:
    policy = RolloutPolicy()
    record = None
    for number in range(8):
        target = RolloutTarget(f"config-{number}")
        record = advance_record(record, policy, [node("a")], target, now=100.0 * number)
    assert [past.config for past in record.history] == [f"config-{n}" for n in (6, 5, 4, 3, 2)]
    assert {past.outcome for past in record.history} == {PastOutcome.REPLACED}
    assert (record.history[0].began_at, record.history[0].ended_at) == (600.0, 700.0)
    assert RolloutRecord.from_json(record.to_json()).history == record.history


def test_history_says_whether_a_rollout_was_complete_or_halted() -> None:
    policy = RolloutPolicy(max_failures=0)
    record = advance_record(None, policy, [node("a", NEW)], NEW, now=10.0)
    assert record.completed_at == 10.0
    after = advance_record(record, policy, [node("a")], RolloutTarget("next"), now=99.0)
    assert (after.history[0].outcome, after.history[0].ended_at) == (PastOutcome.COMPLETE, 10.0)
    halted = replace(after, halted_by=NodeFailure("a", "disk"))
    last = advance_record(halted, policy, [node("a")], NEW, now=120.0)
    assert (last.history[0].outcome, last.history[0].reason) == (PastOutcome.HALTED, "a: disk")


def test_kind_that_drops_the_history_is_not_written_again_and_again() -> None:
    pruned = RolloutRecord.from_json({"config": "new"})
    found = advance_record(pruned, RolloutPolicy(), [node("a", NEW)], NEW, now=10.0)
    assert found.to_json() == {"config": "new"}


def test_times_of_a_finished_rollout_are_dropped() -> None:
    record = RolloutRecord(NEW, began_at=1.0, assigned={"a": 5, "gone": 5})
    found = advance_record(record, RolloutPolicy(), [node("a", NEW)], NEW, now=10.0)
    assert (found.completed_at, found.assigned) == (10.0, {})


def test_node_that_undid_its_assignment_gains_no_time() -> None:
    record = RolloutRecord(NEW, began_at=1.0, assigned={"a": 5})
    assert record_assignment(record, [node("a")], 100.0).assigned == {"a": 5}
    later = replace(record, began_at=50.0)
    assert record_assignment(later, [node("a")], 100.0).assigned == {"a": 100}


def test_assignment_counts_after_the_clock_went_back() -> None:
    record = record_assignment(RolloutRecord(NEW, began_at=500.0), [node("a")], 100.0)
    assert record.assigned_now == {"a": 500}
