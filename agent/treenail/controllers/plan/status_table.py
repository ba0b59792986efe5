"""Table of pools and nodes for users who watch a rollout, also as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.pools import ObservedPool, PoolGrouping
from treenail.controllers.rollout.status import read_reported_status
from treenail.errors import ConfigError

MAX_IDLE_NODES = 5
"""Maximum number of idle nodes listed for a pool; the others are only counted."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: its current and desired target, and its state."""

    name: str
    state: str
    current: str
    desired: str
    is_in_service: bool
    is_idle: bool
    reason: str = ""
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
    message: str
    nodes: tuple[NodeRow, ...]


def build_rows(
    pools: Mapping[str, ObservedPool], nodes: Mapping[str, NodeFacts]
) -> tuple[PoolRow, ...]:
    """Build the rows: pools by name, and in each pool the idle nodes last."""
    grouping = PoolGrouping().group_nodes(pools, nodes)
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
                "message": pool.message,
                "nodes": [
                    {
                        "name": node.name,
                        "state": node.state,
                        "current": node.current,
                        "desired": node.desired,
                        "inService": node.is_in_service,
                        "reason": node.reason,
                        "prestage": node.prestage,
                    }
                    for node in pool.nodes
                ],
            }
            for pool in found
        ]
    }


def format_table(found: Sequence[PoolRow]) -> Iterator[str]:
    """Yield the lines of the table."""
    if not found:
        yield "no MachineConfigPools found"
        return
    width = max(len(row.name) for row in found)
    width = max([width, *(len(node.name) + 2 for row in found for node in row.nodes)])
    yield (
        f"{'POOL / NODE':<{width}}  {'STATE':<14} {'UPDATED':>9} {'UNAVAIL':>7} {'DEGRADED':>8}  "
        "CONFIG"
    )
    for row in found:
        yield from _format_pool(row, width)


def _format_pool(row: PoolRow, width: int) -> Iterator[str]:
    updated = f"{row.counts['updated']}/{row.counts['total']}"
    unavailable, degraded = row.counts["unavailable"], row.counts["degraded"]
    yield (
        f"{row.name:<{width}}  {_format_state(row):<14} {updated:>9} {unavailable:>7} "
        f"{degraded:>8}  {row.config or '-'}"
    )
    if row.message:
        yield f"  {row.message}"
    idle_count = 0
    for node in row.nodes:
        idle_count += node.is_idle
        if node.is_idle and idle_count > MAX_IDLE_NODES:
            continue
        unavailable_mark = "" if node.is_in_service else "yes"
        desired = "" if node.desired == node.current else f" -> {node.desired}"
        prestage = f" (pre-{node.prestage})" if node.prestage else ""
        yield (
            f"  {node.name:<{width - 2}}  {node.state or '-':<14} {'':>9} {unavailable_mark:>7} "
            f"{'':>8}  {node.current or '-'}{desired}{prestage}"
        )
        if node.reason:
            yield f"    {node.reason}"
    if idle_count > MAX_IDLE_NODES:
        yield f"  and {idle_count - MAX_IDLE_NODES} more idle nodes"


def _format_state(row: PoolRow) -> str:
    if row.degraded_status == "True":
        return "Degraded"
    if row.updating_status == "True":
        return "Updating"
    return "Updated" if row.updated_status == "True" else "-"


def _build_pool_row(observed: ObservedPool, nodes: Sequence[NodeFacts]) -> PoolRow:
    pool = observed.pool
    conditions = {condition.type: condition for condition in pool.conditions}
    updating, degraded = conditions.get("Updating"), conditions.get("Degraded")
    message = ""
    if degraded is not None and degraded.status == "True":
        message = degraded.message
    elif updating is not None:
        message = updating.message
    found = sorted(
        (_build_node_row(node) for node in nodes), key=lambda row: (row.is_idle, row.name)
    )
    updated = conditions.get("Updated")
    return PoolRow(
        name=pool.name,
        config=pool.configuration.name,
        counts=_count_nodes(pool),
        updated_status=updated.status if updated else "",
        updating_status=updating.status if updating else "",
        degraded_status=degraded.status if degraded else "",
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


def _build_node_row(node: NodeFacts) -> NodeRow:
    return NodeRow(
        name=node.name,
        state=node.state,
        current=_format_target(RolloutTarget(node.current_config, node.current_image)),
        desired=_format_target(RolloutTarget(node.desired_config, node.desired_image)),
        is_in_service=node.is_in_service,
        is_idle=node.is_done and node.is_in_service,
        reason=node.prestage_error if node.is_done else node.reason,
        prestage=_format_prestage(node),
    )


def _format_prestage(node: NodeFacts) -> str:
    if node.prestage_target is None:
        return ""
    return "staged" if node.prestaged_image == node.prestage_target.image else "staging"


def _format_target(target: RolloutTarget) -> str:
    """Format the config and the first 12 digits of the image digest."""
    if not target.image:
        return target.config
    _, _, digest = target.image.partition("@sha256:")
    return f"{target.config} {digest[:12] or target.image}"
