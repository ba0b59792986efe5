"""The first thing an agent does: count its starts, so that one that crashes at each goes back.

It needs the ledger and the machine, and neither the settings nor the API server.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from treenail.clock import Clock
from treenail.daemon.configuration.machine import UnfinishedChanges
from treenail.daemon.reconcile.interfaces import KernelInfo, LedgerStore, OSBackend, Power
from treenail.daemon.reconcile.observe import summarize_deployments
from treenail.errors import HostError, LedgerError
from treenail.log import MessageId
from treenail.update.checks.health import AGENT, HealthCheckResult, format_unhealthy
from treenail.update.decision.decide_boot import RETRY_REMEDY, ROLLBACK_REBOOTS_ALLOWED
from treenail.update.impact.os_change import is_in_effect
from treenail.update.state import record as records
from treenail.update.state.record import LedgerRecord, Phase, QuarantinedTarget, UpdateRecord

log = logging.getLogger(__name__)


class RestorableFiles(Protocol):
    """The files that the update under way has changed."""

    def find_unfinished(self, owner: str) -> UnfinishedChanges: ...
    def restore_pending(self) -> None: ...


class CrashCounter:
    """Counts starts in a boot on trial; what it takes to go back is made when it is needed."""

    def __init__(
        self,
        ledger: LedgerStore,
        kernel: KernelInfo,
        clock: Clock,
        *,
        open_machine: Callable[[], tuple[OSBackend, Power, RestorableFiles]],
    ) -> None:
        self._ledger = ledger
        self._kernel = kernel
        self._clock = clock
        self._open_machine = open_machine

    def count_start(self) -> bool:
        """Count this start; returns whether the node is on its way back instead.

        Raises `LedgerError` when the ledger can't be read. When going back fails the agent goes on,
        for it may be able to; if it crashes once more, the next start tries again.
        """
        record = records.from_json(self._ledger.read_document())
        update = record.update
        if update is None:
            return False
        boot_id = self._kernel.read_boot_id()
        if not _is_on_trial(update, boot_id):
            return False
        probation = update.boot_trial.count_start(boot_id, self._clock.monotonic())
        update = replace(update, boot_trial=probation)
        record = replace(record, update=update)
        self._write_record(record)
        if not probation.failure:
            return False
        try:
            return self._roll_back(record, update, boot_id)
        except HostError as error:
            log.warning("can't go back to %s now: %s", update.origin, error)
            return False

    def _roll_back(self, record: LedgerRecord, update: UpdateRecord, boot_id: str) -> bool:
        """Begin to, or, as each step can be repeated, finish what was cut short."""
        work = update.impact
        os, power, files = self._open_machine()
        found = summarize_deployments(os.read_deployments(), self._kernel.read_command_line())
        if work is None or not is_in_effect(work.os, found.running):
            return False  # it is back already, and the loop knows what to do
        if update.phase is Phase.ROLLING_BACK and update.boot_id != boot_id:
            by_files = work.os.is_empty and not files.find_unfinished(update.id).has_undo
            if by_files or update.boot_trial.rollback_reboots >= ROLLBACK_REBOOTS_ALLOWED:
                return False  # it is back as well, or can't be brought back
        refused = record.quarantined
        if update.phase is not Phase.ROLLING_BACK or refused is None:
            check = HealthCheckResult(AGENT, is_passing=False, problem=update.boot_trial.failure)
            reason = format_unhealthy(update.target, check)
            log.error("%s", reason, extra={"message_id": MessageId.HEALTH_CHECK_FAILED})
            refused = QuarantinedTarget(update.target, reason, RETRY_REMEDY, check=AGENT)
        update = update.enter_phase(Phase.ROLLING_BACK, boot_id=boot_id, now=self._clock.now())
        self._write_record(replace(record, update=update, quarantined=refused))
        if work.os.is_empty:
            files.restore_pending()
        else:
            os.roll_back()
        probation = replace(
            update.boot_trial, rollback_reboots=update.boot_trial.rollback_reboots + 1
        )
        update = replace(update, boot_trial=probation)
        self._write_record(replace(record, update=update, quarantined=refused))
        log.info("going back to %s", update.origin, extra={"message_id": MessageId.ROLLING_BACK})
        power.reboot_machine()
        return True

    def _write_record(self, record: LedgerRecord) -> None:
        try:
            self._ledger.write_document(records.to_json(record))
        except LedgerError as error:
            log.warning("the agent's start can't be counted: %s", error)


def _is_on_trial(update: UpdateRecord, boot_id: str) -> bool:
    """Whether nobody has found this boot healthy yet; on the way back nobody will."""
    if update.phase is Phase.REBOOTING:
        return update.boot_id != boot_id
    return update.phase in {Phase.VERIFYING, Phase.ROLLING_BACK}
