"""Rollout of one pool: read the caches, decide, write, report.

`RolloutReconciler.sync_pool` runs one reconciliation of one pool. All state that must survive is in
the cluster: the process can end between any two writes, and another process continues.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from treenail import clocks
from treenail.api import annotations as key
from treenail.api import machineconfigpool, object_meta
from treenail.controllers.pools import (
    expected_writes,
    node_facts,
    node_selection,
    os_image,
    pool_membership,
    pool_status,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.rollout import (
    external_gates,
    image_tag_updater,
    lock_manager,
    policy_status,
    writer,
)
from treenail.controllers.rollout.decide import (
    NO_POLICY,
    RolloutContext,
    RolloutDecision,
    decide_rollout,
)
from treenail.errors import (
    ClusterError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from treenail.kube import api_client, event_recorder, resources


class ConfigChecker(Protocol):
    """Checks the target of a pool directly before nodes get it."""

    def check_config(
        self, pool: machineconfigpool.MachineConfigPool
    ) -> os_image.GateWaiting | os_image.GateBlocked | None: ...
    def forget_pool(self, name: str) -> None: ...


class RenderedConfigChecker:
    """Remembers the config of each pool that exists. Thread-safe for different pools."""

    def __init__(self, client: api_client.Client) -> None:
        self._client = client
        self._existing: dict[str, str] = {}

    def check_config(
        self, pool: machineconfigpool.MachineConfigPool
    ) -> os_image.GateBlocked | None:
        """Block the rollout of a rendered config that does not exist."""
        config = pool.configuration.name
        if self._existing.get(pool.name) == config:
            return None
        try:
            self._client.get(resources.MACHINECONFIGS, config)
        except NotFoundError:
            return os_image.GateBlocked(
                f"cannot assign MachineConfig {config}: it does not exist; create it, or correct "
                f"spec.configuration of pool {pool.name}",
                "MissingMachineConfig",
            )
        except ClusterError as error:
            return os_image.GateBlocked(
                f"cannot read MachineConfig {config}: {error}", "ClusterError"
            )
        self._existing[pool.name] = config
        return None

    def forget_pool(self, name: str) -> None:
        """Forget a deleted pool."""
        self._existing.pop(name, None)


log = logging.getLogger(__name__)

_MAX_PINNED_SETS = 100  # in the CRD of the pool
CONFLICT_RETRY_S = 0.5
"""Delay after a conflict. By then the cache shows what the other client wrote."""


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """How pools of one kind and their nodes are checked and written."""

    pools: writer.PoolWriter
    configs: ConfigChecker
    parallel_map: writer.ParallelMap = map

    @classmethod
    def of_client(
        cls, client: api_client.Client, parallel_map: writer.ParallelMap = map
    ) -> "PoolAccess":
        """Return the access to MachineConfigPools and the Nodes of their cluster."""
        pools = writer.MachineConfigPoolWriter(client)
        return cls(pools, RenderedConfigChecker(client), parallel_map)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of the rollout controller that hold for all pools."""

    image_key: str = key.DESIRED_OS_IMAGE
    """The Node annotation that requests an image."""
    own_node: str = ""
    """The node that runs this process. The rollout assigns it last."""
    image_settle_s: float = 0.0
    """How long no node gets a new image. Longer than the settle time of the render controller."""
    image_gate: Callable[
        [machineconfigpool.MachineConfigPool, os_image.PoolBuild], os_image.GateVerdict
    ] = os_image.decide_pool_image
    """Finds the target of a pool."""


@dataclass(frozen=True, slots=True)
class RolloutCaches:
    """Pools and nodes as the watches show them."""

    read_pool: Callable[[str], pool_membership.PoolSnapshot | None]
    """Returns a pool with its nodes; None when it does not exist."""
    find_stale_reason: Callable[[], str] = lambda: ""
    """Returns why the caches may be outdated; empty when they are current."""
    find_node: Callable[[str], node_facts.NodeFacts | None] = lambda _: None
    """Returns a node of any pool or none; None when it does not exist."""
    list_policies: Callable[[], Mapping[str, rollout_policy.ObservedPolicy]] = dict
    """Returns the RolloutPolicies by name."""
    find_build: Callable[[machineconfigpool.MachineConfigPool], os_image.PoolBuild] = lambda _: (
        os_image.NO_BUILD
    )
    """Returns what builds the image of a pool."""
    list_etcd_members: Callable[[], Sequence[node_facts.NodeFacts]] = tuple
    """Returns the nodes of the whole cluster that count as members of etcd."""
    is_single_node: Callable[[], bool] = lambda: False
    """Returns whether the cluster has one node only."""
    find_blocked_nodes: Callable[[], frozenset[str]] = frozenset
    """Returns the nodes that a PodDisruptionBudget blocks."""
    list_pinned_sets: Callable[[], Mapping[str, object_meta.ObjectMeta] | None] = lambda: None
    """Returns the metadata of the PinnedImageSets by name; None while they are unknown."""


@dataclass(slots=True)
class _PoolSync:
    """Observations, decision and errors of one reconciliation."""

    snapshot: pool_membership.PoolSnapshot
    pool: machineconfigpool.MachineConfigPool
    nodes: tuple[node_facts.NodeFacts, ...]
    now: float
    target: node_facts.RolloutTarget
    stale_reason: str = ""
    image: os_image.PoolBuild = os_image.NO_BUILD
    image_tag: object_meta.Condition | None = None
    policy: rollout_policy.RolloutPolicy = NO_POLICY
    decision: RolloutDecision = field(default_factory=RolloutDecision)
    requeue_after_s: list[float] = field(default_factory=list)
    errors: list[ClusterError] = field(default_factory=list)

    def record_error(self, error: ClusterError) -> None:
        """Continue despite the error, and schedule another reconciliation."""
        if isinstance(error, ConflictError):
            self.requeue_after_s.append(CONFLICT_RETRY_S)
        else:
            self.errors.append(error)


class RolloutReconciler:
    """Assigns the target of a pool to its nodes. Thread-safe for different pools."""

    def __init__(
        self,
        client: api_client.Client,
        caches: RolloutCaches,
        clock: clocks.Clock,
        gates: external_gates.Gates,
        events: event_recorder.EventRecorder,
        settings: RolloutSettings,
        *,
        access: PoolAccess | None = None,
        tags: image_tag_updater.TagDependencies | None = None,
    ) -> None:
        """``client`` writes the status of policies, and MachineConfigPools without ``access``."""
        access = access or PoolAccess.of_client(client)
        self._caches = caches
        self._clock = clock
        self._gates = gates
        self._events = events
        self._settings = settings
        self._expected = expected_writes.ExpectedNodes()
        self._pools = expected_writes.ExpectedPools()
        self._status_written_at: dict[str, float] = {}
        self._configs = access.configs
        self._pool_writer = access.pools
        self._writer = writer.RolloutWriter(
            client,
            self._pool_writer,
            clock,
            self._expected,
            parallel_map=access.parallel_map,
            image_key=settings.image_key,
        )
        self._locks = lock_manager.LockManager(
            gates, self._writer, self._pools, caches.list_policies
        )
        self._tags = (
            None
            if tags is None
            else image_tag_updater.ImageTagUpdater(tags, self._writer, self._pools, events, clock)
        )
        self._etcd_lock = threading.Lock()
        self._policy_reporter = policy_status.PolicyReporter(self._writer, caches.list_policies)

    def sync_pool(self, name: str) -> float | None:
        """Reconcile the pool once and return after how many seconds to do it again, or None.

        Writes the pool's status whatever else fails. Raises `ClusterError` when the
        reconciliation must be repeated.
        """
        # Asked first: what is read afterwards is at least as recent.
        stale_reason = self._caches.find_stale_reason()
        snapshot = self._caches.read_pool(name)
        if snapshot is None:
            return self._forget_pool(name)
        pool = self._pools.get_latest(snapshot.observed.pool)
        nodes = rollout_record.apply_record(pool.status, snapshot.nodes)
        snapshot = replace(snapshot, nodes=nodes)
        overlaid = self._expected.overlay_nodes(snapshot.nodes)
        image = self._caches.find_build(pool)
        # Counts and messages refer to the built image also while the gate is closed.
        target = (
            node_facts.RolloutTarget(pool.configuration.name, "")
            if image.config is None
            else os_image.compute_build_target(pool, image.config, image.build)
        )
        sync = _PoolSync(snapshot, pool, overlaid, self._clock.now(), target, stale_reason, image)
        self._refresh_tag(sync)
        is_etcd = any(node_selection.is_etcd_member(node.labels) for node in nodes)
        # Two pools must not each assign one of three members, unaware of the other.
        with self._etcd_lock if is_etcd else nullcontext():
            sync.decision = self._decide_pool(sync)
            self._apply_decision(sync)
        self._report_status(sync)
        self._report_policy(sync)
        if sync.errors:
            raise sync.errors[0]
        if sync.decision.requeue_after_s is not None:
            sync.requeue_after_s.append(sync.decision.requeue_after_s)
        return min(sync.requeue_after_s, default=None)

    def release_orphan(self, name: str) -> float | None:
        """Release the lock and the pins of a node in no pool; return when to try again, or None."""
        node = self._caches.find_node(name)
        if node is None or self._caches.find_stale_reason():
            return None if node is None else external_gates.GATE_RETRY_S
        if node.settings.pinned_sets:
            withdrawal = writer.SettingsChange(node, {key.PINNED_IMAGE_SETS: None})
            if self._writer.copy_settings([withdrawal]):
                return external_gates.GATE_RETRY_S
        return external_gates.find_retry_s(self._locks.release_orphan(node))

    def forget_node(self, name: str) -> None:
        """Forget a deleted node."""
        self._expected.forget_node(name)

    def _refresh_tag(self, sync: _PoolSync) -> None:
        """Resolve the tag of the pool, so that the decision sees the recorded image."""
        if self._tags is None or sync.snapshot.observed.error is not None:
            return
        try:
            result = self._tags.refresh_tag(sync.pool, self._caches.list_policies(), sync.nodes)
        except ClusterError as error:
            sync.record_error(error)
            return
        sync.pool, sync.image_tag = result.pool, result.condition
        if result.requeue_after_s is not None:
            sync.requeue_after_s.append(result.requeue_after_s)

    def _forget_pool(self, name: str) -> float | None:
        self._pools.forget_pool(name)
        self._status_written_at.pop(name, None)
        self._configs.forget_pool(name)
        try:
            self._policy_reporter.remove_pool(name)
        except ClusterError as error:
            log.debug("cannot remove pool %s from the status of its policy: %s", name, error)
            return CONFLICT_RETRY_S
        return None

    def _decide_pool(self, sync: _PoolSync) -> RolloutDecision:
        pool = sync.pool
        try:
            pool_membership.validate_pool(sync.snapshot)
            sync.policy = rollout_policy.find_policy(pool, self._caches.list_policies())
            image_verdict = self._settings.image_gate(pool, sync.image)
            stored = pool.status.get(rollout_record.ROLLOUT_STATUS)
            record = None if stored is None else rollout_record.RolloutRecord.from_json(stored)
            if isinstance(image_verdict, os_image.GateOpen):
                sync.target = image_verdict.target
            pool_gates = tuple(self._find_pool_gates(sync.snapshot))
        except ConfigError as error:
            return RolloutDecision(problem=pool_status.build_config_problem(error))

        def decide(
            *external: os_image.GateWaiting | os_image.GateBlocked,
            blocked_nodes: frozenset[str] = frozenset(),
        ) -> RolloutDecision:
            return decide_rollout(
                pool,
                sync.nodes,
                image_verdict,
                record,
                now=sync.now,
                context=RolloutContext(
                    policy=sync.policy,
                    gate_verdicts=(*pool_gates, *external),
                    last_node=self._settings.own_node,
                    blocked_nodes=blocked_nodes,
                    stale_reason=sync.stale_reason,
                    image_settle_s=self._settings.image_settle_s,
                    etcd_members=self._expected.overlay_nodes(self._caches.list_etcd_members()),
                ),
            )

        decision = decide()
        if not decision.nodes_to_assign:
            return decision
        # Gates cost a request each, so they are queried only when a node would be assigned.
        verdict = self._configs.check_config(pool) or self._gates.check_alerts(sync.policy.alerts)
        if isinstance(verdict, os_image.GatePending):
            sync.requeue_after_s.append(external_gates.PENDING_RETRY_S)
            return replace(decision, nodes_to_assign=())
        if verdict is None:
            blocked_nodes = self._caches.find_blocked_nodes()
            return decide(blocked_nodes=blocked_nodes) if blocked_nodes else decision
        sync.requeue_after_s.append(external_gates.GATE_RETRY_S)
        return decide(verdict)

    def _find_pool_gates(
        self, snapshot: pool_membership.PoolSnapshot
    ) -> Iterator[os_image.GateWaiting]:
        """Yield why the pool must wait for another pool."""
        name = snapshot.observed.pool.name
        for other in snapshot.unreadable_pools:
            yield os_image.GateWaiting(
                f"waiting: the spec of pool {other} is invalid, so its nodes are unknown"
            )
        if name not in machineconfigpool.CONTROL_PLANE_POOLS:
            return
        master, arbiter = (
            self._caches.read_pool(machineconfigpool.MASTER),
            self._caches.read_pool(machineconfigpool.ARBITER),
        )
        if master is None or arbiter is None or not arbiter.nodes:
            return
        masters = self._expected.overlay_nodes(master.nodes)
        arbiters = self._expected.overlay_nodes(arbiter.nodes)
        pool = self._pools.get_latest(master.observed.pool)
        verdict = self._settings.image_gate(pool, self._caches.find_build(pool))
        target = (
            verdict.target
            if isinstance(verdict, os_image.GateOpen)
            else node_facts.RolloutTarget("", "")
        )
        waiting = os_image.check_control_plane(name, masters, arbiters, target)
        if waiting is not None:
            yield waiting

    def _apply_decision(self, sync: _PoolSync) -> None:
        chosen = self._choose_nodes(sync)
        # The record is written before any node: another process must know how far this one got.
        if not self._write_record(sync, chosen):
            return
        self._assign_nodes(sync, chosen)
        self._update_prestage(sync)
        self._copy_settings(sync)
        self._copy_pinned_sets(sync)
        self._release_locks(sync)
        sync.nodes = self._expected.overlay_nodes(sync.snapshot.nodes)

    def _write_record(self, sync: _PoolSync, chosen: Sequence[node_facts.NodeFacts]) -> bool:
        """Write the record with the nodes to assign; return whether the pool has it."""
        record = sync.decision.record
        if record is None:
            return True
        if chosen:
            record = rollout_record.record_assignment(record, chosen, sync.now)
        if record.to_json() == sync.pool.status.get(rollout_record.ROLLOUT_STATUS):
            return True
        try:
            written = self._writer.write_record(sync.pool, record)
        except ClusterError as error:
            sync.record_error(error)
            return False
        sync.pool = self._pools.record_write(sync.pool, written)
        return True

    def _choose_nodes(self, sync: _PoolSync) -> Sequence[node_facts.NodeFacts]:
        """Return the nodes to assign now, with their locks."""
        decision = sync.decision
        if decision.target is None:
            return ()
        by_name = {node.name: node for node in sync.nodes}
        nodes = [by_name[name] for name in decision.nodes_to_assign]
        server = sync.policy.lock_server
        granted = nodes if server is None else self._acquire_locks(sync, server, nodes)
        return (*self._find_unconfirmed(sync, decision.target), *granted)

    def _assign_nodes(self, sync: _PoolSync, chosen: Sequence[node_facts.NodeFacts]) -> None:
        target, server = sync.decision.target, sync.policy.lock_server
        if target is None or not chosen:
            return
        for error in self._writer.assign_target(
            chosen,
            target,
            sync.pool.name,
            lock_server="" if server is None else server.text,
            settings=self._build_settings(sync),
        ):
            sync.record_error(error)

    def _acquire_locks(
        self,
        sync: _PoolSync,
        server: rollout_policy.LockServer,
        nodes: Sequence[node_facts.NodeFacts],
    ) -> Sequence[node_facts.NodeFacts]:
        """Return the nodes that got a lock, up to the first one that did not."""
        try:
            result = self._locks.acquire_locks(sync.pool, server, nodes)
        except ClusterError as error:
            sync.record_error(error)
            return ()
        sync.pool = result.pool
        if isinstance(result.answer, os_image.GateWaiting | os_image.GateBlocked):
            sync.decision = _apply_gate_verdict(sync.decision, result.answer)
        if (delay_s := external_gates.find_retry_s(result.answer)) is not None:
            sync.requeue_after_s.append(delay_s)
        return result.granted

    def _build_settings(self, sync: _PoolSync) -> node_facts.NodeSettings:
        is_single = self._caches.is_single_node()
        return writer.build_settings(sync.pool, sync.policy, is_single_node=is_single)

    def _copy_settings(self, sync: _PoolSync) -> None:
        """Copy changed settings to the nodes. A paused pool changes nothing."""
        target = sync.decision.target
        if target is None or sync.stale_reason or sync.pool.paused or sync.pool.is_deleting:
            return
        changes = writer.find_settings_changes(
            self._expected.overlay_nodes(sync.snapshot.nodes),
            self._build_settings(sync),
            target,
            sync.decision.nodes_to_assign,
        )
        for error in self._writer.copy_settings(changes):
            sync.record_error(error)

    def _copy_pinned_sets(self, sync: _PoolSync) -> None:
        """Name the pinned image sets on the nodes of the pool, also while it is paused."""
        sets = self._caches.list_pinned_sets()
        if sets is None or sync.stale_reason or sync.pool.is_deleting:
            return
        names = [name for name in sorted(sets) if sync.pool.selects(sets[name].labels)]
        names = names[:_MAX_PINNED_SETS]
        wanted = ",".join(f"{name}@{sets[name].generation}" for name in names)
        changes = [
            writer.SettingsChange(node, {key.PINNED_IMAGE_SETS: wanted or None})
            for node in self._expected.overlay_nodes(sync.snapshot.nodes)
            if node.settings.pinned_sets != wanted
        ]
        for error in self._writer.copy_settings(changes):
            sync.record_error(error)

    def _update_prestage(self, sync: _PoolSync) -> None:
        """Request or withdraw prestaging. No other write depends on it."""
        prestage = sync.decision.prestage
        if not (prestage.nodes_to_request or prestage.nodes_to_withdraw):
            return
        by_name = {node.name: node for node in sync.snapshot.nodes}
        for names, target in (
            (prestage.nodes_to_request, sync.decision.target),
            (prestage.nodes_to_withdraw, None),
        ):
            nodes = [by_name[name] for name in names if name not in sync.decision.nodes_to_assign]
            for error in self._writer.request_prestage(nodes, target):
                sync.record_error(error)

    def _find_unconfirmed(
        self, sync: _PoolSync, target: node_facts.RolloutTarget
    ) -> tuple[node_facts.NodeFacts, ...]:
        """Return nodes whose last write got no response or a conflict.

        They count as assigned, so the write must be repeated until it is confirmed.
        """
        record = sync.decision.record
        is_halted = record is not None and record.halted_by is not None
        if sync.stale_reason or is_halted or sync.pool.paused or sync.pool.is_deleting:
            return ()
        return self._expected.find_unconfirmed(sync.nodes, target)

    def _release_locks(self, sync: _PoolSync) -> None:
        """Release the locks of nodes at rest, also while the pool is paused."""
        if sync.stale_reason:
            return
        members = {node.name: node for node in self._expected.overlay_nodes(sync.snapshot.nodes)}
        result = self._locks.release_locks(
            sync.pool,
            members.values(),
            # Also nodes that left the pool.
            lambda name: members.get(name) or self._caches.find_node(name),
            sync.decision.nodes_to_assign,
        )
        sync.pool = result.pool
        if (delay_s := external_gates.find_retry_s(result.answer)) is not None:
            sync.requeue_after_s.append(delay_s)
        for error in result.errors:
            sync.record_error(error)

    def _report_status(self, sync: _PoolSync) -> None:
        desired = self._compute_status(sync)
        written_at = self._status_written_at.get(sync.pool.name, float("-inf"))
        since_last_s = self._clock.monotonic() - written_at
        delay_s = pool_status.compute_write_delay_s(sync.pool, desired, since_last_s)
        if delay_s is None:
            return
        if delay_s > 0:
            sync.requeue_after_s.append(delay_s)
            return
        before = sync.pool
        try:
            sync.pool = self._pools.record_write(before, self._writer.write_status(before, desired))
        except ClusterError as error:
            sync.record_error(error)
            return
        self._status_written_at[before.name] = self._clock.monotonic()
        self._emit_warnings(before, desired)

    def _report_policy(self, sync: _PoolSync) -> None:
        """Show the rollout in the status of the policy that the pool names, and in no other."""
        if sync.stale_reason:
            return
        is_updated = all(node.is_updated_to(sync.target) for node in sync.nodes)
        status_input = policy_status.PolicyStatusInput(
            sync.pool, sync.policy, sync.decision, is_updated, sync.now
        )
        try:
            self._policy_reporter.report_pool(status_input)
        except ClusterError as error:
            sync.record_error(error)

    def _compute_status(self, sync: _PoolSync) -> pool_status.PoolStatus:
        problem = sync.decision.problem or _find_problem(sync)
        now = clocks.format_rfc3339(sync.now)
        if problem is not None and pool_membership.is_unusable(sync.snapshot):
            return pool_status.build_unusable_status(sync.pool, problem, now=now)
        status_input = pool_status.PoolStatusInput(
            pool=sync.pool,
            target=sync.target,
            nodes=sync.nodes,
            image_config=sync.image.config,
            image_build=sync.image.build,
            waiting_reason=sync.decision.waiting_reason,
            progress_message=sync.decision.progress_message,
            stalled_message=sync.decision.stalled_message,
            problem=problem,
            image_tag=sync.image_tag,
            open_labels=node_selection.find_open_labels(sync.policy),
        )
        return pool_status.compute_status(status_input, now=now)

    def _emit_warnings(
        self, pool: machineconfigpool.MachineConfigPool, written: pool_status.PoolStatus
    ) -> None:
        """Emit an Event for a problem that is new or has another message."""
        regarding = self._pool_writer.refer_to(pool)
        for condition in pool_status.find_new_problems(pool, written):
            self._events.record_warning(regarding, condition.reason, condition.message)


def _apply_gate_verdict(
    decision: RolloutDecision, verdict: os_image.GateWaiting | os_image.GateBlocked
) -> RolloutDecision:
    """Return the decision with the answer of a lock server that granted no (further) lock."""
    match verdict:
        case os_image.GateWaiting(reason):
            return replace(decision, waiting_reason=reason)
        case os_image.GateBlocked(reason, kind):
            return replace(decision, problem=pool_status.PoolProblem(kind, reason))


def _find_problem(sync: _PoolSync) -> pool_status.PoolProblem | None:
    """Find a problem that needs a user although the rollout continues."""
    if errors := sync.snapshot.membership_errors:
        more = f"; and {len(errors) - 1} more such nodes" if len(errors) > 1 else ""
        return pool_status.PoolProblem(
            pool_status.NODE_IN_TWO_POOLS,
            f"{pool_status.build_config_problem(errors[0]).message}{more}",
        )
    rejected = [error for error in sync.errors if isinstance(error, ForbiddenError | InvalidError)]
    return pool_status.PoolProblem("WriteRefused", str(rejected[0])) if rejected else None
