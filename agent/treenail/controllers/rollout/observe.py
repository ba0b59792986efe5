"""The caches of pools and nodes to what concerns one pool."""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts
from treenail.controllers.rollout.pools import Membership, membership
from treenail.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SeenPool:
    """A pool, or what can be read of it."""

    pool: MachineConfigPool
    error: ConfigError | None = None
    """Why its spec can't be read; then the pool is one without a spec."""

    @classmethod
    def from_json(cls, document: Json) -> "SeenPool":
        """The pool in an API object; raises `ConfigError` if not even its metadata is right."""
        try:
            return cls(MachineConfigPool.from_json(document))
        except ConfigError as error:
            rest = {name: value for name, value in document.items() if name != "spec"}
            return cls(MachineConfigPool.from_json(rest), error)

    @property
    def selects(self) -> tuple[object, ...]:
        """What the membership of nodes depends on."""
        return self.pool.node_selector, self.error is None

    @property
    def relevant(self) -> tuple[object, ...]:
        """What a decision or the pool's conditions depend on."""
        meta = self.pool.metadata
        return (
            meta.uid,
            meta.generation,
            meta.annotations,
            self.pool.deleting,
            self.pool.conditions,
            str(self.error),
        )


@dataclass(frozen=True, slots=True)
class Sight:
    """One pool and its nodes by the caches."""

    seen: SeenPool
    nodes: tuple[NodeFacts, ...]
    disputes: tuple[ConfigError, ...] = ()
    """Of the nodes that this pool and another one select."""
    unreadable: tuple[str, ...] = ()
    """Other pools whose spec can't be read: nobody knows which nodes they are to have."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All pools with their nodes."""

    pools: Mapping[str, SeenPool]
    members: Mapping[str, tuple[NodeFacts, ...]]
    disputes: Mapping[str, tuple[ConfigError, ...]] = field(default_factory=dict)

    def of(self, pool: str) -> Sight | None:
        """What concerns the pool, None when there is no such pool."""
        if (seen := self.pools.get(pool)) is None:
            return None
        unreadable = sorted(
            name for name, other in self.pools.items() if other.error is not None and name != pool
        )
        return Sight(
            seen, self.members.get(pool, ()), self.disputes.get(pool, ()), tuple(unreadable)
        )


class Grouping:
    """Which nodes belong to which pool, worked out anew only for what changed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selectors: object = None
        self._known: dict[str, tuple[NodeFacts, Membership | ConfigError | None]] = {}

    def look(self, pools: Mapping[str, SeenPool], nodes: Mapping[str, NodeFacts]) -> Picture:
        """The nodes by the pool whose configuration they get."""
        readable = [seen.pool for seen in pools.values()]
        selectors = [(pool.name, pool.node_selector) for pool in readable]
        members: dict[str, list[NodeFacts]] = {}
        disputes: dict[str, list[ConfigError]] = {}
        with self._lock:
            if selectors != self._selectors:
                self._selectors, self._known = selectors, {}
            for name in self._known.keys() - nodes.keys():
                del self._known[name]
            # By name, so that nothing depends on what the cache learned last.
            for name, node in sorted(nodes.items(), key=_name):
                known = self._known.get(name)
                if known is None or known[0] is not node:
                    self._known[name] = known = (node, _found(node, readable))
                match known[1]:
                    case Membership() as found:
                        members.setdefault(found.primary, []).append(node)
                    case ConfigError() as error:
                        for pool in _selecting(node, readable):
                            disputes.setdefault(pool, []).append(error)
                    case None:
                        pass
        return Picture(
            pools,
            {pool: tuple(found) for pool, found in members.items()},
            {pool: tuple(found) for pool, found in disputes.items()},
        )


def _name(item: tuple[str, NodeFacts]) -> str:
    return item[0]


def concerned(node: NodeFacts, pools: Iterable[SeenPool]) -> tuple[str, ...]:
    """The pools that have to be looked at when the node changes."""
    readable = [seen.pool for seen in pools]
    match _found(node, readable):
        case Membership() as found:
            return found.pools
        case ConfigError():
            return _selecting(node, readable)
        case _:
            return ()


def _found(node: NodeFacts, pools: Iterable[MachineConfigPool]) -> Membership | ConfigError | None:
    try:
        return membership(node.name, node.labels, pools)
    except ConfigError as error:
        return error


def _selecting(node: NodeFacts, pools: Iterable[MachineConfigPool]) -> tuple[str, ...]:
    return tuple(
        pool.name
        for pool in pools
        if pool.node_selector is not None
        and not pool.node_selector.selects_all
        and pool.node_selector.matches(node.labels)
    )
