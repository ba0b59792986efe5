"""Pools and nodes in one table, for people who watch a rollout, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.observe import Grouping, SeenPool
from treenail.controllers.rollout.report import reported
from treenail.errors import ConfigError

QUIET_NODES = 5
"""Nodes at rest that are listed of a pool; the others are counted."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: what it has, what it is asked for, what it says."""

    name: str
    state: str
    current: str
    desired: str
    in_service: bool
    at_rest: bool
    reason: str = ""
    ahead: str = ""
    """``staging`` or ``staged``, for a node that has its next image at hand, or will have."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool and its nodes."""

    name: str
    config: str
    counts: Mapping[str, int]
    updated: str
    """Status of the condition; empty when nobody wrote one."""
    updating: str
    degraded: str
    message: str
    nodes: tuple[NodeRow, ...]


def rows(pools: Mapping[str, SeenPool], nodes: Mapping[str, NodeFacts]) -> tuple[PoolRow, ...]:
    """The table's content, pools by name, nodes that need attention first."""
    picture = Grouping().look(pools, nodes)
    return tuple(_pool(pools[name], picture.members.get(name, ())) for name in sorted(pools))


def document(found: Sequence[PoolRow]) -> Json:
    """All of it, with every node."""
    return {
        "pools": [
            {
                "name": pool.name,
                "config": pool.config,
                "counts": dict(pool.counts),
                "updated": pool.updated,
                "updating": pool.updating,
                "degraded": pool.degraded,
                "message": pool.message,
                "nodes": [
                    {
                        "name": node.name,
                        "state": node.state,
                        "current": node.current,
                        "desired": node.desired,
                        "inService": node.in_service,
                        "reason": node.reason,
                        "ahead": node.ahead,
                    }
                    for node in pool.nodes
                ],
            }
            for pool in found
        ]
    }


def lines(found: Sequence[PoolRow]) -> Iterator[str]:
    """The table."""
    if not found:
        yield "there are no MachineConfigPools"
        return
    width = max(len(row.name) for row in found)
    width = max([width, *(len(node.name) + 2 for row in found for node in row.nodes)])
    yield f"{'POOL / NODE':<{width}}  {'STATE':<14} {'UPDATED':>9} {'OUT':>5} {'BAD':>5}  CONFIG"
    for row in found:
        yield from _lines(row, width)


def _lines(row: PoolRow, width: int) -> Iterator[str]:
    done = f"{row.counts['updated']}/{row.counts['total']}"
    out, bad = row.counts["unavailable"], row.counts["degraded"]
    yield f"{row.name:<{width}}  {_word(row):<14} {done:>9} {out:>5} {bad:>5}  {row.config or '-'}"
    if row.message:
        yield f"  {row.message}"
    quiet = 0
    for node in row.nodes:
        quiet += node.at_rest
        if node.at_rest and quiet > QUIET_NODES:
            continue
        out_word = "" if node.in_service else "out"
        wanted = "" if node.desired == node.current else f" -> {node.desired}"
        yield (
            f"  {node.name:<{width - 2}}  {node.state or '-':<14} {'':>9} {out_word:>5} {'':>5}  "
            f"{node.current or '-'}{wanted}{f' ({node.ahead} ahead)' if node.ahead else ''}"
        )
        if node.reason:
            yield f"    {node.reason}"
    if quiet > QUIET_NODES:
        yield f"  and {quiet - QUIET_NODES} more nodes at rest"


def _word(row: PoolRow) -> str:
    if row.degraded == "True":
        return "Degraded"
    if row.updating == "True":
        return "Updating"
    return "Updated" if row.updated == "True" else "-"


def _pool(seen: SeenPool, nodes: Sequence[NodeFacts]) -> PoolRow:
    pool = seen.pool
    said = {condition.type: condition for condition in pool.conditions}
    updating, degraded = said.get("Updating"), said.get("Degraded")
    message = ""
    if degraded is not None and degraded.status == "True":
        message = degraded.message
    elif updating is not None:
        message = updating.message
    found = sorted((_node(node) for node in nodes), key=lambda row: (row.at_rest, row.name))
    updated = said.get("Updated")
    return PoolRow(
        name=pool.name,
        config=pool.configuration.name,
        counts=_counts(pool),
        updated=updated.status if updated else "",
        updating=updating.status if updating else "",
        degraded=degraded.status if degraded else "",
        message=message if seen.error is None else str(seen.error),
        nodes=tuple(found),
    )


def _counts(pool: MachineConfigPool) -> Mapping[str, int]:
    try:
        found = reported(pool).counts
    except ConfigError:
        return {"total": 0, "updated": 0, "unavailable": 0, "degraded": 0}
    return {
        "total": found.total,
        "updated": found.updated,
        "unavailable": found.unavailable,
        "degraded": found.degraded,
    }


def _node(node: NodeFacts) -> NodeRow:
    return NodeRow(
        name=node.name,
        state=node.state,
        current=_short(Target(node.current_config, node.current_image)),
        desired=_short(Target(node.desired_config, node.desired_image)),
        in_service=node.in_service,
        at_rest=node.done and node.in_service,
        reason=node.staging_error if node.done else node.reason,
        ahead=_ahead(node),
    )


def _ahead(node: NodeFacts) -> str:
    if node.stage is None:
        return ""
    return "staged" if node.staged == node.stage.image else "staging"


def _short(target: Target) -> str:
    """The image by the beginning of its digest."""
    if not target.image:
        return target.config
    _, _, digest = target.image.partition("@sha256:")
    return f"{target.config} {digest[:12] or target.image}"
