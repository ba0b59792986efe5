"""The history of disruptions, from the ledger alone."""

from dataclasses import replace

from tests.update.build import A, B, C, update
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.state.history import DisruptionHistory, UpdateSummary, summarize_history
from treenail.update.state.ledger_record import LedgerRecord, PastUpdate, Phase, UpdateOutcome

REASON = "file /etc/a changed (no policy for this path), from MachineConfig 99-a"
QUIET = PastUpdate(
    "3" * 32, C, B, 300.0, 310.0, UpdateOutcome.DONE, phase_seconds={Phase.STAGING: 10.0}
)
REBOOTED = PastUpdate(
    "2" * 32,
    B,
    A,
    200.0,
    290.0,
    UpdateOutcome.DONE,
    reboot_count=1,
    reasons=(REASON,),
    phase_seconds={Phase.STAGING: 50.0, Phase.DRAINING: 20.0, Phase.REBOOTING: 20.0},
)
SUMMARY = UpdateSummary(
    "2" * 32, A, B, 200.0, needs_drain=True, needs_reboot=True, reasons=(REASON,)
)


def test_last_disruption_is_the_last_update_that_drained_or_rebooted() -> None:
    record = LedgerRecord(C, history=(QUIET, REBOOTED))
    assert summarize_history(record, booted_at=None) == DisruptionHistory(last=SUMMARY)


def test_boot_belongs_to_the_update_that_rebooted_then() -> None:
    record = LedgerRecord(C, history=(QUIET, REBOOTED))
    assert summarize_history(record, booted_at=280.0).boot == SUMMARY
    assert summarize_history(record, booted_at=305.0).boot is None
    assert summarize_history(record, booted_at=100.0).boot is None


def test_boot_does_not_belong_to_an_update_that_only_plans_a_reboot() -> None:
    planned = LedgerRecord(A, update(Phase.STAGING, began=400.0))
    assert summarize_history(planned, booted_at=405.0).boot is None
    rebooting = LedgerRecord(A, update(Phase.REBOOTING, began=400.0, reboot_count=1))
    found = summarize_history(rebooting, booted_at=405.0)
    assert found.boot == found.pending


def test_pending_update_has_its_disruption_once_planned() -> None:
    begun = LedgerRecord(A, update(Phase.STAGING, began=400.0, impact=None))
    found = summarize_history(begun, booted_at=None).pending
    assert found.disruption == "change that is being planned"
    impact = UpdateImpact(level=DisruptionLevel.REBOOT, reasons=(REASON,))
    found = summarize_history(replace(begun, update=update(impact=impact)), booted_at=None).pending
    assert (found.disruption, found.reasons) == ("drain and reboot", (REASON,))


def test_history_of_new_node_is_empty() -> None:
    assert summarize_history(LedgerRecord(), booted_at=1.0) == DisruptionHistory()


def test_soft_reboot_is_named_as_disruption() -> None:
    found = summarize_history(
        LedgerRecord(C, history=(replace(REBOOTED, is_soft_reboot=True),)), booted_at=None
    )
    assert found.last.disruption == "drain and soft reboot"
