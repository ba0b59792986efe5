"""Decide the next action of a node that rebooted into its target: commit it or roll back.

None of these decisions needs the API server.
"""

from collections.abc import Sequence

from treenail.errors import RollbackError
from treenail.update.checks.health import (
    BOOT,
    HealthyVerdict,
    PendingVerdict,
    UnhealthyVerdict,
    decide_verdict,
    format_inconclusive,
    format_not_booted,
    format_unhealthy,
)
from treenail.update.decision.actions import (
    CancelStagedAction,
    CommitAction,
    Decision,
    RecoverAction,
    RefuseAction,
    RestoreAction,
    RollBackAction,
    VerifyAction,
)
from treenail.update.decision.decide_idle import WAIT_FOR_DEPLOYMENTS, refuse_unknown_booted
from treenail.update.decision.node_state import DeploymentState, DesiredTarget, Facts
from treenail.update.impact.impact import UpdateImpact
from treenail.update.impact.os_change import is_in_effect
from treenail.update.state.boot_trial import HealthCheckMode
from treenail.update.state.ledger_record import QuarantinedTarget, UpdateRecord
from treenail.update.state.phases import Phase
from treenail.update.steps.step_types import (
    ConfigStep,
    DisableUnits,
    EnableUnits,
    MakeDirectory,
    MakeLink,
    PresetUnits,
    RelabelEntry,
    ReloadUnit,
    RestartUnit,
    WriteFile,
)

CHECKS_BEGIN = "the health checks begin"
ROLLBACK_REBOOTS_ALLOWED = 3
"""Reboots to roll back, after which a user must act."""
RETRY_REMEDY = (
    "the node has its previous target; request another target, give the annotation "
    "treenail.io/retry of the Node a new value, or run on this node: treenail retry"
)

_ETC_DIRECTORY = "/etc/"
_NODE_SERVICES = ("kubelet.service", "crio.service", "containerd.service")


def select_deployment_steps(steps: Sequence[ConfigStep]) -> tuple[ConfigStep, ...]:
    """Return the steps that change only the /etc of the booted deployment."""
    # libostree gives each deployment its own /etc. All else, such as /var and /home, is shared
    # with the previous deployment, and a rollback would not undo a change there.
    return tuple(
        step
        for step in steps
        if isinstance(step, EnableUnits | DisableUnits | PresetUnits)
        or (
            isinstance(step, WriteFile | MakeDirectory | MakeLink | RelabelEntry)
            and step.path.startswith(_ETC_DIRECTORY)
        )
    )


def is_boot_action(decision: Decision, facts: Facts) -> bool:
    """Return whether to run the action before the kubelet and other services start."""
    if isinstance(decision, RollBackAction):
        # The files may be restored in part: the power went while the previous boot did it.
        # The action leads to a `RestoreAction`, and the reboot comes after that.
        update = facts.record.update
        is_begun = update is not None and update.phase is Phase.ROLLING_BACK
        impact = update.impact if update else None
        return is_begun and facts.has_undo and impact is not None and impact.os.is_empty
    return isinstance(decision, RecoverAction | RestoreAction | VerifyAction | CommitAction)


def needs_live_trial(steps: Sequence[ConfigStep]) -> bool:
    """Return whether steps restart or reload the kubelet or the container runtime."""
    return any(
        isinstance(step, RestartUnit | ReloadUnit) and step.unit in _NODE_SERVICES for step in steps
    )


def decide_verification(facts: Facts, update: UpdateRecord, impact: UpdateImpact) -> Decision:
    """Decide during the boot trial."""
    target, deployments = update.target, facts.deployments
    if deployments is None and not impact.os.is_empty:
        return WAIT_FOR_DEPLOYMENTS
    if refusal := refuse_unknown_booted(facts, impact):
        return refusal
    if deployments is not None and not is_in_effect(impact.os, deployments.running):
        return RestoreAction() if facts.has_undo else cancel_unbooted(facts, update, deployments)
    if update.boot_trial.is_healthy or facts.health_mode is HealthCheckMode.OFF:
        return CommitAction(target)
    if facts.trial_status is None or update.boot_id != facts.boot_id:
        return VerifyAction(target, CHECKS_BEGIN)
    is_api_blamed = facts.record.api_blamed == target
    verdict = decide_verdict(
        facts.trial_status,
        update.boot_trial,
        is_api_blamed=is_api_blamed,
        mode=facts.health_mode,
    )
    match verdict:
        case HealthyVerdict(inconclusive=inconclusive):
            return CommitAction(target, format_inconclusive(inconclusive, update.boot_trial))
        case PendingVerdict(reason=reason, problem=problem):
            if _should_withdraw(facts, update, impact):
                return _withdraw_target(update, impact)
            return VerifyAction(
                target, reason, problem and f"{target} is not healthy yet: {problem}"
            )
        case UnhealthyVerdict(check=check, is_only=is_only):
            reason = format_unhealthy(target, check)
            quarantined = QuarantinedTarget(
                target, reason, RETRY_REMEDY, check=check.name, is_only_check=is_only
            )
            if not impact.needs_reboot:
                # The files of a live change are restored without a reboot: the node may serve.
                return CancelStagedAction("a health check failed", quarantine=quarantined)
            return RollBackAction(quarantined)


def _should_withdraw(facts: Facts, update: UpdateRecord, impact: UpdateImpact) -> bool:
    """Return whether to end the boot trial at once, because the Node requests another target.

    Back to the origin, a rollback costs the one reboot that is needed in any case. To a third
    target the fastest way leads over the booted one, unless a check keeps failing on it.
    """
    status, deployments = facts.trial_status, facts.deployments
    desired = facts.node.desired if facts.node else None
    is_changed = isinstance(desired, DesiredTarget) and desired.target != update.target
    if not is_changed or facts.health_mode is not HealthCheckMode.ENFORCE or status is None:
        return False
    if facts.should_drain and impact.needs_drain and not _is_drained(facts, update):
        # The node serves: a user uncordoned it, or etcd was restored.
        return False
    if not impact.os.is_empty and (deployments is None or not deployments.other_ids):
        return False
    if isinstance(desired, DesiredTarget) and desired.target == update.origin:
        return True
    return not status.is_paused and any(
        each.is_passing is False and each.since_s >= status.limits.failing_s
        for each in status.checks
    )


def _is_drained(facts: Facts, update: UpdateRecord) -> bool:
    return facts.node is not None and facts.node.handshake.is_drained_for(update.drain_token)


def _withdraw_target(
    update: UpdateRecord, impact: UpdateImpact
) -> RollBackAction | CancelStagedAction:
    quarantined = make_withdrawn_target(update)
    if not impact.needs_reboot:
        return CancelStagedAction("the desired target changed", quarantine=quarantined)
    return RollBackAction(quarantined)


def make_withdrawn_target(update: UpdateRecord) -> QuarantinedTarget:
    """Return the quarantine of a target that the Node no longer requests."""
    reason = f"the Node requests another target than {update.target}"
    return QuarantinedTarget(update.target, reason, is_withdrawn=True)


def decide_rollback(facts: Facts, update: UpdateRecord, impact: UpdateImpact) -> Decision:
    """Decide during a rollback: of the deployment, or of files alone if the OS is the same."""
    deployments, quarantined = facts.deployments, facts.record.quarantined
    if deployments is None and not impact.os.is_empty:
        return WAIT_FOR_DEPLOYMENTS
    if refusal := refuse_unknown_booted(facts, impact):
        return refusal
    if quarantined is None:
        raise AssertionError("a rollback without a quarantined target")
    is_same_boot = update.boot_id == facts.boot_id
    if impact.os.is_empty or deployments is None:
        if facts.has_undo:
            return RestoreAction() if is_same_boot else RollBackAction(quarantined)
        return RollBackAction(quarantined) if is_same_boot else CancelStagedAction("rolled back")
    if not is_in_effect(impact.os, deployments.running):
        if facts.has_undo:
            return RestoreAction()
        return CancelStagedAction("rolled back", update.staged_id)
    reboot_count = update.boot_trial.rollback_reboots
    if not is_same_boot and reboot_count >= ROLLBACK_REBOOTS_ALLOWED:
        return RefuseAction(
            RollbackError(
                f"cannot roll back to {update.origin}: {reboot_count} reboots booted "
                f"{update.target} again; it is quarantined: {quarantined.reason}",
                remedy="select the previous deployment in the boot menu, or run: rpm-ostree "
                "rollback, or: bootc rollback",
            )
        )
    return RollBackAction(quarantined)


def cancel_unbooted(
    facts: Facts, update: UpdateRecord, deployments: DeploymentState
) -> CancelStagedAction:
    """Cancel an update whose deployment did not boot: the boot loader or a user chose another."""
    reason = format_not_booted(update.target, deployments.booted_digest)
    quarantined = QuarantinedTarget(update.target, reason, RETRY_REMEDY, check=BOOT)
    return CancelStagedAction(
        "the previous deployment was booted",
        update.staged_id,
        facts.record.quarantined or quarantined,
    )
