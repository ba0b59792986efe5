"""The end of an update: cancel it, move it to the history, and note its failed tries."""

import logging
from dataclasses import replace

from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.crash_counter import remove_crash_record
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import LedgerError, TreenailError
from treenail.log import MessageId
from treenail.update.state.phases import Phase
from treenail.update.state.record import QuarantinedTarget, UpdateOutcome

log = logging.getLogger(__name__)


def close_update(interfaces: NodeInterfaces, ledger: UpdateLedger, *, is_done: bool) -> None:
    """Move the update to the history; ``is_done`` if it reached its target."""
    update, now = ledger.update, interfaces.read_moment()
    if is_done:
        log.info(
            "finished update %s to %s after %d s",
            update.id,
            update.target,
            now.wall - update.began,
            extra={"message_id": MessageId.UPDATE_DONE},
        )
    else:
        log.info(
            "cancelled update %s to %s; the node stays at %s",
            update.id,
            update.target,
            ledger.record.current,
            extra={"message_id": MessageId.UPDATE_CANCELLED},
        )
    outcome = UpdateOutcome.DONE if is_done else _judge_cancelled(ledger.record.quarantined)
    ledger.save_record(ledger.record.close_update(outcome, now))
    remove_crash_record(interfaces.crash_record)
    interfaces.os.release_daemon()


def cancel_update(
    interfaces: NodeInterfaces,
    ledger: UpdateLedger,
    reason: str,
    staged_id: str,
    quarantine: QuarantinedTarget | None,
) -> None:
    """Cancel the update, and drop the deployment that it staged."""
    update = ledger.update
    if update.phase is not Phase.CANCELLING or quarantine is not None:
        log.info("cancelling update %s: %s", update.id, reason)
        ledger.enter_phase(Phase.CANCELLING, quarantined=quarantine)
    if update.impact is None or update.impact.needs_reboot:
        interfaces.soft_reboots.clear_soft_reboot()
        interfaces.os.drop_staged(staged_id)
    log.info(
        "undid the staging of %s",
        update.target,
        extra={"message_id": MessageId.UPDATE_UNDONE},
    )


def record_failed_try(
    interfaces: NodeInterfaces, ledger: UpdateLedger, error: TreenailError
) -> None:
    """Add the error to the update in progress, for the history; without one do nothing."""
    record = ledger.record
    if record.update is None:
        return
    update = record.update.add_failed_try(str(error), now=interfaces.clock.now())
    try:
        ledger.save_record(replace(record, update=update))
    except LedgerError as problem:
        log.debug("cannot add the failed try to the ledger: %s", problem)


def _judge_cancelled(quarantined: QuarantinedTarget | None) -> UpdateOutcome:
    if quarantined is None or quarantined.is_cancelled_by_user or quarantined.is_withdrawn:
        return UpdateOutcome.CANCELLED
    return UpdateOutcome.FAILED
