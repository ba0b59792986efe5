"""Nodes that hold a rollout up: why, since when, and whether for too long.

`classify_wait` reduces the message of a waiting pool to a word for metrics, tables and pages.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from treenail.clocks import format_rfc3339
from treenail.controllers.pools import node_facts, rollout_record

AGENT_RESPONSE_S = 120.0
"""Time in which an agent reports that it saw its target. It usually takes a second."""
_MAX_NAMED_NODES = 3
"""Nodes that a condition names; it counts the others."""


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """A node that uses a part of ``maxUnavailable``, or that cannot get the target now."""

    name: str
    reason: str
    is_expected: bool = False
    """It is updating, and nothing blocks it."""


@dataclass(frozen=True, slots=True)
class StallCheck:
    """Result of `check_progress`."""

    record: rollout_record.RolloutRecord
    message: str = ""
    """Why the rollout made no progress for too long; empty while it does."""
    is_moving: bool = True
    """False while every node that holds the rollout up waits for a user."""
    recheck_s: float | None = None
    """Delay until time alone exceeds the deadline."""


def find_holders(
    nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget, now: float
) -> tuple[SlotHolder, ...]:
    """Find the nodes that use capacity."""
    return tuple(
        describe_holder(node, now)
        for node in nodes
        if node.is_unavailable or (node.is_failing and node.is_assigned(target))
    )


def describe_holder(node: node_facts.NodeFacts, now: float) -> SlotHolder:
    """Describe why the node holds the rollout up."""
    if node.is_degraded:
        return SlotHolder(node.name, "degraded")
    if node.drain_blocker:
        return SlotHolder(node.name, f"drain blocked by {node.drain_blocker}")
    if node.pressure:
        return SlotHolder(node.name, node.pressure, is_expected=not node.is_done)
    if not node.is_healthy:
        at = node.ready_changed_at
        since = "" if at is None else f" since {format_rfc3339(at)}"
        return SlotHolder(node.name, f"not ready{since}", is_expected=not node.is_done)
    if not node.is_done:
        return _describe_update(node, now)
    # An agent reports Done only after its uncordon, so this cordon is not part of an update.
    return SlotHolder(
        node.name, "cordoned by a user" if node.unschedulable else "image not prestaged"
    )


def format_holders(holders: Sequence[SlotHolder]) -> str:
    """Format the first holders, and count the others; the unexpected ones come first."""
    ordered = sorted(holders, key=lambda holder: holder.is_expected)
    named = ", ".join(f"{holder.name} ({holder.reason})" for holder in ordered[:_MAX_NAMED_NODES])
    more = len(ordered) - _MAX_NAMED_NODES
    return f"{named} and {more} more" if more > 0 else named


def format_unexpected(holders: Iterable[SlotHolder]) -> str:
    """Format the holders that need attention; empty without any."""
    unexpected = [holder for holder in holders if not holder.is_expected]
    return f"waiting for {format_holders(unexpected)}" if unexpected else ""


def check_progress(
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    record: rollout_record.RolloutRecord,
    *,
    deadline_s: float,
    now: float,
    is_held: bool,
) -> StallCheck:
    """Check whether the rollout exceeds its progress deadline; 0 disables the deadline.

    The time of a node that is updating begins at its assignment. While ``is_held`` and no node is
    updating, the time begins with the first such decision. The record keeps it.
    """
    updating = [node for node in nodes if _is_updating_to(node, target)]
    is_blocked = is_held and not updating
    blocked_since = record.blocked_since if is_blocked else None
    if is_blocked and blocked_since is None:
        # Whole seconds, as in the status of the pool.
        blocked_since = float(int(now))
    record = replace(record, blocked_since=blocked_since)
    if deadline_s <= 0:
        return StallCheck(record, is_moving=not is_blocked)
    ends = {node.name: (node.started_at or 0.0) + deadline_s for node in updating}
    late = [node for node in updating if node.started_at and now >= ends[node.name]]
    waits = [end - now for end in ends.values() if end > now]
    if blocked_since is not None:
        waits.append(max(blocked_since + deadline_s - now, 0.0))
        if now >= blocked_since + deadline_s:
            late = [node for node in nodes if node.is_unavailable or node.is_failing]
    if not late:
        return StallCheck(record, is_moving=not is_blocked, recheck_s=min(waits, default=None))
    named = format_holders([describe_holder(node, now) for node in late])
    limit = rollout_record.format_limit(deadline_s)
    message = f"no progress for more than {limit} (progressDeadline): {named}"
    is_moving = len(late) < len(updating)
    return StallCheck(record, message, is_moving, min((s for s in waits if s > 0), default=None))


def _is_updating_to(node: node_facts.NodeFacts, target: node_facts.RolloutTarget) -> bool:
    # A node that the controller did not assign has no time to be measured from.
    is_own = node.started_at is not None and node.is_assigned(target)
    return is_own and not node.is_done and not node.is_degraded


def _describe_update(node: node_facts.NodeFacts, now: float) -> SlotHolder:
    started = node.started_at
    if node.has_not_responded and started is not None and now >= started + AGENT_RESPONSE_S:
        return SlotHolder(
            node.name, f"no agent has responded since the assignment at {format_rfc3339(started)}"
        )
    return SlotHolder(node.name, "updating", is_expected=True)


# The first word that the message of a waiting pool contains; see gates and `decide`.
_WAIT_REASONS = (
    ("maxUnavailable", re.compile("maxUnavailable")),
    ("window", re.compile("maintenance window")),
    ("soak", re.compile("soaking")),
    ("lock", re.compile(r"\block\b|FleetLock")),
    ("alert", re.compile(r"\balerts?\b|Prometheus")),
    ("prestage", re.compile(r"pre-?stag")),
    ("build", re.compile(r"\bbuil[dt]")),
    ("stale", re.compile("the watch of|are not listed yet")),
    ("wave", re.compile(r"\bwave\b")),
    ("nodes", re.compile(r"^waiting for |^waiting: (?:arbiter|master) ")),
)
_UPDATING = "All nodes are updating to "
WAIT_REASONS = (*(name for name, _ in _WAIT_REASONS), "other")


def classify_wait(message: str) -> str:
    """Return one of `WAIT_REASONS` for the message of a pool that waits."""
    if message.startswith(_UPDATING):
        # The names of the config and the image may contain any word.
        message = message.partition("; ")[2]
    for name, pattern in _WAIT_REASONS:
        if pattern.search(message):
            return name
    return "other"
