"""Decide what to do about a pre-staged target: an image that is deployed before its update begins.

Pre-staging needs neither a drain nor an update; the node stays idle at its current target. An
update takes the deployment over if it needs the same image. The agent drops it once the Node no
longer requests it.
"""

from treenail.update.decision.actions import (
    AdoptAction,
    Decision,
    DropPrestagedAction,
    IdleAction,
    PrestageAction,
    UncordonAction,
    WaitAction,
)
from treenail.update.decision.desired import DesiredTarget
from treenail.update.decision.facts import Facts, ObservedNode
from treenail.update.state.record import PrestagedTarget, Target


def decide_prestage(facts: Facts, decision: Decision, target: Target) -> Decision:
    """Return the decision about the target, or the pre-stage action that comes before it."""
    prestaged, requested = facts.record.prestaged, _find_requested_target(facts)
    if prestaged is not None and prestaged.target.image != target.image:
        is_requested = requested is not None and prestaged.target.image == requested.image
        is_idle = isinstance(decision, IdleAction | WaitAction | UncordonAction | AdoptAction)
        if not (is_requested and is_idle):
            return DropPrestagedAction(_find_staged_id(facts, prestaged))
    deployments = facts.deployments
    is_settled = isinstance(decision, IdleAction) and decision.is_settled
    if requested is None or deployments is None or not is_settled:
        return decision
    if _is_prestaged(facts, requested):
        return decision
    is_ours = deployments.has_staged(requested.digest) and deployments.is_locked
    return PrestageAction(requested, "" if is_ours else deployments.staged_id)


def needs_deployments_for_prestage(facts: Facts) -> bool:
    """Return whether the decision about pre-staging on an idle node needs the deployments."""
    prestaged, requested = facts.record.prestaged, _find_requested_target(facts)
    if prestaged is not None and (requested is None or prestaged.target.image != requested.image):
        return True
    return requested is not None and not _is_prestaged(facts, requested)


def is_prestage_requested(node: ObservedNode, prestaged: PrestagedTarget, current: Target) -> bool:
    """Return whether to go on: the Node still requests to pre-stage the image, or to move to it."""
    desired = node.desired
    if not isinstance(desired, DesiredTarget):
        return False
    is_idle = desired.target == current and node.prestage == prestaged.target
    return is_idle or desired.target.image == prestaged.target.image


def _find_requested_target(facts: Facts) -> Target | None:
    return None if facts.node is None else facts.node.prestage


def _is_prestaged(facts: Facts, requested: Target) -> bool:
    # A staged deployment is in /run/ostree until ostree-finalize-staged writes it at shutdown. That
    # skips a locked one, so the next boot has lost it.
    prestaged = facts.record.prestaged
    if prestaged is None or not prestaged.is_done:
        return False
    return prestaged.target == requested and prestaged.boot_id == facts.boot_id


def _find_staged_id(facts: Facts, prestaged: PrestagedTarget) -> str:
    """Return the deployment to drop, also if the agent crashed before it recorded the ID."""
    deployments = facts.deployments
    if prestaged.staged_id or deployments is None:
        return prestaged.staged_id
    is_ours = deployments.has_staged(prestaged.target.digest) and deployments.is_locked
    return deployments.staged_id if is_ours else ""
