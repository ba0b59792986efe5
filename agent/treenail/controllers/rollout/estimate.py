"""How long the rest of a rollout takes, as far as the nodes that are through can tell."""

from collections.abc import Iterable
from statistics import median

from treenail.controllers.rollout.gates.windows import Closed, Window, look
from treenail.controllers.rollout.nodes import NodeFacts, Target

USUAL_S = 600.0
"""What a node is taken to need before any is through."""

_OPENINGS = 400


def node_s(nodes: Iterable[NodeFacts], target: Target) -> float:
    """What a node needs from being given the target to being back: the median of those that are."""
    took = [
        node.ready_changed_at - node.started_at
        for node in nodes
        if node.started_at is not None
        and node.ready_changed_at is not None
        and node.ready_changed_at > node.started_at
        and node.has(target)
    ]
    return median(took) if took else USUAL_S


def left_s(
    remaining: int, at_once: int, each_s: float, windows: tuple[Window, ...], now: float
) -> float | None:
    """Until the ``remaining`` nodes are through, ``at_once`` at a time, inside the windows.

    None when that is never: no window is long enough for a node, or it takes too many of them.
    """
    turns = -(-remaining // max(at_once, 1))
    at = now
    for _ in range(_OPENINGS):
        seen = look(windows, at)
        if isinstance(seen, Closed):
            at += seen.opens_in_s
            continue
        fit = turns if seen.left_s is None else int(seen.left_s // each_s)
        if seen.left_s is None or fit >= turns:
            return at + turns * each_s - now
        turns -= fit
        at += seen.left_s
    return None


def words(seconds: float) -> str:
    """A length of time for people, rounded."""
    minutes = max(1, round(seconds / 60))
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} h" if hours < 48 else f"{round(hours / 24)} days"
