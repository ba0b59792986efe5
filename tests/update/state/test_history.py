"""Why a node was disturbed can be told from the ledger alone."""

from dataclasses import replace

from tests.update.build import A, B, C, update
from treenail.update.impact.disruption import Level
from treenail.update.impact.impact import Work
from treenail.update.state.history import Account, Asked, account
from treenail.update.state.record import Outcome, Past, Phase, Record

REASON = "file /etc/a changed (no policy for this path), from MachineConfig 99-a"
QUIET = Past("3" * 32, C, B, 300.0, 310.0, Outcome.DONE, spent=((Phase.STAGING, 10.0),))
REBOOTED = Past(
    "2" * 32,
    B,
    A,
    200.0,
    290.0,
    Outcome.DONE,
    reboots=1,
    reasons=(REASON,),
    spent=((Phase.STAGING, 50.0), (Phase.DRAINING, 20.0), (Phase.REBOOTING, 20.0)),
)
ASKED = Asked("2" * 32, A, B, 200.0, drains=True, reboots=True, reasons=(REASON,))


def test_last_update_that_disturbed_the_node_is_named_and_a_quiet_one_is_not() -> None:
    record = Record(C, history=(QUIET, REBOOTED))
    assert account(record, booted_at=None) == Account(last=ASKED)


def test_boot_is_attributed_to_the_update_that_rebooted_then() -> None:
    record = Record(C, history=(QUIET, REBOOTED))
    assert account(record, booted_at=280.0).boot == ASKED
    assert account(record, booted_at=305.0).boot is None
    assert account(record, booted_at=100.0).boot is None


def test_reboot_that_was_only_planned_explains_no_boot() -> None:
    planned = Record(A, update(Phase.STAGING, began=400.0))
    assert account(planned, booted_at=405.0).boot is None
    asked = Record(A, update(Phase.REBOOTING, began=400.0, reboots=1))
    found = account(asked, booted_at=405.0)
    assert found.boot == found.pending


def test_update_under_way_says_what_it_asks_for_once_that_is_known() -> None:
    begun = Record(A, update(Phase.STAGING, began=400.0, work=None))
    found = account(begun, booted_at=None).pending
    assert found is not None
    assert found.deed == "change that is being worked out"
    work = Work(level=Level.REBOOT, reasons=(REASON,))
    found = account(replace(begun, update=update(work=work)), booted_at=None).pending
    assert found is not None
    assert (found.deed, found.reasons) == ("drain and reboot", (REASON,))


def test_node_that_was_never_updated_has_nothing_to_account_for() -> None:
    assert account(Record(), booted_at=1.0) == Account()


def test_a_soft_reboot_is_called_so() -> None:
    found = account(Record(C, history=(replace(REBOOTED, soft=True),)), booted_at=None)
    assert found.last is not None
    assert found.last.deed == "drain and soft reboot"
