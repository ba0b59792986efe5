"""Pools and nodes in one table, for people who watch a rollout, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.observe import ObservedPool, PoolGrouping
from treenail.controllers.rollout.report import read_reported_status
from treenail.errors import ConfigError

MAX_IDLE_NODES = 5
"""Nodes at rest that are listed of a pool; the others are counted."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: what it has, what it is asked for, what it says."""

    name: str
    state: str
    current: str
    desired: str
    is_in_service: bool
    is_idle: bool
    reason: str = ""
    prestage: str = ""
    """``staging`` or ``staged``, for a node that has its next image at hand, or will have."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool and its nodes."""

    name: str
    config: str
    counts: Mapping[str, int]
    updated_status: str
    """Status of the condition; empty when nobody wrote one."""
    updating_status: str
    degraded_status: str
    message: str
    nodes: tuple[NodeRow, ...]


def build_rows(
    pools: Mapping[str, ObservedPool], nodes: Mapping[str, NodeFacts]
) -> tuple[PoolRow, ...]:
    """The table's content, pools by name, nodes that need attention first."""
    picture = PoolGrouping().group_nodes(pools, nodes)
    return tuple(
        _build_pool_row(pools[name], picture.members.get(name, ())) for name in sorted(pools)
    )


def convert_to_json(found: Sequence[PoolRow]) -> Json:
    """All of it, with every node."""
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
                        "ahead": node.prestage,
                    }
                    for node in pool.nodes
                ],
            }
            for pool in found
        ]
    }


def format_table(found: Sequence[PoolRow]) -> Iterator[str]:
    """The table."""
    if not found:
        yield "there are no MachineConfigPools"
        return
    width = max(len(row.name) for row in found)
    width = max([width, *(len(node.name) + 2 for row in found for node in row.nodes)])
    yield f"{'POOL / NODE':<{width}}  {'STATE':<14} {'UPDATED':>9} {'OUT':>5} {'BAD':>5}  CONFIG"
    for row in found:
        yield from _format_pool(row, width)


def _format_pool(row: PoolRow, width: int) -> Iterator[str]:
    done = f"{row.counts['updated']}/{row.counts['total']}"
    out, bad = row.counts["unavailable"], row.counts["degraded"]
    yield f"{row.name:<{width}}  {_format_state(row):<14} {done:>9} {out:>5} {bad:>5}  {row.config or '-'}"
    if row.message:
        yield f"  {row.message}"
    quiet = 0
    for node in row.nodes:
        quiet += node.is_idle
        if node.is_idle and quiet > MAX_IDLE_NODES:
            continue
        out_word = "" if node.is_in_service else "out"
        wanted = "" if node.desired == node.current else f" -> {node.desired}"
        yield (
            f"  {node.name:<{width - 2}}  {node.state or '-':<14} {'':>9} {out_word:>5} {'':>5}  "
            f"{node.current or '-'}{wanted}{f' ({node.prestage} ahead)' if node.prestage else ''}"
        )
        if node.reason:
            yield f"    {node.reason}"
    if quiet > MAX_IDLE_NODES:
        yield f"  and {quiet - MAX_IDLE_NODES} more nodes at rest"


def _format_state(row: PoolRow) -> str:
    if row.degraded_status == "True":
        return "Degraded"
    if row.updating_status == "True":
        return "Updating"
    return "Updated" if row.updated_status == "True" else "-"


def _build_pool_row(seen: ObservedPool, nodes: Sequence[NodeFacts]) -> PoolRow:
    pool = seen.pool
    said = {condition.type: condition for condition in pool.conditions}
    updating, degraded = said.get("Updating"), said.get("Degraded")
    message = ""
    if degraded is not None and degraded.status == "True":
        message = degraded.message
    elif updating is not None:
        message = updating.message
    found = sorted(
        (_build_node_row(node) for node in nodes), key=lambda row: (row.is_idle, row.name)
    )
    updated = said.get("Updated")
    return PoolRow(
        name=pool.name,
        config=pool.configuration.name,
        counts=_count_nodes(pool),
        updated_status=updated.status if updated else "",
        updating_status=updating.status if updating else "",
        degraded_status=degraded.status if degraded else "",
        message=message if seen.error is None else str(seen.error),
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
    """The image by the beginning of its digest."""
    if not target.image:
        return target.config
    _, _, digest = target.image.partition("@sha256:")
    return f"{target.config} {digest[:12] or target.image}"
