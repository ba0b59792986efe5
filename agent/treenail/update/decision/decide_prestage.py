"""What is staged ahead: an image that the node is to have at hand before it is asked to move.

It needs no drain and no update: the node is at rest at its target, and stays there. What was staged
is the update's as soon as that very image is asked for, and is dropped when it no longer is.
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
    """The decision about the target, or what comes before it for what is staged ahead."""
    kept, asked = facts.record.prestaged, _find_requested_target(facts)
    if kept is not None and kept.target.image != target.image:
        wanted = asked is not None and kept.target.image == asked.image
        if not wanted or not isinstance(
            decision, IdleAction | WaitAction | UncordonAction | AdoptAction
        ):
            return DropPrestagedAction(_find_staged_id(facts, kept))
    at_rest = isinstance(decision, IdleAction) and decision.is_settled
    if asked is None or facts.deployments is None or not at_rest or _has_prestaged(facts, asked):
        return decision
    deployed = facts.deployments
    ours = deployed.staged_digest == asked.digest and deployed.is_locked
    return PrestageAction(asked, "" if ours else deployed.staged_id)


def needs_deployments_for_prestage(facts: Facts) -> bool:
    """Whether what is staged ahead needs a look at the deployments of a node at rest."""
    kept, asked = facts.record.prestaged, _find_requested_target(facts)
    if kept is not None and (asked is None or kept.target.image != asked.image):
        return True
    return asked is not None and not _has_prestaged(facts, asked)


def is_prestage_requested(node: ObservedNode, kept: PrestagedTarget, current: Target) -> bool:
    """Whether it is worth going on: it is still asked for, or it is what the node is to move to."""
    wish = node.desired
    if not isinstance(wish, DesiredTarget):
        return False
    at_rest = wish.target == current and node.prestage == kept.target
    return at_rest or wish.target.image == kept.target.image


def _find_requested_target(facts: Facts) -> Target | None:
    return None if facts.node is None else facts.node.prestage


def _has_prestaged(facts: Facts, asked: Target) -> bool:
    """A locked deployment does not outlive the boot in which it was staged."""
    kept = facts.record.prestaged
    return (
        kept is not None and kept.is_done and (kept.target, kept.boot_id) == (asked, facts.boot_id)
    )


def _find_staged_id(facts: Facts, kept: PrestagedTarget) -> str:
    """What is to be dropped; also when the process ended before it was noted."""
    deployed = facts.deployments
    if kept.staged_id or deployed is None:
        return kept.staged_id
    ours = deployed.staged_digest == kept.target.digest and deployed.is_locked
    return deployed.staged_id if ours else ""
