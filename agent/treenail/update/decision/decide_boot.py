"""Decide the next action of a node that rebooted into its target: commit it or roll back.

None of these decisions needs the API server.
"""

from collections.abc import Sequence

from treenail.errors import RollbackError
from treenail.update.checks import health
from treenail.update.decision import actions, decide_idle, node_state
from treenail.update.impact import os_change
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state import boot_trial, ledger_record
from treenail.update.steps import step_types

CHECKS_BEGIN = "the health checks begin"
ROLLBACK_REBOOTS_ALLOWED = 3
"""Reboots to roll back, after which a user must act."""
RETRY_REMEDY = (
    "the node has its previous target; request another target, give the annotation "
    "treenail.io/retry of the Node a new value, or run on this node: treenail retry"
)

_ETC_DIRECTORY = "/etc/"
_NODE_SERVICES = ("kubelet.service", "crio.service", "containerd.service")


def select_deployment_steps(
    steps: Sequence[step_types.ConfigStep],
) -> tuple[step_types.ConfigStep, ...]:
    """Return the steps that change only the /etc of the booted deployment."""
    # libostree gives each deployment its own /etc. All else, such as /var and /home, is shared
    # with the previous deployment, and a rollback would not undo a change there.
    return tuple(
        step
        for step in steps
        if isinstance(
            step, step_types.EnableUnits | step_types.DisableUnits | step_types.PresetUnits
        )
        or (
            isinstance(
                step,
                step_types.WriteFile
                | step_types.MakeDirectory
                | step_types.MakeLink
                | step_types.RelabelEntry,
            )
            and step.path.startswith(_ETC_DIRECTORY)
        )
    )


def is_boot_action(decision: actions.Decision, facts: node_state.Facts) -> bool:
    """Return whether to run the action before the kubelet and other services start."""
    if isinstance(decision, actions.RollBackAction):
        # The files may be restored in part: the power went while the previous boot did it.
        # The action leads to a `RestoreAction`, and the reboot comes after that.
        update = facts.record.update
        is_begun = update is not None and update.phase is ledger_record.Phase.ROLLING_BACK
        impact = update.impact if update else None
        return is_begun and facts.has_undo and impact is not None and impact.os.is_empty
    return isinstance(
        decision,
        actions.RecoverAction | actions.RestoreAction | actions.VerifyAction | actions.CommitAction,
    )


def needs_live_trial(steps: Sequence[step_types.ConfigStep]) -> bool:
    """Return whether steps restart or reload the kubelet or the container runtime."""
    return any(
        isinstance(step, step_types.RestartUnit | step_types.ReloadUnit)
        and step.unit in _NODE_SERVICES
        for step in steps
    )


def decide_verification(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> actions.Decision:
    """Decide during the boot trial."""
    target, deployments = update.target, facts.deployments
    if deployments is None and not impact.os.is_empty:
        return decide_idle.WAIT_FOR_DEPLOYMENTS
    if refusal := decide_idle.refuse_unknown_booted(facts, impact):
        return refusal
    if deployments is not None and not os_change.is_in_effect(impact.os, deployments):
        return (
            actions.RestoreAction()
            if facts.has_undo
            else cancel_unbooted(facts, update, deployments)
        )
    if update.boot_trial.is_healthy or facts.health_mode is boot_trial.HealthCheckMode.OFF:
        return actions.CommitAction(target)
    if facts.trial_status is None or update.boot_id != facts.boot_id:
        return actions.VerifyAction(target, CHECKS_BEGIN)
    is_api_blamed = facts.record.api_blamed == target
    verdict = health.decide_verdict(
        facts.trial_status,
        update.boot_trial,
        is_api_blamed=is_api_blamed,
        mode=facts.health_mode,
    )
    match verdict:
        case health.HealthyVerdict(inconclusive=inconclusive):
            return actions.CommitAction(
                target, health.format_inconclusive(inconclusive, update.boot_trial)
            )
        case health.PendingVerdict(reason=reason, problem=problem):
            if _should_withdraw(facts, update, impact):
                return _withdraw_target(update, impact)
            return actions.VerifyAction(
                target, reason, problem and f"{target} is not healthy yet: {problem}"
            )
        case health.UnhealthyVerdict(check=check, is_only=is_only):
            reason = health.format_unhealthy(target, check)
            quarantined = ledger_record.QuarantinedTarget(
                target, reason, RETRY_REMEDY, check=check.name, is_only_check=is_only
            )
            if not impact.needs_reboot:
                # The files of a live change are restored without a reboot: the node may serve.
                return actions.CancelStagedAction("a health check failed", quarantine=quarantined)
            return actions.RollBackAction(quarantined)


def _should_withdraw(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> bool:
    """Return whether to end the boot trial at once, because the Node requests another target.

    Back to the origin, a rollback costs the one reboot that is needed in any case. To a third
    target the fastest way leads over the booted one, unless a check keeps failing on it.
    """
    status, deployments = facts.trial_status, facts.deployments
    desired = facts.node.desired if facts.node else None
    is_changed = isinstance(desired, node_state.DesiredTarget) and desired.target != update.target
    if (
        not is_changed
        or facts.health_mode is not boot_trial.HealthCheckMode.ENFORCE
        or status is None
    ):
        return False
    if facts.should_drain and impact.needs_drain and not _is_drained(facts, update):
        # The node serves: a user uncordoned it, or etcd was restored.
        return False
    if not impact.os.is_empty and (deployments is None or not deployments.other_ids):
        return False
    if isinstance(desired, node_state.DesiredTarget) and desired.target == update.origin:
        return True
    return not status.is_paused and any(
        check.is_passing is False and check.since_s >= status.limits.failing_s
        for check in status.checks
    )


def _is_drained(facts: node_state.Facts, update: ledger_record.UpdateRecord) -> bool:
    return facts.node is not None and facts.node.handshake.is_drained_for(update.drain_token)


def _withdraw_target(
    update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> actions.RollBackAction | actions.CancelStagedAction:
    quarantined = make_withdrawn_target(update)
    if not impact.needs_reboot:
        return actions.CancelStagedAction("the desired target changed", quarantine=quarantined)
    return actions.RollBackAction(quarantined)


def make_withdrawn_target(update: ledger_record.UpdateRecord) -> ledger_record.QuarantinedTarget:
    """Return the quarantine of a target that the Node no longer requests."""
    reason = f"the Node requests another target than {update.target}"
    return ledger_record.QuarantinedTarget(update.target, reason, is_withdrawn=True)


def decide_rollback(
    facts: node_state.Facts, update: ledger_record.UpdateRecord, impact: UpdateImpact
) -> actions.Decision:
    """Decide during a rollback: of the deployment, or of files alone if the OS is the same."""
    deployments, quarantined = facts.deployments, facts.record.quarantined
    if deployments is None and not impact.os.is_empty:
        return decide_idle.WAIT_FOR_DEPLOYMENTS
    if refusal := decide_idle.refuse_unknown_booted(facts, impact):
        return refusal
    if quarantined is None:
        raise AssertionError("a rollback without a quarantined target")
    is_same_boot = update.boot_id == facts.boot_id
    if impact.os.is_empty or deployments is None:
        if facts.has_undo:
            return actions.RestoreAction() if is_same_boot else actions.RollBackAction(quarantined)
        return (
            actions.RollBackAction(quarantined)
            if is_same_boot
            else actions.CancelStagedAction("rolled back")
        )
    if not os_change.is_in_effect(impact.os, deployments):
        if facts.has_undo:
            return actions.RestoreAction()
        return actions.CancelStagedAction("rolled back", update.staged_id)
    reboot_count = update.boot_trial.rollback_reboots
    if not is_same_boot and reboot_count >= ROLLBACK_REBOOTS_ALLOWED:
        return actions.RefuseAction(
            RollbackError(
                f"cannot roll back to {update.origin}: {reboot_count} reboots booted "
                f"{update.target} again; it is quarantined: {quarantined.reason}",
                remedy="select the previous deployment in the boot menu, or run: rpm-ostree "
                "rollback, or: bootc rollback",
            )
        )
    return actions.RollBackAction(quarantined)


def cancel_unbooted(
    facts: node_state.Facts,
    update: ledger_record.UpdateRecord,
    deployments: os_change.DeploymentState,
) -> actions.CancelStagedAction:
    """Cancel an update whose deployment did not boot: the boot loader or a user chose another."""
    reason = health.format_not_booted(update.target, deployments.booted_digest)
    quarantined = ledger_record.QuarantinedTarget(
        update.target, reason, RETRY_REMEDY, check=health.BOOT
    )
    return actions.CancelStagedAction(
        "the previous deployment was booted",
        update.staged_id,
        facts.record.quarantined or quarantined,
    )
