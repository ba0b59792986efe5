"""Counts the agent's starts in a boot trial, and rolls back an image whose agent keeps crashing.

It runs before everything else. It reads the ledger and the machine, but neither settings nor API
server, because either may be what makes the agent crash.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from treenail.clock import Clock
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.interfaces import OSBackend, Power
from treenail.daemon.reconcile.observe import summarize_deployments
from treenail.errors import HostError, LedgerError
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import Ledger
from treenail.log import MessageId
from treenail.update.checks.health import AGENT, HealthCheckResult, format_unhealthy
from treenail.update.decision.decide_boot import RETRY_REMEDY, ROLLBACK_REBOOTS_ALLOWED
from treenail.update.impact.os_change import is_in_effect
from treenail.update.state import record as records
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, QuarantinedTarget, UpdateRecord

log = logging.getLogger(__name__)


class CrashCounter:
    """Counts starts during a boot trial; opens the machine only when a rollback is needed."""

    def __init__(
        self,
        ledger: Ledger,
        kernel: HostKernel,
        clock: Clock,
        *,
        open_machine: Callable[[], tuple[OSBackend, Power, NodeConfiguration]],
    ) -> None:
        self._ledger = ledger
        self._kernel = kernel
        self._clock = clock
        self._open_machine = open_machine

    def count_start(self) -> bool:
        """Count this start; return True when the node is rolling back instead of starting.

        When the rollback fails, the agent continues. If it crashes again, the next start tries the
        rollback again. Raises `LedgerError` when the ledger cannot be read.
        """
        record = records.from_json(self._ledger.read_document())
        update = record.update
        if update is None:
            return False
        boot_id = self._kernel.read_boot_id()
        if not _is_on_trial(update, boot_id):
            return False
        boot_trial = update.boot_trial.count_start(boot_id, self._clock.monotonic())
        update = replace(update, boot_trial=boot_trial)
        record = replace(record, update=update)
        self._write_record(record)
        if not boot_trial.failure:
            return False
        try:
            return self._roll_back(record, update, boot_id)
        except HostError as error:
            log.warning("cannot roll back to %s, continuing: %s", update.origin, error)
            return False

    def _roll_back(self, record: LedgerRecord, update: UpdateRecord, boot_id: str) -> bool:
        """Begin the rollback, or finish an interrupted one: every step is idempotent."""
        impact = update.impact
        os, power, files = self._open_machine()
        found = summarize_deployments(os.read_deployments(), self._kernel.read_command_line())
        if impact is None or not is_in_effect(impact.os, found.running):
            # Already rolled back: the loop finishes the update.
            return False
        if update.phase is Phase.ROLLING_BACK and update.boot_id != boot_id:
            is_restored = impact.os.is_empty and not files.find_unfinished(update.id).has_undo
            if is_restored or update.boot_trial.rollback_reboots >= ROLLBACK_REBOOTS_ALLOWED:
                # Rolled back, or all attempts are used up.
                return False
        quarantined = record.quarantined
        if update.phase is not Phase.ROLLING_BACK or quarantined is None:
            check = HealthCheckResult(AGENT, is_passing=False, problem=update.boot_trial.failure)
            reason = format_unhealthy(update.target, check)
            log.error("%s", reason, extra={"message_id": MessageId.HEALTH_CHECK_FAILED})
            quarantined = QuarantinedTarget(update.target, reason, RETRY_REMEDY, check=AGENT)
        update = update.enter_phase(Phase.ROLLING_BACK, boot_id=boot_id, now=self._clock.now())
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

    def _write_record(self, record: LedgerRecord) -> None:
        try:
            self._ledger.write_document(records.to_json(record))
        except LedgerError as error:
            log.warning("cannot count this start of the agent: %s", error)


def _is_on_trial(update: UpdateRecord, boot_id: str) -> bool:
    """Return whether this boot is not yet verified, or is being rolled back."""
    if update.phase is Phase.REBOOTING:
        return update.boot_id != boot_id
    return update.phase in {Phase.VERIFYING, Phase.ROLLING_BACK}
