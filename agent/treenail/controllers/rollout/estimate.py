"""How long the rest of a rollout takes, as far as the nodes that are through can tell."""

from collections.abc import Iterable
from statistics import median

from treenail.controllers.rollout.gates.windows import (
    MaintenanceWindow,
    WindowClosed,
    find_window_state,
)
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget

DEFAULT_NODE_S = 600.0
"""What a node is taken to need before any is through."""

_MAX_WINDOWS = 400


def estimate_node_s(nodes: Iterable[NodeFacts], target: RolloutTarget) -> float:
    """What a node needs from being given the target to being back: the median of those that are."""
    took = [
        node.ready_changed_at - node.started_at
        for node in nodes
        if node.started_at is not None
        and node.ready_changed_at is not None
        and node.ready_changed_at > node.started_at
        and node.is_updated_to(target)
    ]
    return median(took) if took else DEFAULT_NODE_S


def estimate_remaining_s(
    remaining: int,
    max_parallel: int,
    node_duration_s: float,
    windows: tuple[MaintenanceWindow, ...],
    now: float,
) -> float | None:
    """Until the ``remaining`` nodes are through, ``max_parallel`` at a time, inside the windows.

    None when that is never: no window is long enough for a node, or it takes too many of them.
    """
    turns = -(-remaining // max(max_parallel, 1))
    at = now
    for _ in range(_MAX_WINDOWS):
        seen = find_window_state(windows, at)
        if isinstance(seen, WindowClosed):
            at += seen.opens_in_s
            continue
        fit = turns if seen.closes_in_s is None else int(seen.closes_in_s // node_duration_s)
        if seen.closes_in_s is None or fit >= turns:
            return at + turns * node_duration_s - now
        turns -= fit
        at += seen.closes_in_s
    return None


def format_duration(seconds: float) -> str:
    """A length of time for people, rounded."""
    minutes = max(1, round(seconds / 60))
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} h" if hours < 48 else f"{round(hours / 24)} days"
