"""Runs the action that a decision names; nothing is decided here.

The ledger records each phase before the first step of that phase. An agent killed at any
instruction therefore restarts in a phase from which the next decision continues.
"""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from treenail.config.image_content import IMAGE_FILES
from treenail.config.wanted_state import read_wanted_state
from treenail.daemon.interfaces import Watch
from treenail.daemon.reconcile import prestage, state
from treenail.daemon.reconcile.boot_trial import BootTrialRunner, pin_booted, unpin_retained
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.os_transaction import (
    build_deployment_change,
    pull_image,
    wait_while_busy,
)
from treenail.daemon.reconcile.planning import UpdatePlanner
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import (
    BusError,
    BusyError,
    CancelledError,
    ConfigError,
    PreflightError,
    StepError,
    TreenailError,
)
from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict
from treenail.log import MessageId
from treenail.update.decision.actions import (
    AdoptAction,
    AnnotateNodeAction,
    ApplyAction,
    CancelStagedAction,
    CheckImageAction,
    CommitAction,
    Decision,
    DrainAction,
    DropPrestagedAction,
    ExcuseTargetAction,
    FinishAction,
    IdleAction,
    PlanAction,
    PrestageAction,
    RebootAction,
    RecoverAction,
    RefuseAction,
    RepairDriftAction,
    RestoreAction,
    RetryAction,
    RollBackAction,
    StageAction,
    UncordonAction,
    UnpinAction,
    VerifyAction,
    WaitAction,
)
from treenail.update.decision.decide_idle import compute_retry_delay, format_retry_remedy
from treenail.update.decision.node_state import Facts
from treenail.update.state.ledger_record import (
    LedgerRecord,
    PrestagedTarget,
    QuarantinedTarget,
    Target,
    UpdateRecord,
)
from treenail.update.state.phases import Phase
from treenail.update.status import NodeEvent, list_failed_service_events, list_service_events

log = logging.getLogger(__name__)

NOW = 0.0
SOON_S = 10.0
APPLY_ATTEMPTS = 3
"""Attempts at a step that failed with a D-Bus error: the service may be restarting."""


UpdateAction = (
    PlanAction
    | StageAction
    | CheckImageAction
    | ApplyAction
    | RestoreAction
    | CommitAction
    | FinishAction
    | CancelStagedAction
)


class ActionRunner:
    """Runs actions, and owns the ledger."""

    def __init__(
        self,
        interfaces: NodeInterfaces,
        *,
        resync_s: float,
        on_progress: Callable[[UpdateRecord | PrestagedTarget, TransactionProgress], WatchVerdict],
        on_record: Callable[[LedgerRecord], None],
    ) -> None:
        self._interfaces = interfaces
        self._resync_s = resync_s
        self._on_progress = on_progress
        self._planner = UpdatePlanner(interfaces)
        self._apply_failures = 0
        self._ledger = UpdateLedger(interfaces, on_record=on_record)
        self._boot_trial = BootTrialRunner(interfaces, self._ledger, self._planner)

    @property
    def record(self) -> LedgerRecord:
        """The ledger record as last saved."""
        return self._ledger.record

    def record_failed_try(self, error: TreenailError) -> None:
        """Add the error to the update in progress, for the history."""
        state.record_failed_try(self._interfaces, self._ledger, error)

    def run_action(self, decision: Decision, facts: Facts) -> float:
        """Run the action; return the seconds until the next pass.

        Raises `TreenailError` when the machine or the cluster rejects a step. The ledger records
        what was done until then, and the next decision continues from there.
        """
        match decision:
            case AnnotateNodeAction() | IdleAction() | WaitAction() | UncordonAction():
                self._ledger.note_report(facts)
                return self._resync_s
            case RefuseAction(error=error):
                raise error
            case DrainAction(token=token):
                return self._request_drain(token)
            case RebootAction():
                return self._reboot_machine(decision, facts)
            case VerifyAction():
                return self._boot_trial.verify_boot(facts)
            case RollBackAction(quarantine=quarantine):
                return self._boot_trial.roll_back(quarantine, facts)
            case AdoptAction(target=target):
                self._adopt_target(target, facts)
            case PrestageAction() | DropPrestagedAction():
                self._run_prestage_action(decision, facts)
            case RetryAction() | ExcuseTargetAction() | UnpinAction():
                return self._clear_record(decision)
            case RepairDriftAction(drifts=drifts):
                self._interfaces.drift.repair_drift(self._ledger.record.current, drifts)
            case RecoverAction():
                update = self._ledger.record.update
                self._interfaces.configuration.recover_interrupted(update.id if update else "")
            case _:
                self._run_update_action(decision, facts)
        return NOW

    def _run_prestage_action(
        self, decision: PrestageAction | DropPrestagedAction, facts: Facts
    ) -> None:
        progress, save = self._on_progress, self._ledger.save_record
        match decision:
            case PrestageAction():
                prestage.prestage_target(
                    decision,
                    facts,
                    self._interfaces,
                    self._planner,
                    on_progress=progress,
                    save_record=save,
                )
            case DropPrestagedAction():
                prestage.drop_prestaged(decision, facts, self._interfaces, save_record=save)

    def _clear_record(self, decision: RetryAction | ExcuseTargetAction | UnpinAction) -> float:
        if not isinstance(decision, UnpinAction):
            self._ledger.change_quarantine(decision)
            return NOW
        update = self._ledger.record.update
        watch = self._make_watch(update)[0] if update else None
        is_done = unpin_retained(decision.id, self._interfaces, self._ledger, watch)
        return NOW if is_done or update else SOON_S

    def _adopt_target(self, target: Target, facts: Facts) -> None:
        if not target.image:
            # Ignition wrote these files at installation. Own them, so that a later config that
            # drops them removes them.
            config = self._interfaces.config_cache.fetch_config(target.config)
            self._interfaces.configuration.record_ownership(
                read_wanted_state(config), target.config
            )
        self._ledger.save_record(self._ledger.record_at_target(target, facts))
        log.info("adopted %s: the machine already matches it", target)

    def _run_update_action(self, decision: UpdateAction, facts: Facts) -> None:
        """Run one step of the update; the next pass may follow at once."""
        match decision:
            case PlanAction(target=target):
                self._plan_update(target, facts)
            case StageAction(target=target):
                self._stage_target(target)
            case CheckImageAction(target=target, staged_id=staged_id):
                self._check_image(target, staged_id)
            case ApplyAction(target=target):
                self._apply_config(target, facts)
            case RestoreAction():
                is_booted = self._ledger.update.has_booted_files(facts.boot_id)
                self._interfaces.configuration.restore_pending(is_booted=is_booted)
            case CommitAction(unhealthy=unhealthy):
                self._commit_update(facts, unhealthy)
            case FinishAction(is_done=is_done):
                state.close_update(self._interfaces, self._ledger, is_done=is_done)
            case CancelStagedAction(reason=reason, staged_id=staged_id, quarantine=quarantine):
                state.cancel_update(self._interfaces, self._ledger, reason, staged_id, quarantine)

    def _plan_update(self, target: Target, facts: Facts) -> None:
        update = self._ledger.record.update
        if update is None or update.target != target:
            update = self._begin_update(target, facts)
        deployments = facts.deployments
        if deployments is None:
            raise AssertionError("an update was planned without reading the deployments")
        impact = self._planner.plan_update(
            target, update.origin, deployments, writes_image_files=not facts.has_files_in_image
        )
        log.info(
            "planned %s: %s%s",
            target,
            impact.level_name,
            "".join(f"; {reason}" for reason in impact.reasons),
        )
        self._ledger.enter_phase(Phase.STAGING, impact=impact)
        self._interfaces.drift.remove_force_file()

    def _begin_update(self, target: Target, facts: Facts) -> UpdateRecord:
        claimed = facts.node.claimed if facts.node else Target()
        now = self._interfaces.read_moment()
        update = UpdateRecord(
            id=secrets.token_hex(16),
            target=target,
            origin=self._ledger.record.current
            if self._ledger.record.current != Target()
            else claimed,
            phase=Phase.STAGING,
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

    def _stage_target(self, target: Target) -> None:
        update = self._ledger.update
        if update.phase is not Phase.STAGING or update.staged_id:
            # The deployment staged earlier is gone. Forget its ID before another is staged.
            update = self._ledger.enter_phase(Phase.STAGING, staged_id="")
        os_change = self._ledger.impact.os
        watch, ended = self._make_watch(update)

        def attempt() -> bool:
            self._interfaces.preflight.check_image(os_change.image)
            self._interfaces.os.stage_deployment(build_deployment_change(os_change), watch=watch)
            return not ended

        try:
            pull_image(self._interfaces.pull_secrets, os_change.image, attempt)
        except BusyError as error:
            wait_while_busy(error, self._interfaces.os, watch)
            return
        except CancelledError:
            if not ended:
                raise
            return
        staged = self._interfaces.os.read_deployments().staged
        staged_update = replace(update, staged_id=staged.id if staged else "")
        self._ledger.save_record(replace(self._ledger.record, update=staged_update))
        log.info("staged %s, locked", target, extra={"message_id": MessageId.STAGED})

    def _check_image(self, target: Target, staged_id: str) -> None:
        """Compare the staged image with the config; cancel the update if the image lacks a part."""
        update, impact = self._ledger.update, self._ledger.impact
        checked = replace(impact, checked_id=staged_id)
        try:
            self._interfaces.preflight.check_staged_image(staged_id, impact.os.image)
            if target.image:
                checked = self._planner.plan_staged_update(target, update.origin, impact, staged_id)
        except (ConfigError, PreflightError) as error:
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            is_config = isinstance(error, ConfigError)
            check = IMAGE_FILES if is_config else ""
            blamed = QuarantinedTarget(target, str(error), error.remedy, check=check)
            reason = "the image differs from the config" if is_config else "the image has no agent"
            state.cancel_update(self._interfaces, self._ledger, reason, staged_id, blamed)
            return
        log.info("checked %s: the image has what it must", impact.os.image)
        self._ledger.save_record(
            replace(self._ledger.record, update=replace(update, impact=checked))
        )

    def _make_watch(self, update: UpdateRecord) -> tuple[Watch, list[WatchVerdict]]:
        """Return a watch for the transaction, and the list of verdicts with which it ended it."""
        ended: list[WatchVerdict] = []

        def watch(progress: TransactionProgress) -> WatchVerdict:
            verdict = self._on_progress(update, progress)
            if verdict is not WatchVerdict.CONTINUE:
                ended.append(verdict)
            return verdict

        return watch, ended

    def _request_drain(self, token: str) -> float:
        update = self._ledger.update
        if update.phase is not Phase.DRAINING or update.drain_token != token:
            if self._ledger.impact.needs_reboot:
                # Staging may be long past. A failure found now costs no drain.
                self._interfaces.preflight.check_machine(self._ledger.impact.os.image)
            self._ledger.enter_phase(Phase.DRAINING, drain=token)
            log.info("requested the drain %s", token)
            return NOW
        # The report carries the token. Wait for the drain controller to apply it.
        return SOON_S if self._interfaces.cluster.get_cached_node() is None else self._resync_s

    def _apply_config(self, target: Target, facts: Facts) -> None:
        update, impact = self._ledger.update, self._ledger.impact
        if update.phase is not Phase.APPLYING or update.boot_id != facts.boot_id:
            self._log_drained(update)
            boot_trial = (
                self._boot_trial.take_baseline(facts)
                if impact.needs_reboot
                # The crash counter reads the mode.
                else replace(update.boot_trial, mode=facts.health_mode)
            )
            update = self._ledger.enter_phase(Phase.APPLYING, boot_trial=boot_trial)
        staged_id = facts.deployments.staged_id if facts.deployments and impact.os.image else ""
        pending = self._planner.plan_pending_steps(
            target, update.origin, impact, staged_id=staged_id
        )
        if pending.impact.level > impact.level:
            if facts.has_undo:
                # The written files would count as all of them, and the reboot would come first.
                reason = f"its impact grew after files were written: {pending.impact.level_name}"
                state.cancel_update(self._interfaces, self._ledger, reason, staged_id, None)
                return
            log.info(
                "planning %s again, its impact grew: %s", target, "; ".join(pending.impact.reasons)
            )
            self._ledger.enter_phase(Phase.STAGING, impact=pending.impact)
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
        except StepError as error:
            self._apply_failures += 1
            is_bus_error = isinstance(error.__cause__, BusError)
            if is_bus_error and self._apply_failures < APPLY_ATTEMPTS:
                raise
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            self._record_events(list_failed_service_events(error.step, error))
            delay_s = compute_retry_delay(
                self._ledger.record, target, needs_drain=impact.needs_drain
            )
            retry_at = float(round(self._interfaces.clock.now() + delay_s))
            remedy = format_retry_remedy(error.remedy, retry_at)
            quarantined = QuarantinedTarget(target, str(error), remedy, retry_at=retry_at)
            self._ledger.enter_phase(Phase.CANCELLING, quarantined=quarantined)
            return
        log.info("applied %s in %d steps", target, len(pending.steps))
        if not impact.needs_reboot:
            self._record_events(list_service_events(pending.steps, target))
            if live_trial is None:
                self._finish_verification(facts)
                # Not earlier: until then the crash counter may have to restore the files.
                self._interfaces.configuration.confirm_pending()
            else:
                self._ledger.enter_phase(Phase.VERIFYING, boot_trial=live_trial)
        elif not pending.steps:
            self._ledger.enter_phase(Phase.APPLYING, impact=replace(impact, needs_write=False))

    def _record_events(self, events: Iterable[NodeEvent]) -> None:
        for event in events:
            self._interfaces.cluster.record_event(event)

    def _reboot_machine(self, action: RebootAction, facts: Facts) -> float:
        update, staged_id = self._ledger.update, action.staged_id
        boot_id = self._interfaces.kernel.read_boot_id()
        if update.phase is not Phase.REBOOTING or update.boot_id != boot_id:
            self._log_drained(update)
            # Record the ID first: an unlocked deployment no longer shows who staged it.
            self._ledger.enter_phase(
                Phase.REBOOTING,
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
            self._ledger.enter_phase(Phase.REBOOTING, boot_trial=boot_trial)
        self._boot_trial.arm_crash_record(facts)
        watch, _ = self._make_watch(self._ledger.update)
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

    def _log_drained(self, update: UpdateRecord) -> None:
        if update.phase is Phase.DRAINING:
            log.info("drained for %s", update.drain_token, extra={"message_id": MessageId.DRAINED})

    def _commit_update(self, facts: Facts, unhealthy: str) -> None:
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
        if pending.steps:
            log.info("completing %d steps after the boot", len(pending.steps))
            self._interfaces.configuration.complete_steps(
                pending.steps, pending.split, update.target.config
            )
        self._interfaces.configuration.confirm_pending()
        self._finish_verification(facts)

    def _finish_verification(self, facts: Facts) -> None:
        """Make the verified target current and begin to uncordon."""
        update = self._ledger.enter_phase(Phase.UNCORDONING, reached_facts=facts)
        self._interfaces.config_cache.prune_cache({update.target.config})
        log.info(
            "verified %s after %d s",
            update.target,
            facts.now - update.began,
            extra={"message_id": MessageId.BOOT_VERIFIED},
        )
