"""What was written and is not seen yet: a cache lags behind the controller's own writes.

Whatever is written here is written on condition that the object is still the version it was
judged by. So a cache that shows this very version says nothing about the write, and one that
shows any other version shows what became of it: caches only go forward.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.nodes import NodeFacts, Target, as_written


@dataclass(frozen=True, slots=True)
class Expectation:
    """A target that a node was given."""

    version: str
    """The node's resource version that it was written over."""
    target: Target
    at: float
    sure: bool = True
    """False when the answer was lost: the write may or may not have happened."""


class ExpectedNodes:
    """The nodes that were given a target which the cache may not show. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_node: dict[str, Expectation] = {}
        self._staging: dict[str, tuple[str, Target | None]] = {}

    def expect(self, node: NodeFacts, target: Target, at: float) -> None:
        """Count the target as written from before it is: the answer may get lost."""
        with self._lock:
            self._by_node[node.name] = Expectation(node.resource_version, target, at, sure=False)

    def confirm(self, name: str) -> None:
        """The write is over: it happened, or the node is another version by now."""
        with self._lock:
            if (found := self._by_node.get(name)) is not None:
                self._by_node[name] = replace(found, sure=True)

    def forget(self, name: str) -> None:
        """The write was refused, and will never happen."""
        with self._lock:
            self._by_node.pop(name, None)

    def stages(self, node: NodeFacts, target: Target | None) -> None:
        """The node was asked to stage this ahead, or nothing any more."""
        with self._lock:
            self._staging[node.name] = (node.resource_version, target)

    def over(self, nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
        """The nodes with what they were given, where the cache can't tell what came of it."""
        seen = self._over_stages(tuple(nodes))
        written = {}
        with self._lock:
            for node in seen if self._by_node else ():
                if (found := self._by_node.get(node.name)) is None:
                    continue
                if found.version == node.resource_version:
                    written[node.name] = (found.target, found.at)
                else:
                    del self._by_node[node.name]
        return as_written(seen, written) if written else seen

    def unsure(self, nodes: Iterable[NodeFacts], target: Target) -> tuple[NodeFacts, ...]:
        """Those of the nodes of which nobody knows whether they were given this target."""
        with self._lock:
            return tuple(
                node
                for node in nodes
                if (found := self._by_node.get(node.name)) is not None
                and (found.sure, found.target) == (False, target)
            )

    def keep(self, names: Iterable[str]) -> None:
        """Forget the nodes that are not among the names."""
        known = frozenset(names)
        with self._lock:
            for name in self._by_node.keys() - known:
                del self._by_node[name]
            for name in self._staging.keys() - known:
                del self._staging[name]

    def _over_stages(self, nodes: tuple[NodeFacts, ...]) -> tuple[NodeFacts, ...]:
        with self._lock:
            if not self._staging:
                return nodes
            found = []
            for node in nodes:
                version, target = self._staging.get(node.name, ("", None))
                if version == node.resource_version:
                    found.append(replace(node, stage=target))
                else:
                    self._staging.pop(node.name, None)
                    found.append(node)
        return tuple(found)


class ExpectedPools:
    """The pools as the controller wrote them last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, tuple[frozenset[str], MachineConfigPool]] = {}

    def wrote(self, over: MachineConfigPool, answer: MachineConfigPool) -> MachineConfigPool:
        """Remember what the server answered to a write; it is returned."""
        with self._lock:
            older, _ = self._by_name.get(over.name, (frozenset[str](), over))
            self._by_name[over.name] = (older | {over.metadata.resource_version}, answer)
        return answer

    def latest(self, cached: MachineConfigPool) -> MachineConfigPool:
        """The pool as it was written if the cache still shows it as it was before."""
        with self._lock:
            older, written = self._by_name.get(cached.name, (frozenset[str](), cached))
            if cached.metadata.resource_version in older:
                return written
            self._by_name.pop(cached.name, None)
            return cached

    def forget(self, name: str) -> None:
        """The pool is gone."""
        with self._lock:
            self._by_name.pop(name, None)
