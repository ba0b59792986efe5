"""Acquire and release the locks of nodes, and record them in the pool."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools import expected_writes, node_facts, os_image, rollout_policy
from treenail.controllers.rollout.external_gates import Gates
from treenail.controllers.rollout.locks import (
    NodeLock,
    add_locks,
    find_annotated_locks,
    find_releasable_locks,
    get_holder,
    is_at_rest,
    read_locks,
)
from treenail.controllers.rollout.writer import RolloutWriter
from treenail.errors import ClusterError, ConfigError, NotFoundError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LockResult:
    """Result of requests to lock servers."""

    pool: MachineConfigPool
    granted: Sequence[node_facts.NodeFacts] = ()
    answer: os_image.GateAnswer = None
    """The answer that stopped it, or None."""
    errors: list[ClusterError] = field(default_factory=list)


class LockManager:
    """Locks of the nodes of all pools. Thread-safe for different pools."""

    def __init__(
        self,
        gates: Gates,
        writer: RolloutWriter,
        pools: expected_writes.ExpectedPools,
        list_policies: Callable[[], Mapping[str, rollout_policy.ObservedPolicy]],
    ) -> None:
        self._gates = gates
        self._list_policies = list_policies
        self._writer = writer
        self._pools = pools
        self._lock = threading.Lock()
        self._pool_by_lock: dict[NodeLock, str] = {}
        """The pool that requested a lock last. A node may move to another pool."""
        self._in_release: set[NodeLock] = set()
        self._cleared: dict[NodeLock, str] = {}
        """The version of the Node whose annotation was removed; the watch shows that later."""

    def acquire_locks(
        self,
        pool: MachineConfigPool,
        server: rollout_policy.LockServer,
        nodes: Sequence[node_facts.NodeFacts],
    ) -> LockResult:
        """Acquire locks in this order, up to the first that is not granted.

        Raises `ClusterError` when the locks cannot be recorded. Then none is requested.
        """
        locks = read_locks(pool)
        wanted = add_locks(locks, server, nodes)
        # Recorded before the request: a granted lock must be released whatever happens.
        if wanted != locks:
            pool = self._write_locks(pool, wanted)
        with self._lock:
            for node in nodes:
                lock = NodeLock(server, get_holder(node))
                self._pool_by_lock[lock] = pool.name
                self._cleared.pop(lock, None)
        for index, node in enumerate(nodes):
            answer = self._gates.acquire_lock(server, get_holder(node))
            if answer is not None:
                return LockResult(pool, nodes[:index], answer)
        return LockResult(pool, nodes)

    def release_locks(
        self,
        pool: MachineConfigPool,
        members: Iterable[node_facts.NodeFacts],
        find_node: Callable[[str], node_facts.NodeFacts | None],
        busy: Collection[str],
    ) -> LockResult:
        """Release the locks of the pool's nodes at rest and of nodes that are gone."""
        result = LockResult(pool)
        try:
            locks = read_locks(pool)
        except ConfigError as error:
            log.warning("cannot read the locks of pool %s: %s", pool.name, error)
            return result
        members = tuple(members)
        names = {node.name for node in members}
        annotated = find_annotated_locks(members, self._list_policies())
        released = [
            lock
            for lock in find_releasable_locks(dict.fromkeys((*locks, *annotated)), find_node, busy)
            # The pool that the node moved to releases it.
            if (lock.holder.name not in names and self._was_requested_by_another(lock, pool.name))
            or self._release_lock(lock, find_node(lock.holder.name), result)
        ]
        left = tuple(lock for lock in locks if lock not in released)
        if left != locks:
            try:
                result.pool = self._write_locks(pool, left)
            except ClusterError as error:
                result.errors.append(error)
        return result

    def release_orphan(self, node: node_facts.NodeFacts) -> os_image.GateAnswer:
        """Release the lock in the annotation of a node that is in no pool; None when done."""
        result = LockResult(MachineConfigPool.from_json({}))
        for lock in find_annotated_locks([node], self._list_policies()):
            if is_at_rest(node):
                self._release_lock(lock, node, result)
        if result.errors:
            raise result.errors[0]
        return result.answer

    def _was_requested_by_another(self, lock: NodeLock, pool: str) -> bool:
        with self._lock:
            return self._pool_by_lock.get(lock, pool) != pool

    def _release_lock(
        self, lock: NodeLock, node: node_facts.NodeFacts | None, result: LockResult
    ) -> bool:
        """Release a lock once, although a deleted pool and its node may both request it."""
        with self._lock:
            if node is not None and self._cleared.get(lock) == node.resource_version:
                return True
            if lock in self._in_release:
                result.answer = result.answer or os_image.GatePending()
                return False
            self._in_release.add(lock)
        try:
            return self._release_once(lock, node, result)
        finally:
            with self._lock:
                self._in_release.discard(lock)

    def _release_once(
        self, lock: NodeLock, node: node_facts.NodeFacts | None, result: LockResult
    ) -> bool:
        answer = self._gates.release_lock(lock.server, lock.holder)
        if answer is not None:
            # Look again soon if any answer is pending.
            if result.answer is None or isinstance(answer, os_image.GatePending):
                result.answer = answer
            if not isinstance(answer, os_image.GatePending):
                name = lock.holder.name
                log.warning("cannot release the lock of node %s: %s", name, answer.reason)
            return False
        try:
            if node is not None and node.uid == lock.holder.uid and node.locked_by:
                self._writer.clear_lock(node)
                with self._lock:
                    self._cleared[lock] = node.resource_version
        except NotFoundError:
            log.debug("node %s is deleted", lock.holder.name)
        except ClusterError as error:
            result.errors.append(error)
            return False
        with self._lock:
            self._pool_by_lock.pop(lock, None)
        return True

    def _write_locks(self, pool: MachineConfigPool, locks: Iterable[NodeLock]) -> MachineConfigPool:
        return self._pools.record_write(pool, self._writer.write_locks(pool, locks))
