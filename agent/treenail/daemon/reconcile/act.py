"""Runs the action that a decision names; nothing is decided here.

The ledger records each phase before the first step of that phase. An agent killed at any
instruction therefore restarts in a phase from which the next decision continues.
"""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from treenail.config.wanted import read_wanted_state
from treenail.daemon.interfaces import Watch
from treenail.daemon.reconcile import pinning, prestage
from treenail.daemon.reconcile.boot_trial import BootTrialRunner
from treenail.daemon.reconcile.context import NodeInterfaces
from treenail.daemon.reconcile.os_transaction import (
    build_deployment_change,
    pull_image,
    wait_while_busy,
)
from treenail.daemon.reconcile.planning import UpdatePlanner
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
from treenail.update.state.phases import Phase
from treenail.update.state.record import (
    LedgerRecord,
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
"""Attempts at a step that failed with a D-Bus error: the service may be restarting."""


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
    """Runs actions, and owns the ledger."""

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
        """The ledger record as last saved."""
        return self._ledger.record

    def run_action(self, decision: Decision, facts: Facts) -> float:
        """Run the action; return the seconds until the next pass.

        Raises `TreenailError` when the machine or the cluster rejects a step. The ledger records
        what was done until then, and the next decision continues from there.
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
            case RollBackAction(quarantine=quarantine):
                return self._boot_trial.roll_back(quarantine, facts)
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
        is_done = pinning.unpin_retained(decision.id, self._interfaces, self._ledger, watch)
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
            case ApplyAction(target=target):
                self._apply_config(target, facts)
            case RestoreAction():
                is_booted = self._ledger.update.boot_id != facts.boot_id
                self._interfaces.configuration.restore_pending(is_booted=is_booted)
            case CommitAction():
                self._commit_update(facts)
            case FinishAction(is_done=is_done):
                self._close_update(is_done=is_done)
            case CancelStagedAction(reason=reason, staged_id=staged_id, quarantine=quarantine):
                self._cancel_update(reason, staged_id, quarantine)

    def _plan_update(self, target: Target, facts: Facts) -> None:
        update = self._ledger.record.update
        if update is None or update.target != target:
            update = self._begin_update(target, facts)
        deployments = facts.deployments
        if deployments is None:
            raise AssertionError("an update was planned without reading the deployments")
        impact = self._planner.plan_update(target, update.origin, deployments)
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
            update = self._ledger.enter_phase(Phase.APPLYING)
        pending = self._planner.plan_pending_steps(target, update.origin, impact)
        if pending.impact.level > impact.level:
            log.info(
                "planning %s again, its impact grew: %s", target, "; ".join(pending.impact.reasons)
            )
            self._ledger.enter_phase(Phase.STAGING, impact=pending.impact)
            return
        try:
            self._interfaces.configuration.apply_steps(
                pending.steps,
                pending.wanted,
                target.config,
                owner=update.id if impact.needs_reboot else "",
            )
        except StepError as error:
            self._apply_failures += 1
            is_bus_error = isinstance(error.__cause__, BusError)
            if is_bus_error and self._apply_failures < APPLY_ATTEMPTS:
                raise
            log.warning("%s", error, extra={"message_id": MessageId.DEGRADED})
            self._record_events(list_failed_service_events(error.step, error))
            quarantined = QuarantinedTarget(target, str(error), error.remedy)
            self._ledger.enter_phase(Phase.CANCELLING, quarantined=quarantined)
            return
        log.info("applied %s in %d steps", target, len(pending.steps))
        if not impact.needs_reboot:
            self._record_events(list_service_events(pending.steps, target))
            self._finish_verification(facts)
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
                boot_trial=BootTrial(has_api_before_reboot=facts.is_api_reachable),
            )
        elif update.boot_trial.has_api_before_reboot is not facts.is_api_reachable:
            # An inhibitor may delay the reboot. Record the state right before it: an API server
            # that was unreachable before the reboot cannot fail the target.
            boot_trial = BootTrial(has_api_before_reboot=facts.is_api_reachable)
            self._ledger.enter_phase(Phase.REBOOTING, boot_trial=boot_trial)
        watch, _ = self._make_watch(self._ledger.update)
        if staged_id and not pinning.pin_booted(facts, self._interfaces, self._ledger, watch):
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

    def _commit_update(self, facts: Facts) -> None:
        """Complete the steps that the boot undid, then make the target current.

        OSTree's merge of /etc drops files that equal the old image's /usr/etc.
        """
        self._boot_trial.record_healthy()
        update = self._ledger.update
        pending = self._planner.plan_pending_steps(
            update.target, update.origin, self._ledger.impact
        )
        if pending.steps:
            log.info("completing %d steps after the boot", len(pending.steps))
            self._interfaces.configuration.complete_steps(
                pending.steps, pending.wanted, update.target.config
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

    def _close_update(self, *, is_done: bool) -> None:
        update = self._ledger.update
        took_s = self._interfaces.clock.now() - update.began
        if is_done:
            log.info(
                "finished update %s to %s after %d s",
                update.id,
                update.target,
                took_s,
                extra={"message_id": MessageId.UPDATE_DONE},
            )
        else:
            log.info(
                "cancelled update %s to %s; the node stays at %s",
                update.id,
                update.target,
                self._ledger.record.current,
                extra={"message_id": MessageId.UPDATE_CANCELLED},
            )
        quarantined = self._ledger.record.quarantined
        failed = quarantined is not None and not quarantined.is_cancelled_by_user
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

    def _cancel_update(
        self, reason: str, staged_id: str, quarantine: QuarantinedTarget | None
    ) -> None:
        update = self._ledger.update
        if update.phase is not Phase.CANCELLING:
            log.info("cancelling update %s: %s", update.id, reason)
            self._ledger.enter_phase(Phase.CANCELLING, quarantined=quarantine)
        if update.impact is None or update.impact.needs_reboot:
            self._interfaces.soft_reboots.clear_soft_reboot()
            self._interfaces.os.drop_staged(staged_id)
        log.info(
            "undid the staging of %s",
            update.target,
            extra={"message_id": MessageId.UPDATE_UNDONE},
        )
