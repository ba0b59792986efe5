"""Progress of a rollout: waves, soak times, failures and estimates.

The record holds what cannot be read from the nodes. It is stored on the pool, so that another
controller process continues where this one stopped.

`PastRollout` is one of the last rollouts of a pool, for tables and pages. No decision depends on
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Annotated

from treenail import errors
from treenail.controllers.pools import maintenance_windows, node_facts, rollout_policy
from treenail.encoding import codec

MAX_PAST_ROLLOUTS = 5
"""Rollouts that the status of a pool keeps: at most 3 KB."""
_PAST_REASON_LIMIT = 200


class PastOutcome(StrEnum):
    """How a rollout ended."""

    COMPLETE = "Complete"
    HALTED = "Halted"
    """Another target came while a failure halted it."""
    REPLACED = "Replaced"
    """Another target came before all nodes were updated."""


_Seconds = Annotated[float, codec.Via(float, int, wire=int)]


@dataclass(frozen=True, slots=True)
class PastRollout(codec.JsonObject, omits_defaults=True):
    """A rollout that another one followed."""

    config: str
    image: str | None
    began_at: _Seconds
    ended_at: _Seconds
    outcome: Annotated[PastOutcome, codec.Key(fallback=PastOutcome.REPLACED)]
    reason: Annotated[str, codec.Via(write=lambda reason: reason[:_PAST_REASON_LIMIT])] = ""
    """Node and reason of the failure that halted it."""


ROLLOUT_STATUS = "rollout"
"""Field of a pool's status with the record. Only the rollout controller may write it."""

MAX_ACKNOWLEDGED = 500
_REASON_LIMIT = 400


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node that failed on the target."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutRecord(codec.JsonObject, where=f"status.{ROLLOUT_STATUS}", omits_defaults=True):
    """Record of the rollout of one target."""

    target: Annotated[node_facts.RolloutTarget, codec.INLINE]
    wave: int = 0
    """Number of complete waves."""
    image_changed_at: _Seconds | None = None
    """When the target got another image than the previous one; None when it had none."""
    settled_at: _Seconds | None = None
    """Since when all nodes of the current wave are updated and healthy; None while they are not."""
    halted_by: Annotated[NodeFailure | None, codec.Key("halted")] = None
    """The failure that halted the rollout."""
    resume_value: Annotated[str, codec.Key("resumed")] = ""
    """The last value of the policy's field resume that was applied."""
    blocked_since: _Seconds | None = None
    """Since when nodes hold the rollout up although none is updating; None while they do not."""
    acknowledged: tuple[str, ...] = ()
    """Nodes whose failure the user acknowledged by resuming, and that have not recovered since."""
    assigned: Mapping[str, int] | None = field(default=None, compare=False)
    """When the controller assigned the target to each node; None in the record of an older version.

    A node can write its own Node: only nodes in here count for waves, failures and deadlines. Times
    before ``began_at`` are of nodes that did not finish another target.
    """
    prestaging: Mapping[str, int] = field(default_factory=dict, compare=False)
    """When the controller requested each node to prestage the target."""
    began_at: _Seconds | None = field(default=None, compare=False)
    """When the target was first seen; None in the record of an older version."""
    completed_at: _Seconds | None = field(default=None, compare=False)
    """When all nodes had the target; None while they do not."""
    history: Annotated[
        tuple[PastRollout, ...], codec.Via(lambda history: history[:MAX_PAST_ROLLOUTS])
    ] = field(default=(), compare=False)
    """The rollouts before, the latest first."""

    @property
    def assigned_now(self) -> Mapping[str, int]:
        """When the controller assigned this target, without the times of other targets."""
        since = self.began_at or 0.0
        return {name: at for name, at in (self.assigned or {}).items() if at >= since}


def apply_record(
    status: Mapping[str, object], nodes: Iterable[node_facts.NodeFacts]
) -> tuple[node_facts.NodeFacts, ...]:
    """Return the nodes with the times of the record in the status of their pool, if it is valid."""
    try:
        record = RolloutRecord.from_json(status.get(ROLLOUT_STATUS, {}))
    except errors.ConfigError:
        return tuple(nodes)
    known = record.assigned_now
    return tuple(_apply_times(record, known, node) for node in nodes)


def _apply_times(
    record: RolloutRecord, known: Mapping[str, int], node: node_facts.NodeFacts
) -> node_facts.NodeFacts:
    requested_at = record.prestaging.get(node.name)
    times = known if node.is_assigned(record.target) else record.assigned or {}
    started_at: float | None = times.get(node.name)
    if record.assigned is None and node.is_assigned(record.target):
        # The record of an older version does not say which nodes the controller assigned.
        started_at = record.began_at or 0.0
    if started_at is requested_at is None:
        return node
    return replace(node, started_at=started_at, prestage_requested_at=requested_at)


def record_assignment(
    record: RolloutRecord, nodes: Iterable[node_facts.NodeFacts], now: float
) -> RolloutRecord:
    """Return the record after an assignment; a node that undid an earlier one gains no time.

    No time is before that of the target: the clock may go back, or another host may lead.
    """
    start = max(now, record.began_at or 0.0)
    new = {node.name: int(node.compute_start(start)) for node in nodes}
    return replace(record, assigned={**(record.assigned or {}), **new, **record.assigned_now})


@dataclass(frozen=True, slots=True)
class WaveCapacity:
    """Size and use of the current wave."""

    member_count: int
    """Nodes of the pool that the wave's selector matches."""
    size: int
    """How many of them belong to the wave."""
    assigned: int
    """How many of them have the target assigned."""

    @property
    def remaining(self) -> int:
        return self.size - self.assigned


def advance_record(
    record: RolloutRecord | None,
    policy: rollout_policy.RolloutPolicy,
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    *,
    now: float,
    resume_value: str = "",
) -> RolloutRecord:
    """Return the record after observing the nodes.

    Another target starts another rollout. A new ``resume_value`` ends a halt and acknowledges the
    present failures.
    """
    if record is None or record.target != target:
        record = RolloutRecord(
            target,
            resume_value=resume_value,
            image_changed_at=_compute_image_change(record, target, now),
            began_at=float(int(now)),
            history=() if record is None else _archive_rollout(record, now),
            assigned={} if record is None else record.assigned or {},
        )
    # A kind of an older version drops ``beganAt``, and would drop ``completedAt`` at each write.
    if record.completed_at is None and record.began_at is not None:
        is_complete = bool(nodes) and all(node.is_updated_to(target) for node in nodes)
        record = replace(record, completed_at=float(int(now)) if is_complete else None)
    record = _update_times(record, policy, nodes)
    if policy.max_failures is None:
        # The user removed the policy, and with it the limit that halted the rollout.
        record = replace(record, halted_by=None)
    failed = find_failures(nodes, target, policy, now=now)
    if resume_value != record.resume_value:
        acknowledged = tuple(failure.node for failure in failed)[:MAX_ACKNOWLEDGED]
        record = replace(
            record, halted_by=None, resume_value=resume_value, acknowledged=acknowledged
        )
    record = _drop_recovered(record, nodes)
    new = [failure for failure in failed if failure.node not in record.acknowledged]
    has_too_many = policy.max_failures is not None and len(new) > policy.max_failures
    if has_too_many and record.halted_by is None:
        record = replace(record, halted_by=new[0])
    if record.halted_by is not None:
        return record
    names = {failure.node for failure in failed}
    while record.wave < len(policy.waves):
        wave = policy.waves[record.wave]
        if not _is_settled(wave, nodes, target, names):
            return replace(record, settled_at=None)
        if record.settled_at is None:
            record = replace(record, settled_at=now)
        if now < compute_soak_end(record, policy):
            return record
        record = replace(record, wave=record.wave + 1, settled_at=None)
    return record


def _update_times(
    record: RolloutRecord,
    policy: rollout_policy.RolloutPolicy,
    nodes: Iterable[node_facts.NodeFacts],
) -> RolloutRecord:
    """Drop the times of nodes that left, and after the rollout of those that are updated."""
    if record.assigned is None and record.began_at is None:
        return record
    is_over = record.completed_at is not None and record.wave >= len(policy.waves)
    by_name = {node.name: node for node in nodes}
    started = {node.name: int(node.started_at) for node in nodes if node.started_at is not None}
    current = record.assigned_now
    assigned = {
        name: at
        for name, at in (started if record.assigned is None else record.assigned).items()
        if name in by_name and not (by_name[name].is_done and (is_over or name not in current))
    }
    prestaging = {name: at for name, at in record.prestaging.items() if name in by_name}
    return replace(record, assigned=assigned, prestaging=prestaging)


def _drop_recovered(record: RolloutRecord, nodes: Sequence[node_facts.NodeFacts]) -> RolloutRecord:
    """Return the record without the acknowledgement of nodes that recovered or left the pool.

    Their next failure is another one. A node that only tries again has not recovered.
    """
    if not record.acknowledged:
        return record
    remaining = {
        node.name for node in nodes if not (node.is_updated_to(record.target) and node.is_healthy)
    }
    acknowledged = tuple(name for name in record.acknowledged if name in remaining)
    return replace(record, acknowledged=acknowledged)


def _archive_rollout(record: RolloutRecord, now: float) -> tuple[PastRollout, ...]:
    """Return the history with the rollout of the record, which another target ends."""
    if record.began_at is None:
        return record.history
    halted = record.halted_by
    outcome = PastOutcome.REPLACED if halted is None else PastOutcome.HALTED
    past = PastRollout(
        record.target.config,
        record.target.image,
        record.began_at,
        float(int(now)) if record.completed_at is None else record.completed_at,
        outcome if record.completed_at is None else PastOutcome.COMPLETE,
        "" if halted is None else f"{halted.node}: {halted.reason}",
    )
    return (past, *record.history)[:MAX_PAST_ROLLOUTS]


def compute_image_settle_s(record: RolloutRecord, settle_s: float, now: float) -> float:
    """Compute how long no node may get the image of the target, in seconds."""
    if record.image_changed_at is None:
        return 0.0
    # Not more than the whole time, also after the clock was set back.
    return min(settle_s, record.image_changed_at + settle_s - now)


def compute_wave_capacity(
    record: RolloutRecord,
    policy: rollout_policy.RolloutPolicy,
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
) -> WaveCapacity:
    """Compute how many more nodes may get the target before the current wave is complete."""
    if record.wave >= len(policy.waves):
        assigned = sum(node.is_assigned(target) for node in nodes)
        return WaveCapacity(len(nodes), len(nodes), assigned)
    return _compute_capacity(policy.waves[record.wave], nodes, target)


def compute_soak_end(record: RolloutRecord, policy: rollout_policy.RolloutPolicy) -> float:
    """Compute when the soak time of the settled wave ends."""
    wave = policy.waves[record.wave]
    return (record.settled_at or 0.0) + wave.soak_s


def compute_remaining_soaks_s(
    record: RolloutRecord, policy: rollout_policy.RolloutPolicy, now: float
) -> float:
    """Compute the soak time of all waves that is not over yet, in seconds."""
    waves = policy.waves[record.wave :]
    total_s = sum(wave.soak_s for wave in waves)
    if not waves or record.settled_at is None:
        return total_s
    # Not negative, and not more than the whole time after the clock was set back.
    over_s = min(max(0.0, now - record.settled_at), waves[0].soak_s)
    return total_s - over_s


def find_failures(
    nodes: Iterable[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    policy: rollout_policy.RolloutPolicy,
    *,
    now: float,
) -> tuple[NodeFailure, ...]:
    """Return the nodes that failed on the target, in the order of their assignment.

    Only nodes that the controller assigned, or requested to prestage, can fail.
    """
    failures = sorted(
        (node.started_at or 0.0, node.name, reason)
        for node in nodes
        if (reason := _describe_failure(node, policy, now, target))
    )
    return tuple(NodeFailure(name, reason) for _at, name, reason in failures)


def find_wave_members(
    wave: rollout_policy.Wave | None, nodes: Iterable[node_facts.NodeFacts]
) -> list[node_facts.NodeFacts]:
    """Return the nodes that the wave's selector matches; after the last wave, all."""
    selector = None if wave is None else wave.selector
    return [node for node in nodes if selector is None or selector.matches(node.labels)]


def compute_next_check_s(
    record: RolloutRecord,
    policy: rollout_policy.RolloutPolicy,
    nodes: Iterable[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    *,
    now: float,
) -> float | None:
    """Return the seconds until time alone makes a node fail or completes a wave, or None.

    Failures that are already recorded do not count.
    """
    times = [
        at
        for node in nodes
        if _is_own(node, target)
        and (at := _compute_failure_time(node, policy)) is not None
        and at > now
    ]
    if record.settled_at is not None and record.wave < len(policy.waves):
        times.append(compute_soak_end(record, policy))
    return max(0.0, min(times) - now) if times else None


def _describe_failure(
    node: node_facts.NodeFacts,
    policy: rollout_policy.RolloutPolicy,
    now: float,
    target: node_facts.RolloutTarget,
) -> str:
    """Describe why the node counts as failed on the target; empty when it does not."""
    if not node.is_assigned(target):
        if node.prestage_requested_at is None or node.prestage_target != target:
            return ""
        if not node.prestage_error:
            return ""
        return f"prestaging failed: {node.prestage_error}"[:_REASON_LIMIT]
    at = _compute_failure_time(node, policy) if _is_own(node, target) else None
    if at is None or now < at:
        return ""
    if node.is_degraded:
        return (node.reason or f"it is {node.state} without a reason")[:_REASON_LIMIT]
    unhealthy_s = now - _find_unhealthy_since(node)
    allowed = format_limit(policy.reboot_timeout_s or 0.0)
    state = node.pressure or "it has not been ready"
    return f"{state} for {format_limit(unhealthy_s)} (rebootTimeout: {allowed})"[:_REASON_LIMIT]


def _compute_image_change(
    before: RolloutRecord | None, target: node_facts.RolloutTarget, now: float
) -> float | None:
    image = None if before is None else before.target.image
    if image != target.image:
        # Rounded as in the status of the pool, so that a record equals itself after a restart.
        return float(int(now))
    return None if before is None else before.image_changed_at


def _compute_failure_time(
    node: node_facts.NodeFacts, policy: rollout_policy.RolloutPolicy
) -> float | None:
    """Compute since or from when the node's present state is a failure; None when it is none."""
    started = node.started_at or 0.0
    if node.is_degraded:
        return started
    if node.is_healthy or policy.reboot_timeout_s is None or node.started_at is None:
        return None
    return _find_unhealthy_since(node) + policy.reboot_timeout_s


def _find_unhealthy_since(node: node_facts.NodeFacts) -> float:
    changed_at = node.pressure_changed_at if node.pressure else node.ready_changed_at
    return max(node.started_at or 0.0, changed_at or 0.0)


def _compute_capacity(
    wave: rollout_policy.Wave,
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
) -> WaveCapacity:
    wave_members = find_wave_members(wave, nodes)
    # A node that the controller did not assign tests nothing, and takes no place of the wave.
    own = [node for node in wave_members if _is_own(node, target)]
    others = sum(not node.is_assigned(target) for node in wave_members)
    size = min(wave.share.compute_count(len(nodes)), len(own) + others)
    return WaveCapacity(len(wave_members), size, len(own))


def _is_settled(
    wave: rollout_policy.Wave,
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    failed: set[str],
) -> bool:
    capacity = _compute_capacity(wave, nodes, target)
    if capacity.remaining > 0 or (capacity.member_count == 0 and len(nodes) > 0):
        return False
    return all(
        (node.is_updated_to(target) and node.is_healthy) or node.name in failed
        for node in nodes
        if _is_own(node, target)
    )


def _is_own(node: node_facts.NodeFacts, target: node_facts.RolloutTarget) -> bool:
    """Return whether the node has the target because the controller assigned it."""
    return node.started_at is not None and node.is_assigned(target)


DEFAULT_NODE_S = 600.0
"""Assumed duration of a node's update before any node has finished."""

_MAX_WINDOWS = 400


def estimate_node_s(
    nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget
) -> float:
    """Estimate the time from assignment to Ready: the median of the updated nodes.

    With the default as one more value, and with two nodes at least, no single node decides it.
    """
    durations = [
        node.ready_changed_at - node.started_at
        for node in nodes
        if node.started_at is not None
        and node.ready_changed_at is not None
        and node.ready_changed_at > node.started_at
        and node.is_updated_to(target)
    ]
    return median((*durations, DEFAULT_NODE_S)) if len(durations) > 1 else DEFAULT_NODE_S


def estimate_remaining_s(
    remaining: int,
    max_parallel: int,
    node_duration_s: float,
    windows: tuple[maintenance_windows.MaintenanceWindow, ...],
    now: float,
) -> float | None:
    """Estimate the time until the ``remaining`` nodes are updated inside the windows.

    None when no window is long enough for a node, or when it takes more than `_MAX_WINDOWS`.
    """
    batches = -(-remaining // max(max_parallel, 1))
    at = now
    for _ in range(_MAX_WINDOWS):
        window = maintenance_windows.find_window_state(windows, at)
        if isinstance(window, maintenance_windows.WindowClosed):
            at += window.opens_in_s
            continue
        fitting = (
            batches if window.closes_in_s is None else int(window.closes_in_s // node_duration_s)
        )
        if window.closes_in_s is None or fitting >= batches:
            return at + batches * node_duration_s - now
        batches -= fitting
        at += window.closes_in_s
    return None


def format_duration(seconds: float) -> str:
    """Format a duration, rounded to minutes, hours or days."""
    minutes = max(1, round(seconds / 60))
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} h" if hours < 48 else f"{round(hours / 24)} days"


def format_limit(seconds: float) -> str:
    """Format a duration that a user sets: in seconds below two minutes, else rounded."""
    return f"{round(seconds)} s" if seconds < 120 else format_duration(seconds)
