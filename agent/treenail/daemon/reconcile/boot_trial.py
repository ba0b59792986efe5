"""The moves of a node that was rebooted into its target: the trial, and the way back."""

import logging
from dataclasses import replace

from treenail.daemon.reconcile.interfaces import NodeInterfaces
from treenail.daemon.reconcile.planning import UpdatePlanner
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import ClusterError, TreenailError
from treenail.log import MessageId
from treenail.update.checks.health import CONFIGURATION
from treenail.update.decision.decide_boot import select_deployment_steps
from treenail.update.decision.facts import Facts
from treenail.update.state.record import Phase, QuarantinedTarget

log = logging.getLogger(__name__)

_NOW = 0.0
_SOON_S = 10.0


class BootTrialRunner:
    """Carries `VerifyAction` and `RollBackAction` out; each returns in how many seconds to look again."""

    def __init__(
        self, interfaces: NodeInterfaces, ledger: UpdateLedger, planner: UpdatePlanner
    ) -> None:
        self._interfaces = interfaces
        self._ledger = ledger
        self._planner = planner
        self._completed_boot_id = ""
        self._counted_boot_id = ""

    def verify_boot(self, facts: Facts) -> float:
        """The trial goes on, or begins: by the record of the agent's starts, or here."""
        update = self._ledger.update
        probation = update.boot_trial
        if probation.boot_id != facts.boot_id:
            probation = probation.count_start(facts.boot_id, self._interfaces.clock.monotonic())
        if facts.trial_status is not None and facts.trial_status.is_api_reachable:
            probation = replace(probation, has_api_since_reboot=True)
        if update.phase is not Phase.VERIFYING or update.boot_id != facts.boot_id:
            self._ledger.enter_phase(Phase.VERIFYING, probation=probation)
        else:
            record = self._ledger.record
            self._ledger.save_record(replace(record, update=replace(update, boot_trial=probation)))
        if self._completed_boot_id != facts.boot_id:
            self._complete_early_steps(facts.boot_id)
        return self._interfaces.health.interval_s

    def record_healthy(self) -> None:
        """Have it for good that the verdict is given: the node does not go back any more."""
        update = self._ledger.update
        healthy = replace(update, boot_trial=replace(update.boot_trial, is_healthy=True))
        self._ledger.save_record(replace(self._ledger.record, update=healthy))

    def roll_back(self, quarantine: QuarantinedTarget, facts: Facts) -> float:
        """Have the previous deployment, or what the files were, with the next boot."""
        update, work = self._ledger.update, self._ledger.impact
        if update.phase is not Phase.ROLLING_BACK or update.boot_id != facts.boot_id:
            log.error("%s", quarantine.reason, extra={"message_id": MessageId.HEALTH_CHECK_FAILED})
            self._ledger.enter_phase(Phase.ROLLING_BACK, refused=quarantine)
        if work.os.is_empty and facts.has_undo:
            return _NOW
        if not work.os.is_empty:
            self._interfaces.os.roll_back()
        self._count_rollback(facts.boot_id)
        log.info("going back to %s", update.origin, extra={"message_id": MessageId.ROLLING_BACK})
        self._interfaces.power.reboot_machine()
        return _SOON_S

    def _count_rollback(self, boot_id: str) -> None:
        """Once a boot, and not before what is to make the next boot the way back is done."""
        if self._counted_boot_id != boot_id:
            update = self._ledger.update
            probation = replace(
                update.boot_trial, rollback_reboots=update.boot_trial.rollback_reboots + 1
            )
            self._ledger.save_record(
                replace(self._ledger.record, update=replace(update, boot_trial=probation))
            )
            self._counted_boot_id = boot_id

    def _complete_early_steps(self, boot_id: str) -> None:
        """Write what the boot took away and the kubelet may need to be healthy."""
        update, problem = self._ledger.update, ""
        try:
            due = self._planner.plan_pending_steps(
                update.target, update.origin, self._ledger.impact
            )
            steps = select_deployment_steps(due.steps)
            if steps:
                log.info("%d steps are left to do after the boot", len(steps))
                self._interfaces.configuration.complete_early_steps(steps)
            self._completed_boot_id = boot_id
        except ClusterError as error:
            log.info("what is left to do after the boot can't be known now: %s", error)
        except TreenailError as error:
            problem = str(error)
        self._interfaces.health.set_check_problem(CONFIGURATION, problem)
