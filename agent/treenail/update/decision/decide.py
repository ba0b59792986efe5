"""Facts to the node's next move: start reading here.

The order of an update is: weigh what there is to do, stage what the OS needs, locked, while the
node serves, have the node drained if that costs a drain, write files, units and users, unlock and
reboot if it costs a reboot, verify, ask for the uncordon. Two rules hold in every state:

* The machine changes only out of service, unless the change disturbs nothing. A staged deployment
  stays locked until the drain is acknowledged, because anybody's reboot finalizes an unlocked one.
* Until the reboot is asked for, a changed mind costs nothing: files are put back, what was staged
  is dropped and the drain taken back. From then on the update goes through, whether the API server
  answers or not.
"""

from treenail.update.decision import decide_prestage
from treenail.update.decision.actions import (
    ApplyAction,
    CancelStagedAction,
    Decision,
    DrainAction,
    FinishAction,
    IdleAction,
    PlanAction,
    RebootAction,
    RecoverAction,
    RestoreAction,
    StageAction,
    UncordonAction,
    UnpinAction,
    VerifyAction,
    WaitAction,
)
from treenail.update.decision.decide_boot import (
    cancel_unbooted,
    decide_rollback,
    decide_verification,
)
from treenail.update.decision.decide_idle import (
    WAIT_FOR_DEPLOYMENTS,
    decide_without_update,
    is_built_from_other_config,
    make_other_config_error,
    refuse_foreign_staged,
)
from treenail.update.decision.desired import DesiredTarget
from treenail.update.decision.facts import DeploymentState, Facts, ObservedNode
from treenail.update.decision.request import is_cancel_request, make_cancelled_target
from treenail.update.impact.impact import UpdateImpact
from treenail.update.impact.os_change import is_in_effect
from treenail.update.state import boot_id
from treenail.update.state.phases import Phase
from treenail.update.state.record import QuarantinedTarget, UpdateRecord

REBOOTS_ALLOWED = 3
_UNCORDON_LIMIT_S = 600.0
"""Reboots into one target before it is refused: a power cut may take one, a broken boot all."""


def decide_action(facts: Facts) -> Decision:
    """The one next move that the facts call for."""
    if facts.is_shutting_down:
        return IdleAction("the machine is going down")
    if facts.has_interrupted_change:
        return RecoverAction()
    update = facts.record.update
    if update is None:
        return _decide_unpin(facts) or decide_without_update(facts)
    return _unpin_before_staging(facts, _decide_in_phase(facts, update))


def _decide_in_phase(facts: Facts, update: UpdateRecord) -> Decision:
    match update.phase:
        case Phase.STAGING | Phase.DRAINING | Phase.APPLYING:
            return _decide_before_reboot(facts, update)
        case Phase.REBOOTING:
            return _decide_rebooting(facts, update)
        case Phase.VERIFYING:
            return decide_verification(facts, update, update.impact or UpdateImpact())
        case Phase.ROLLING_BACK:
            return decide_rollback(facts, update, update.impact or UpdateImpact())
        case Phase.UNCORDONING:
            return _decide_uncordon(facts, update, is_done=True)
        case Phase.CANCELLING:
            return _decide_cancelling(facts, update)


def needs_deployments(facts: Facts, *, is_first: bool) -> bool:
    """Whether the next decision needs the deployments.

    A node at rest must not ask: each question would start rpm-ostreed, which exits when idle.
    """
    update, node = facts.record.update, facts.node
    if update is not None:
        asks = update.impact is None or update.impact.needs_reboot
        return asks and update.phase is not Phase.UNCORDONING
    if node is None or not isinstance(node.desired, DesiredTarget):
        return False
    asks = facts.is_forced or decide_prestage.needs_deployments_for_prestage(facts)
    return is_first or asks or node.desired.target != facts.record.current


def is_target_requested(node: ObservedNode | None, update: UpdateRecord) -> bool:
    """Whether the update's target is still wanted; as long as nobody can be asked, it is."""
    if node is None:
        return True
    return isinstance(node.desired, DesiredTarget) and node.desired.target == update.target


def make_drain_token(config: str, previous: str) -> str:
    """The token that asks for a drain and differs from ``previous``.

    The drain controller of the reference reads what stands before the first hyphen and compares
    the whole; a peer that expects exactly ``drain-<config>`` is served by the first attempt.
    """
    plain = f"drain-{config}"
    if previous.partition(".again-")[0] != plain:
        return plain
    return f"{plain}.again-{int(previous.partition('.again-')[2] or 0) + 1}"


def make_uncordon_token(config: str) -> str:
    """The token that asks for the uncordon."""
    return f"uncordon-{config}"


def _is_staged_by_update(
    update: UpdateRecord, work: UpdateImpact, deployed: DeploymentState
) -> bool:
    """Whether we staged what is staged; where that was not noted, by what we had asked for."""
    if update.staged_id:
        return deployed.staged_id == update.staged_id
    if work.os.image:
        return deployed.staged_digest == work.os.digest
    return deployed.is_locked and deployed.staged_digest == deployed.booted_digest


def _decide_unpin(facts: Facts) -> UnpinAction | None:
    """The previous deployment, when it was kept for long enough."""
    kept = facts.record.retained
    over = kept is not None and kept.is_expired(now=facts.now, retention_s=facts.retention_s)
    return UnpinAction(kept.id) if kept and over else None


def _unpin_before_staging(facts: Facts, decision: Decision) -> Decision:
    """Before a third deployment comes, for which /boot may be too small, the oldest is let go."""
    kept = facts.record.retained
    comes = isinstance(decision, StageAction) or (
        isinstance(decision, RebootAction) and decision.staged_id
    )
    return UnpinAction(kept.id) if comes and kept and kept.healthy_since is not None else decision


def _decide_before_reboot(facts: Facts, update: UpdateRecord) -> Decision:
    target, work, deployed = update.target, update.impact, facts.deployments
    if is_cancel_request(facts.request, update):
        reason = "a person on this machine asked for that"
        return CancelStagedAction(
            reason, _find_own_staged_id(facts, update), make_cancelled_target(update)
        )
    if not is_target_requested(facts.node, update):
        return CancelStagedAction("another target is asked for", _find_own_staged_id(facts, update))
    if work is None:
        return PlanAction(target)
    if facts.has_undo and update.boot_id != facts.boot_id:
        return _decide_after_boot(facts, update, work)
    if work.needs_reboot:
        if deployed is None:
            return WAIT_FOR_DEPLOYMENTS
        if not work.os.is_empty and is_in_effect(work.os, deployed.running):
            return PlanAction(target)
        staging = _decide_staging(facts, update, work, deployed)
        if staging is not None:
            return staging
    return _decide_while_in_service(facts, update, work) or _decide_when_drained(
        facts, update, work
    )


def _decide_staging(
    facts: Facts, update: UpdateRecord, work: UpdateImpact, deployed: DeploymentState
) -> Decision | None:
    """What there is to do until that is staged, and nothing else, which the update needs."""
    if not deployed.staged_id:
        return None if work.os.is_empty else StageAction(update.target)
    if work.os.is_empty or not _is_staged_by_update(update, work, deployed):
        return refuse_foreign_staged(deployed)
    if not deployed.is_locked:
        reason = "somebody unlocked the staged deployment while the node was in service"
        return CancelStagedAction(reason, deployed.staged_id)
    if is_built_from_other_config(facts, update.target, deployed.staged_config):
        error = make_other_config_error(update.target, deployed.staged_config)
        bad = QuarantinedTarget(update.target, str(error), error.remedy)
        return CancelStagedAction(
            "the image was built from another config", deployed.staged_id, bad
        )
    return None


def _decide_while_in_service(
    facts: Facts, update: UpdateRecord, work: UpdateImpact
) -> Decision | None:
    """What there is to do until the node is out of service; None when it is, or need not be."""
    if not facts.should_drain or not work.needs_drain:
        return None
    if facts.node is None and update.phase is Phase.APPLYING and update.boot_id == facts.boot_id:
        # The drain was acknowledged before this phase was entered, in this same boot.
        return None
    if facts.has_undo and facts.node is not None:
        if facts.node.handshake.is_drained_for(update.drain_token):
            return None
        reason = "the node came back into service while its files were being changed"
        return CancelStagedAction(reason, _find_own_staged_id(facts, update))
    return _decide_drain(facts, update)


def _decide_drain(facts: Facts, update: UpdateRecord) -> Decision | None:
    """What there is to do until the node is drained; None when it is."""
    if facts.node is None:
        return WaitAction("waiting for the API server, to ask for the drain")
    handshake = facts.node.handshake
    if handshake.requested and not handshake.is_drain_requested and not handshake.is_settled:
        # Asking now could cross the drain controller's uncordon on the way.
        return WaitAction("waiting for the uncordon that was asked for before")
    token = update.drain_token
    if not token.startswith("drain-"):
        return DrainAction(update.target, make_drain_token(update.target.config, ""))
    if handshake.is_drained_for(token):
        return None
    if handshake.requested == handshake.applied == token:
        # Drained once, but somebody made the node schedulable: only a new token drains it again.
        return DrainAction(update.target, make_drain_token(update.target.config, token))
    if handshake.requested != token or update.phase is not Phase.DRAINING:
        return DrainAction(update.target, token)
    overdue = facts.now - update.entered > facts.drain_limit_s
    return WaitAction("waiting for the drain", is_overdue=overdue)


def _decide_when_drained(facts: Facts, update: UpdateRecord, work: UpdateImpact) -> Decision:
    if work.needs_reboot and (facts.has_undo or not work.needs_write):
        return _make_reboot_action(facts, update, work, _find_own_staged_id(facts, update))
    return ApplyAction(update.target)


def _make_reboot_action(
    facts: Facts, update: UpdateRecord, work: UpdateImpact, staged_id: str
) -> RebootAction:
    """A soft one at most once: one that led elsewhere is made good by a full one."""
    asked_now = update.phase is Phase.REBOOTING and update.boot_id == facts.boot_id
    first = update.reboot_count - asked_now == 0
    softly = facts.can_soft_reboot and first and bool(staged_id) and work.os.can_keep_kernel
    return RebootAction(update.target, staged_id, is_soft=softly)


def _decide_rebooting(facts: Facts, update: UpdateRecord) -> Decision:
    target, work, deployed = update.target, update.impact or UpdateImpact(), facts.deployments
    if update.boot_id != facts.boot_id:
        return _decide_after_boot(facts, update, work)
    if not is_target_requested(facts.node, update):
        return CancelStagedAction("another target is asked for", _find_own_staged_id(facts, update))
    if deployed is None:
        return WAIT_FOR_DEPLOYMENTS
    staged_id = _find_own_staged_id(facts, update)
    if deployed.staged_id and not staged_id:
        return refuse_foreign_staged(deployed)
    if not staged_id and not work.os.is_empty:
        return _decide_full_reboot(facts, update, work, deployed) or StageAction(target)
    reboot = _make_reboot_action(facts, update, work, staged_id)
    if facts.node is None or not facts.should_drain or not work.needs_drain:
        # The drain was acknowledged before this phase was entered, in this same boot.
        return reboot
    if facts.node.handshake.is_drained_for(update.drain_token):
        return reboot
    if facts.has_undo or (staged_id and not deployed.is_locked):
        return CancelStagedAction(
            "the node came back into service while it was about to reboot", staged_id
        )
    return _decide_drain(facts, update) or reboot


def _decide_after_boot(facts: Facts, update: UpdateRecord, work: UpdateImpact) -> Decision:
    """After a boot of an update that had changed files, or unlocked what it staged."""
    target, deployed = update.target, facts.deployments
    if deployed is None and not work.os.is_empty:
        return WAIT_FOR_DEPLOYMENTS
    if deployed is None or is_in_effect(work.os, deployed.running):
        return VerifyAction(target, "the checks begin")
    soft = update.phase is Phase.REBOOTING and boot_id.is_soft_reboot(update.boot_id, facts.boot_id)
    once_more = _decide_full_reboot(facts, update, work, deployed) if soft else None
    if once_more is not None and update.reboot_count < REBOOTS_ALLOWED:
        return once_more
    if facts.has_undo:
        return RestoreAction()
    if update.staged_id and update.staged_id in deployed.other_ids:
        return cancel_unbooted(facts, update, deployed)
    if update.reboot_count >= REBOOTS_ALLOWED:
        return CancelStagedAction(
            "the reboot did not lead to the target",
            _find_own_staged_id(facts, update),
            QuarantinedTarget(
                target,
                f"{target} was staged and rebooted into {update.reboot_count} times, but each "
                f"time {deployed.booted_digest or 'something without a digest'} was booted",
                "see why with 'journalctl -b -1 -u ostree-finalize-staged'; it is tried again "
                "once another target was asked for in between",
            ),
        )
    if not is_target_requested(facts.node, update):
        return CancelStagedAction("another target is asked for", _find_own_staged_id(facts, update))
    return _decide_staging(facts, update, work, deployed) or StageAction(target)


def _decide_full_reboot(
    facts: Facts, update: UpdateRecord, work: UpdateImpact, deployed: DeploymentState
) -> Decision | None:
    """Into what is ours and boots next, if a soft reboot led elsewhere; it is a full one."""
    ours = update.staged_id
    if not ours or ours not in {deployed.staged_id, deployed.pending_id}:
        return None
    if not is_target_requested(facts.node, update):
        return CancelStagedAction("another target is asked for", ours)
    drained = facts.node is None or facts.node.handshake.is_drained_for(update.drain_token)
    if facts.should_drain and work.needs_drain and not drained:
        return CancelStagedAction(
            "the node came back into service while it was about to reboot", ours
        )
    return RebootAction(update.target, deployed.staged_id if deployed.staged_id == ours else "")


def _find_own_staged_id(facts: Facts, update: UpdateRecord) -> str:
    """The staged deployment if it is ours; empty otherwise."""
    work, deployed = update.impact, facts.deployments
    if work is None or deployed is None or work.os.is_empty or not deployed.staged_id:
        return ""
    return deployed.staged_id if _is_staged_by_update(update, work, deployed) else ""


def _find_failed_pending_id(facts: Facts, update: UpdateRecord) -> str:
    """What was ours and did not boot, if the boot loader would try it again; empty otherwise."""
    pending = facts.deployments.pending_id if facts.deployments else ""
    return pending if pending == update.staged_id else ""


def _decide_cancelling(facts: Facts, update: UpdateRecord) -> Decision:
    if facts.deployments is None and needs_deployments(facts, is_first=False):
        return WAIT_FOR_DEPLOYMENTS
    if staged_id := _find_own_staged_id(facts, update) or _find_failed_pending_id(facts, update):
        return CancelStagedAction("called off", staged_id)
    if facts.has_undo:
        return RestoreAction()
    return _decide_uncordon(facts, update, is_done=False)


def _decide_uncordon(facts: Facts, update: UpdateRecord, *, is_done: bool) -> Decision:
    if not facts.should_drain or not update.drain_token:
        return FinishAction(is_done=is_done)
    if facts.node is None:
        return WaitAction("waiting for the API server, to ask for the uncordon")
    handshake = facts.node.handshake
    if handshake.is_drain_requested:
        return UncordonAction(make_uncordon_token(update.target.config))
    if handshake.is_settled:
        return FinishAction(is_done=is_done)
    overdue = facts.now - update.entered > _UNCORDON_LIMIT_S
    return WaitAction("waiting for the uncordon", is_overdue=overdue)
