"""The rows about pools and nodes as one JSON document, for scripts and for the page."""

from collections.abc import Sequence

from treenail import clocks
from treenail.api.decode import Json
from treenail.controllers.pools import node_facts, pool_status
from treenail.controllers.status import leader_status, status_table


def build_status_document(
    pools: Sequence[status_table.PoolRow],
    *,
    now: float,
    leader: leader_status.LeaderReport | None = None,
) -> Json:
    """Build the document with all pools and every node; ``now`` is in seconds since the epoch."""
    return {
        "time": clocks.format_rfc3339(now),
        **({} if leader is None else {"controller": leader.to_json()}),
        "pools": [_convert_pool(pool, now) for pool in pools],
    }


def _convert_pool(pool: status_table.PoolRow, now: float) -> Json:
    statuses = {name: condition.status for name, condition in pool.conditions.items()}
    remaining_s = pool.remaining_s
    return {
        "name": pool.name,
        "state": pool.state,
        "reportedState": pool.reported_state or pool.state,
        "config": pool.target.config,
        "image": pool.target.image or "",
        "counts": _convert_counts(pool.counts),
        "updated": statuses.get("Updated", ""),
        "updating": statuses.get("Updating", ""),
        "degraded": statuses.get("Degraded", ""),
        "stalled": statuses.get("Stalled", ""),
        "message": pool.message,
        "policy": pool.policy,
        "wave": pool.wave,
        "waves": pool.waves,
        "nextWindow": _format_time(pool.next_window_at),
        "began": _format_time(pool.began_at),
        "remainingSeconds": None if remaining_s is None else round(remaining_s),
        "estimatedEnd": _format_time(None if remaining_s is None else now + remaining_s),
        "blockers": [
            {"kind": blocker.kind, "node": blocker.node, "message": blocker.message}
            for blocker in pool.blockers
        ],
        "build": _convert_build(pool.build),
        "history": [
            {
                "config": past.config,
                "image": past.image or "",
                "began": _format_time(past.began_at),
                "ended": _format_time(past.ended_at),
                "outcome": str(past.outcome),
                "reason": past.reason,
            }
            for past in pool.history
        ],
        "nodes": [_convert_node(node) for node in pool.nodes],
    }


def _convert_build(build: status_table.BuildRow | None) -> Json | None:
    if build is None:
        return None
    return {
        "name": build.name,
        "state": build.state,
        "message": build.message,
        "seconds": None if build.seconds is None else round(build.seconds),
    }


def _convert_node(node: status_table.NodeRow) -> Json:
    outage_s = node.out_of_service_s
    return {
        "name": node.name,
        "state": node.state,
        "current": _convert_target(node.current),
        "desired": _convert_target(node.desired),
        "osImage": node.os_image,
        "inService": node.is_in_service,
        "outOfServiceSeconds": None if outage_s is None else round(outage_s),
        "reason": node.reason,
        "phase": node.phase,
        "percent": node.percent,
        "stagingPercent": node.staging_percent,
        "prestage": node.prestage,
    }


def _convert_counts(counts: pool_status.PoolCounts | None) -> Json:
    names = "total", "updated", "unavailable", "degraded"
    return {name: None if counts is None else getattr(counts, name) for name in names}


def _convert_target(target: node_facts.RolloutTarget) -> Json:
    return {"config": target.config, "image": target.image or ""}


def _format_time(seconds: float | None) -> str | None:
    # A number in the status of a pool, or a soak time, may be one that no calendar has.
    if seconds is None or not clocks.YEAR_1000 <= seconds <= clocks.END_OF_9999:
        return None
    return clocks.format_rfc3339(seconds)
