"""Rows about pools and nodes for users who watch a rollout: a pure function of the objects.

The command ``status``, the page of the controllers and the demo show these rows. A row of a pool
has its image build and the blockers of its rollout: the pool, its policy, a window, a disruption
budget or a node.

`build_status_document` makes one JSON document of them, for scripts and for the page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api import decode, machineconfigpool, machineosbuild, machineosconfig, object_meta
from treenail.controllers.pools import (
    holders,
    maintenance_windows,
    node_facts,
    node_selection,
    pool_membership,
    pool_status,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.pools.os_image import find_pool_owner
from treenail.controllers.status import leader_status

MAX_NODE_BLOCKERS = 50
"""Nodes that are named as blockers of a pool; the rows of the others have their reasons too."""
_PROGRESS_WORDS = ("nodes are updated", "are limited to", "is limited to")
REJECTED, PENDING = "Rejected", "Pending"
# Percent of an update at which each phase begins; staging fills its part by its own percentage.
_PHASE_PERCENT = {
    "waiting": 0,
    "staging": 0,
    "draining": 60,
    "applying": 70,
    "rebooting": 75,
    "verifying": 85,
    "uncordoning": 92,
    "updated": 100,
}
_TIMED_BLOCKERS = frozenset({"maxUnavailable", "window", "soak", "wave"})
"""Blockers whose end the estimate knows."""
_LATE_FACTOR = 3.0
"""A node that takes so many times the usual time makes the estimate worthless."""
CONFLICT = "conflict"
PHASE_WIDTH = max(map(len, _PHASE_PERCENT))


@dataclass(frozen=True, slots=True)
class RolloutBlocker:
    """One thing that blocks a rollout, or a part of it."""

    kind: str
    """``paused``, ``halted``, ``invalid``, ``degraded``, ``stalled``, ``failed``, ``drain``,
    ``node``, or one of `WAIT_REASONS`."""
    message: str
    node: str = ""


def find_pool_blockers(
    observed: pool_membership.ObservedPool,
    conditions: Mapping[str, object_meta.Condition],
    record: rollout_record.RolloutRecord | None,
    nodes: Sequence[node_facts.NodeFacts],
    now: float,
) -> tuple[RolloutBlocker, ...]:
    """Find what blocks the rollout of a pool; empty while nothing does."""
    return (
        *_find_own_blockers(observed, conditions, record, nodes),
        *[
            blocker
            for blocker in _find_node_blockers(nodes, now)
            # The blocker of the pool has this reason.
            if blocker.kind != "failed" or blocker.node != _get_halting_node(record)
        ][:MAX_NODE_BLOCKERS],
    )


def _get_halting_node(record: rollout_record.RolloutRecord | None) -> str:
    return "" if record is None or record.halted_by is None else record.halted_by.node


def _complete_reason(
    failure: rollout_record.NodeFailure, nodes: Sequence[node_facts.NodeFacts]
) -> str:
    """Return the reason of the failure as the node has it; the record has its beginning."""
    reasons = (node.reason for node in nodes if node.name == failure.node)
    return next((reason for reason in reasons if reason.startswith(failure.reason)), failure.reason)


def _find_own_blockers(
    observed: pool_membership.ObservedPool,
    conditions: Mapping[str, object_meta.Condition],
    record: rollout_record.RolloutRecord | None,
    nodes: Sequence[node_facts.NodeFacts],
) -> Iterator[RolloutBlocker]:
    pool = observed.pool
    if observed.error is not None:
        yield RolloutBlocker("invalid", str(observed.error))
        return
    if pool.paused and not _is_true(conditions, "Updated"):
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
            part for part in parts if not any(word in part for word in _PROGRESS_WORDS)
        )
        yield RolloutBlocker(
            holders.classify_wait(updating.message), text.removeprefix("waiting: ")
        )


def _find_node_blockers(
    nodes: Sequence[node_facts.NodeFacts], now: float
) -> Iterator[RolloutBlocker]:
    for node in nodes:
        if node.is_degraded:
            yield RolloutBlocker("failed", node.reason or f"it is {node.state}", node.name)
        elif node.drain_blocker:
            yield RolloutBlocker("drain", node.drain_blocker, node.name)
        elif node.is_unavailable and not (holder := holders.describe_holder(node, now)).is_expected:
            yield RolloutBlocker("node", holder.reason, node.name)


@dataclass(frozen=True, slots=True)
class BuildRow:
    """The build that a pool's MachineOSConfig works towards, or has finished."""

    name: str
    """Of the MachineOSBuild; of the MachineOSConfig if there is none."""
    state: str
    """Type of the condition that is true; ``Pending`` before it, ``Rejected`` without a build."""
    message: str = ""
    seconds: float | None = None
    """Duration up to now, or of the whole build; None before it starts."""


def find_pool_builds(
    configs: Mapping[str, machineosconfig.MachineOSConfig],
    builds: Mapping[str, machineosbuild.MachineOSBuild],
    now: float,
) -> dict[str, BuildRow]:
    """Return the builds by pool; ``now`` is in seconds since the epoch."""
    owners = (
        find_pool_owner(pool, configs.values())
        for pool in {config.pool for config in configs.values()}
    )
    return {
        config.pool: _describe_build(config, builds.get(config.current_build), now)
        for config in owners
        if config is not None
    }


def _describe_build(
    config: machineosconfig.MachineOSConfig, build: machineosbuild.MachineOSBuild | None, now: float
) -> BuildRow:
    if config.problem:
        return BuildRow(config.name, REJECTED, config.problem)
    if build is None:
        return BuildRow(config.name, PENDING)
    began, ended = clocks.parse_rfc3339(build.start), clocks.parse_rfc3339(build.end)
    seconds = None if began is None else max((ended or now) - began, 0.0)
    return BuildRow(build.name, build.state or PENDING, build.message, seconds)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: its current and desired target, and its state."""

    name: str
    state: str
    current: node_facts.RolloutTarget
    desired: node_facts.RolloutTarget
    is_in_service: bool
    is_idle: bool
    reason: str = ""
    """What blocks the node, or why it failed."""
    phase: str = ""
    """Of the update: ``waiting``, ``staging``, ``draining``, ``applying``, ``rebooting``,
    ``verifying``, ``uncordoning``, ``failed`` or ``updated``; ``conflict`` for a node of two custom
    pools."""
    percent: int = 0
    """Of the whole update."""
    staging_percent: int | None = None
    """Of the pull and the deployment of the image; None while the agent reports none."""
    os_image: str = ""
    """Name of the booted operating system, as the kubelet reports it."""
    out_of_service_s: float | None = None
    """How long the node is out of service, or how long its last drain kept it; None if unknown."""
    prestage: str = ""
    """``staging`` or ``staged`` for a node that pre-stages its next image, else empty."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool and its nodes."""

    name: str
    target: node_facts.RolloutTarget
    state: str
    """``Updated``, ``Updating``, ``Paused``, ``Halted``, ``Stalled``, ``Degraded``, ``Unknown``."""
    conditions: Mapping[str, object_meta.Condition]
    counts: pool_status.PoolCounts | None
    """As the rollout controller reported them; None if unknown."""
    message: str
    nodes: tuple[NodeRow, ...]
    blockers: tuple[RolloutBlocker, ...] = ()
    policy: str = ""
    """Name of the RolloutPolicy."""
    wave: int = 0
    """Number of the current wave, from 1; 0 without a rollout."""
    waves: int = 0
    next_window_at: float | None = None
    """When a maintenance window opens; None while one is open, and without windows."""
    began_at: float | None = None
    """When the rollout began, in seconds since the epoch."""
    remaining_s: float | None = None
    """Estimate of the time until all nodes are updated; None where only a user can end it."""
    history: tuple[rollout_record.PastRollout, ...] = ()
    reported_state: str = ""
    """The last state that a controller reported, while no controller leads; else empty."""
    build: BuildRow | None = None
    """The build of the pool's image; None if no MachineOSConfig requests one."""
    image_stream: str = ""


def build_rows(
    pools: Mapping[str, pool_membership.ObservedPool],
    nodes: Mapping[str, node_facts.NodeFacts],
    policies: Mapping[str, rollout_policy.ObservedPolicy] | None = None,
    *,
    now: float,
    leader: leader_status.LeaderReport | None = None,
    builds: Mapping[str, BuildRow] | None = None,
) -> tuple[PoolRow, ...]:
    """Build the rows: pools and their nodes by name. ``now`` is in seconds since the epoch.

    ``policies`` None means that they are unknown; then rows have neither windows nor estimates.
    While no controller leads, the states of pools are unknown; nodes report themselves.
    """
    grouping = pool_membership.group_nodes(pools, nodes)
    members = [node for node in nodes.values() if node_selection.is_etcd_member(node.labels)]
    rows = tuple(
        replace(
            _build_pool_row(
                pools[name],
                grouping.members.get(name, ()),
                grouping.disputed.get(name, ()),
                policies,
                members,
                now,
            ),
            build=(builds or {}).get(name),
        )
        for name in sorted(pools)
    )
    if leader is None or leader.state is not leader_status.LeaderState.NONE:
        return rows
    return tuple(_mark_outdated(row, leader) for row in rows)


def _mark_outdated(row: PoolRow, leader: leader_status.LeaderReport) -> PoolRow:
    """Return the row without what only a controller that leads keeps up to date."""
    return replace(
        row,
        state="Unknown",
        reported_state=row.state,
        message=leader.message,
        remaining_s=None,
        # A paused pool, a halt and the nodes do not need a controller.
        blockers=tuple(
            blocker
            for blocker in row.blockers
            if blocker.node or blocker.kind in ("paused", "invalid")
        ),
    )


def _build_pool_row(
    observed: pool_membership.ObservedPool,
    nodes: Sequence[node_facts.NodeFacts],
    disputed: Sequence[pool_membership.DisputedNode],
    policies: Mapping[str, rollout_policy.ObservedPolicy] | None,
    etcd_members: Sequence[node_facts.NodeFacts],
    now: float,
) -> PoolRow:
    pool = observed.pool
    conditions = {condition.type: condition for condition in pool.conditions}
    record = _read_record(pool)
    nodes = rollout_record.apply_record(pool.status, nodes)
    target = node_facts.RolloutTarget(pool.configuration.name)
    if record is not None and record.target.config == target.config:
        target = record.target
    policy = _find_policy(pool, policies)
    state = _choose_state(pool, conditions, record)
    blockers = find_pool_blockers(observed, conditions, record, nodes, now)
    has_estimate = state == "Updating" and all(
        blocker.kind in _TIMED_BLOCKERS for blocker in blockers
    )
    window = maintenance_windows.find_window_state(policy.windows, now) if policy else None
    return PoolRow(
        name=pool.name,
        target=target,
        state=state,
        conditions=conditions,
        counts=pool_status.read_reported_counts(pool),
        message=_choose_message(observed, conditions),
        nodes=(
            *(_build_node_row(node, target, now) for node in nodes),
            *(_build_disputed_row(node, target, now) for node in disputed),
        ),
        blockers=blockers,
        policy=pool.rollout_policy,
        wave=0 if record is None else record.wave + 1,
        waves=len(policy.waves) + 1 if policy else 0,
        next_window_at=now + window.opens_in_s
        if isinstance(window, maintenance_windows.WindowClosed)
        else None,
        began_at=record.began_at if record else None,
        remaining_s=_estimate_s(pool, policy, record, nodes, etcd_members, now)
        if has_estimate
        else None,
        history=record.history if record else (),
        image_stream=pool.status_os_image_stream,
    )


def _read_record(pool: machineconfigpool.MachineConfigPool) -> rollout_record.RolloutRecord | None:
    stored = pool.status.get(rollout_record.ROLLOUT_STATUS)
    try:
        return None if stored is None else rollout_record.RolloutRecord.from_json(stored)
    except errors.ConfigError:
        return None


def _find_policy(
    pool: machineconfigpool.MachineConfigPool,
    policies: Mapping[str, rollout_policy.ObservedPolicy] | None,
) -> rollout_policy.RolloutPolicy | None:
    if not pool.rollout_policy:
        return rollout_policy.RolloutPolicy()
    observed = (policies or {}).get(pool.rollout_policy)
    return observed.policy if observed is not None and observed.error is None else None


def _is_true(conditions: Mapping[str, object_meta.Condition], name: str) -> bool:
    return name in conditions and conditions[name].status == "True"


def _is_observed(pool: machineconfigpool.MachineConfigPool) -> bool:
    """Return whether the conditions apply to the present spec."""
    observed = pool.status.get("observedGeneration")
    return isinstance(observed, int) and observed >= pool.metadata.generation


def _choose_state(
    pool: machineconfigpool.MachineConfigPool,
    conditions: Mapping[str, object_meta.Condition],
    record: rollout_record.RolloutRecord | None,
) -> str:
    if record is not None and record.halted_by is not None:
        return "Halted"
    for name in ("Degraded", "Stalled"):
        if _is_true(conditions, name):
            return name
    if _is_true(conditions, "Updated"):
        return "Updated" if _is_observed(pool) else "Unknown"
    if pool.paused:
        return "Paused"
    return "Updating" if _is_true(conditions, "Updating") else "Unknown"


def _choose_message(
    observed: pool_membership.ObservedPool, conditions: Mapping[str, object_meta.Condition]
) -> str:
    if observed.error is not None:
        return str(observed.error)
    for name in ("Degraded", "Stalled"):
        if _is_true(conditions, name):
            return conditions[name].message
    if _is_true(conditions, "Updated") and not _is_observed(observed.pool):
        return "the controller has not seen the change yet"
    updating = conditions.get("Updating")
    return updating.message if updating is not None else ""


def _estimate_s(
    pool: machineconfigpool.MachineConfigPool,
    policy: rollout_policy.RolloutPolicy | None,
    record: rollout_record.RolloutRecord | None,
    nodes: Sequence[node_facts.NodeFacts],
    etcd_members: Sequence[node_facts.NodeFacts],
    now: float,
) -> float | None:
    """Estimate the time until the last node is updated, as the rollout controller does."""
    if policy is None or record is None:
        return None
    node_s = rollout_record.estimate_node_s(nodes, record.target)
    waiting = [node for node in nodes if not node.is_updated_to(record.target)]
    starts = [node.started_at for node in waiting if node.is_assigned(record.target)]
    if any(at is not None and now - at > _LATE_FACTOR * node_s for at in starts):
        return None
    try:
        limit = node_selection.compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    except errors.ConfigError:
        return None
    left_s = rollout_record.estimate_remaining_s(
        len(waiting),
        max(1, node_selection.limit_to_quorum(limit, nodes, etcd_members)),
        node_s,
        policy.windows,
        now,
    )
    return (
        None
        if left_s is None
        else left_s + rollout_record.compute_remaining_soaks_s(record, policy, now)
    )


def _build_node_row(
    node: node_facts.NodeFacts, target: node_facts.RolloutTarget, now: float
) -> NodeRow:
    phase = _compute_phase(node, target)
    return NodeRow(
        name=node.name,
        state=node.state,
        current=node_facts.RolloutTarget(node.current_config, node.current_image),
        desired=node_facts.RolloutTarget(node.desired_config, node.desired_image),
        is_in_service=node.is_in_service,
        is_idle=node.is_done and node.is_in_service,
        reason=_choose_reason(node, target, now),
        phase=phase,
        percent=_compute_percent(phase, node.progress.percent),
        staging_percent=node.progress.percent,
        os_image=node.progress.os_image,
        out_of_service_s=_compute_outage_s(node, now),
        prestage=_format_prestage(node),
    )


def _build_disputed_row(
    disputed: pool_membership.DisputedNode, target: node_facts.RolloutTarget, now: float
) -> NodeRow:
    """Build the row of a node that two custom pools select: no pool updates or counts it."""
    row = _build_node_row(disputed.node, target, now)
    reason = pool_status.build_config_problem(disputed.error).message
    return replace(row, is_idle=False, reason=reason, phase=CONFLICT, percent=0)


def _choose_reason(node: node_facts.NodeFacts, target: node_facts.RolloutTarget, now: float) -> str:
    if node.is_done and node.prestage_error:
        return node.prestage_error
    if node.reason and not node.is_done:
        return node.reason
    if (
        target.image
        and node.architecture
        and not node_facts.find_architectures([node.architecture])
    ):
        return f"no image is built for its architecture {node.architecture!r}"
    if not node.is_unavailable:
        return ""
    holder = holders.describe_holder(node, now)
    return "" if holder.is_expected else holder.reason


def _compute_phase(node: node_facts.NodeFacts, target: node_facts.RolloutTarget) -> str:
    if node.is_degraded:
        return "failed"
    if node.is_done:
        return "updated" if node.is_updated_to(target) else "waiting"
    return node.progress.phase or "waiting"


def _compute_percent(phase: str, staging_percent: int | None) -> int:
    if phase == "staging":
        return (staging_percent or 0) * _PHASE_PERCENT["draining"] // 100
    return _PHASE_PERCENT.get(phase, 0)


def _compute_outage_s(node: node_facts.NodeFacts, now: float) -> float | None:
    """Compute the time out of service from the drain, or from the loss of the Ready condition."""
    if node.is_in_service:
        return node.progress.last_outage_s
    starts = [node.progress.drain_began_at] if node.unschedulable else []
    if not node.is_healthy and not node.pressure:
        starts.append(node.ready_changed_at)
    known = [at for at in starts if at is not None]
    return max(0.0, now - min(known)) if known else None


def _format_prestage(node: node_facts.NodeFacts) -> str:
    if node.prestage_target is None:
        return ""
    return "staged" if node.prestaged_image == node.prestage_target.image else "staging"


def build_status_document(
    pools: Sequence[PoolRow],
    *,
    now: float,
    leader: leader_status.LeaderReport | None = None,
) -> decode.Json:
    """Build the document with all pools and every node; ``now`` is in seconds since the epoch."""
    return {
        "time": clocks.format_rfc3339(now),
        **({} if leader is None else {"controller": leader.to_json()}),
        "pools": [_convert_pool(pool, now) for pool in pools],
    }


def _convert_pool(pool: PoolRow, now: float) -> decode.Json:
    statuses = {name: condition.status for name, condition in pool.conditions.items()}
    remaining_s = pool.remaining_s
    return {
        "name": pool.name,
        "state": pool.state,
        "reportedState": pool.reported_state or pool.state,
        "config": pool.target.config,
        "image": pool.target.image or "",
        "imageStream": pool.image_stream,
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


def _convert_build(build: BuildRow | None) -> decode.Json | None:
    if build is None:
        return None
    return {
        "name": build.name,
        "state": build.state,
        "message": build.message,
        "seconds": None if build.seconds is None else round(build.seconds),
    }


def _convert_node(node: NodeRow) -> decode.Json:
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


def _convert_counts(counts: pool_status.PoolCounts | None) -> decode.Json:
    names = "total", "updated", "unavailable", "degraded"
    return {name: None if counts is None else getattr(counts, name) for name in names}


def _convert_target(target: node_facts.RolloutTarget) -> decode.Json:
    return {"config": target.config, "image": target.image or ""}


def _format_time(seconds: float | None) -> str | None:
    # A number in the status of a pool, or a soak time, may be one that no calendar has.
    if seconds is None or not clocks.YEAR_1000 <= seconds <= clocks.END_OF_9999:
        return None
    return clocks.format_rfc3339(seconds)
