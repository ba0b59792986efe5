"""What was written and is not seen yet: a cache lags behind the controller's own writes.

Whatever is written here is written on condition that the object is still the version it was
judged by. So a cache that shows this very version says nothing about the write, and one that
shows any other version shows what became of it: caches only go forward.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget, overlay_written


@dataclass(frozen=True, slots=True)
class ExpectedTarget:
    """A target that a node was given."""

    resource_version: str
    """The node's resource version that it was written over."""
    target: RolloutTarget
    assigned_at: float
    is_confirmed: bool = True
    """False when the answer was lost: the write may or may not have happened."""


class ExpectedNodes:
    """The nodes that were given a target which the cache may not show. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_node: dict[str, ExpectedTarget] = {}
        self._prestage_by_node: dict[str, tuple[str, RolloutTarget | None]] = {}

    def expect_target(self, node: NodeFacts, target: RolloutTarget, assigned_at: float) -> None:
        """Count the target as written from before it is: the answer may get lost."""
        with self._lock:
            self._by_node[node.name] = ExpectedTarget(
                node.resource_version, target, assigned_at, is_confirmed=False
            )

    def confirm_target(self, name: str) -> None:
        """The write is over: it happened, or the node is another version by now."""
        with self._lock:
            if (found := self._by_node.get(name)) is not None:
                self._by_node[name] = replace(found, is_confirmed=True)

    def forget_target(self, name: str) -> None:
        """The write was refused, and will never happen."""
        with self._lock:
            self._by_node.pop(name, None)

    def expect_prestage(self, node: NodeFacts, target: RolloutTarget | None) -> None:
        """The node was asked to stage this ahead, or nothing any more."""
        with self._lock:
            self._prestage_by_node[node.name] = (node.resource_version, target)

    def overlay_nodes(self, nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
        """The nodes with what they were given, where the cache can't tell what came of it."""
        seen = self._overlay_prestage(tuple(nodes))
        written = {}
        with self._lock:
            for node in seen if self._by_node else ():
                if (found := self._by_node.get(node.name)) is None:
                    continue
                if found.resource_version == node.resource_version:
                    written[node.name] = (found.target, found.assigned_at)
                else:
                    del self._by_node[node.name]
        return overlay_written(seen, written) if written else seen

    def find_unconfirmed(
        self, nodes: Iterable[NodeFacts], target: RolloutTarget
    ) -> tuple[NodeFacts, ...]:
        """Those of the nodes of which nobody knows whether they were given this target."""
        with self._lock:
            return tuple(
                node
                for node in nodes
                if (found := self._by_node.get(node.name)) is not None
                and (found.is_confirmed, found.target) == (False, target)
            )

    def retain_nodes(self, names: Iterable[str]) -> None:
        """Forget the nodes that are not among the names."""
        known = frozenset(names)
        with self._lock:
            for name in self._by_node.keys() - known:
                del self._by_node[name]
            for name in self._prestage_by_node.keys() - known:
                del self._prestage_by_node[name]

    def _overlay_prestage(self, nodes: tuple[NodeFacts, ...]) -> tuple[NodeFacts, ...]:
        with self._lock:
            if not self._prestage_by_node:
                return nodes
            found = []
            for node in nodes:
                version, target = self._prestage_by_node.get(node.name, ("", None))
                if version == node.resource_version:
                    found.append(replace(node, prestage_target=target))
                else:
                    self._prestage_by_node.pop(node.name, None)
                    found.append(node)
        return tuple(found)


class ExpectedPools:
    """The pools as the controller wrote them last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, tuple[frozenset[str], MachineConfigPool]] = {}

    def record_write(
        self, previous: MachineConfigPool, written: MachineConfigPool
    ) -> MachineConfigPool:
        """Remember what the server answered to a write; it is returned."""
        with self._lock:
            older, _ = self._by_name.get(previous.name, (frozenset[str](), previous))
            self._by_name[previous.name] = (older | {previous.metadata.resource_version}, written)
        return written

    def get_latest(self, cached: MachineConfigPool) -> MachineConfigPool:
        """The pool as it was written if the cache still shows it as it was before."""
        with self._lock:
            older, written = self._by_name.get(cached.name, (frozenset[str](), cached))
            if cached.metadata.resource_version in older:
                return written
            self._by_name.pop(cached.name, None)
            return cached

    def forget_pool(self, name: str) -> None:
        """The pool is gone."""
        with self._lock:
            self._by_name.pop(name, None)
