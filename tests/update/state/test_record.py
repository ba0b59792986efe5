"""What the ledger holds, written and read again."""

from dataclasses import replace

import pytest

from tests.update.build import A, B, C, update
from treenail.errors import LedgerError
from treenail.update.state.record import (
    HISTORY_LIMIT,
    LedgerRecord,
    PastUpdate,
    Phase,
    QuarantinedTarget,
    UpdateOutcome,
    from_json,
    to_json,
)

PAST = PastUpdate(
    "1" * 32, B, A, 1.0, 2.5, UpdateOutcome.FAILED, 3, ("file /etc/a changed",), "it broke"
)
SPENT = ((Phase.STAGING, 12.0), (Phase.DRAINING, 3.5))


@pytest.mark.parametrize(
    "record",
    [
        LedgerRecord(),
        LedgerRecord(current=A),
        LedgerRecord(
            A, update(Phase.DRAINING, drain_token="drain-x", reboot_count=2, phase_seconds=SPENT)
        ),
        LedgerRecord(
            A,
            None,
            QuarantinedTarget(B, "it broke", "mend it"),
            (PAST, replace(PAST, phase_seconds=SPENT)),
        ),
    ],
)
def test_a_record_is_read_as_it_was_written(record: LedgerRecord) -> None:
    assert from_json(to_json(record)) == record


@pytest.mark.parametrize("key", ["current", "update", "refused"])
def test_a_ledger_of_another_form_is_refused(key: str) -> None:
    document = to_json(LedgerRecord(current=A))
    with pytest.raises(LedgerError, match="not of a form"):
        from_json({**document, key: "nonsense"})


def test_an_update_that_is_over_is_history() -> None:
    begun = update(Phase.CANCELLING, began=5.0, entered=6.0, reboot_count=1)
    record = LedgerRecord(A, begun, QuarantinedTarget(B, "it broke"))
    over = record.close_update(UpdateOutcome.FAILED, now=9.0)
    past = PastUpdate(
        "0" * 32,
        B,
        A,
        5.0,
        9.0,
        UpdateOutcome.FAILED,
        reboot_count=1,
        failure="it broke",
        phase_seconds=((Phase.CANCELLING, 3.0),),
    )
    assert over == replace(record, update=None, history=(past,))


def test_history_begins_with_the_newest_and_ends() -> None:
    record = LedgerRecord(current=A)
    for number in range(HISTORY_LIMIT + 3):
        begun = replace(record, update=update(id=str(number), target=C))
        record = begun.close_update(UpdateOutcome.DONE, now=float(number))
    assert [past.id for past in record.history] == [
        str(number) for number in range(HISTORY_LIMIT + 2, 2, -1)
    ]


def test_time_in_each_phase_is_added_up() -> None:
    begun = update(Phase.STAGING, began=0.0, entered=0.0)
    drained = begun.enter_phase(Phase.DRAINING, boot_id="a", now=10.0)
    again = drained.enter_phase(Phase.STAGING, boot_id="a", now=15.0)
    late = again.enter_phase(Phase.DRAINING, boot_id="a", now=12.0)
    assert late.phase_seconds == ((Phase.STAGING, 10.0), (Phase.DRAINING, 5.0))
    assert late.compute_phase_seconds(20.0) == ((Phase.STAGING, 10.0), (Phase.DRAINING, 13.0))
