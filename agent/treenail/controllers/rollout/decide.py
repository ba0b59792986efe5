"""The next turn of a pool's rollout: which nodes are given the target now, and why no others.

Everything here is pure. The controller observes, writes what a turn says, and looks again when
something changed or the turn asks for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout import estimate, order
from treenail.controllers.rollout.estimate import format_duration
from treenail.controllers.rollout.gates import windows
from treenail.controllers.rollout.gates.os_image import (
    GateBlocked,
    GateOpen,
    GateVerdict,
    GateWaiting,
)
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.policy import (
    ROLLOUT_RESUME,
    NodeOrder,
    RolloutPolicy,
    Wave,
    parse_policy,
)
from treenail.controllers.rollout.progress import (
    NodeFailure,
    RolloutRecord,
    advance_record,
    compute_next_check_s,
    compute_soak_end,
    compute_wave_capacity,
    find_wave_members,
)
from treenail.controllers.rollout.select import (
    compute_max_unavailable,
    find_candidates,
    find_redirectable,
)
from treenail.controllers.rollout.staging import (
    PrestageRequests,
    decide_prestage_requests,
    is_prestage_done,
)
from treenail.controllers.rollout.status import PoolProblem, format_target
from treenail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """What to do for a pool now."""

    nodes_to_assign: tuple[str, ...] = ()
    """Nodes to be given the target, in this order.

    Only on condition that the annotations a node was judged by are unchanged: a node that seemed
    to be on its way may have arrived, and would be taken out of service once more.
    """
    target: RolloutTarget | None = None
    """None when there is none to give."""
    record: RolloutRecord | None = None
    """To be kept on the pool before any node is given anything; None means leave it."""
    waiting_reason: str = ""
    progress_message: str = ""
    problem: PoolProblem | None = None
    requeue_after_s: float | None = None
    """When time alone may change the answer."""
    prestage: PrestageRequests = field(default_factory=PrestageRequests)
    """What to ask of nodes that serve; it takes none out of service."""


def decide_rollout(
    pool: MachineConfigPool,
    nodes: Sequence[NodeFacts],
    image_verdict: GateVerdict,
    record: RolloutRecord | None,
    *,
    now: float,
    gate_verdicts: Sequence[GateWaiting | GateBlocked] = (),
    last_node: str = "",
    blocked_nodes: Collection[str] = (),
) -> RolloutDecision:
    """The next turn.

    ``nodes`` are those of the pool, with what was written but may not be seen yet. ``image_verdict`` says
    what the target is; ``gate_verdicts`` are others who ask to wait. The node ``last_node`` is taken when no
    other is left: the one that the controller runs on. Those that are ``blocked_nodes`` have pods that
    can't be evicted now; others are preferred to them.
    """
    try:
        careful = parse_policy(pool)
        limit = compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    except ConfigError as error:
        return RolloutDecision(record=record, problem=build_config_problem(error))
    for found in (image_verdict, *gate_verdicts):
        if isinstance(found, GateBlocked):
            return RolloutDecision(record=record, problem=PoolProblem(found.kind, found.reason))
    waiting = "; ".join(
        found.reason for found in (image_verdict, *gate_verdicts) if isinstance(found, GateWaiting)
    )
    if not isinstance(image_verdict, GateOpen):
        return RolloutDecision(record=record, waiting_reason=waiting)
    if not image_verdict.target.config:
        return RolloutDecision(record=record, waiting_reason="no configuration is rendered yet")
    resume = pool.metadata.annotations.get(ROLLOUT_RESUME, "")
    record = advance_record(
        record, careful, nodes, image_verdict.target, now=now, resume_value=resume
    )
    look = _RolloutState(
        careful,
        nodes,
        image_verdict.target,
        record,
        limit,
        now,
        last_node,
        frozenset(blocked_nodes),
    )
    stopped = pool.paused or pool.is_deleting
    ahead = decide_prestage_requests(careful, nodes, image_verdict.target, is_stopped=stopped)
    if record.halted_by is not None:
        # What is staged stays: a person looks, and may let it go on.
        return look.build_decision(problem=_build_halt_problem(record, record.halted_by))
    if stopped or waiting:
        return replace(look.build_decision(waiting_reason=waiting), prestage=ahead)
    if ahead.waiting_reason:
        return replace(look.build_decision(waiting_reason=ahead.waiting_reason), prestage=ahead)
    return replace(_select_nodes(look), prestage=ahead)


def build_config_problem(error: ConfigError) -> PoolProblem:
    """What to say about a pool that can't be read."""
    remedy = f"; {error.remedy}" if error.remedy else ""
    return PoolProblem("InvalidConfiguration", f"{error}{remedy}")


@dataclass(frozen=True, slots=True)
class _RolloutState:
    """What a turn is made from."""

    policy: RolloutPolicy
    nodes: Sequence[NodeFacts]
    target: RolloutTarget
    record: RolloutRecord
    max_unavailable: int
    now: float
    last_node: str
    blocked_nodes: frozenset[str]

    @property
    def current_wave(self) -> Wave | None:
        waves = self.policy.waves
        return waves[self.record.wave] if self.record.wave < len(waves) else None

    @property
    def node_duration_s(self) -> float:
        return estimate.estimate_node_s(self.nodes, self.target)

    def build_decision(
        self,
        nodes_to_assign: Sequence[NodeFacts] = (),
        *,
        waiting_reason: str = "",
        problem: PoolProblem | None = None,
        requeue_after_s: float | None = None,
    ) -> RolloutDecision:
        """A turn, with when to look again at the latest."""
        timed_s = compute_next_check_s(
            self.record, self.policy, self.nodes, self.target, now=self.now
        )
        times = [at for at in (timed_s, requeue_after_s) if at is not None]
        return RolloutDecision(
            nodes_to_assign=tuple(node.name for node in nodes_to_assign),
            target=self.target,
            record=self.record,
            waiting_reason=waiting_reason,
            progress_message=self.progress_message(),
            problem=problem,
            requeue_after_s=min(times) if times else None,
        )

    def progress_message(self) -> str:
        """How many nodes are through, and how long the others may take."""
        total = len(self.nodes)
        done = sum(node.is_updated_to(self.target) for node in self.nodes)
        if done == total:
            return ""
        left_s = estimate.estimate_remaining_s(
            total - done, self.max_unavailable, self.node_duration_s, self.policy.windows, self.now
        )
        if left_s is None:
            return f"{done} of {total} nodes are updated, the maintenance windows are too short"
        soaks_s = sum(wave.soak_s for wave in self.policy.waves[self.record.wave :])
        return (
            f"{done} of {total} nodes are updated, about {format_duration(left_s + soaks_s)} left"
        )


def _select_nodes(state: _RolloutState) -> RolloutDecision:
    if all(node.is_assigned(state.target) for node in state.nodes):
        return state.build_decision()
    closed, again_s = _check_windows(state)
    if closed:
        return state.build_decision(waiting_reason=closed, requeue_after_s=again_s)
    space = compute_wave_capacity(state.record, state.policy, state.nodes, state.target)
    if space.member_count == 0:
        sentence = f"no node of the pool matches the nodeSelector of wave {state.record.wave + 1}"
        return state.build_decision(problem=PoolProblem("EmptyWave", sentence))
    if space.remaining <= 0:
        return state.build_decision(waiting_reason=_format_wave_progress(state))
    give = _choose_candidates(state)[: space.remaining]
    waiting = "" if give else "as many nodes are unavailable as may be"
    return state.build_decision(give, waiting_reason=waiting, requeue_after_s=again_s)


def _choose_candidates(state: _RolloutState) -> Sequence[NodeFacts]:
    """Who is unavailable anyway turns first; of the others as many as the capacity allows."""
    turning = _filter_wave(state, find_redirectable(state.nodes, state.target))
    found = find_candidates(state.nodes, state.target, state.max_unavailable)
    turned = {node.name for node in turning}
    fresh = [node for node in _filter_wave(state, found.nodes) if node.name not in turned]
    if state.policy.prestage_max_parallel is not None and state.target.image:
        fresh = [node for node in fresh if is_prestage_done(node, state.target)]
    if len(fresh) > 1:
        fresh = [node for node in fresh if node.name != state.last_node]
    # A node that fails already has the most to win, and its pods the least to lose.
    failing = order.sort_by_zone(node for node in fresh if node.is_failing)
    sound = _sort_nodes(state, [node for node in fresh if not node.is_failing])
    # The sort is stable: among the blocked and among the others the order is as it was.
    sound = sorted(sound, key=lambda node: node.name in state.blocked_nodes)
    return [*turning, *(*failing, *sound)[: found.capacity]]


def _filter_wave(state: _RolloutState, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    return nodes if state.current_wave is None else find_wave_members(state.current_wave, nodes)


def _sort_nodes(state: _RolloutState, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    match state.policy.order:
        case NodeOrder.ZONES:
            return order.sort_by_zone(nodes)
        case NodeOrder.SPREAD:
            return order.spread_over_zones(
                nodes, [node for node in state.nodes if node.is_unavailable]
            )


def _check_windows(state: _RolloutState) -> tuple[str, float | None]:
    """Why no node may be taken out of service now, empty if it may; and until when that is so."""
    seen = windows.find_window_state(state.policy.windows, state.now)
    if isinstance(seen, windows.WindowClosed):
        return f"the maintenance window opens at {seen.opens_at}", seen.opens_in_s
    if seen.closes_in_s is None or state.node_duration_s <= seen.closes_in_s:
        return "", seen.closes_in_s
    sentence = (
        f"a node takes about {format_duration(state.node_duration_s)}, and the maintenance window closes in "
        f"{format_duration(seen.closes_in_s)}"
    )
    return sentence, seen.closes_in_s


def _format_wave_progress(state: _RolloutState) -> str:
    which = f"wave {state.record.wave + 1} of {len(state.policy.waves) + 1}"
    if state.record.settled_at is None:
        return f"{which} is given out and not through yet"
    left_s = compute_soak_end(state.record, state.policy) - state.now
    return f"{which} runs well, more nodes follow in {format_duration(left_s)}"


def _build_halt_problem(record: RolloutRecord, first: NodeFailure) -> PoolProblem:
    return PoolProblem(
        "Halted",
        f"The rollout of {format_target(record.target)} is halted: node {first.node} failed first: "
        f"{first.reason}; give the pool another target, or change its annotation {ROLLOUT_RESUME} to go "
        "on",
    )
