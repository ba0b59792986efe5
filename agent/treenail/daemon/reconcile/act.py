"""Run the action that a decision names; nothing is decided here.

The ledger records each phase before the first step of that phase. An agent killed at any
instruction therefore restarts in a phase from which the next decision continues.
"""

import logging
import secrets
from collections.abc import Iterable
from dataclasses import replace

from treenail import deployment_change, errors
from treenail.config import image_content
from treenail.daemon.reconcile import context, os_transaction, planning, update_ledger
from treenail.daemon.reconcile.boot_trial import BootTrialRunner, pin_booted, unpin_retained
from treenail.log import MessageId
from treenail.update import status
from treenail.update.decision import actions, decide_idle, node_state
from treenail.update.state import ledger_record
from treenail.update.steps import step_types

log = logging.getLogger(__name__)

NOW = 0.0
SOON_S = 10.0
APPLY_ATTEMPTS = 3
"""Attempts at a step that failed with a D-Bus error: the service may be restarting."""


UpdateAction = (
    actions.PrestageAction
    | actions.DropPrestagedAction
    | actions.PlanAction
    | actions.StageAction
    | actions.CheckImageAction
    | actions.ApplyAction
    | actions.RestoreAction
    | actions.CommitAction
    | actions.FinishAction
    | actions.CancelStagedAction
)


class ActionRunner:
    """Runs actions, and writes the ledger."""

    def __init__(
        self,
        interfaces: context.NodeInterfaces,
        ledger: update_ledger.UpdateLedger,
        transaction_step: os_transaction.TransactionStep,
        *,
        resync_s: float,
    ) -> None:
        self._interfaces = interfaces
        self._ledger = ledger
        self._transaction_step = transaction_step
        self._resync_s = resync_s
        self._planner = planning.UpdatePlanner(interfaces)
        self._apply_failures = 0
        self._boot_trial = BootTrialRunner(interfaces, ledger, self._planner)

    def run_action(self, decision: actions.Decision, facts: node_state.Facts) -> float:
        """Run the action; return the seconds until the next pass.

        Raises `TreenailError` when the machine or the cluster rejects a step. The ledger records
        what was done until then, and the next decision continues from there.
        """
        match decision:
            case (
                actions.AnnotateNodeAction()
                | actions.IdleAction()
                | actions.WaitAction()
                | actions.UncordonAction()
            ):
                self._ledger.note_report(facts)
                return self._resync_s
            case actions.RefuseAction(error=error):
                raise error
            case actions.DrainAction(token=token):
                return self._request_drain(token)
            case actions.RebootAction():
                return self._reboot_machine(decision, facts)
            case actions.VerifyAction():
                return self._boot_trial.verify_boot(facts)
            case actions.RollBackAction(quarantine=quarantine):
                return self._boot_trial.roll_back(quarantine, facts)
            case actions.AdoptAction(target=target):
                self._adopt_target(target, facts)
            case actions.RetryAction() | actions.ExcuseTargetAction() | actions.UnpinAction():
                return self._clear_record(decision)
            case actions.RepairDriftAction(drifts=drifts):
                self._interfaces.drift.repair_drift(self._ledger.record.current, drifts)
            case actions.RecoverAction():
                update = self._ledger.record.update
                self._interfaces.configuration.recover_interrupted(update.id if update else "")
            case _:
                self._run_update_action(decision, facts)
        return NOW

    def _clear_record(
        self, decision: actions.RetryAction | actions.ExcuseTargetAction | actions.UnpinAction
    ) -> float:
        if not isinstance(decision, actions.UnpinAction):
            self._ledger.change_quarantine(decision)
            return NOW
        update = self._ledger.record.update
        watch = self._transaction_step.make_watch(self._ledger.record) if update else None
        is_done = unpin_retained(decision.id, self._interfaces, self._ledger, watch)
        return NOW if is_done or update else SOON_S

    def _adopt_target(self, target: ledger_record.Target, facts: node_state.Facts) -> None:
        if not target.image:
            # Ignition wrote these files at installation. Own them, so that a later config that
            # drops them removes them.
            config = self._interfaces.config_cache.fetch_config(target.config)
            self._interfaces.configuration.record_ownership(config.wanted, target.config)
        self._ledger.save_record(self._ledger.record_at_target(target, facts))
        log.info("adopted %s: the machine already matches it", target)

    def _run_update_action(self, decision: UpdateAction, facts: node_state.Facts) -> None:
        """Run one step of an update, or stage before it; the next pass may follow at once."""
        match decision:
            case actions.PrestageAction():
                self._prestage_target(decision, facts)
            case actions.DropPrestagedAction(staged_id=staged_id):
                self._drop_prestaged(staged_id)
            case actions.PlanAction(target=target):
                self._plan_update(target, facts)
            case actions.StageAction(target=target):
                self._stage_target(target)
            case actions.CheckImageAction(target=target, staged_id=staged_id):
                self._check_image(target, staged_id)
            case actions.ApplyAction(target=target):
                self._apply_config(target, facts)
            case actions.RestoreAction():
                is_booted = self._ledger.update.has_booted_files(facts.boot_id)
                self._interfaces.configuration.restore_pending(is_booted=is_booted)
            case actions.CommitAction(unhealthy=unhealthy):
                self._commit_update(facts, unhealthy)
            case actions.FinishAction(is_done=is_done):
                update_ledger.close_update(self._interfaces, self._ledger, is_done=is_done)
            case actions.CancelStagedAction(
                reason=reason, staged_id=staged_id, quarantine=quarantine
            ):
                update_ledger.cancel_update(
                    self._interfaces, self._ledger, reason, staged_id, quarantine
                )

    def _plan_update(self, target: ledger_record.Target, facts: node_state.Facts) -> None:
        update = self._ledger.record.update
        if update is None or update.target != target:
            update = self._begin_update(target, facts)
        deployments = facts.deployments
        if deployments is None:
            raise AssertionError("an update was planned without reading the deployments")
        if facts.is_hosted and not self._ledger.record.current.config:
            self._own_origin(update.origin)
        impact = self._planner.plan_update(
            target, update.origin, deployments, writes_image_files=not facts.has_files_in_image
        )
        log.info(
            "planned %s: %s%s",
            target,
            impact.level_name,
            "".join(f"; {reason}" for reason in impact.reasons),
        )
        self._ledger.enter_phase(ledger_record.Phase.STAGING, impact=impact)
        self._interfaces.drift.remove_force_file()

    def _own_origin(self, origin: ledger_record.Target) -> None:
        """Own what another agent or the installation wrote, so that the target can remove it."""
        try:
            config = self._interfaces.config_cache.find_config(origin.config)
            if config is not None:
                self._interfaces.configuration.record_ownership(config.wanted, origin.config)
        except errors.ConfigError as error:
            log.warning("cannot read the config of this machine, its files stay: %s", error)

    def _begin_update(
        self, target: ledger_record.Target, facts: node_state.Facts
    ) -> ledger_record.UpdateRecord:
        claimed = facts.node.claimed if facts.node else ledger_record.Target()
        now = self._interfaces.read_moment()
        update = ledger_record.UpdateRecord(
            id=secrets.token_hex(16),
            target=target,
            origin=self._ledger.record.current
            if self._ledger.record.current != ledger_record.Target()
            else claimed,
            phase=ledger_record.Phase.STAGING,
            boot_id=now.boot_id,
            began=now.wall,
            entered=now.wall,
            entered_monotonic=now.monotonic,
        )
        self._apply_failures = 0
        self._ledger.save_record(
            replace(self._ledger.record, update=update, quarantined=None, prestaged=None)
        )
        log.info(
            "started update %s from %s to %s",
            update.id,
            update.origin,
            target,
            extra={"message_id": MessageId.UPDATE_STARTED},
        )
        return update

    def _prestage_target(self, decision: actions.PrestageAction, facts: node_state.Facts) -> None:
        """Pull and stage the target's change of the operating system before an update begins.

        The ledger records the pre-staged target before the transaction begins, so that a restarted
        agent knows whose deployment is staged.
        """
        target = decision.target
        if decision.foreign_id:
            raise errors.HostError(
                f"cannot pre-stage {target}: deployment {decision.foreign_id} is staged, and "
                "treenail did not stage it",
                remedy="run: rpm-ostree cleanup --pending, or reboot into it",
            )
        if facts.deployments is None:
            raise AssertionError("pre-staging was decided without reading the deployments")
        origin = self._ledger.record.current
        impact = self._planner.plan_update(
            target, origin, facts.deployments, writes_image_files=not facts.has_files_in_image
        )
        prestaged = ledger_record.PrestagedTarget(target, facts.boot_id)
        self._ledger.save_record(replace(self._ledger.record, prestaged=prestaged))
        staged_id = ""
        if not impact.os.is_empty:
            if not self._stage_change(impact.os):
                return
            staged_id = self._read_staged_id()
            if staged_id and target.image and impact.os.image:
                # The update compares again. A part that the image lacks is reported days before it.
                self._planner.plan_staged_update(target, origin, impact, staged_id)
        done = replace(prestaged, staged_id=staged_id, is_done=True)
        self._ledger.save_record(replace(self._ledger.record, prestaged=done))
        self._interfaces.os.release_daemon()
        log.info("pre-staged %s, locked", target)

    def _drop_prestaged(self, staged_id: str) -> None:
        """Drop the pre-staged deployment and remove it from the ledger."""
        self._interfaces.os.drop_staged(staged_id)
        self._interfaces.os.release_daemon()
        log.info("dropped the pre-staged deployment")
        self._ledger.save_record(replace(self._ledger.record, prestaged=None))

    def _stage_target(self, target: ledger_record.Target) -> None:
        update = self._ledger.update
        if update.phase is not ledger_record.Phase.STAGING or update.staged_id:
            # The deployment staged earlier is gone. Forget its ID before another is staged.
            update = self._ledger.enter_phase(ledger_record.Phase.STAGING, staged_id="")
        if not self._stage_change(self._ledger.impact.os):
            return
        staged_update = replace(update, staged_id=self._read_staged_id())
        self._ledger.save_record(replace(self._ledger.record, update=staged_update))
        log.info("staged %s, locked", target, extra={"message_id": MessageId.STAGED})

    def _stage_change(self, change: deployment_change.DeploymentChange) -> bool:
        """Check, pull and stage the change, locked; return False if the next pass decides again.

        That is after waiting for another transaction, and after a verdict that ended ours.
        """
        interfaces, watch = self._interfaces, self._transaction_step.make_watch(self._ledger.record)

        def attempt() -> None:
            interfaces.preflight.check_image(change.image)
            interfaces.os.stage_deployment(change, watch=watch)

        try:
            os_transaction.pull_with_logins(interfaces.pull_secrets, change.image, attempt)
        except errors.BusyError as error:
            os_transaction.wait_while_busy(error, interfaces.os, watch)
            return False
        except errors.CancelledError:
            if not self._transaction_step.has_ended_transaction:
                raise
            return False
        return True

    def _read_staged_id(self) -> str:
        staged = self._interfaces.os.read_deployments().staged
        return staged.id if staged else ""

    def _check_image(self, target: ledger_record.Target, staged_id: str) -> None:
        """Compare the staged image with the config; cancel the update if the image lacks a part."""
        update, impact = self._ledger.update, self._ledger.impact
        checked = replace(impact, checked_id=staged_id)
        try:
            self._interfaces.preflight.check_staged_image(staged_id, impact.os.image)
            if target.image:
                checked = self._planner.plan_staged_update(target, update.origin, impact, staged_id)
        except (errors.ConfigError, errors.PreflightError) as error:
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            is_config = isinstance(error, errors.ConfigError)
            check = image_content.IMAGE_FILES if is_config else ""
            blamed = ledger_record.QuarantinedTarget(target, str(error), error.remedy, check=check)
            reason = "the image differs from the config" if is_config else "the image has no agent"
            update_ledger.cancel_update(self._interfaces, self._ledger, reason, staged_id, blamed)
            return
        log.info("checked %s: the image has what it must", impact.os.image)
        self._ledger.save_record(
            replace(self._ledger.record, update=replace(update, impact=checked))
        )

    def _request_drain(self, token: str) -> float:
        update = self._ledger.update
        if update.phase is not ledger_record.Phase.DRAINING or update.drain_token != token:
            if self._ledger.impact.needs_reboot:
                # Staging may be long past. A failure found now costs no drain.
                self._interfaces.preflight.check_machine(self._ledger.impact.os.image)
            self._ledger.enter_phase(ledger_record.Phase.DRAINING, drain=token)
            log.info("requested the drain %s", token)
            return NOW
        # The report carries the token. Wait for the drain controller to apply it.
        return SOON_S if self._interfaces.cluster.get_cached_node() is None else self._resync_s

    def _apply_config(self, target: ledger_record.Target, facts: node_state.Facts) -> None:
        update, impact = self._ledger.update, self._ledger.impact
        if update.phase is not ledger_record.Phase.APPLYING or update.boot_id != facts.boot_id:
            self._log_drained(update)
            boot_trial = (
                self._boot_trial.take_baseline(facts)
                if impact.needs_reboot
                # The crash counter reads the mode.
                else replace(update.boot_trial, mode=facts.health_mode)
            )
            update = self._ledger.enter_phase(ledger_record.Phase.APPLYING, boot_trial=boot_trial)
        staged_id = facts.deployments.staged_id if facts.deployments and impact.os.image else ""
        pending = self._planner.plan_pending_steps(
            target, update.origin, impact, staged_id=staged_id
        )
        if pending.impact.level > impact.level:
            if facts.has_undo:
                # The written files would count as all of them, and the reboot would come first.
                reason = f"its impact grew after files were written: {pending.impact.level_name}"
                update_ledger.cancel_update(self._interfaces, self._ledger, reason, staged_id, None)
                return
            log.info(
                "planning %s again, its impact grew: %s", target, "; ".join(pending.impact.reasons)
            )
            self._ledger.enter_phase(ledger_record.Phase.STAGING, impact=pending.impact)
            return
        live_trial = self._boot_trial.prepare_live_trial(pending.steps, facts)
        try:
            self._interfaces.configuration.apply_steps(
                pending.steps,
                pending.split,
                target.config,
                # A second pending change would replace the undo log of the first.
                owner="" if facts.has_undo else update.id,
            )
        except errors.StepError as error:
            self._apply_failures += 1
            is_bus_error = isinstance(error.__cause__, errors.BusError)
            if is_bus_error and self._apply_failures < APPLY_ATTEMPTS:
                raise
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            self._record_events(status.list_failed_service_events(error.step, error))
            delay_s = decide_idle.compute_retry_delay(
                self._ledger.record, target, needs_drain=impact.needs_drain
            )
            retry_at = float(round(self._interfaces.clock.now() + delay_s))
            remedy = decide_idle.format_retry_remedy(error.remedy, retry_at)
            quarantined = ledger_record.QuarantinedTarget(
                target, str(error), remedy, retry_at=retry_at
            )
            self._ledger.enter_phase(ledger_record.Phase.CANCELLING, quarantined=quarantined)
            return
        log.info("applied %s in %d steps", target, len(pending.steps))
        if not impact.needs_reboot:
            self._record_events(status.list_service_events(pending.steps, target))
            if live_trial is None:
                self._finish_verification(facts)
                # Not earlier: until then the crash counter may have to restore the files.
                self._interfaces.configuration.confirm_pending()
            else:
                self._ledger.enter_phase(ledger_record.Phase.VERIFYING, boot_trial=live_trial)
        elif not pending.steps:
            self._ledger.enter_phase(
                ledger_record.Phase.APPLYING, impact=replace(impact, needs_write=False)
            )

    def _record_events(self, events: Iterable[status.NodeEvent]) -> None:
        for event in events:
            self._interfaces.cluster.record_event(event)

    def _reboot_machine(self, action: actions.RebootAction, facts: node_state.Facts) -> float:
        update, staged_id = self._ledger.update, action.staged_id
        boot_id = self._interfaces.kernel.read_boot_id()
        if update.phase is not ledger_record.Phase.REBOOTING or update.boot_id != boot_id:
            self._log_drained(update)
            # Record the ID first: an unlocked deployment no longer shows who staged it.
            self._ledger.enter_phase(
                ledger_record.Phase.REBOOTING,
                reboots=update.reboot_count + 1,
                staged_id=staged_id or update.staged_id,
                boot_trial=self._boot_trial.take_baseline(facts),
            )
            # The checks take time. Decide again with a Node that is read right before the reboot.
            return NOW
        if update.boot_trial.has_api_before_reboot is not facts.is_api_reachable:
            # An inhibitor may delay the reboot. Record the state right before it: an API server
            # that was unreachable before the reboot cannot fail the target.
            boot_trial = replace(update.boot_trial, has_api_before_reboot=facts.is_api_reachable)
            self._ledger.enter_phase(ledger_record.Phase.REBOOTING, boot_trial=boot_trial)
        self._boot_trial.arm_crash_record(facts)
        watch = self._transaction_step.make_watch(self._ledger.record)
        if staged_id and not pin_booted(facts, self._interfaces, self._ledger, watch):
            return NOW
        is_soft = action.is_soft and self._prepare_soft_reboot(staged_id)
        log.info(
            "%s into %s",
            "soft-rebooting" if is_soft else "rebooting",
            action.target,
            extra={"message_id": MessageId.REBOOTING},
        )
        if staged_id and not is_soft:
            self._interfaces.os.finalize_staged(staged_id)
        self._interfaces.power.reboot_machine(is_soft=is_soft)
        return SOON_S

    def _prepare_soft_reboot(self, staged_id: str) -> bool:
        """Unlock the staged deployment; return whether a soft reboot can switch to it.

        It is unlocked here already because ostree-finalize-staged.service merges /etc into the
        new root during the shutdown, soft or not.
        """
        self._interfaces.os.finalize_staged(staged_id, is_soft=True)
        return self._interfaces.soft_reboots.prepare_soft_reboot()

    def _log_drained(self, update: ledger_record.UpdateRecord) -> None:
        if update.phase is ledger_record.Phase.DRAINING:
            log.info("drained for %s", update.drain_token, extra={"message_id": MessageId.DRAINED})

    def _commit_update(self, facts: node_state.Facts, unhealthy: str) -> None:
        """Complete the steps that the boot undid, then make the target current.

        OSTree's merge of /etc drops files that equal the old image's /usr/etc.
        """
        if unhealthy and not self._ledger.update.boot_trial.is_healthy:
            self._boot_trial.report_unhealthy(unhealthy)
        self._boot_trial.record_healthy()
        update = self._ledger.update
        pending = self._planner.plan_pending_steps(
            update.target, update.origin, self._ledger.impact
        )
        # Services have read the files, unless one is written again.
        if any(not isinstance(step, step_types.ServiceStep) for step in pending.steps):
            log.info("completing %d steps after the boot", len(pending.steps))
            self._interfaces.configuration.complete_steps(
                pending.steps, pending.split, update.target.config
            )
        self._interfaces.configuration.confirm_pending()
        self._finish_verification(facts)

    def _finish_verification(self, facts: node_state.Facts) -> None:
        """Make the verified target current and begin to uncordon."""
        update = self._ledger.enter_phase(ledger_record.Phase.UNCORDONING, reached_facts=facts)
        self._interfaces.config_cache.prune_cache({update.target.config})
        log.info(
            "verified %s after %d s",
            update.target,
            facts.now - update.began,
            extra={"message_id": MessageId.BOOT_VERIFIED},
        )
