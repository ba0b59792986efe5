"""Actions after the reboot into a target: verify the boot, or roll back."""

import logging
from dataclasses import replace

from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.planning import UpdatePlanner
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import ClusterError, TreenailError
from treenail.log import MessageId
from treenail.update.checks.health import CONFIGURATION
from treenail.update.decision.decide_boot import select_deployment_steps
from treenail.update.decision.facts import Facts
from treenail.update.state.phases import Phase
from treenail.update.state.record import QuarantinedTarget

log = logging.getLogger(__name__)

_NOW = 0.0
_SOON_S = 10.0


class BootTrialRunner:
    """Runs `VerifyAction` and `RollBackAction`; both return the seconds until the next pass."""

    def __init__(
        self, interfaces: NodeInterfaces, ledger: UpdateLedger, planner: UpdatePlanner
    ) -> None:
        self._interfaces = interfaces
        self._ledger = ledger
        self._planner = planner
        self._completed_boot_id = ""
        self._counted_boot_id = ""

    def verify_boot(self, facts: Facts) -> float:
        """Begin or continue the boot trial, unless the crash counter already began it."""
        update = self._ledger.update
        boot_trial = update.boot_trial
        if boot_trial.boot_id != facts.boot_id:
            boot_trial = boot_trial.count_start(facts.boot_id, self._interfaces.clock.monotonic())
        if facts.trial_status is not None and facts.trial_status.is_api_reachable:
            boot_trial = replace(boot_trial, has_api_since_reboot=True)
        if update.phase is not Phase.VERIFYING or update.boot_id != facts.boot_id:
            self._ledger.enter_phase(Phase.VERIFYING, boot_trial=boot_trial)
        else:
            record = self._ledger.record
            self._ledger.save_record(replace(record, update=replace(update, boot_trial=boot_trial)))
        if self._completed_boot_id != facts.boot_id:
            self._complete_early_steps(facts.boot_id)
        return self._interfaces.health.interval_s

    def record_healthy(self) -> None:
        """Record durably that the boot is healthy, so that no later failure rolls it back."""
        update = self._ledger.update
        healthy = replace(update, boot_trial=replace(update.boot_trial, is_healthy=True))
        self._ledger.save_record(replace(self._ledger.record, update=healthy))

    def roll_back(self, quarantine: QuarantinedTarget, facts: Facts) -> float:
        """Reboot into the previous deployment, or with the previous files.

        For an update of files only, `RestoreAction` restores the files before the reboot.
        """
        update, impact = self._ledger.update, self._ledger.impact
        if update.phase is not Phase.ROLLING_BACK or update.boot_id != facts.boot_id:
            log.error("%s", quarantine.reason, extra={"message_id": MessageId.HEALTH_CHECK_FAILED})
            self._ledger.enter_phase(Phase.ROLLING_BACK, quarantined=quarantine)
        if impact.os.is_empty and facts.has_undo:
            return _NOW
        if not impact.os.is_empty:
            self._interfaces.os.roll_back()
        self._count_rollback(facts.boot_id)
        log.info("rolling back to %s", update.origin, extra={"message_id": MessageId.ROLLING_BACK})
        self._interfaces.power.reboot_machine()
        return _SOON_S

    def _count_rollback(self, boot_id: str) -> None:
        """Count the rollback once a boot, after the boot loader points to the old deployment."""
        if self._counted_boot_id != boot_id:
            update = self._ledger.update
            boot_trial = replace(
                update.boot_trial, rollback_reboots=update.boot_trial.rollback_reboots + 1
            )
            self._ledger.save_record(
                replace(self._ledger.record, update=replace(update, boot_trial=boot_trial))
            )
            self._counted_boot_id = boot_id

    def _complete_early_steps(self, boot_id: str) -> None:
        """Write the files that the boot removed and that the kubelet may need to become Ready.

        OSTree's merge of /etc drops a file that equals the old image's /usr/etc.
        """
        update, problem = self._ledger.update, ""
        try:
            pending = self._planner.plan_pending_steps(
                update.target, update.origin, self._ledger.impact
            )
            steps = select_deployment_steps(pending.steps)
            if steps:
                log.info("completing %d steps after the boot", len(steps))
                self._interfaces.configuration.complete_early_steps(steps)
            self._completed_boot_id = boot_id
        except ClusterError as error:
            log.info("cannot plan the steps after the boot, retrying: %s", error)
        except TreenailError as error:
            problem = str(error)
        self._interfaces.health.set_check_problem(CONFIGURATION, problem)
