"""A target whose step failed is tried again, less and less often."""

from dataclasses import replace

from tests.update.build import A, B, facts, observed_node
from treenail.errors import HostError
from treenail.update.decision.actions import RefuseAction, RetryAction
from treenail.update.decision.decide import decide_action
from treenail.update.decision.decide_idle import (
    LAST_DELAY_S,
    compute_retry_delay,
    format_retry_remedy,
)
from treenail.update.state.ledger_record import (
    LedgerRecord,
    PastUpdate,
    QuarantinedTarget,
    UpdateOutcome,
)

FAILED = PastUpdate("1", B, A, 0.0, 1.0, UpdateOutcome.FAILED)


def test_delay_doubles_with_each_failure_of_target_in_a_row() -> None:
    other = replace(FAILED, target=A)
    delays = [
        compute_retry_delay(LedgerRecord(history=(FAILED,) * count), B, needs_drain=False)
        for count in (0, 1, 2, 20)
    ]
    assert delays == [120.0, 240.0, 480.0, LAST_DELAY_S]
    mixed = LedgerRecord(history=(other, FAILED))
    assert compute_retry_delay(mixed, B, needs_drain=True) == 600.0


def test_failed_step_is_retried_when_delay_is_over() -> None:
    quarantined = QuarantinedTarget(B, "cannot restart fake.service: not found", retry_at=200.0)
    record = LedgerRecord(current=A, quarantined=quarantined)
    at = facts(record=record, node=observed_node(B))
    assert isinstance(decide_action(replace(at, now=199.0)), RefuseAction)
    assert isinstance(decide_action(replace(at, now=200.0)), RetryAction)
    unhealthy = replace(record, quarantined=replace(quarantined, retry_at=0.0))
    assert isinstance(decide_action(replace(at, record=unhealthy, now=1e9)), RefuseAction)


def test_failed_step_is_retried_when_its_time_was_set_by_a_clock_of_the_future() -> None:
    quarantined = QuarantinedTarget(B, "cannot restart fake.service", retry_at=4e9)
    record = LedgerRecord(current=A, quarantined=quarantined)
    at = facts(record=record, node=observed_node(B))
    assert isinstance(decide_action(replace(at, now=4e9 - LAST_DELAY_S)), RefuseAction)
    assert isinstance(decide_action(replace(at, now=1.8e9)), RetryAction)


def test_remedy_names_time_and_command() -> None:
    error = HostError("x", remedy=format_retry_remedy("correct the unit", 0.0))
    assert error.remedy == (
        "correct the unit; the agent tries again at 1970-01-01T00:00:00Z; "
        "to try at once, run on this node: treenail retry"
    )
