"""Decide which nodes of a pool get the target now, and why no others.

All functions are pure. The reconciler observes, writes the decision, and decides again after a
change or after `RolloutDecision.requeue_after_s`. With prestaging (opt-in), serving nodes pull the
image before the first node is drained.
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools import (
    maintenance_windows,
    node_facts,
    node_selection,
    os_image,
    pool_status,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.pools.holders import (
    check_progress,
    describe_holder,
    find_holders,
    format_holders,
    format_unexpected,
)
from treenail.errors import ConfigError

STALE_RETRY_S = 2.0
"""Delay until the next decision while the caches are outdated."""
NO_POLICY = rollout_policy.RolloutPolicy()


@dataclass(frozen=True, slots=True)
class PrestageRequests:
    """Prestage requests to write now, by node name."""

    nodes_to_request: tuple[str, ...] = ()
    """Nodes to prestage the target."""
    nodes_to_withdraw: tuple[str, ...] = ()
    """Nodes whose request is obsolete."""
    waiting_reason: str = ""
    """Why no node may be drained yet, or empty."""
    requeue_after_s: float | None = field(default=None, compare=False)
    """Delay until a node no longer holds the others up."""


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """Writes for a pool now, and the reasons for its conditions."""

    nodes_to_assign: tuple[str, ...] = ()
    """Nodes that get the target, in this order.

    Each write must be conditional on the observed version of the Node. A node that seemed to be
    updating may be Done by now, and the write would take it out of service again.
    """
    target: node_facts.RolloutTarget | None = None
    """None when the target is unknown."""
    record: rollout_record.RolloutRecord | None = None
    """Written to the pool before any node is assigned; None leaves the stored one."""
    waiting_reason: str = ""
    progress_message: str = ""
    problem: pool_status.PoolProblem | None = None
    requeue_after_s: float | None = None
    """Delay after which time alone may change the decision."""
    is_held: bool = False
    """Nodes that are not updated yet hold the rollout up."""
    stalled_message: str = ""
    """Why the rollout exceeds its progress deadline; empty while it does not."""
    prestage: PrestageRequests = field(default_factory=PrestageRequests)
    """Requests to serving nodes. They take no node out of service."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Further inputs of a decision."""

    policy: rollout_policy.RolloutPolicy = NO_POLICY
    gate_verdicts: Sequence[os_image.GateWaiting | os_image.GateBlocked] = ()
    """Of the gates beside that of the image."""
    last_node: str = ""
    """Where the controller runs; it gets the target last."""
    blocked_nodes: Collection[str] = ()
    """They have pods that cannot be evicted now, so other nodes go first."""
    stale_reason: str = ""
    """Why the facts may be outdated, or empty. If they are, nothing is decided from them."""
    image_settle_s: float = 0.0
    """How long no node gets a new image, so that MachineConfigs of the same change come along."""
    etcd_members: Sequence[node_facts.NodeFacts] = ()
    """Of the whole cluster, including own writes that the cache does not show yet."""


NO_CONTEXT = RolloutContext()


def decide_rollout(
    pool: MachineConfigPool,
    nodes: Sequence[node_facts.NodeFacts],
    image_verdict: os_image.GateVerdict,
    record: rollout_record.RolloutRecord | None,
    *,
    now: float,
    context: RolloutContext = NO_CONTEXT,
) -> RolloutDecision:
    """Decide the next writes for the pool.

    ``nodes`` are the pool's nodes, including own writes that the cache does not show yet.
    ``image_verdict`` carries the target.
    """
    policy, gate_verdicts = context.policy, context.gate_verdicts
    try:
        limit = node_selection.compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    except ConfigError as error:
        return RolloutDecision(record=record, problem=pool_status.build_config_problem(error))
    if context.stale_reason:
        return RolloutDecision(
            record=record,
            waiting_reason=f"waiting: {context.stale_reason}",
            requeue_after_s=STALE_RETRY_S,
        )
    for verdict in (image_verdict, *gate_verdicts):
        if isinstance(verdict, os_image.GateBlocked):
            return RolloutDecision(
                record=record, problem=pool_status.PoolProblem(verdict.kind, verdict.reason)
            )
    waiting = "; ".join(
        verdict.reason
        for verdict in (image_verdict, *gate_verdicts)
        if isinstance(verdict, os_image.GateWaiting)
    )
    if not isinstance(image_verdict, os_image.GateOpen):
        return RolloutDecision(record=record, waiting_reason=waiting)
    if not image_verdict.target.config:
        return RolloutDecision(
            record=record, waiting_reason="waiting: no configuration is rendered yet"
        )
    resume = policy.resume.get(pool.name, "")
    record = rollout_record.advance_record(
        record, policy, nodes, image_verdict.target, now=now, resume_value=resume
    )
    situation = _RolloutSituation(
        policy,
        nodes,
        image_verdict.target,
        record,
        node_selection.limit_to_quorum(limit, nodes, context.etcd_members),
        limit,
        now,
        context.last_node,
        frozenset(context.blocked_nodes),
        context.etcd_members,
        node_selection.describe_zero_limit(pool.max_unavailable),
    )
    is_stopped = pool.paused or pool.is_deleting
    settle_s = rollout_record.compute_image_settle_s(record, context.image_settle_s, now)
    if settle_s > 0 and not (is_stopped or record.halted_by or waiting):
        return situation.build_decision(
            waiting_reason="waiting: the image changed, and MachineConfigs may change with it",
            requeue_after_s=settle_s,
        )
    prestage = decide_prestage_requests(policy, nodes, record, now=now, is_stopped=is_stopped)
    if record.halted_by is not None:
        # Prestaged images stay: the user may resume the rollout.
        failed = {
            failure.node
            for failure in rollout_record.find_failures(nodes, record.target, policy, now=now)
        }
        has_recovered = record.halted_by.node not in failed
        problem = _build_halt_problem(pool, record, record.halted_by, has_recovered=has_recovered)
        return situation.build_decision(problem=problem)
    if is_stopped or waiting:
        decision = situation.build_decision(waiting_reason=waiting)
    elif prestage.waiting_reason:
        decision = situation.build_decision(waiting_reason=prestage.waiting_reason)
    else:
        decision = _select_nodes(situation)
    new = dict.fromkeys(prestage.nodes_to_request, int(now))
    requested = {} if is_stopped else {**new, **record.prestaging}
    decision = _add_stall(
        replace(situation, record=replace(record, prestaging=requested)), decision
    )
    times = [at for at in (decision.requeue_after_s, prestage.requeue_after_s) if at is not None]
    return replace(decision, prestage=prestage, requeue_after_s=min(times, default=None))


@dataclass(frozen=True, slots=True)
class _RolloutSituation:
    """Inputs of a decision after the gates."""

    policy: rollout_policy.RolloutPolicy
    nodes: Sequence[node_facts.NodeFacts]
    target: node_facts.RolloutTarget
    record: rollout_record.RolloutRecord
    max_unavailable: int
    requested_max_unavailable: int
    """What the pool allows; more than ``max_unavailable`` where etcd could lose its quorum."""
    now: float
    last_node: str
    blocked_nodes: frozenset[str]
    etcd_members: Sequence[node_facts.NodeFacts]
    limit_note: str

    @property
    def current_wave(self) -> rollout_policy.Wave | None:
        waves = self.policy.waves
        return waves[self.record.wave] if self.record.wave < len(waves) else None

    @property
    def node_duration_s(self) -> float:
        return rollout_record.estimate_node_s(self.nodes, self.target)

    def build_decision(
        self,
        nodes_to_assign: Sequence[node_facts.NodeFacts] = (),
        *,
        waiting_reason: str = "",
        problem: pool_status.PoolProblem | None = None,
        requeue_after_s: float | None = None,
        is_held: bool = False,
    ) -> RolloutDecision:
        """Build a decision, with the delay until the next one."""
        next_check_s = rollout_record.compute_next_check_s(
            self.record, self.policy, self.nodes, self.target, now=self.now
        )
        times = [at for at in (next_check_s, requeue_after_s) if at is not None]
        return RolloutDecision(
            nodes_to_assign=tuple(node.name for node in nodes_to_assign),
            target=self.target,
            record=self.record,
            waiting_reason=waiting_reason,
            progress_message=self.format_progress(),
            problem=problem,
            requeue_after_s=min(times) if times else None,
            is_held=is_held,
        )

    def format_progress(self, *, has_estimate: bool = True) -> str:
        """Format how many nodes are updated, and the estimated time left."""
        limits = self.limit_note
        if self.max_unavailable < self.requested_max_unavailable:
            limits = (
                f"maxUnavailable ({self.requested_max_unavailable}) is limited to "
                f"{self.max_unavailable}, so that etcd keeps the quorum of its members; "
            )
        total = len(self.nodes)
        done = sum(node.is_updated_to(self.target) for node in self.nodes)
        if done == total:
            return ""
        if not has_estimate:
            return f"{limits}{done} of {total} nodes are updated"
        left_s = rollout_record.estimate_remaining_s(
            total - done,
            max(1, self.max_unavailable),
            self.node_duration_s,
            self.policy.windows,
            self.now,
        )
        if left_s is None:
            duration = rollout_record.format_duration(self.node_duration_s)
            return (
                f"{limits}{done} of {total} nodes are updated; no maintenance window is as long as "
                f"the {duration} that a node takes: lengthen the windows"
            )
        left_s += rollout_record.compute_remaining_soaks_s(self.record, self.policy, self.now)
        left = rollout_record.format_duration(left_s)
        return f"{limits}{done} of {total} nodes are updated, about {left} left"


def _select_nodes(situation: _RolloutSituation) -> RolloutDecision:
    if all(node.is_assigned(situation.target) for node in situation.nodes):
        is_held = not all(node.is_updated_to(situation.target) for node in situation.nodes)
        return situation.build_decision(is_held=is_held)
    closed_reason, recheck_s = _check_windows(situation)
    if closed_reason:
        return situation.build_decision(waiting_reason=closed_reason, requeue_after_s=recheck_s)
    capacity = rollout_record.compute_wave_capacity(
        situation.record, situation.policy, situation.nodes, situation.target
    )
    if capacity.member_count == 0:
        message = (
            f"no node of the pool matches the nodeSelector of wave {situation.record.wave + 1}: "
            "label a node, or correct the selector in the rollout policy"
        )
        return situation.build_decision(problem=pool_status.PoolProblem("EmptyWave", message))
    if capacity.remaining <= 0:
        is_held = situation.record.settled_at is None
        return situation.build_decision(
            waiting_reason=_format_wave_progress(situation), is_held=is_held
        )
    chosen = _choose_candidates(situation)[: capacity.remaining]
    waiting = "" if chosen else _format_unavailability(situation)
    return situation.build_decision(
        chosen, waiting_reason=waiting, requeue_after_s=recheck_s, is_held=not chosen
    )


def _add_stall(situation: _RolloutSituation, decision: RolloutDecision) -> RolloutDecision:
    """Add which nodes hold the rollout up, and whether for longer than the deadline."""
    check = check_progress(
        situation.nodes,
        situation.target,
        situation.record,
        deadline_s=situation.policy.progress_deadline_s,
        now=situation.now,
        is_held=decision.is_held,
    )
    times = [at for at in (decision.requeue_after_s, check.recheck_s) if at is not None]
    message = decision.progress_message
    if not check.is_moving:
        # An estimate would promise an end that only a user can bring about.
        message = situation.format_progress(has_estimate=False)
    unexpected = ""
    if not decision.waiting_reason:
        assigned = [node for node in situation.nodes if node.is_assigned(situation.target)]
        unexpected = format_unexpected(find_holders(assigned, situation.target, situation.now))
    return replace(
        decision,
        record=check.record,
        progress_message="; ".join(filter(None, (unexpected, message))),
        stalled_message=check.message,
        requeue_after_s=min(times, default=None),
    )


def _choose_candidates(situation: _RolloutSituation) -> Sequence[node_facts.NodeFacts]:
    """Choose unavailable nodes first, then as many others as the capacity allows."""
    redirected = rollout_record.find_wave_members(
        situation.current_wave, node_selection.find_redirectable(situation.nodes, situation.target)
    )
    candidates = node_selection.find_candidates(
        situation.nodes, situation.target, situation.max_unavailable
    )
    redirected_names = {node.name for node in redirected}
    fresh = [
        node
        for node in rollout_record.find_wave_members(situation.current_wave, candidates.nodes)
        if node.name not in redirected_names
    ]
    if situation.policy.prestage_max_parallel is not None and situation.target.image:
        fresh = [node for node in fresh if is_prestage_done(node, situation.target)]
    if len(fresh) > 1:
        fresh = [node for node in fresh if node.name != situation.last_node]
    # A failing node gains most from a new target, and its pods lose least.
    failing = node_selection.sort_by_zone(node for node in fresh if node.is_failing)
    ordered = node_selection.sort_nodes(
        situation.policy.order,
        (node for node in fresh if not node.is_failing),
        (node for node in situation.nodes if node.is_unavailable),
    )
    # Blocked nodes go last; the sort is stable, so it keeps the order otherwise.
    others = sorted(ordered, key=lambda node: node.name in situation.blocked_nodes)
    # A node that undid its assignment, or reports an update that the controller did not assign,
    # would otherwise always be the first.
    since = situation.now - node_facts.GRACE_S
    last = {node.name for node in redirected if node.started_at is None}
    last |= {name for name, at in situation.record.assigned_now.items() if at < since}
    ranked = sorted((*failing, *others), key=lambda node: node.name in last)
    chosen = (*redirected, *ranked[: candidates.capacity])
    return sorted(chosen, key=lambda node: node.name in last)


def _check_windows(situation: _RolloutSituation) -> tuple[str, float | None]:
    """Return why the windows let no node leave service now, or empty, and until when."""
    window = maintenance_windows.find_window_state(situation.policy.windows, situation.now)
    if isinstance(window, maintenance_windows.WindowClosed):
        message = f"waiting: the maintenance window opens at {window.opens_at}"
        return message, window.opens_in_s
    if window.closes_in_s is None or situation.node_duration_s <= window.closes_in_s:
        return "", window.closes_in_s
    duration = rollout_record.format_duration(situation.node_duration_s)
    left = rollout_record.format_duration(window.closes_in_s)
    message = f"waiting: a node takes about {duration}, but the maintenance window closes in {left}"
    return message, window.closes_in_s


def _format_wave_progress(situation: _RolloutSituation) -> str:
    wave = f"wave {situation.record.wave + 1} of {len(situation.policy.waves) + 1}"
    if situation.record.settled_at is None:
        holders = find_holders(situation.nodes, situation.target, situation.now)
        return "; ".join(filter(None, (f"{wave} is in progress", format_unexpected(holders))))
    left_s = rollout_record.compute_soak_end(situation.record, situation.policy) - situation.now
    return f"{wave} is soaking; the next wave starts in {rollout_record.format_limit(left_s)}"


def _format_unavailability(situation: _RolloutSituation) -> str:
    """Format which nodes use up maxUnavailable, or which nodes cannot get the target now."""
    holders = find_holders(situation.nodes, situation.target, situation.now)
    if situation.max_unavailable < situation.requested_max_unavailable:
        names = {node.name for node in situation.nodes}
        others = [node for node in situation.etcd_members if node.name not in names]
        if down := [describe_holder(node, situation.now) for node in others if node.is_unavailable]:
            return (
                f"waiting: maxUnavailable ({situation.max_unavailable}) for the quorum of etcd "
                f"reached by {format_holders([*holders, *down])} in all pools"
            )
    if len(holders) >= situation.max_unavailable:
        named = format_holders(holders)
        return f"waiting: maxUnavailable ({situation.max_unavailable}) reached by {named}"
    held = [
        describe_holder(node, situation.now)
        for node in rollout_record.find_wave_members(situation.current_wave, situation.nodes)
        if not node.is_assigned(situation.target)
    ]
    return f"waiting for {format_holders(held)}"


def _build_halt_problem(
    pool: MachineConfigPool,
    record: rollout_record.RolloutRecord,
    first: rollout_record.NodeFailure,
    *,
    has_recovered: bool,
) -> pool_status.PoolProblem:
    # A copied command must change the value, whatever the last one was.
    last = record.resume_value
    value = str(int(last) + 1) if last.isdecimal() else "1"
    patch = json.dumps({"spec": {"resume": {pool.name: value}}})
    cause = f"node {first.node} failed first: {first.reason}"
    if has_recovered:
        cause = f"node {first.node} failed and has recovered since; its failure was: {first.reason}"
    return pool_status.PoolProblem(
        "Halted",
        f"The rollout of {pool_status.format_target(record.target)} is halted: {cause}; set "
        f"another target, or resume: kubectl patch rolloutpolicy {pool.rollout_policy} "
        f"--type merge -p '{patch}'",
    )


def decide_prestage_requests(
    policy: rollout_policy.RolloutPolicy,
    nodes: Sequence[node_facts.NodeFacts],
    record: rollout_record.RolloutRecord,
    *,
    now: float,
    is_stopped: bool,
) -> PrestageRequests:
    """Decide which nodes prestage the target; withdraw all requests when ``is_stopped``.

    No node waits for one that has neither the image nor an error after ``progressDeadline``.
    """
    target = record.target
    max_parallel = None if is_stopped else policy.prestage_max_parallel
    if max_parallel is None or not target.image:
        return PrestageRequests(
            nodes_to_withdraw=_get_names(node for node in nodes if node.prestage_target is not None)
        )
    unstaged = [node for node in nodes if not is_prestage_done(node, target)]
    serving = [node for node in unstaged if node.is_healthy]
    # A node that already pulls this image for another config costs the registry nothing more.
    retargeted = [
        node for node in serving if node.prestage_target != target and _is_pulling(node, target)
    ]
    idle = [node for node in serving if not _is_pulling(node, target)]
    # A node that removed its request goes behind those without any.
    idle.sort(key=lambda node: node.prestage_requested_at is not None)
    left_s = {
        node.name: (node.prestage_requested_at or record.began_at or now)
        + (policy.progress_deadline_s or math.inf)
        - now
        for node in serving
        if node.prestage_requested_at is not None or _is_pulling(node, target)
    }
    on_time = [node for node in serving if left_s.get(node.name, math.inf) > 0]
    pulling = [node for node in on_time if _is_pulling(node, target) and not node.prestage_error]
    chosen = [*retargeted, *idle[: max(max_parallel - len(pulling), 0)]]
    stale = [
        node
        for node in nodes
        if node.prestage_target is not None
        and (node.is_assigned(target) or not _is_pulling(node, target))
    ]
    has_begun = any(node.is_assigned(target) and node.started_at is not None for node in nodes)
    pending = [
        node for node in on_time if not node.prestage_error or node.prestage_target != target
    ]
    waiting = ""
    if pending and not has_begun:
        staged = len(nodes) - len(unstaged)
        waiting = f"waiting: {staged} of {len(nodes)} nodes have prestaged the image"
    names = _get_names(chosen)
    return PrestageRequests(
        names,
        tuple(name for name in _get_names(stale) if name not in names),
        waiting,
        min((seconds for seconds in left_s.values() if 0 < seconds < math.inf), default=None),
    )


def is_prestage_done(node: node_facts.NodeFacts, target: node_facts.RolloutTarget) -> bool:
    """True when the node need not prestage: it has the image, or an update is in progress."""
    return (
        (node.prestage_target == target and node.prestaged_image == target.image)
        or node.current_image == target.image
        or node.is_assigned(target)
        or not node.is_done
    )


def _is_pulling(node: node_facts.NodeFacts, target: node_facts.RolloutTarget) -> bool:
    return node.prestage_target is not None and node.prestage_target.image == target.image


def _get_names(nodes: Iterable[node_facts.NodeFacts]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
