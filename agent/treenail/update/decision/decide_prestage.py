"""What is staged ahead: an image that the node is to have at hand before it is asked to move.

It needs no drain and no update: the node is at rest at its target, and stays there. What was staged
is the update's as soon as that very image is asked for, and is dropped when it no longer is.
"""

from treenail.update.decision.actions import (
    Adopt,
    Decision,
    DropAhead,
    Rest,
    Resume,
    StageAhead,
    Wait,
)
from treenail.update.decision.desired import Wish
from treenail.update.decision.facts import Facts, NodeSeen
from treenail.update.state.record import StagedAhead, Target


def beside(facts: Facts, decision: Decision, target: Target) -> Decision:
    """The decision about the target, or what comes before it for what is staged ahead."""
    kept, asked = facts.record.ahead, _asked(facts)
    if kept is not None and kept.target.image != target.image:
        wanted = asked is not None and kept.target.image == asked.image
        if not wanted or not isinstance(decision, Rest | Wait | Resume | Adopt):
            return DropAhead(_staged_id(facts, kept))
    at_rest = isinstance(decision, Rest) and decision.settled
    if asked is None or facts.deployed is None or not at_rest or _has(facts, asked):
        return decision
    deployed = facts.deployed
    ours = deployed.staged == asked.digest and deployed.locked
    return StageAhead(asked, "" if ours else deployed.staged_id)


def looks(facts: Facts) -> bool:
    """Whether what is staged ahead needs a look at the deployments of a node at rest."""
    kept, asked = facts.record.ahead, _asked(facts)
    if kept is not None and (asked is None or kept.target.image != asked.image):
        return True
    return asked is not None and not _has(facts, asked)


def stands(node: NodeSeen, kept: StagedAhead, current: Target) -> bool:
    """Whether it is worth going on: it is still asked for, or it is what the node is to move to."""
    wish = node.wish
    if not isinstance(wish, Wish):
        return False
    at_rest = wish.target == current and node.ahead == kept.target
    return at_rest or wish.target.image == kept.target.image


def _asked(facts: Facts) -> Target | None:
    return None if facts.node is None else facts.node.ahead


def _has(facts: Facts, asked: Target) -> bool:
    """A locked deployment does not outlive the boot in which it was staged."""
    kept = facts.record.ahead
    return kept is not None and kept.done and (kept.target, kept.boot_id) == (asked, facts.boot_id)


def _staged_id(facts: Facts, kept: StagedAhead) -> str:
    """What is to be dropped; also when the process ended before it was noted."""
    deployed = facts.deployed
    if kept.staged_id or deployed is None:
        return kept.staged_id
    ours = deployed.staged == kept.target.digest and deployed.locked
    return deployed.staged_id if ours else ""
