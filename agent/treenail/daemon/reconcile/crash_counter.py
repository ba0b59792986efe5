"""Count the agent's crashes with a target, and roll back a target whose agent keeps crashing.

It counts in a boot trial, and from the first written file on: a file may make the agent crash.

It runs before everything else. It reads the machine, the ledger and a record of its own, but
neither settings nor API server, because either may be what makes the agent crash. The ledger may
be, too: without one it rolls back by its own record. Only a rollback changes the ledger.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail import clocks, errors
from treenail.daemon.configuration.node_configuration import NodeConfiguration
from treenail.daemon.reconcile.observe import summarize_deployments
from treenail.host.ostree.deployments import OSBackend
from treenail.host.system import state_file
from treenail.host.system.kernel import HostKernel
from treenail.host.systemd.logind import Logind
from treenail.log import MessageId
from treenail.update.checks import health
from treenail.update.decision import decide_boot
from treenail.update.impact.os_change import is_in_effect
from treenail.update.state import crash_record, ledger_record
from treenail.update.state import crash_record as crash_records
from treenail.update.state import ledger_record as records
from treenail.update.state.boot_trial import HealthCheckMode

log = logging.getLogger(__name__)


class CrashCounter:
    """Counts starts with an unverified target; opens the machine only for a rollback."""

    def __init__(
        self,
        ledger: state_file.Ledger,
        crash_file: state_file.CrashRecordFile,
        kernel: HostKernel,
        clock: clocks.Clock,
        *,
        open_machine: Callable[[], tuple[OSBackend, Logind, NodeConfiguration]],
    ) -> None:
        self._ledger = ledger
        self._file = crash_file
        self._kernel = kernel
        self._clock = clock
        self._open_machine = open_machine

    def count_start(self) -> bool:
        """Count this start; return True when the node is rolling back instead of starting.

        When the rollback fails, the agent continues. If it crashes again, the next start tries the
        rollback again. Raises `LedgerError` when the ledger cannot be read.
        """
        boot_id = self._kernel.read_boot_id()
        crashes = crash_records.from_json(self._file.read_document())
        try:
            record = records.from_json(self._ledger.read_document())
        except errors.LedgerError as error:
            if self._count_without_ledger(crashes, boot_id, error):
                return True
            raise
        update = record.update
        if update is None or not _is_on_trial(update):
            if crashes is not None and not (
                update and update.phase is ledger_record.Phase.REBOOTING
            ):
                remove_crash_record(self._file)
            return False
        if crashes is None or crashes.update_id != update.id:
            crashes = crash_record.derive_crash_record(update)
        crashes = crashes.count_start(
            boot_id, counts_boot=update.phase is not ledger_record.Phase.APPLYING
        )
        self._write_crashes(crashes)
        if not crashes.failure or not _may_roll_back(crashes):
            return False
        try:
            return self._roll_back(record, update, crashes)
        except errors.HostError as error:
            log.warning("cannot roll back to %s, continuing: %s", update.origin, error)
            return False

    def _roll_back(
        self,
        record: ledger_record.LedgerRecord,
        update: ledger_record.UpdateRecord,
        crashes: crash_record.CrashRecord,
    ) -> bool:
        """Begin the rollback, or finish an interrupted one: every step is idempotent."""
        impact, boot_id = update.impact, crashes.boot_id
        os, power, files = self._open_machine()
        deployments = summarize_deployments(os.read_deployments(), self._kernel, {})
        if impact is None:
            return False
        is_booted = is_in_effect(impact.os, deployments)
        is_before_reboot = update.boot_id == boot_id and _has_begun(update)
        if update.phase is ledger_record.Phase.APPLYING and (
            is_before_reboot or impact.os.is_empty
        ):
            unfinished = files.find_unfinished(update.id)
            if not (unfinished.has_undo or unfinished.is_interrupted):
                log.error(
                    "%s: %s; no written file of it can be restored; request another target, and "
                    "see the journal for the cause",
                    update.target,
                    crashes.failure,
                )
                return False
        elif not is_before_reboot and not is_booted:
            # Already rolled back, or the staged deployment is gone: the loop finishes the update.
            return False
        if update.phase is ledger_record.Phase.ROLLING_BACK and update.boot_id != boot_id:
            is_restored = impact.os.is_empty and not files.find_unfinished(update.id).has_undo
            if (
                is_restored
                or update.boot_trial.rollback_reboots >= decide_boot.ROLLBACK_REBOOTS_ALLOWED
            ):
                # Rolled back, or all attempts are used up.
                return False
        if not impact.needs_reboot or is_before_reboot:
            return self._restore_files(record, update, crashes, files)
        quarantined = record.quarantined
        if update.phase is not ledger_record.Phase.ROLLING_BACK or quarantined is None:
            quarantined = _quarantine_target(update, crashes)
        update = update.enter_phase(ledger_record.Phase.ROLLING_BACK, self._read_moment(boot_id))
        self._write_record(replace(record, update=update, quarantined=quarantined))
        if impact.os.is_empty:
            files.restore_pending()
        else:
            os.roll_back()
        boot_trial = replace(
            update.boot_trial, rollback_reboots=update.boot_trial.rollback_reboots + 1
        )
        update = replace(update, boot_trial=boot_trial)
        self._write_record(replace(record, update=update, quarantined=quarantined))
        log.info("rolling back to %s", update.origin, extra={"message_id": MessageId.ROLLING_BACK})
        power.reboot_machine()
        return True

    def _restore_files(
        self,
        record: ledger_record.LedgerRecord,
        update: ledger_record.UpdateRecord,
        crashes: crash_record.CrashRecord,
        files: NodeConfiguration,
    ) -> bool:
        """Restore the files without a reboot. The agent then starts, and cancels the update."""
        quarantined = _quarantine_target(update, crashes)
        is_booted = update.has_booted_files(crashes.boot_id)
        update = update.enter_phase(
            ledger_record.Phase.CANCELLING, self._read_moment(crashes.boot_id)
        )
        self._write_record(replace(record, update=update, quarantined=quarantined))
        if files.find_unfinished(update.id).is_interrupted:
            files.recover_interrupted(update.id)
        files.restore_pending(is_booted=is_booted)
        return False

    def _count_without_ledger(
        self, crashes: crash_record.CrashRecord | None, boot_id: str, error: errors.LedgerError
    ) -> bool:
        """Count a start that cannot read the ledger; return True when the node is rolling back.

        Without a crash record, and in the boot that requested the reboot, the ledger was damaged
        outside a boot trial. The previous deployment could not read it either.
        """
        if crashes is None or boot_id == crashes.origin_boot_id:
            return False
        crashes = crashes.count_start(boot_id)
        self._write_crashes(crashes)
        if not crashes.failure or not _may_roll_back(crashes):
            return False
        try:
            return self._roll_back_without_ledger(crashes, error)
        except errors.HostError as problem:
            log.warning("cannot roll back %s, continuing: %s", crashes.target, problem)
            return False

    def _roll_back_without_ledger(
        self, crashes: crash_record.CrashRecord, error: errors.LedgerError
    ) -> bool:
        os, power, files = self._open_machine()
        if crashes.has_os_change:
            booted = os.read_deployments().booted
            is_target = booted is not None and booted.id != crashes.origin_id
            is_used_up = crashes.rollback_reboots >= decide_boot.ROLLBACK_REBOOTS_ALLOWED
            if not crashes.origin_id or not is_target or is_used_up:
                return False
            os.roll_back()
        else:
            if not files.find_unfinished(crashes.update_id).has_undo:
                return False
            files.restore_pending()
        log.error(
            "%s is not healthy: %s: %s",
            crashes.target,
            crashes.failure,
            error,
            extra={"message_id": MessageId.HEALTH_CHECK_FAILED},
        )
        if not crashes.needs_reboot:
            # The node may be in service.
            log.warning("restored the files before %s", crashes.target)
            return False
        self._write_crashes(replace(crashes, rollback_reboots=crashes.rollback_reboots + 1))
        log.info(
            "rolling back %s without the ledger",
            crashes.target,
            extra={"message_id": MessageId.ROLLING_BACK},
        )
        power.reboot_machine()
        return True

    def _read_moment(self, boot_id: str) -> ledger_record.Moment:
        return ledger_record.Moment(self._clock.now(), boot_id, self._clock.monotonic())

    def _write_crashes(self, crashes: crash_record.CrashRecord) -> None:
        try:
            self._file.write_document(crash_records.to_json(crashes))
        except errors.FileError as error:
            log.warning("cannot count this start of the agent: %s", error)

    def _write_record(self, record: ledger_record.LedgerRecord) -> None:
        try:
            self._ledger.write_document(records.to_json(record))
        except errors.LedgerError as error:
            log.warning("cannot record the rollback in the ledger: %s", error)


def arm_crash_record(file: state_file.CrashRecordFile, crashes: crash_record.CrashRecord) -> None:
    """Write the record of an update that is about to reboot. Raises `FileError`."""
    if crash_records.from_json(file.read_document()) != crashes:
        file.write_document(crash_records.to_json(crashes))


def record_clean_stop(file: state_file.CrashRecordFile) -> None:
    """Record that the agent ended because it was stopped, so that this end counts as no crash."""
    crashes = crash_records.from_json(file.read_document())
    if crashes is None or not crashes.is_running:
        return
    try:
        file.write_document(crash_records.to_json(replace(crashes, is_running=False)))
    except errors.FileError as error:
        log.warning("cannot record the stop of the agent: %s", error)


def remove_crash_record(file: state_file.CrashRecordFile) -> None:
    """Remove the record after the trial. A failure is logged; the next start repeats it."""
    try:
        file.remove_document()
    except errors.FileError as error:
        log.warning("cannot remove the crash record: %s", error)


def _quarantine_target(
    update: ledger_record.UpdateRecord, crashes: crash_record.CrashRecord
) -> ledger_record.QuarantinedTarget:
    check = health.HealthCheckResult(health.AGENT, is_passing=False, problem=crashes.failure)
    reason = health.format_unhealthy(update.target, check)
    log.error("%s", reason, extra={"message_id": MessageId.HEALTH_CHECK_FAILED})
    return ledger_record.QuarantinedTarget(
        update.target, reason, decide_boot.RETRY_REMEDY, check=health.AGENT
    )


def _may_roll_back(crashes: crash_record.CrashRecord) -> bool:
    if crashes.mode is HealthCheckMode.ENFORCE:
        return True
    log.warning(
        "not rolling back %s: %s; the health mode is %s",
        crashes.target,
        crashes.failure,
        crashes.mode,
    )
    return False


def _is_on_trial(update: ledger_record.UpdateRecord) -> bool:
    """Return whether the agent runs with a target that is not yet verified, or rolled back."""
    if update.boot_trial.is_healthy:
        return False
    return _has_begun(update) or update.phase in {
        ledger_record.Phase.VERIFYING,
        ledger_record.Phase.ROLLING_BACK,
    }


def _has_begun(update: ledger_record.UpdateRecord) -> bool:
    """Return whether files of the target may be written, and no boot with it is recorded."""
    return update.phase in {ledger_record.Phase.APPLYING, ledger_record.Phase.REBOOTING}
