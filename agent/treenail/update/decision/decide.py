"""Decide the node's next action from the facts. Start reading the update logic here.

An update runs in this order: plan it, stage the OS (locked, while the node is in service), drain
if the impact needs it, write files, units and users, unlock and reboot if the impact needs it,
verify, uncordon. Two rules hold in every phase:

* The machine changes only while the node is drained, unless the change disrupts nothing. A staged
  deployment stays locked until the drain controller has drained the node, because any reboot
  finalizes an unlocked one.
* Until the agent requests the reboot, a changed request costs nothing: the agent restores files,
  drops the staged deployment and withdraws the drain. After that the update continues, whether
  the API server answers or not.
"""

from treenail.update.decision import actions, decide_boot, decide_idle, node_state, user_requests
from treenail.update.impact import os_change
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state import ledger_record

REBOOTS_ALLOWED = 3
"""Reboots into one target before its quarantine: one may fail by a power cut."""
_UNCORDON_LIMIT_S = 600.0  # as long as the Machine Config Daemon waits
_ACKNOWLEDGE_LIMIT_S = 60.0
_UNACKNOWLEDGED = (
    "the node is schedulable; waiting for the drain controller to acknowledge the uncordon"
)
_ACKNOWLEDGE_REMEDY = (
    "check that the drain controller runs: treenail-controller status; in a cluster without one, "
    'set drain = "never" in agent.toml'
)

_TARGET_CHANGED = "the desired target changed"
_UNCORDONED = "another client uncordoned the node before its reboot"


def decide_action(facts: node_state.Facts) -> actions.Decision:
    """Return the next action for the facts."""
    if facts.is_shutting_down:
        return actions.IdleAction("the machine is shutting down")
    if facts.has_interrupted_change:
        return actions.RecoverAction()
    update = facts.record.update
    if update is None:
        return _decide_unpin(facts) or decide_idle.decide_without_update(facts)
    if update.phase is ledger_record.Phase.CANCELLING and (
        excuse := decide_idle.decide_excuse(facts)
    ):
        return excuse
    return _unpin_before_staging(facts, _decide_in_phase(facts, update))


def _decide_in_phase(
    facts: node_state.Facts, update: ledger_record.UpdateRecord
) -> actions.Decision:
    match update.phase:
        case (
            ledger_record.Phase.STAGING
            | ledger_record.Phase.DRAINING
            | ledger_record.Phase.APPLYING
        ):
            return _decide_before_reboot(facts, update)
        case ledger_record.Phase.REBOOTING:
            return _decide_rebooting(facts, update)
        case ledger_record.Phase.VERIFYING:
            return decide_boot.decide_verification(facts, update, update.impact or UpdateImpact())
        case ledger_record.Phase.ROLLING_BACK:
            return decide_boot.decide_rollback(facts, update, update.impact or UpdateImpact())
        case ledger_record.Phase.UNCORDONING:
            return _decide_uncordon(facts, update, is_done=True)
        case ledger_record.Phase.CANCELLING:
            return _decide_cancelling(facts, update)


def needs_deployments(facts: node_state.Facts, *, is_first: bool) -> bool:
    """Return whether the next decision needs the deployments; ``is_first``: of this process."""
    # Each query starts rpm-ostreed, which exits after 60 s idle, so an idle node makes none.
    update, node = facts.record.update, facts.node
    if update is not None:
        may_reboot = update.impact is None or update.impact.needs_reboot
        return may_reboot and update.phase is not ledger_record.Phase.UNCORDONING
    if node is None or not isinstance(node.desired, node_state.DesiredTarget):
        return False
    if is_first or facts.is_forced or decide_idle.needs_deployments_for_prestage(facts):
        return True
    return node.desired.target != facts.record.current


def is_target_requested(
    node: node_state.ObservedNode | None, update: ledger_record.UpdateRecord
) -> bool:
    """Return whether the Node still requests the update's target; True without a Node.

    A mistake in a further annotation does not withdraw a request that is still there.
    """
    if node is None:
        return True
    if isinstance(node.desired, node_state.InvalidTarget):
        return update.target in node.desired.candidates
    return (
        isinstance(node.desired, node_state.DesiredTarget) and node.desired.target == update.target
    )


def _is_staged_by_update(
    update: ledger_record.UpdateRecord,
    impact: UpdateImpact,
    deployments: os_change.DeploymentState,
) -> bool:
    """Return whether this update staged the deployment; without a recorded ID, by its content."""
    if update.staged_id:
        return deployments.staged_id == update.staged_id
    if impact.os.image:
        return deployments.has_staged(impact.os.digest)
    return deployments.is_locked and deployments.staged_digest == deployments.booted_digest


def _decide_unpin(facts: node_state.Facts) -> actions.UnpinAction | None:
    retained = facts.record.retained
    if retained is None or not retained.is_expired(facts.moment, retention_s=facts.retention_s):
        return None
    return actions.UnpinAction(retained.id)


def _unpin_before_staging(facts: node_state.Facts, decision: actions.Decision) -> actions.Decision:
    """Unpin the oldest deployment before a third one is made: /boot may lack the space for it."""
    retained = facts.record.retained
    adds_deployment = isinstance(decision, actions.StageAction) or (
        isinstance(decision, actions.RebootAction) and decision.staged_id
    )
    if adds_deployment and retained is not None and retained.healthy_since is not None:
        return actions.UnpinAction(retained.id)
    return decision


def _decide_before_reboot(
    facts: node_state.Facts, update: ledger_record.UpdateRecord
) -> actions.Decision:
    impact, deployments = update.impact, facts.deployments
    if user_requests.is_cancel_request(facts.request, update):
        reason = "a user cancelled it on this node"
        return actions.CancelStagedAction(
            reason, _find_own_staged_id(facts, update), user_requests.make_cancelled_target(update)
        )
    if not is_target_requested(facts.node, update):
        return actions.CancelStagedAction(_TARGET_CHANGED, _find_own_staged_id(facts, update))
    if impact is None:
        return actions.PlanAction(update.target)
    if facts.has_undo and update.boot_id != facts.boot_id:
        return _decide_after_boot(facts, update, impact)
    if impact.needs_reboot:
        if deployments is None:
            return decide_idle.WAIT_FOR_DEPLOYMENTS
        if refusal := decide_idle.refuse_unknown_booted(facts, impact):
            return refusal
        if not impact.os.is_empty and os_change.is_in_effect(impact.os, deployments):
            return actions.PlanAction(update.target)
        staging = _decide_staging(update, impact, deployments)
        if staging is not None:
            return staging
    return _decide_while_in_service(facts, update, impact) or _decide_when_drained(
        facts, update, impact
    )


def _decide_staging(
    update: ledger_record.UpdateRecord,
    impact: UpdateImpact,
    deployments: os_change.DeploymentState,
) -> actions.Decision | None:
    """Return the next action until exactly what the update needs is staged, then None."""
    if not deployments.staged_id:
        return None if impact.os.is_empty else actions.StageAction(update.target)
    if impact.os.is_empty or not _is_staged_by_update(update, impact, deployments):
        return decide_idle.refuse_foreign_staged(deployments)
    if not deployments.is_locked:
        reason = "another program unlocked the staged deployment while the node was in service"
        return actions.CancelStagedAction(reason, deployments.staged_id)
    if impact.os.image and impact.checked_id != deployments.staged_id:
        return actions.CheckImageAction(update.target, deployments.staged_id)
    return None


def _decide_while_in_service(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> actions.Decision | None:
    """Return the next action until the node is drained, or needs no drain; then None."""
    if not facts.should_drain or not impact.needs_drain:
        return None
    if (
        facts.node is None
        and update.phase is ledger_record.Phase.APPLYING
        and update.boot_id == facts.boot_id
    ):
        # The drain was complete before this phase was entered, in this same boot.
        return None
    if facts.has_undo and facts.node is not None:
        if facts.node.handshake.is_drained_for(update.drain_token):
            return None
        reason = (
            "another client uncordoned the node while files were written"
            if update.drain_token
            # The policy changed meanwhile, or more files differ.
            else "files were written without the drain that the update now needs"
        )
        return actions.CancelStagedAction(reason, _find_own_staged_id(facts, update))
    return _decide_drain(facts, update)


def _decide_drain(
    facts: node_state.Facts, update: ledger_record.UpdateRecord
) -> actions.Decision | None:
    """Return the next action until the node is drained; then None."""
    if facts.node is None:
        return actions.WaitAction("waiting for the API server before requesting the drain")
    handshake = facts.node.handshake
    if handshake.requested and not handshake.is_drain_requested and not handshake.is_settled:
        # The drain controller may be about to uncordon: a drain requested now could be overtaken.
        return actions.WaitAction(
            "waiting for the earlier uncordon", remedy=decide_idle.DRAIN_REMEDY
        )
    token = update.drain_token
    if not token.startswith("drain-"):
        return actions.DrainAction(
            update.target, node_state.make_drain_token(update.target.config, "")
        )
    if handshake.is_drained_for(token):
        return None
    if handshake.requested == handshake.applied == token:
        # Another client uncordoned the drained node. Only another token drains it again.
        return actions.DrainAction(
            update.target, node_state.make_drain_token(update.target.config, token)
        )
    if handshake.requested != token or update.phase is not ledger_record.Phase.DRAINING:
        return actions.DrainAction(update.target, token)
    is_overdue = update.compute_wait(facts.moment) > facts.drain_limit_s
    return actions.WaitAction(
        "waiting for the drain",
        is_overdue,
        limit_s=facts.drain_limit_s,
        remedy=decide_idle.DRAIN_REMEDY,
    )


def _decide_when_drained(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> actions.Decision:
    if impact.needs_reboot and (facts.has_undo or not impact.needs_write):
        return _make_reboot_action(facts, update, impact, _find_own_staged_id(facts, update))
    return actions.ApplyAction(update.target)


def _make_reboot_action(
    facts: node_state.Facts,
    update: ledger_record.UpdateRecord,
    impact: UpdateImpact,
    staged_id: str,
) -> actions.RebootAction:
    """Return a soft reboot for the first try only: a full one must correct a wrong soft reboot."""
    is_counted = update.phase is ledger_record.Phase.REBOOTING and update.boot_id == facts.boot_id
    is_first = update.reboot_count - is_counted == 0
    is_soft = (
        facts.can_soft_reboot
        and is_first
        and bool(staged_id)
        and os_change.can_keep_kernel(impact.os)
    )
    return actions.RebootAction(update.target, staged_id, is_soft=is_soft)


def _decide_rebooting(
    facts: node_state.Facts, update: ledger_record.UpdateRecord
) -> actions.Decision:
    impact, deployments = update.impact or UpdateImpact(), facts.deployments
    if update.boot_id != facts.boot_id:
        return _decide_after_boot(facts, update, impact)
    if not is_target_requested(facts.node, update):
        return actions.CancelStagedAction(_TARGET_CHANGED, _find_own_staged_id(facts, update))
    if deployments is None:
        return decide_idle.WAIT_FOR_DEPLOYMENTS
    if refusal := decide_idle.refuse_unknown_booted(facts, impact):
        return refusal
    staged_id = _find_own_staged_id(facts, update)
    if deployments.staged_id and not staged_id:
        return decide_idle.refuse_foreign_staged(deployments)
    if not staged_id and not impact.os.is_empty:
        return _decide_full_reboot(facts, update, impact, deployments) or actions.StageAction(
            update.target
        )
    reboot = _make_reboot_action(facts, update, impact, staged_id)
    if facts.node is None or not facts.should_drain or not impact.needs_drain:
        # The drain was complete before this phase was entered, in this same boot.
        return reboot
    if facts.node.handshake.is_drained_for(update.drain_token):
        return reboot
    if facts.has_undo or (staged_id and not deployments.is_locked):
        return actions.CancelStagedAction(_UNCORDONED, staged_id)
    return _decide_drain(facts, update) or reboot


def _decide_after_boot(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> actions.Decision:
    """Decide after a boot of an update that changed files, or unlocked its deployment."""
    target, deployments = update.target, facts.deployments
    if deployments is None and not impact.os.is_empty:
        return decide_idle.WAIT_FOR_DEPLOYMENTS
    if refusal := decide_idle.refuse_unknown_booted(facts, impact):
        return refusal
    if deployments is None or os_change.is_in_effect(impact.os, deployments):
        return actions.VerifyAction(target, decide_boot.CHECKS_BEGIN)
    if update.phase is ledger_record.Phase.REBOOTING and ledger_record.is_soft_reboot(
        update.boot_id, facts.boot_id
    ):
        full_reboot = _decide_full_reboot(facts, update, impact, deployments)
        if full_reboot is not None and update.reboot_count < REBOOTS_ALLOWED:
            return full_reboot
    if facts.has_undo:
        return actions.RestoreAction()
    if update.staged_id and update.staged_id in deployments.other_ids:
        return decide_boot.cancel_unbooted(facts, update, deployments)
    if update.reboot_count >= REBOOTS_ALLOWED:
        booted = deployments.booted_digest or "a deployment without a digest"
        cause = facts.finalization_error
        why = f"; ostree-finalize-staged failed: {cause}" if cause else ""
        return actions.CancelStagedAction(
            "no reboot booted the target",
            _find_own_staged_id(facts, update),
            ledger_record.QuarantinedTarget(
                target,
                f"cannot boot {target}: each of {update.reboot_count} reboots booted {booted}{why}",
                # A staged deployment that cannot be finalized is dropped, and only the journal of
                # that shutdown has the error.
                "read the cause with: journalctl -b -1 -u ostree-finalize-staged; then request "
                "another target, or run on this node: treenail retry",
            ),
        )
    if not is_target_requested(facts.node, update):
        return actions.CancelStagedAction(_TARGET_CHANGED, _find_own_staged_id(facts, update))
    return _decide_staging(update, impact, deployments) or actions.StageAction(target)


def _decide_full_reboot(
    facts: node_state.Facts,
    update: ledger_record.UpdateRecord,
    impact: UpdateImpact,
    deployments: os_change.DeploymentState,
) -> actions.Decision | None:
    """Return a full reboot into the update's deployment if a soft one booted another."""
    staged_id = update.staged_id
    if not staged_id or staged_id not in {deployments.staged_id, deployments.pending_id}:
        return None
    if not is_target_requested(facts.node, update):
        return actions.CancelStagedAction(_TARGET_CHANGED, staged_id)
    is_drained = facts.node is None or facts.node.handshake.is_drained_for(update.drain_token)
    if facts.should_drain and impact.needs_drain and not is_drained:
        return actions.CancelStagedAction(_UNCORDONED, staged_id)
    return actions.RebootAction(
        update.target, staged_id if deployments.staged_id == staged_id else ""
    )


def _find_own_staged_id(facts: node_state.Facts, update: ledger_record.UpdateRecord) -> str:
    """Return the staged deployment if this update staged it; empty otherwise."""
    impact, deployments = update.impact, facts.deployments
    if impact is None or deployments is None or impact.os.is_empty or not deployments.staged_id:
        return ""
    is_ours = _is_staged_by_update(update, impact, deployments)
    return deployments.staged_id if is_ours else ""


def _find_failed_pending_id(facts: node_state.Facts, update: ledger_record.UpdateRecord) -> str:
    """Return the update's deployment if it did not boot and the next boot would try it again."""
    pending_id = facts.deployments.pending_id if facts.deployments else ""
    return pending_id if pending_id == update.staged_id else ""


def _decide_cancelling(
    facts: node_state.Facts, update: ledger_record.UpdateRecord
) -> actions.Decision:
    if facts.deployments is None and needs_deployments(facts, is_first=False):
        return decide_idle.WAIT_FOR_DEPLOYMENTS
    if _is_left_by_newer_agent(facts, update) and facts.deployments is not None:
        return decide_boot.cancel_unbooted(facts, update, facts.deployments)
    if _is_booted_nevertheless(facts, update):
        return actions.RollBackAction(
            _find_quarantine(facts, update) or decide_boot.make_withdrawn_target(update)
        )
    if staged_id := _find_own_staged_id(facts, update) or _find_failed_pending_id(facts, update):
        return actions.CancelStagedAction("cancelled", staged_id)
    if facts.has_undo:
        return actions.RestoreAction()
    return _decide_uncordon(facts, update, is_done=False)


def _is_left_by_newer_agent(facts: node_state.Facts, update: ledger_record.UpdateRecord) -> bool:
    """Return whether the update was in a phase of a newer agent, whose deployment left again.

    The ledger reads such a phase as cancelling. Without a quarantine the update would begin again.
    """
    deployments = facts.deployments
    if deployments is None or _find_quarantine(facts, update) is not None:
        return False
    is_rebooted = update.reboot_count > 0 and update.boot_id != facts.boot_id
    return is_rebooted and update.staged_id != "" and update.staged_id in deployments.other_ids


def _is_booted_nevertheless(facts: node_state.Facts, update: ledger_record.UpdateRecord) -> bool:
    """Return whether a reboot came before the staged deployment of a cancelled update was dropped.

    The node has all of a target that is not the current one, and no boot trial.
    """
    impact, deployments = update.impact, facts.deployments
    if impact is None or impact.os.is_empty or deployments is None:
        return False
    return (
        update.boot_id != facts.boot_id
        and os_change.is_in_effect(impact.os, deployments)
        and bool(deployments.other_ids)
    )


def _find_quarantine(
    facts: node_state.Facts, update: ledger_record.UpdateRecord
) -> ledger_record.QuarantinedTarget | None:
    """Return the quarantine of the update's own target."""
    quarantined = facts.record.quarantined
    is_own = quarantined is not None and quarantined.target == update.target
    return quarantined if is_own else None


def _decide_uncordon(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, *, is_done: bool
) -> actions.Decision:
    if not facts.should_drain or not update.drain_token:
        return actions.FinishAction(is_done=is_done)
    if facts.node is None:
        return actions.WaitAction("waiting for the API server before requesting the uncordon")
    handshake = facts.node.handshake
    if handshake.is_drain_requested:
        return actions.UncordonAction(
            node_state.make_uncordon_token(update.target.config, handshake.applied)
        )
    if handshake.is_settled:
        return actions.FinishAction(is_done=is_done)
    waited_s = update.compute_wait(facts.moment)
    is_overdue = waited_s > _UNCORDON_LIMIT_S
    if not handshake.is_unschedulable and waited_s > _ACKNOWLEDGE_LIMIT_S:
        # The node was never cordoned, or a user uncordoned it. Without a drain controller no
        # acknowledgement follows.
        if not is_done:
            return actions.FinishAction(is_done=False)
        # The MCO's controllers expect the acknowledgement before the state Done of a new target.
        return actions.WaitAction(_UNACKNOWLEDGED, is_overdue, remedy=_ACKNOWLEDGE_REMEDY)
    return actions.WaitAction(
        "waiting for the uncordon", is_overdue, remedy=decide_idle.DRAIN_REMEDY
    )
