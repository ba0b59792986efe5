"""One move: what a decision does to the machine.

Nothing is decided here. Every change of phase is in the ledger before the step that it names, so
that a process killed at any instruction finds, at its next start, a phase whose facts lead on.
"""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from treenail.config.wanted import read_wanted_state
from treenail.daemon.reconcile import pinning, prestage
from treenail.daemon.reconcile.boot_trial import BootTrialRunner
from treenail.daemon.reconcile.busy_wait import wait_while_busy
from treenail.daemon.reconcile.interfaces import NodeInterfaces, Watch
from treenail.daemon.reconcile.planning import UpdatePlanner
from treenail.daemon.reconcile.pull import pull_image
from treenail.daemon.reconcile.state import UpdateLedger
from treenail.errors import BusError, BusyError, CancelledError, StepError
from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict
from treenail.log import MessageId
from treenail.update.decision.actions import (
    AdoptAction,
    ApplyAction,
    CancelStagedAction,
    CommitAction,
    Decision,
    DrainAction,
    DropPrestagedAction,
    FinishAction,
    IdleAction,
    IntroduceNodeAction,
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
from treenail.update.decision.facts import Facts
from treenail.update.state.boot_trial import BootTrial
from treenail.update.state.record import (
    LedgerRecord,
    Phase,
    PrestagedTarget,
    QuarantinedTarget,
    Target,
    UpdateOutcome,
    UpdateRecord,
)
from treenail.update.status import NodeEvent, list_failed_service_events, list_service_events

log = logging.getLogger(__name__)

NOW = 0.0
SOON_S = 10.0
APPLY_ATTEMPTS = 3
"""Of a step that failed because a service did not answer: it may be back in a moment."""


UpdateAction = (
    PlanAction
    | StageAction
    | ApplyAction
    | RestoreAction
    | CommitAction
    | FinishAction
    | CancelStagedAction
)


class ActionRunner:
    """Carries decisions out, and owns the ledger."""

    def __init__(
        self,
        interfaces: NodeInterfaces,
        *,
        resync_s: float,
        has_files_in_image: bool,
        on_progress: Callable[[UpdateRecord | PrestagedTarget, TransactionProgress], WatchVerdict],
        on_record: Callable[[LedgerRecord], None],
    ) -> None:
        self._interfaces = interfaces
        self._resync_s = resync_s
        self._on_progress = on_progress
        self._planner = UpdatePlanner(interfaces, has_files_in_image=has_files_in_image)
        self._apply_failures = 0
        self._ledger = UpdateLedger(interfaces, on_record=on_record)
        self._boot_trial = BootTrialRunner(interfaces, self._ledger, self._planner)

    @property
    def record(self) -> LedgerRecord:
        """What the ledger holds."""
        return self._ledger.record

    def run_action(self, decision: Decision, facts: Facts) -> float:
        """Carry the decision out; returns in how many seconds to look again.

        Raises `TreenailError` when the machine or the cluster refused; what had been done is in
        the ledger, and deciding anew leads on from there.
        """
        match decision:
            case IdleAction() | WaitAction() | UncordonAction() | IntroduceNodeAction():
                return self._resync_s
            case RefuseAction(error=error):
                raise error
            case DrainAction(token=token):
                return self._request_drain(token)
            case RebootAction():
                return self._reboot_machine(decision, facts)
            case VerifyAction():
                return self._boot_trial.verify_boot(facts)
            case RollBackAction(quarantine=refuse):
                return self._boot_trial.roll_back(refuse, facts)
            case AdoptAction(target=target):
                self._adopt_target(target, facts)
            case PrestageAction() | DropPrestagedAction():
                self._run_prestage_action(decision, facts)
            case RetryAction() | UnpinAction():
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

    def _clear_record(self, decision: RetryAction | UnpinAction) -> float:
        if isinstance(decision, RetryAction):
            self._ledger.save_record(replace(self._ledger.record, quarantined=None))
            return NOW
        update = self._ledger.record.update
        watch = self._make_watch(update)[0] if update else None
        done = pinning.unpin_retained(decision.id, self._interfaces, self._ledger, watch)
        return NOW if done or update else SOON_S

    def _adopt_target(self, target: Target, facts: Facts) -> None:
        if not target.image:
            # Whoever installed the machine wrote these files, and they go with their config.
            config = self._interfaces.config_cache.fetch_config(target.config)
            self._interfaces.configuration.record_ownership(
                read_wanted_state(config), target.config
            )
        self._ledger.save_record(self._ledger.record_at_target(target, facts))
        log.info("the machine already is at %s", target)

    def _run_update_action(self, decision: UpdateAction, facts: Facts) -> None:
        """One step of the update, of which the next can be taken at once."""
        match decision:
            case PlanAction(target=target):
                self._plan_update(target, facts)
            case StageAction(target=target):
                self._stage_target(target)
            case ApplyAction(target=target):
                self._apply_config(target, facts)
            case RestoreAction():
                booted = self._ledger.update.boot_id != facts.boot_id
                self._interfaces.configuration.restore_pending(is_booted=booted)
            case CommitAction():
                self._commit_update(facts)
            case FinishAction(is_done=done):
                self._close_update(is_done=done)
            case CancelStagedAction(reason=reason, staged_id=staged_id, quarantine=refuse):
                self._cancel_update(reason, staged_id, refuse)

    def _plan_update(self, target: Target, facts: Facts) -> None:
        update = self._ledger.record.update
        if update is None or update.target != target:
            update = self._begin_update(target, facts)
        deployed = facts.deployments
        if deployed is None:
            raise AssertionError("an update was to be weighed without a look at the deployments")
        work = self._planner.plan_update(target, update.origin, deployed)
        log.info(
            "%s asks for: %s%s",
            target,
            work.level_name,
            "".join(f"; {reason}" for reason in work.reasons),
        )
        self._ledger.enter_phase(Phase.STAGING, impact=work)
        self._interfaces.drift.remove_force_file()

    def _begin_update(self, target: Target, facts: Facts) -> UpdateRecord:
        claimed = facts.node.claimed if facts.node else Target()
        update = UpdateRecord(
            id=secrets.token_hex(16),
            target=target,
            origin=self._ledger.record.current
            if self._ledger.record.current != Target()
            else claimed,
            phase=Phase.STAGING,
            boot_id=self._interfaces.kernel.read_boot_id(),
            began=self._interfaces.clock.now(),
            entered=self._interfaces.clock.now(),
        )
        self._apply_failures = 0
        self._ledger.save_record(
            replace(self._ledger.record, update=update, quarantined=None, prestaged=None)
        )
        log.info(
            "update %s began: from %s to %s",
            update.id,
            update.origin,
            target,
            extra={"message_id": MessageId.UPDATE_STARTED},
        )
        return update

    def _stage_target(self, target: Target) -> None:
        update = self._ledger.update
        if update.phase is not Phase.STAGING or update.staged_id:
            # What was staged before is gone; until it is noted, what is staged now has no name.
            update = self._ledger.enter_phase(Phase.STAGING, staged_id="")
        asked = self._ledger.impact.os
        watch, called_off = self._make_watch(update)

        def attempt() -> bool:
            self._interfaces.preflight.check_image(asked.image)
            self._interfaces.os.stage_deployment(
                prestage.build_deployment_change(asked), watch=watch
            )
            return not called_off

        try:
            pull_image(self._interfaces.pull_secrets, asked.image, attempt)
        except BusyError as error:
            wait_while_busy(error, self._interfaces.os, watch)
            return
        except CancelledError:
            if not called_off:
                raise
            return
        staged = self._interfaces.os.read_deployments().staged
        noted = replace(update, staged_id=staged.id if staged else "")
        self._ledger.save_record(replace(self._ledger.record, update=noted))
        log.info("staged %s, locked", target, extra={"message_id": MessageId.STAGED})

    def _make_watch(self, update: UpdateRecord) -> tuple[Watch, list[WatchVerdict]]:
        """A watch for the transaction, and where it notes that we ended it ourselves."""
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
                # It may be long since it was staged, and what fails after this costs a drain.
                self._interfaces.preflight.check_machine(self._ledger.impact.os.image)
            self._ledger.enter_phase(Phase.DRAINING, drain=token)
            log.info("asking for the drain: %s", token)
            return NOW
        # The ledger has the token and so has the report; what is missing is the answer.
        return SOON_S if self._interfaces.cluster.get_cached_node() is None else self._resync_s

    def _apply_config(self, target: Target, facts: Facts) -> None:
        update, work = self._ledger.update, self._ledger.impact
        if update.phase is not Phase.APPLYING or update.boot_id != facts.boot_id:
            self._log_drained(update)
            update = self._ledger.enter_phase(Phase.APPLYING)
        due = self._planner.plan_pending_steps(target, update.origin, work)
        if due.impact.level > work.level:
            log.info("%s has come to ask for more: %s", target, "; ".join(due.impact.reasons))
            self._ledger.enter_phase(Phase.STAGING, impact=due.impact)
            return
        try:
            self._interfaces.configuration.apply_steps(
                due.steps, due.wanted, target.config, owner=update.id if work.needs_reboot else ""
            )
        except StepError as error:
            self._apply_failures += 1
            gone = isinstance(error.__cause__, BusError)
            if gone and self._apply_failures < APPLY_ATTEMPTS:
                raise
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            self._record_events(list_failed_service_events(error.step, error))
            refused = QuarantinedTarget(target, str(error), error.remedy)
            self._ledger.enter_phase(Phase.CANCELLING, refused=refused)
            return
        log.info("applied %s in %d steps", target, len(due.steps))
        if not work.needs_reboot:
            self._record_events(list_service_events(due.steps, target))
            self._finish_verification(facts)
        elif not due.steps:
            self._ledger.enter_phase(Phase.APPLYING, impact=replace(work, needs_write=False))

    def _record_events(self, events: Iterable[NodeEvent]) -> None:
        for event in events:
            self._interfaces.cluster.record_event(event)

    def _reboot_machine(self, action: RebootAction, facts: Facts) -> float:
        update, staged_id = self._ledger.update, action.staged_id
        boot_id = self._interfaces.kernel.read_boot_id()
        if update.phase is not Phase.REBOOTING or update.boot_id != boot_id:
            self._log_drained(update)
            # Once it is unlocked nothing but its name tells that it is ours.
            self._ledger.enter_phase(
                Phase.REBOOTING,
                reboots=update.reboot_count + 1,
                staged_id=staged_id or update.staged_id,
                probation=BootTrial(has_api_before_reboot=facts.is_api_reachable),
            )
        elif update.boot_trial.has_api_before_reboot is not facts.is_api_reachable:
            # What counts is whether it answered right before the reboot, and this may be held up.
            probation = BootTrial(has_api_before_reboot=facts.is_api_reachable)
            self._ledger.enter_phase(Phase.REBOOTING, probation=probation)
        watch, _ = self._make_watch(self._ledger.update)
        if staged_id and not pinning.pin_booted(facts, self._interfaces, self._ledger, watch):
            return NOW
        soft = action.is_soft and self._prepare_soft_reboot(staged_id)
        log.info(
            "%s into %s",
            "soft-rebooting" if soft else "rebooting",
            action.target,
            extra={"message_id": MessageId.REBOOTING},
        )
        if staged_id and not soft:
            self._interfaces.os.finalize_staged(staged_id)
        self._interfaces.power.reboot_machine(is_soft=soft)
        return SOON_S

    def _prepare_soft_reboot(self, staged_id: str) -> bool:
        """Whether a soft reboot leads into it; until the shutdown finalizes it, it has no /etc."""
        self._interfaces.os.finalize_staged(staged_id, is_soft=True)
        return self._interfaces.soft_reboots.prepare_soft_reboot()

    def _log_drained(self, update: UpdateRecord) -> None:
        if update.phase is Phase.DRAINING:
            log.info("drained: %s", update.drain_token, extra={"message_id": MessageId.DRAINED})

    def _commit_update(self, facts: Facts) -> None:
        """What an image, or a merge of two /etc, took away with it is written again."""
        self._boot_trial.record_healthy()
        update = self._ledger.update
        due = self._planner.plan_pending_steps(update.target, update.origin, self._ledger.impact)
        if due.steps:
            log.info("%d steps are left to do after the boot", len(due.steps))
            self._interfaces.configuration.complete_steps(
                due.steps, due.wanted, update.target.config
            )
        self._interfaces.configuration.confirm_pending()
        self._finish_verification(facts)

    def _finish_verification(self, facts: Facts) -> None:
        """Verified: the target is current from now on."""
        update = self._ledger.enter_phase(Phase.UNCORDONING, reached_facts=facts)
        self._interfaces.config_cache.prune_cache({update.target.config})
        log.info(
            "verified %s after %d s",
            update.target,
            facts.now - update.began,
            extra={"message_id": MessageId.BOOT_VERIFIED},
        )

    def _close_update(self, *, is_done: bool) -> None:
        update = self._ledger.update
        took_s = self._interfaces.clock.now() - update.began
        if is_done:
            log.info(
                "update %s to %s done after %d s",
                update.id,
                update.target,
                took_s,
                extra={"message_id": MessageId.UPDATE_DONE},
            )
        else:
            log.info(
                "update %s to %s called off, the node is as it was: %s",
                update.id,
                update.target,
                self._ledger.record.current,
                extra={"message_id": MessageId.UPDATE_CANCELLED},
            )
        refused = self._ledger.record.quarantined
        failed = refused is not None and not refused.is_cancelled_by_user
        outcome = (
            UpdateOutcome.DONE
            if is_done
            else UpdateOutcome.FAILED
            if failed
            else UpdateOutcome.CANCELLED
        )
        self._ledger.save_record(
            self._ledger.record.close_update(outcome, now=self._interfaces.clock.now())
        )
        self._interfaces.os.release_daemon()

    def _cancel_update(self, reason: str, staged_id: str, refuse: QuarantinedTarget | None) -> None:
        update = self._ledger.update
        if update.phase is not Phase.CANCELLING:
            log.info("calling update %s off: %s", update.id, reason)
            self._ledger.enter_phase(Phase.CANCELLING, refused=refuse)
        if update.impact is None or update.impact.needs_reboot:
            self._interfaces.soft_reboots.clear_soft_reboot()
            self._interfaces.os.drop_staged(staged_id)
        log.info(
            "dropped what was staged for %s",
            update.target,
            extra={"message_id": MessageId.UPDATE_UNDONE},
        )
