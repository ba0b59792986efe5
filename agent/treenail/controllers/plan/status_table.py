"""Rows about pools and nodes for users who watch a rollout, and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.pools import ObservedPool, group_nodes
from treenail.controllers.rollout.status import read_reported_status
from treenail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: its current and desired target, and its state."""

    name: str
    state: str
    current: str
    desired: str
    current_target: RolloutTarget
    desired_target: RolloutTarget
    is_in_service: bool
    is_idle: bool
    reason: str = ""
    phase: str = ""
    """Of the update: ``waiting``, ``staging``, ``draining``, ``applying``, ``rebooting``,
    ``uncordoning``, ``failed`` or ``updated``."""
    prestage: str = ""
    """``staging`` or ``staged`` for a node that pre-stages its next image, else empty."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool and its nodes."""

    name: str
    config: str
    counts: Mapping[str, int]
    updated_status: str
    """Status of the condition Updated; empty without the condition."""
    updating_status: str
    degraded_status: str
    stalled_status: str
    message: str
    nodes: tuple[NodeRow, ...]


def build_rows(
    pools: Mapping[str, ObservedPool], nodes: Mapping[str, NodeFacts]
) -> tuple[PoolRow, ...]:
    """Build the rows: pools by name, and in each pool the idle nodes last."""
    grouping = group_nodes(pools, nodes)
    return tuple(
        _build_pool_row(pools[name], grouping.members.get(name, ())) for name in sorted(pools)
    )


def convert_to_json(found: Sequence[PoolRow]) -> Json:
    """Convert all rows, with every node."""
    return {
        "pools": [
            {
                "name": pool.name,
                "config": pool.config,
                "counts": dict(pool.counts),
                "updated": pool.updated_status,
                "updating": pool.updating_status,
                "degraded": pool.degraded_status,
                "stalled": pool.stalled_status,
                "message": pool.message,
                "nodes": [
                    {
                        "name": node.name,
                        "state": node.state,
                        "current": _convert_target(node.current_target),
                        "desired": _convert_target(node.desired_target),
                        "inService": node.is_in_service,
                        "reason": node.reason,
                        "phase": node.phase,
                        "prestage": node.prestage,
                    }
                    for node in pool.nodes
                ],
            }
            for pool in found
        ]
    }


def _build_pool_row(observed: ObservedPool, nodes: Sequence[NodeFacts]) -> PoolRow:
    pool = observed.pool
    conditions = {condition.type: condition for condition in pool.conditions}
    updating, degraded = conditions.get("Updating"), conditions.get("Degraded")
    stalled = conditions.get("Stalled")
    message = ""
    if degraded is not None and degraded.status == "True":
        message = degraded.message
    elif stalled is not None and stalled.status == "True":
        message = stalled.message
    elif updating is not None:
        message = updating.message
    found = sorted(
        (_build_node_row(node, pool.configuration.name) for node in nodes),
        key=lambda row: (row.is_idle, row.name),
    )
    updated = conditions.get("Updated")
    return PoolRow(
        name=pool.name,
        config=pool.configuration.name,
        counts=_count_nodes(pool),
        updated_status=updated.status if updated else "",
        updating_status=updating.status if updating else "",
        degraded_status=degraded.status if degraded else "",
        stalled_status=stalled.status if stalled else "",
        message=message if observed.error is None else str(observed.error),
        nodes=tuple(found),
    )


def _count_nodes(pool: MachineConfigPool) -> Mapping[str, int]:
    try:
        found = read_reported_status(pool).counts
    except ConfigError:
        return {"total": 0, "updated": 0, "unavailable": 0, "degraded": 0}
    return {
        "total": found.total,
        "updated": found.updated,
        "unavailable": found.unavailable,
        "degraded": found.degraded,
    }


def _build_node_row(node: NodeFacts, pool_config: str) -> NodeRow:
    return NodeRow(
        name=node.name,
        state=node.state,
        current=_format_target(RolloutTarget(node.current_config, node.current_image)),
        desired=_format_target(RolloutTarget(node.desired_config, node.desired_image)),
        is_in_service=node.is_in_service,
        is_idle=node.is_done and node.is_in_service,
        reason=_choose_reason(node),
        phase=_compute_phase(node, pool_config),
        current_target=RolloutTarget(node.current_config, node.current_image),
        desired_target=RolloutTarget(node.desired_config, node.desired_image),
        prestage=_format_prestage(node),
    )


def _choose_reason(node: NodeFacts) -> str:
    if node.is_done:
        return node.prestage_error
    if node.reason or not node.drain_blocker:
        return node.reason
    return f"drain blocked by {node.drain_blocker}"


def _compute_phase(node: NodeFacts, pool_config: str) -> str:
    if node.is_degraded:
        return "failed"
    if node.is_done:
        return "updated" if node.current_config == pool_config else "waiting"
    return node.phase or "waiting"


def _format_prestage(node: NodeFacts) -> str:
    if node.prestage_target is None:
        return ""
    return "staged" if node.prestaged_image == node.prestage_target.image else "staging"


def _convert_target(target: RolloutTarget) -> Json:
    return {"config": target.config, "image": target.image or ""}


def _format_target(target: RolloutTarget) -> str:
    """Format the config and the first 12 digits of the image digest."""
    if not target.image:
        return target.config
    _, _, digest = target.image.partition("@sha256:")
    return f"{target.config} {digest[:12] or target.image}"
