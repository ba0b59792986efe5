"""The rollout of pools: look at the caches, decide, write, say how it stands.

`RolloutReconciler.sync_pool` is one pass for one pool. All that it has to remember is in the cluster,
so it may be stopped between any two writes, and another one goes on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from treenail.api import annotations as key
from treenail.api.machineconfigpool import API_VERSION, ARBITER, KIND, MASTER, MachineConfigPool
from treenail.clock import Clock, format_rfc3339
from treenail.controllers.rollout import report, status
from treenail.controllers.rollout.act import ParallelMap, RolloutWriter, WriterApi
from treenail.controllers.rollout.decide import (
    RolloutDecision,
    build_config_problem,
    decide_rollout,
)
from treenail.controllers.rollout.expected import ExpectedNodes, ExpectedPools
from treenail.controllers.rollout.gates import os_image
from treenail.controllers.rollout.gates.external import LockServer
from treenail.controllers.rollout.gates.os_image import (
    GateBlocked,
    GateOpen,
    GateVerdict,
    GateWaiting,
)
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.observe import (
    ClusterSnapshot,
    ObservedPool,
    PoolGrouping,
    PoolSnapshot,
)
from treenail.controllers.rollout.policy import RolloutPolicy, parse_policy
from treenail.controllers.rollout.progress import ROLLOUT_STATE, RolloutRecord
from treenail.controllers.rollout.status import DEGRADED, PoolProblem, PoolStatus, PoolStatusInput
from treenail.errors import (
    ClusterError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from treenail.kube.events import ObjectReference
from treenail.kube.resources import MACHINECONFIGS

log = logging.getLogger(__name__)

CONFLICT_RETRY_S = 0.5
"""When to look again after somebody else was quicker: the cache will show what they did."""
GATE_RETRY_S = 30.0
"""How often somebody who asks to wait is asked again."""


class RolloutCaches(Protocol):
    """Pools and nodes by name, as watches show them."""

    def list_pools(self) -> Mapping[str, ObservedPool]: ...
    def list_nodes(self) -> Mapping[str, NodeFacts]: ...


class RolloutGates(Protocol):
    """Who else is asked; None is a yes."""

    def check_alerts(self, policy: RolloutPolicy) -> GateWaiting | GateBlocked | None: ...
    def acquire_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None: ...
    def release_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None: ...


class RolloutEvents(Protocol):
    """Where people are told."""

    def record_warning(self, regarding: ObjectReference, reason: str, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How rollouts are done in this cluster."""

    image_key: str = key.DESIRED_OS_IMAGE
    """The annotation of a node that asks for an image."""
    own_node: str = ""
    """The node that this process runs on, which is left for last."""
    image_gate: Callable[[MachineConfigPool], GateVerdict] = os_image.read_annotated_image
    """Which target a pool is after: the seat of the gate for images built in the cluster."""


@dataclass(slots=True)
class _PoolSync:
    """What is seen, decided and met in one pass."""

    snapshot: PoolSnapshot
    pool: MachineConfigPool
    nodes: tuple[NodeFacts, ...]
    now: float
    target: RolloutTarget
    decision: RolloutDecision = field(default_factory=RolloutDecision)
    requeue_after_s: list[float] = field(default_factory=list)
    errors: list[ClusterError] = field(default_factory=list)

    def record_error(self, error: ClusterError) -> None:
        """Go on in spite of the error; the pass is repeated."""
        if isinstance(error, ConflictError):
            self.requeue_after_s.append(CONFLICT_RETRY_S)
        else:
            self.errors.append(error)


class RolloutReconciler:
    """Brings the nodes of pools to their pool's target. Thread-safe for different pools."""

    def __init__(
        self,
        api: WriterApi,
        caches: RolloutCaches,
        clock: Clock,
        gates: RolloutGates,
        events: RolloutEvents,
        settings: RolloutSettings,
        *,
        parallel_map: ParallelMap = map,
        find_blocked_nodes: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._api = api
        self._caches = caches
        self._clock = clock
        self._gates = gates
        self._events = events
        self._settings = settings
        self._find_blocked_nodes = find_blocked_nodes
        self._grouping = PoolGrouping()
        self._expected = ExpectedNodes()
        self._pools = ExpectedPools()
        self._status_written_at: dict[str, float] = {}
        self._existing_configs: dict[str, str] = {}
        self._writer = RolloutWriter(
            api,
            clock,
            self._expected,
            parallel_map=parallel_map,
            image_key=settings.image_key,
        )

    def sync_pool(self, name: str) -> float | None:
        """One pass for the pool; after how many seconds the next is due at the latest.

        The pool's status is written whatever else fails. Raises `ClusterError` when the pass has
        to be repeated.
        """
        nodes = self._caches.list_nodes()
        picture = self._grouping.group_nodes(self._caches.list_pools(), nodes)
        sight = picture.find_pool(name)
        self._expected.retain_nodes(nodes)
        if sight is None:
            self._forget_pool(name)
            return None
        pool = self._pools.get_latest(sight.observed.pool)
        seen = self._expected.overlay_nodes(sight.nodes)
        target = RolloutTarget(pool.configuration.name, "")
        found = _PoolSync(sight, pool, seen, self._clock.now(), target)
        found.decision = self._decide_pool(found, picture)
        self._apply_decision(found)
        self._report_status(found)
        if found.errors:
            raise found.errors[0]
        if found.decision.requeue_after_s is not None:
            found.requeue_after_s.append(found.decision.requeue_after_s)
        return min(found.requeue_after_s, default=None)

    def _forget_pool(self, name: str) -> None:
        self._pools.forget_pool(name)
        self._status_written_at.pop(name, None)
        self._existing_configs.pop(name, None)

    def _decide_pool(self, sync: _PoolSync, cluster: ClusterSnapshot) -> RolloutDecision:
        pool = sync.pool
        try:
            _validate_pool(sync.snapshot)
            verdict = self._settings.image_gate(pool)
            text = pool.metadata.annotations.get(ROLLOUT_STATE)
            record = None if text is None else RolloutRecord.from_text(text)
            if isinstance(verdict, GateOpen):
                sync.target = verdict.target
            inside = tuple(self._find_pool_gates(sync.snapshot, cluster))
        except ConfigError as error:
            return RolloutDecision(problem=build_config_problem(error))

        def turn(
            *outside: GateWaiting | GateBlocked, blocked: frozenset[str] = frozenset()
        ) -> RolloutDecision:
            return decide_rollout(
                pool,
                sync.nodes,
                verdict,
                record,
                now=sync.now,
                gate_verdicts=(*inside, *outside),
                last_node=self._settings.own_node,
                blocked_nodes=blocked,
            )

        decided = turn()
        if not decided.nodes_to_assign:
            return decided
        asked = self._check_config_exists(pool) or self._gates.check_alerts(parse_policy(pool))
        if asked is None:
            blocked = self._find_blocked_nodes()
            return turn(blocked=blocked) if blocked else decided
        sync.requeue_after_s.append(GATE_RETRY_S)
        return turn(asked)

    def _find_pool_gates(
        self, snapshot: PoolSnapshot, cluster: ClusterSnapshot
    ) -> Iterator[GateWaiting]:
        """Why the pool has to wait for another one."""
        name = snapshot.observed.pool.name
        for other in snapshot.unreadable_pools:
            yield GateWaiting(
                f"pool {other} can't be read, so nobody knows which nodes are its own"
            )
        if name in (MASTER, ARBITER) and cluster.members.get(ARBITER) and MASTER in cluster.pools:
            masters = self._expected.overlay_nodes(cluster.members.get(MASTER, ()))
            arbiters = self._expected.overlay_nodes(cluster.members[ARBITER])
            verdict = self._settings.image_gate(self._pools.get_latest(cluster.pools[MASTER].pool))
            want = verdict.target if isinstance(verdict, GateOpen) else RolloutTarget("", "")
            hold = os_image.check_control_plane(name, masters, arbiters, want)
            if hold is not None:
                yield hold

    def _check_config_exists(self, pool: MachineConfigPool) -> GateBlocked | None:
        """A config that does not exist is given to nobody."""
        config = pool.configuration.name
        if self._existing_configs.get(pool.name) == config:
            return None
        try:
            self._api.get(MACHINECONFIGS, config)
        except NotFoundError:
            return GateBlocked(
                f"MachineConfig {config}, which spec.configuration names, does not exist",
                "MissingMachineConfig",
            )
        except ClusterError as error:
            return GateBlocked(
                f"MachineConfig {config} can't be looked up: {error}", "ClusterError"
            )
        self._existing_configs[pool.name] = config
        return None

    def _apply_decision(self, sync: _PoolSync) -> None:
        record = sync.decision.record
        # Before any node is given anything: who comes next has to know how far it went.
        if record is not None and record.to_text() != sync.pool.metadata.annotations.get(
            ROLLOUT_STATE
        ):
            try:
                sync.pool = self._pools.record_write(
                    sync.pool, self._writer.write_record(sync.pool, record)
                )
            except ClusterError as error:
                sync.record_error(error)
                return
        self._assign_nodes(sync)
        self._update_prestage(sync)
        self._release_locks(sync)
        sync.nodes = self._expected.overlay_nodes(sync.snapshot.nodes)

    def _assign_nodes(self, sync: _PoolSync) -> None:
        turn = sync.decision
        if turn.target is None:
            return
        chosen = [*self._find_unconfirmed(sync, turn.target)]
        by_name = {node.name: node for node in sync.nodes}
        lock = parse_policy(sync.pool).lock_server if turn.nodes_to_assign else None
        for name in turn.nodes_to_assign:
            if lock is not None and (answer := self._gates.acquire_lock(lock, name)) is not None:
                sync.decision = _apply_gate_verdict(turn, answer)
                sync.requeue_after_s.append(GATE_RETRY_S)
                break
            chosen.append(by_name[name])
        if not chosen:
            return
        server = "" if lock is None else lock.text
        outcome = self._writer.assign_target(chosen, turn.target, sync.pool.name, server)
        for error in outcome.errors:
            sync.record_error(error)

    def _update_prestage(self, sync: _PoolSync) -> None:
        """Ask for what is to be staged ahead, or take it back; nothing depends on it."""
        ahead = sync.decision.prestage
        by_name = {node.name: node for node in sync.snapshot.nodes}
        for names, target in (
            (ahead.nodes_to_request, sync.decision.target),
            (ahead.nodes_to_withdraw, None),
        ):
            nodes = [by_name[name] for name in names if name not in sync.decision.nodes_to_assign]
            for error in self._writer.request_prestage(nodes, target):
                sync.record_error(error)

    def _find_unconfirmed(self, sync: _PoolSync, target: RolloutTarget) -> tuple[NodeFacts, ...]:
        """Nodes whose last write got no answer: they count as given, so it has to be made sure."""
        record = sync.decision.record
        halted = record is not None and record.halted_by is not None
        if halted or sync.pool.paused or sync.pool.is_deleting:
            return ()
        return self._expected.find_unconfirmed(sync.nodes, target)

    def _release_locks(self, sync: _PoolSync) -> None:
        """Give back the locks of nodes that are through, also of a pool that is paused."""
        for node in self._expected.overlay_nodes(sync.snapshot.nodes):
            server = LockServer.from_text(node.locked_by)
            if server is None or not (node.is_done and node.is_in_service):
                continue
            if (answer := self._gates.release_lock(server, node.name)) is not None:
                log.warning("the lock of node %s is not given back: %s", node.name, answer.reason)
                sync.requeue_after_s.append(GATE_RETRY_S)
                return
            try:
                self._writer.clear_lock(node)
            except NotFoundError:
                continue
            except ClusterError as error:
                sync.record_error(error)

    def _report_status(self, sync: _PoolSync) -> None:
        wanted = self._compute_status(sync)
        told = self._status_written_at.get(sync.pool.name, float("-inf"))
        due_s = report.compute_write_delay_s(sync.pool, wanted, self._clock.monotonic() - told)
        if due_s is None:
            return
        if due_s > 0:
            sync.requeue_after_s.append(due_s)
            return
        before = sync.pool
        try:
            sync.pool = self._pools.record_write(before, self._writer.write_status(before, wanted))
        except ClusterError as error:
            sync.record_error(error)
            return
        self._status_written_at[before.name] = self._clock.monotonic()
        self._emit_warnings(before, wanted)

    def _compute_status(self, sync: _PoolSync) -> PoolStatus:
        trouble = sync.decision.problem or _find_problem(sync)
        view = PoolStatusInput(
            pool=sync.pool,
            target=sync.target,
            nodes=sync.nodes,
            waiting_reason=sync.decision.waiting_reason,
            progress_message=sync.decision.progress_message,
            problem=trouble,
        )
        now = format_rfc3339(sync.now)
        if trouble is not None and _is_unusable(sync.snapshot):
            return report.build_unusable_status(sync.pool, trouble, now=now)
        return status.compute_status(view, now=now)

    def _emit_warnings(self, pool: MachineConfigPool, written: PoolStatus) -> None:
        before = [(each.status, each.message) for each in pool.conditions if each.type == DEGRADED]
        for condition in written.conditions:
            now = (condition.status, condition.message)
            if condition.type == DEGRADED and condition.status == "True" and now not in before:
                regarding = ObjectReference(
                    KIND, pool.name, uid=pool.metadata.uid, api_version=API_VERSION
                )
                self._events.record_warning(regarding, condition.reason, condition.message)


def _is_unusable(snapshot: PoolSnapshot) -> bool:
    selector = snapshot.observed.pool.node_selector
    return snapshot.observed.error is not None or (selector is not None and selector.is_empty)


def _validate_pool(snapshot: PoolSnapshot) -> None:
    """Raises `ConfigError` for a pool of which nobody knows which nodes it means."""
    if snapshot.observed.error is not None:
        raise snapshot.observed.error
    if _is_unusable(snapshot):
        raise ConfigError(
            f"spec.nodeSelector of pool {snapshot.observed.pool.name} has no requirements and would "
            "select every node, so it selects none",
            remedy="write a nodeSelector with at least one requirement",
        )


def _apply_gate_verdict(
    decision: RolloutDecision, verdict: GateWaiting | GateBlocked
) -> RolloutDecision:
    """The turn when a lock server does not let (more) nodes go."""
    match verdict:
        case GateWaiting(reason):
            return replace(decision, waiting_reason=reason)
        case GateBlocked(reason, kind):
            return replace(decision, problem=PoolProblem(kind, reason))


def _find_problem(sync: _PoolSync) -> PoolProblem | None:
    """What a person has to look at although the rollout goes on."""
    if disputes := sync.snapshot.membership_errors:
        more = f"; and {len(disputes) - 1} more such nodes" if len(disputes) > 1 else ""
        return PoolProblem("NodeInTwoPools", f"{build_config_problem(disputes[0]).message}{more}")
    refused = [error for error in sync.errors if isinstance(error, ForbiddenError | InvalidError)]
    return PoolProblem("WriteRefused", str(refused[0])) if refused else None
