"""Locks of FleetLock servers: which nodes may hold one, and which locks to release.

A lock is recorded in the status of the pool before it is requested. So no lock is lost when the
process ends between both, when the node is deleted or when it leaves the pool. For a pool that is
deleted, the annotation of the node says which server of a RolloutPolicy granted the lock.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from treenail.api import decode, machineconfigpool
from treenail.controllers.pools import node_facts, rollout_policy
from treenail.controllers.rollout.external_gates import LockHolder
from treenail.encoding import codec

LOCKS_STATUS = "fleetLocks"
"""Field of a pool's status. Only the rollout controller may write it."""


@dataclass(frozen=True, slots=True)
class NodeLock(codec.JsonObject):
    """A lock that a node may hold: it was requested, and not released since."""

    server: Annotated[rollout_policy.LockServer, codec.INLINE]
    holder: Annotated[LockHolder, codec.INLINE]


def get_holder(node: node_facts.NodeFacts) -> LockHolder:
    """Return the holder of a node's lock."""
    return LockHolder(node.name, node.uid)


def read_locks(pool: machineconfigpool.MachineConfigPool) -> tuple[NodeLock, ...]:
    """Read the locks that nodes of the pool may hold; raises `ConfigError`."""
    return decode.Fields(pool.status, "status").read_list(LOCKS_STATUS, NodeLock)


def add_locks(
    present: tuple[NodeLock, ...],
    server: rollout_policy.LockServer,
    nodes: Iterable[node_facts.NodeFacts],
) -> tuple[NodeLock, ...]:
    """Return the locks together with those to request for the nodes."""
    wanted = (NodeLock(server, get_holder(node)) for node in nodes)
    return (*present, *(lock for lock in wanted if lock not in present))


def find_releasable_locks(
    locks: Iterable[NodeLock],
    find_node: Callable[[str], node_facts.NodeFacts | None],
    busy: Collection[str] = (),
) -> tuple[NodeLock, ...]:
    """Find the locks whose node is at rest, was deleted, or was installed again.

    ``busy`` nodes get the target now.
    """
    releasable = []
    for lock in locks:
        node = find_node(lock.holder.name)
        is_gone = node is None or node.uid != lock.holder.uid
        if is_gone or (node is not None and node.name not in busy and is_at_rest(node)):
            releasable.append(lock)
    return tuple(releasable)


def find_annotated_locks(
    nodes: Iterable[node_facts.NodeFacts], policies: Mapping[str, rollout_policy.ObservedPolicy]
) -> tuple[NodeLock, ...]:
    """Find the locks in the annotations of the nodes, of servers of these policies only.

    A node can write its annotation, and must not choose where the controller sends requests.
    """
    servers = [observed.policy.lock_server for observed in policies.values()]
    by_text = {server.text: server for server in servers if server is not None}
    return tuple(
        NodeLock(by_text[node.locked_by], get_holder(node))
        for node in nodes
        if node.locked_by in by_text
    )


def is_at_rest(node: node_facts.NodeFacts) -> bool:
    """True when no update of the node is in progress."""
    return node.is_in_service and (node.is_done or node.is_unassigned)
