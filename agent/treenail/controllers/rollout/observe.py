"""The caches of pools and nodes to what concerns one pool."""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts
from treenail.controllers.rollout.pools import Membership, find_membership
from treenail.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """A pool, or what can be read of it."""

    pool: MachineConfigPool
    error: ConfigError | None = None
    """Why its spec can't be read; then the pool is one without a spec."""

    @classmethod
    def from_json(cls, document: Json) -> "ObservedPool":
        """The pool in an API object; raises `ConfigError` if not even its metadata is right."""
        try:
            return cls(MachineConfigPool.from_json(document))
        except ConfigError as error:
            rest = {name: value for name, value in document.items() if name != "spec"}
            return cls(MachineConfigPool.from_json(rest), error)

    @property
    def selection_key(self) -> tuple[object, ...]:
        """What the membership of nodes depends on."""
        return self.pool.node_selector, self.error is None

    @property
    def decision_key(self) -> tuple[object, ...]:
        """What a decision or the pool's conditions depend on."""
        meta = self.pool.metadata
        return (
            meta.uid,
            meta.generation,
            meta.annotations,
            self.pool.is_deleting,
            self.pool.conditions,
            str(self.error),
        )


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One pool and its nodes by the caches."""

    observed: ObservedPool
    nodes: tuple[NodeFacts, ...]
    membership_errors: tuple[ConfigError, ...] = ()
    """Of the nodes that this pool and another one select."""
    unreadable_pools: tuple[str, ...] = ()
    """Other pools whose spec can't be read: nobody knows which nodes they are to have."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All pools with their nodes."""

    pools: Mapping[str, ObservedPool]
    members: Mapping[str, tuple[NodeFacts, ...]]
    membership_errors: Mapping[str, tuple[ConfigError, ...]] = field(default_factory=dict)

    def find_pool(self, pool: str) -> PoolSnapshot | None:
        """What concerns the pool, None when there is no such pool."""
        if (seen := self.pools.get(pool)) is None:
            return None
        unreadable = sorted(
            name for name, other in self.pools.items() if other.error is not None and name != pool
        )
        return PoolSnapshot(
            seen,
            self.members.get(pool, ()),
            self.membership_errors.get(pool, ()),
            tuple(unreadable),
        )


class PoolGrouping:
    """Which nodes belong to which pool, worked out anew only for what changed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selectors: object = None
        self._memberships: dict[str, tuple[NodeFacts, Membership | ConfigError | None]] = {}

    def group_nodes(
        self, pools: Mapping[str, ObservedPool], nodes: Mapping[str, NodeFacts]
    ) -> ClusterSnapshot:
        """The nodes by the pool whose configuration they get."""
        readable = [seen.pool for seen in pools.values()]
        selectors = [(pool.name, pool.node_selector) for pool in readable]
        members: dict[str, list[NodeFacts]] = {}
        disputes: dict[str, list[ConfigError]] = {}
        with self._lock:
            if selectors != self._selectors:
                self._selectors, self._memberships = selectors, {}
            for name in self._memberships.keys() - nodes.keys():
                del self._memberships[name]
            # By name, so that nothing depends on what the cache learned last.
            for name, node in sorted(nodes.items(), key=_get_name):
                known = self._memberships.get(name)
                if known is None or known[0] is not node:
                    self._memberships[name] = known = (node, _try_find_membership(node, readable))
                match known[1]:
                    case Membership() as found:
                        members.setdefault(found.primary, []).append(node)
                    case ConfigError() as error:
                        for pool in _find_selecting_pools(node, readable):
                            disputes.setdefault(pool, []).append(error)
                    case None:
                        pass
        return ClusterSnapshot(
            pools,
            {pool: tuple(found) for pool, found in members.items()},
            {pool: tuple(found) for pool, found in disputes.items()},
        )


def _get_name(item: tuple[str, NodeFacts]) -> str:
    return item[0]


def find_pools_of_node(node: NodeFacts, pools: Iterable[ObservedPool]) -> tuple[str, ...]:
    """The pools that have to be looked at when the node changes."""
    readable = [seen.pool for seen in pools]
    match _try_find_membership(node, readable):
        case Membership() as found:
            return found.pools
        case ConfigError():
            return _find_selecting_pools(node, readable)
        case _:
            return ()


def _try_find_membership(
    node: NodeFacts, pools: Iterable[MachineConfigPool]
) -> Membership | ConfigError | None:
    try:
        return find_membership(node.name, node.labels, pools)
    except ConfigError as error:
        return error


def _find_selecting_pools(node: NodeFacts, pools: Iterable[MachineConfigPool]) -> tuple[str, ...]:
    return tuple(
        pool.name
        for pool in pools
        if pool.node_selector is not None
        and not pool.node_selector.is_empty
        and pool.node_selector.matches(node.labels)
    )
