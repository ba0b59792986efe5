"""Decide the next action of a node without an update: stay idle, or begin something."""

from treenail.config.drift import Drift
from treenail.errors import ConfigError, DriftError, HostError, PreflightError
from treenail.update.checks.preflight import make_foreign_staged_problem
from treenail.update.decision.actions import (
    AdoptAction,
    Decision,
    IdleAction,
    IntroduceNodeAction,
    PlanAction,
    RefuseAction,
    RepairDriftAction,
    RetryAction,
    UncordonAction,
    WaitAction,
)
from treenail.update.decision.decide_prestage import decide_prestage
from treenail.update.decision.desired import DesiredTarget, InvalidTarget
from treenail.update.decision.facts import DeploymentState, DrainHandshake, Facts
from treenail.update.decision.request import RequestKind, UserRequest
from treenail.update.drift.drift_policy import format_drift, format_drift_remedy
from treenail.update.state.record import Target

WAIT_FOR_DEPLOYMENTS = WaitAction("waiting for the list of deployments")


def decide_without_update(facts: Facts) -> Decision:
    """Return the next action of a node that has no update in progress."""
    if facts.node is None:
        return WaitAction("waiting for the API server to return this Node")
    desired = facts.node.desired
    if isinstance(desired, InvalidTarget):
        return RefuseAction(desired.error)
    if not isinstance(desired, DesiredTarget):
        if facts.initial_annotations and not facts.node.claimed.config:
            return IntroduceNodeAction(facts.initial_annotations)
        return IdleAction("the Node requests no config")
    target = desired.target
    if facts.is_forced:
        return WAIT_FOR_DEPLOYMENTS if facts.deployments is None else PlanAction(target)
    quarantined = facts.record.quarantined
    if quarantined is not None:
        if quarantined.target != target or facts.request == UserRequest(RequestKind.RETRY):
            return RetryAction()
        error = HostError(quarantined.reason, remedy=quarantined.remedy)
        return _uncordon_first(facts, RefuseAction(error))
    drift = _decide_drift(facts)
    return drift or decide_prestage(facts, _decide_desired(facts, target), target)


def is_built_from_other_config(facts: Facts, target: Target, image_config: str) -> bool:
    """Return whether the image contains the files and units of another config."""
    return (
        facts.has_files_in_image and bool(target.image) and image_config not in {"", target.config}
    )


def make_other_config_error(target: Target, image_config: str) -> ConfigError:
    """Return the error for an image that was built from another config."""
    return ConfigError(
        f"cannot use {target.image}: it was built from {image_config}, and the Node requests "
        f"{target.config} beside it",
        remedy=f"request an image that was built from {target.config}, or set image_files in "
        'agent.toml to "write" if the image contains no config',
    )


def refuse_foreign_staged(deployments: DeploymentState) -> RefuseAction:
    """Refuse to replace a deployment that another program staged."""
    problem = make_foreign_staged_problem(deployments.staged_id)
    error = PreflightError(str(problem), reasons=(problem.reason,), remedy=problem.remedy)
    return RefuseAction(error)


def _find_requested_repairs(facts: Facts) -> tuple[Drift, ...]:
    """Return the drift that a user requested to repair and that no policy repairs."""
    request, drift = facts.request, facts.drift
    if request is None or request.kind is not RequestKind.REPAIR:
        return ()
    left_alone = (*drift.blocking, *drift.reported)
    return tuple(each for each in left_alone if each.subject in request.paths)


def _decide_drift(facts: Facts) -> Decision | None:
    """Return the action about drift that comes before all others; None if there is none."""
    drift, config = facts.drift, facts.record.current.config
    to_repair = (*drift.to_repair, *_find_requested_repairs(facts))
    if to_repair:
        return RepairDriftAction(to_repair)
    if not drift.blocking:
        return None
    error = DriftError(
        format_drift(drift.blocking, config, drift.contested),
        remedy=format_drift_remedy(drift.blocking, drift.contested),
    )
    return _uncordon_first(facts, RefuseAction(error))


def _decide_desired(facts: Facts, target: Target) -> Decision:
    record, deployments = facts.record, facts.deployments
    at_target = IdleAction(f"at {target}", is_settled=True)
    if deployments is None:
        # They are read whenever the desired target is not the current one.
        return _uncordon_first(facts, at_target)
    expected_digest = target.digest or record.booted_digest
    is_booted = deployments.booted_digest == expected_digest or not expected_digest
    if record.current == target and is_booted:
        return _uncordon_first(facts, at_target)
    if is_booted and is_built_from_other_config(facts, target, deployments.booted_config):
        return RefuseAction(make_other_config_error(target, deployments.booted_config))
    if record.current == Target() and _is_already_at(facts, deployments, target):
        return AdoptAction(target)
    if target.image and deployments.booted_digest != target.digest:
        return _check_foreign_staged(deployments, target) or PlanAction(target)
    return PlanAction(target)


def _is_already_at(facts: Facts, deployments: DeploymentState, target: Target) -> bool:
    """Return whether a machine without a ledger has the target: by its image, or as it claims."""
    if target.image:
        return deployments.booted_digest == target.digest
    return facts.node is not None and facts.node.claimed == target


def _uncordon_first(facts: Facts, otherwise: Decision) -> Decision:
    """Withdraw a drain that no update needs, such as one from before the ledger was lost."""
    handshake = facts.node.handshake if facts.node else DrainHandshake()
    if handshake.is_drain_requested:
        return UncordonAction("uncordon-" + handshake.requested.removeprefix("drain-"))
    if handshake.requested and not handshake.is_settled:
        return WaitAction("waiting for the uncordon")
    return otherwise


def _check_foreign_staged(deployments: DeploymentState, target: Target) -> RefuseAction | None:
    """Refuse the target if another program staged a deployment."""
    if not deployments.staged_id:
        return None
    if target.image and deployments.staged_digest == target.digest and deployments.is_locked:
        return None
    return refuse_foreign_staged(deployments)
