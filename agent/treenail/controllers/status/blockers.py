"""Finds blockers of a rollout: the pool, its policy, a window, a disruption budget, a node."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.meta import Condition
from treenail.controllers.pools.holders import classify_wait, describe_holder
from treenail.controllers.pools.nodes import NodeFacts
from treenail.controllers.pools.pools import ObservedPool
from treenail.controllers.pools.rollout_record import NodeFailure, RolloutRecord

MAX_NODE_BLOCKERS = 50
"""Nodes that are named as blockers of a pool; the rows of the others have their reasons too."""
_PROGRESS_WORDS = ("nodes are updated", "are limited to", "is limited to")


@dataclass(frozen=True, slots=True)
class RolloutBlocker:
    """One thing that blocks a rollout, or a part of it."""

    kind: str
    """``paused``, ``halted``, ``invalid``, ``degraded``, ``stalled``, ``failed``, ``drain``,
    ``node``, or one of `WAIT_REASONS`."""
    message: str
    node: str = ""


def find_pool_blockers(
    observed: ObservedPool,
    conditions: Mapping[str, Condition],
    record: RolloutRecord | None,
    nodes: Sequence[NodeFacts],
    now: float,
) -> tuple[RolloutBlocker, ...]:
    """Find what blocks the rollout of a pool; empty while nothing does."""
    return (
        *_find_own_blockers(observed, conditions, record, nodes),
        *[
            each
            for each in _find_node_blockers(nodes, now)
            # The blocker of the pool has this reason.
            if each.kind != "failed" or each.node != _get_halting_node(record)
        ][:MAX_NODE_BLOCKERS],
    )


def _get_halting_node(record: RolloutRecord | None) -> str:
    return "" if record is None or record.halted_by is None else record.halted_by.node


def _complete_reason(failure: NodeFailure, nodes: Sequence[NodeFacts]) -> str:
    """Return the reason of the failure as the node has it; the record has its beginning."""
    reasons = (node.reason for node in nodes if node.name == failure.node)
    return next((each for each in reasons if each.startswith(failure.reason)), failure.reason)


def _find_own_blockers(
    observed: ObservedPool,
    conditions: Mapping[str, Condition],
    record: RolloutRecord | None,
    nodes: Sequence[NodeFacts],
) -> Iterator[RolloutBlocker]:
    pool = observed.pool
    if observed.error is not None:
        yield RolloutBlocker("invalid", str(observed.error))
        return
    updated = conditions.get("Updated")
    if pool.paused and not (updated is not None and updated.status == "True"):
        yield RolloutBlocker("paused", f"spec.paused of pool {pool.name} is true")
    if record is not None and record.halted_by is not None:
        failure = record.halted_by
        yield RolloutBlocker(
            "halted",
            f"node {failure.node} failed: {_complete_reason(failure, nodes)}",
            failure.node,
        )
        return
    degraded, stalled = conditions.get("Degraded"), conditions.get("Stalled")
    if degraded is not None and degraded.status == "True":
        yield RolloutBlocker("degraded", degraded.message or degraded.reason)
        return
    if stalled is not None and stalled.status == "True":
        yield RolloutBlocker("stalled", stalled.message or stalled.reason)
    updating = conditions.get("Updating")
    if updating is not None and (updating.status, updating.reason) == ("True", "Waiting"):
        # "All nodes are updating to TARGET; why the pool waits; how many nodes are updated".
        parts = updating.message.split("; ")[1:]
        text = "; ".join(
            each for each in parts if not any(word in each for word in _PROGRESS_WORDS)
        )
        yield RolloutBlocker(classify_wait(updating.message), text.removeprefix("waiting: "))


def _find_node_blockers(nodes: Sequence[NodeFacts], now: float) -> Iterator[RolloutBlocker]:
    for node in nodes:
        if node.is_degraded:
            yield RolloutBlocker("failed", node.reason or f"it is {node.state}", node.name)
        elif node.drain_blocker:
            yield RolloutBlocker("drain", node.drain_blocker, node.name)
        elif node.is_unavailable and not (holder := describe_holder(node, now)).is_expected:
            yield RolloutBlocker("node", holder.reason, node.name)
