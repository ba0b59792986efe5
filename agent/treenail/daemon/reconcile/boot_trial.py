"""Actions after the reboot into a target: verify the boot, or roll back.

The previous deployment is pinned while the new one may still roll back, and unpinned afterwards.
``ostree admin pin`` waits silently for the sysroot lock. A running transaction is therefore
awaited first, with progress.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from treenail import errors
from treenail.daemon.reconcile import context, os_transaction, planning, update_ledger
from treenail.daemon.reconcile.crash_counter import arm_crash_record, remove_crash_record
from treenail.host.ostree.deployments import TransactionWatch
from treenail.log import MessageId
from treenail.update.checks import health
from treenail.update.decision import decide_boot, node_state
from treenail.update.state import crash_record, ledger_record
from treenail.update.state.boot_trial import BootTrial, HealthCheckMode
from treenail.update.status import NodeEvent
from treenail.update.steps.step_types import ConfigStep

log = logging.getLogger(__name__)

EVENT_LIMIT = 1000
"""The API server rejects longer messages of Events (1024 bytes)."""
_NOW = 0.0
_SOON_S = 10.0


class BootTrialRunner:
    """Runs `VerifyAction` and `RollBackAction`; both return the seconds until the next pass."""

    def __init__(
        self,
        interfaces: context.NodeInterfaces,
        ledger: update_ledger.UpdateLedger,
        planner: planning.UpdatePlanner,
    ) -> None:
        self._interfaces = interfaces
        self._ledger = ledger
        self._planner = planner
        self._completed_boot_id = ""
        self._counted_boot_id = ""

    def verify_boot(self, facts: node_state.Facts) -> float:
        """Begin or continue the boot trial."""
        update = self._ledger.update
        boot_trial = update.boot_trial
        if boot_trial.boot_id != facts.boot_id:
            boot_trial = boot_trial.begin_boot(facts.boot_id, self._interfaces.clock.monotonic())
        if facts.trial_status is not None:
            boot_trial = health.record_trial_status(boot_trial, facts.trial_status)
        if update.phase is not ledger_record.Phase.VERIFYING or update.boot_id != facts.boot_id:
            self._ledger.enter_phase(ledger_record.Phase.VERIFYING, boot_trial=boot_trial)
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
        remove_crash_record(self._interfaces.crash_record)

    def report_unhealthy(self, unhealthy: str) -> None:
        """Log and report the checks that did not pass although the target stays."""
        target = self._ledger.update.target
        message = f"{target} stays although not every health check passed: {unhealthy}"
        log.warning("%s", message, extra={"message_id": MessageId.HEALTH_CHECK_FAILED})
        self._interfaces.cluster.record_event(
            NodeEvent("Warning", "HealthCheckFailed", message[:EVENT_LIMIT])
        )

    def take_baseline(self, facts: node_state.Facts) -> BootTrial:
        """Return a new trial with the results of the health checks before the update.

        The checks run when the update is about to change files, or to reboot if it changes none:
        after that they may fail because of it. An earlier result of this update is kept.
        """
        update = self._ledger.update
        is_same_boot = update.boot_id == facts.boot_id
        if facts.has_undo or (update.phase is ledger_record.Phase.APPLYING and is_same_boot):
            before = update.boot_trial
            baseline = BootTrial(
                failed_before=before.failed_before, passed_before=before.passed_before
            )
        elif facts.health_mode is HealthCheckMode.OFF:
            baseline = BootTrial()
        else:
            baseline = self._run_baseline(facts)
        return replace(
            baseline, has_api_before_reboot=facts.is_api_reachable, mode=facts.health_mode
        )

    def _run_baseline(self, facts: node_state.Facts) -> BootTrial:
        baseline = self._interfaces.health.take_baseline(facts.boot_id)
        if baseline.failed_before:
            log.warning(
                "health checks failed before the reboot, and cannot fail %s: %s",
                self._ledger.update.target,
                ", ".join(baseline.failed_before),
            )
        return baseline

    def prepare_live_trial(
        self, steps: Sequence[ConfigStep], facts: node_state.Facts
    ) -> BootTrial | None:
        """Return the trial of an update without a reboot; None if it needs none.

        Call it before the steps are applied. With an undo log, steps were applied before a crash.
        """
        if self._ledger.impact.needs_reboot or facts.health_mode is HealthCheckMode.OFF:
            return None
        applied = self._interfaces.configuration.list_pending_services() if facts.has_undo else ()
        if not decide_boot.needs_live_trial((*applied, *steps)):
            return None
        baseline = BootTrial() if applied else self._run_baseline(facts)
        trial = replace(baseline, mode=facts.health_mode)
        return trial.begin_boot(facts.boot_id, self._interfaces.clock.monotonic())

    def arm_crash_record(self, facts: node_state.Facts) -> None:
        """Record durably what a rollback needs if the next boot cannot read the ledger."""
        update, deployments = self._ledger.update, facts.deployments
        crashes = crash_record.CrashRecord(
            update_id=update.id,
            target=update.target,
            origin_boot_id=facts.boot_id,
            origin_id=deployments.booted_id if deployments else "",
            has_os_change=not self._ledger.impact.os.is_empty,
            mode=update.boot_trial.mode,
            boot_count=update.boot_trial.boot_count,
        )
        arm_crash_record(self._interfaces.crash_record, crashes)

    def roll_back(
        self, quarantine: ledger_record.QuarantinedTarget, facts: node_state.Facts
    ) -> float:
        """Reboot into the previous deployment, or with the previous files.

        For an update of files only, `RestoreAction` restores the files before the reboot.
        """
        update, impact = self._ledger.update, self._ledger.impact
        if update.phase is not ledger_record.Phase.ROLLING_BACK or update.boot_id != facts.boot_id:
            if quarantine.is_withdrawn or quarantine.is_cancelled_by_user:
                log.info("not keeping %s: %s", update.target, quarantine.reason)
            else:
                failed = {"message_id": MessageId.HEALTH_CHECK_FAILED}
                log.error("%s", quarantine.reason, extra=failed)
            self._ledger.enter_phase(ledger_record.Phase.ROLLING_BACK, quarantined=quarantine)
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
            steps = decide_boot.select_deployment_steps(pending.steps)
            if steps:
                log.info("completing %d steps after the boot", len(steps))
                self._interfaces.configuration.complete_early_steps(steps)
            self._completed_boot_id = boot_id
        except errors.ClusterError as error:
            log.info("cannot plan the steps after the boot, retrying: %s", error)
        except errors.TreenailError as error:
            problem = str(error)
        self._interfaces.health.set_check_problem(health.CONFIGURATION, problem)


def pin_booted(
    facts: node_state.Facts,
    interfaces: context.NodeInterfaces,
    ledger: update_ledger.UpdateLedger,
    watch: TransactionWatch,
) -> bool:
    """Pin the booted deployment until the new one has been healthy for `retention_s`.

    Returns False after waiting for another program's transaction; the caller tries again. Raises
    `HostError`.
    """
    deployed, record = facts.deployments, ledger.record
    if deployed is None or (record.retained is None and deployed.is_booted_pinned):
        # The user pinned it. Pinning it again would make us remove the user's pin later.
        return True
    ledger.save_record(
        replace(record, retained=ledger_record.RetainedDeployment(deployed.booted_id))
    )
    return _try_operation(
        lambda: interfaces.pins.pin_deployment(deployed.booted_id), interfaces, watch
    )


def unpin_retained(
    deployment_id: str,
    interfaces: context.NodeInterfaces,
    ledger: update_ledger.UpdateLedger,
    watch: TransactionWatch | None,
) -> bool:
    """Remove our pin from the deployment.

    Returns False when another program has the sysroot. With a ``watch``, waits until that
    program's transaction ends. Raises `HostError`.
    """
    is_done = _try_operation(
        lambda: interfaces.pins.unpin_deployment(deployment_id), interfaces, watch
    )
    if is_done:
        ledger.save_record(replace(ledger.record, retained=None))
    return is_done


def _try_operation(
    operation: Callable[[], None],
    interfaces: context.NodeInterfaces,
    watch: TransactionWatch | None,
) -> bool:
    try:
        operation()
    except errors.BusyError as error:
        if watch is None:
            log.debug("postponed unpinning: %s", error)
        else:
            os_transaction.wait_while_busy(error, interfaces.os, watch)
        return False
    return True
