"""The ledger as actions use it: the record, and the update in progress with its phase.

An update ends here: it is cancelled, or moved to the history with its failed tries.
"""

import logging
from dataclasses import replace

from treenail import errors
from treenail import log as journal
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile import context, crash_counter
from treenail.log import MessageId
from treenail.update.checks import health
from treenail.update.decision import actions, node_state
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state import ledger_record
from treenail.update.state.boot_trial import BootTrial

log = logging.getLogger(__name__)

_TRIAL_PHASES = (ledger_record.Phase.VERIFYING, ledger_record.Phase.ROLLING_BACK)


class UpdateLedger:
    """The current ledger record. Every change is fsynced before the call returns.

    The status file and the log context follow the record. Methods that save raise `LedgerError`.
    """

    def __init__(self, interfaces: context.NodeInterfaces, status_file: StatusFile) -> None:
        self._interfaces = interfaces
        self._status_file = status_file
        self._save_error = ""
        self._record = ledger_record.from_json(interfaces.ledger.read_document())
        self._show_record()

    @property
    def record(self) -> ledger_record.LedgerRecord:
        """The record as last saved."""
        return self._record

    @property
    def update(self) -> ledger_record.UpdateRecord:
        """The update in progress; it must exist."""
        update = self._record.update
        if update is None:
            raise AssertionError("an action of an update was decided without an update")
        return update

    @property
    def impact(self) -> UpdateImpact:
        """The impact of the update in progress; the update must have been planned."""
        impact = self.update.impact
        if impact is None:
            raise AssertionError("an action was decided before the update was planned")
        return impact

    def enter_phase(
        self,
        phase: ledger_record.Phase,
        *,
        impact: UpdateImpact | None = None,
        staged_id: str | None = None,
        drain: str | None = None,
        reboots: int | None = None,
        quarantined: ledger_record.QuarantinedTarget | None = None,
        boot_trial: BootTrial | None = None,
        reached_facts: node_state.Facts | None = None,
    ) -> ledger_record.UpdateRecord:
        """Save the update with this phase; with ``reached_facts``, its target becomes current."""
        update = self.update.enter_phase(phase, self._interfaces.read_moment())
        update = replace(
            update,
            impact=update.impact if impact is None else impact,
            staged_id=update.staged_id if staged_id is None else staged_id,
            drain_token=update.drain_token if drain is None else drain,
            reboot_count=update.reboot_count if reboots is None else reboots,
            boot_trial=update.boot_trial if boot_trial is None else boot_trial,
        )
        record = (
            self._record
            if reached_facts is None
            else self.record_at_target(update.target, reached_facts)
        )
        if quarantined is not None:
            # An unreachable API server rolls back each target at most once. Remember which one.
            blamed = (
                quarantined.target if quarantined.check == health.API_SERVER else record.api_blamed
            )
            record = replace(record, quarantined=quarantined, api_blamed=blamed)
        self.save_record(replace(record, update=update))
        return update

    def change_quarantine(self, decision: actions.RetryAction | actions.ExcuseTargetAction) -> None:
        """End the quarantine, or record that the check also fails with the previous target."""
        record, quarantined = self._record, self._record.quarantined
        if isinstance(decision, actions.ExcuseTargetAction):
            if quarantined is not None:
                quarantined = replace(quarantined, fails_on_origin=True)
            self.save_record(replace(record, quarantined=quarantined))
            return
        if quarantined is not None:
            log.info("%s: %s", decision, quarantined.target)
        retry = record.retry if decision.retry is None else decision.retry
        self.save_record(replace(record, quarantined=None, retry=retry))

    def note_report(self, facts: node_state.Facts) -> None:
        """Remember, between updates, that the Node shows the current target."""
        record = self._record
        if record.is_reported or record.update is not None or facts.node is None:
            return
        if facts.node.shows_current(record.current):
            self.save_record(replace(record, is_reported=True))

    def record_at_target(
        self, target: ledger_record.Target, facts: node_state.Facts
    ) -> ledger_record.LedgerRecord:
        """Return the record with the target as current and nothing quarantined."""
        booted = (
            facts.deployments.booted_digest if facts.deployments else self._record.booted_digest
        )
        update = self._record.update
        return replace(
            self._record,
            current=target,
            booted_digest=booted,
            quarantined=None,
            machine_arguments=update.impact.machine_arguments if update and update.impact else {},
            is_reported=self._record.is_reported and target == self._record.current,
        )

    def save_record(self, record: ledger_record.LedgerRecord) -> None:
        """Save the record.

        During a boot trial a failure to save is a failed health check instead of an error: a full
        disk is a reason to roll back and must not prevent the rollback.
        """
        if record == self._record and not self._save_error:
            return
        try:
            self._interfaces.ledger.write_document(ledger_record.to_json(record))
            self._save_error = ""
        except errors.LedgerError as error:
            if record.update is None or record.update.phase not in _TRIAL_PHASES:
                raise
            log.warning("cannot save the ledger during the boot trial: %s", error)
            self._save_error = str(error)
        self._interfaces.health.set_check_problem(health.LEDGER, self._save_error)
        self._record = record
        self._show_record()

    def record_failed_try(self, error: errors.TreenailError) -> None:
        """Add the error to the update in progress, for the history; without one do nothing."""
        record = self._record
        if record.update is None:
            return
        update = record.update.add_failed_try(str(error), now=self._interfaces.clock.now())
        try:
            self.save_record(replace(record, update=update))
        except errors.LedgerError as problem:
            log.debug("cannot add the failed try to the ledger: %s", problem)

    def _show_record(self) -> None:
        """Put the update and its phase into the log context and the status file."""
        record, update = self._record, self._record.update
        journal.set_log_context(
            update=update.id if update else "",
            phase=str(update.phase) if update else "",
            config=update.target.config if update else record.current.config,
        )
        self._status_file.show_record(record)


def close_update(
    interfaces: context.NodeInterfaces, ledger: UpdateLedger, *, is_done: bool
) -> None:
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
    outcome = (
        ledger_record.UpdateOutcome.DONE if is_done else _judge_cancelled(ledger.record.quarantined)
    )
    ledger.save_record(ledger.record.close_update(outcome, now))
    crash_counter.remove_crash_record(interfaces.crash_record)
    interfaces.os.release_daemon()


def cancel_update(
    interfaces: context.NodeInterfaces,
    ledger: UpdateLedger,
    reason: str,
    staged_id: str,
    quarantine: ledger_record.QuarantinedTarget | None,
) -> None:
    """Cancel the update, and drop the deployment that it staged."""
    update = ledger.update
    if update.phase is not ledger_record.Phase.CANCELLING or quarantine is not None:
        log.info("cancelling update %s: %s", update.id, reason)
        ledger.enter_phase(ledger_record.Phase.CANCELLING, quarantined=quarantine)
    if update.impact is None or update.impact.needs_reboot:
        interfaces.soft_reboots.clear_soft_reboot()
        interfaces.os.drop_staged(staged_id)
    log.info(
        "undid the staging of %s",
        update.target,
        extra={"message_id": MessageId.UPDATE_UNDONE},
    )


def _judge_cancelled(
    quarantined: ledger_record.QuarantinedTarget | None,
) -> ledger_record.UpdateOutcome:
    if quarantined is None or quarantined.is_cancelled_by_user or quarantined.is_withdrawn:
        return ledger_record.UpdateOutcome.CANCELLED
    return ledger_record.UpdateOutcome.FAILED
