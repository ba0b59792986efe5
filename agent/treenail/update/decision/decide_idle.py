"""A node without an update: whether it rests, and what it begins."""

from treenail.config.drift import Drift
from treenail.errors import ConfigError, DriftError, HostError, PreflightError
from treenail.update.checks.preflight import describe_foreign_staged
from treenail.update.decision import decide_prestage
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
from treenail.update.decision.desired import DesiredTarget, InvalidTarget
from treenail.update.decision.facts import DeploymentState, DrainHandshake, Facts
from treenail.update.decision.request import RequestKind, UserRequest
from treenail.update.drift.drift_policy import format_drift, format_drift_remedy
from treenail.update.state.record import Target

WAIT_FOR_DEPLOYMENTS = WaitAction("waiting for a look at the deployments")


def decide_without_update(facts: Facts) -> Decision:
    """The next move of a node that has no update under way."""
    if facts.node is None:
        return WaitAction("waiting for the API server to show this Node")
    wish = facts.node.desired
    if isinstance(wish, InvalidTarget):
        return RefuseAction(wish.error)
    if not isinstance(wish, DesiredTarget):
        if facts.initial_annotations and not facts.node.claimed.config:
            return IntroduceNodeAction(facts.initial_annotations)
        return IdleAction("no config is asked of this node")
    if facts.is_forced:
        return WAIT_FOR_DEPLOYMENTS if facts.deployments is None else PlanAction(wish.target)
    bad = facts.record.quarantined
    if bad is not None:
        if bad.target != wish.target or facts.request == UserRequest(RequestKind.RETRY):
            return RetryAction()
        return _uncordon_first(facts, RefuseAction(HostError(bad.reason, remedy=bad.remedy)))
    return _decide_drift(facts) or decide_prestage.decide_prestage(
        facts, _decide_desired(facts, wish.target), wish.target
    )


def is_built_from_other_config(facts: Facts, target: Target, baked: str) -> bool:
    """Whether files and units would be those of another config than the target's."""
    return facts.has_files_in_image and bool(target.image) and baked not in {"", target.config}


def make_other_config_error(target: Target, baked: str) -> ConfigError:
    """Why the target can't be had with this image."""
    return ConfigError(
        f"the image {target.image} was built from {baked}, and the node is asked for "
        f"{target.config} beside it",
        remedy=f"ask for an image that was built from {target.config}, or set image_files in "
        'agent.toml to "write" if this one bakes nothing',
    )


def refuse_foreign_staged(deployed: DeploymentState) -> RefuseAction:
    """What is staged is somebody else's, and not ours to drop."""
    found = describe_foreign_staged(deployed.staged_id)
    return RefuseAction(PreflightError(str(found), reasons=(found.reason,), remedy=found.remedy))


def _find_requested_repairs(facts: Facts) -> tuple[Drift, ...]:
    """What a person asks to have put right, of what would be left as it is."""
    request, drift = facts.request, facts.drift
    if request is None or request.kind is not RequestKind.REPAIR:
        return ()
    left_alone = (*drift.blocking, *drift.reported)
    return tuple(each for each in left_alone if each.subject in request.paths)


def _decide_drift(facts: Facts) -> Decision | None:
    """What there is to do about drift before anything else is done; None when nothing is."""
    drift, config = facts.drift, facts.record.current.config
    healed = (*drift.to_repair, *_find_requested_repairs(facts))
    if healed:
        return RepairDriftAction(healed)
    if not drift.blocking:
        return None
    error = DriftError(
        format_drift(drift.blocking, config, drift.contested),
        remedy=format_drift_remedy(drift.blocking, drift.contested),
    )
    return _uncordon_first(facts, RefuseAction(error))


def _decide_desired(facts: Facts, target: Target) -> Decision:
    record, deployed = facts.record, facts.deployments
    if deployed is None:
        # It is looked at whenever the wish is not what is current.
        return _uncordon_first(facts, IdleAction(f"at {target}", is_settled=True))
    expected = target.digest or record.booted_digest
    as_booted = deployed.booted_digest == expected or not expected
    if record.current == target and as_booted:
        return _uncordon_first(facts, IdleAction(f"at {target}", is_settled=True))
    if as_booted and is_built_from_other_config(facts, target, deployed.booted_config):
        return RefuseAction(make_other_config_error(target, deployed.booted_config))
    if record.current == Target() and _is_already_at(facts, deployed, target):
        return AdoptAction(target)
    if target.image and deployed.booted_digest != target.digest:
        return _check_foreign_staged(deployed, target) or PlanAction(target)
    return PlanAction(target)


def _is_already_at(facts: Facts, deployed: DeploymentState, target: Target) -> bool:
    """Whether a machine that nobody has a record of is the target: by its image, or as claimed."""
    if target.image:
        return deployed.booted_digest == target.digest
    return facts.node is not None and facts.node.claimed == target


def _uncordon_first(facts: Facts, otherwise: Decision) -> Decision:
    """Take back a drain that nothing under way needs: one from before the ledger was lost."""
    handshake = facts.node.handshake if facts.node else DrainHandshake()
    if handshake.is_drain_requested:
        return UncordonAction("uncordon-" + handshake.requested.removeprefix("drain-"))
    if handshake.requested and not handshake.is_settled:
        return WaitAction("waiting for the uncordon")
    return otherwise


def _check_foreign_staged(deployed: DeploymentState, target: Target) -> RefuseAction | None:
    """Somebody else's staged deployment is in the way."""
    if not deployed.staged_id:
        return None
    if target.image and deployed.staged_digest == target.digest and deployed.is_locked:
        return None
    return refuse_foreign_staged(deployed)
