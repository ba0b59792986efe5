"""Own writes that the cache does not show yet.

Every write is conditional on the resourceVersion that the decision was based on. While the cache
shows this version, it does not know the write. Any other version in the cache already includes the
result of the write, because a watch only moves forward.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools import node_facts


@dataclass(frozen=True, slots=True)
class ExpectedTarget:
    """A target that was written to a node."""

    resource_version: str
    """The resourceVersion that the write replaced."""
    target: node_facts.RolloutTarget
    assigned_at: float
    is_confirmed: bool = True
    """False without a response that says so: the write may or may not have happened."""
    has_conflict: bool = False
    """The API server rejected the write, because the node changed."""


class ExpectedNodes:
    """Nodes with a target that the cache may not show yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_node: dict[str, ExpectedTarget] = {}
        self._prestage_by_node: dict[str, tuple[str, node_facts.RolloutTarget | None]] = {}

    def expect_target(
        self, node: node_facts.NodeFacts, target: node_facts.RolloutTarget, assigned_at: float
    ) -> None:
        """Count the target as written. Call it before the write: the response may get lost."""
        version = node.resource_version
        with self._lock:
            before = self._by_node.get(node.name)
            self._by_node[node.name] = ExpectedTarget(
                version,
                target,
                assigned_at,
                is_confirmed=False,
                has_conflict=(
                    before is not None
                    and before.has_conflict
                    and before.resource_version == version
                ),
            )

    def confirm_target(self, name: str) -> None:
        """Note that the write happened."""
        with self._lock:
            if (expected := self._by_node.get(name)) is not None:
                self._by_node[name] = replace(expected, is_confirmed=True)

    def note_conflict(self, name: str) -> bool:
        """Note a conflict; return True if the same write had one before.

        A retry after a lost response conflicts with its own first write, so the target still counts
        as written. The write is repeated until the cache shows another version: an admission
        webhook or a proxy may answer 409 although nothing changed.
        """
        with self._lock:
            if (expected := self._by_node.get(name)) is None:
                return False
            self._by_node[name] = replace(expected, has_conflict=True)
            return expected.has_conflict

    def forget_target(self, name: str) -> None:
        """Forget a write that the API server rejected."""
        with self._lock:
            self._by_node.pop(name, None)

    def expect_prestage(
        self, node: node_facts.NodeFacts, target: node_facts.RolloutTarget | None
    ) -> None:
        """Note a request to prestage the target, or its withdrawal (None)."""
        with self._lock:
            self._prestage_by_node[node.name] = (node.resource_version, target)

    def overlay_nodes(
        self, nodes: Iterable[node_facts.NodeFacts]
    ) -> tuple[node_facts.NodeFacts, ...]:
        """Return the nodes, with the written targets where the cache does not show them yet."""
        overlaid = self._overlay_prestage(tuple(nodes))
        written = {}
        with self._lock:
            for node in overlaid if self._by_node else ():
                if (expected := self._by_node.get(node.name)) is None:
                    continue
                if expected.resource_version == node.resource_version:
                    written[node.name] = (expected.target, expected.assigned_at)
                else:
                    del self._by_node[node.name]
        return node_facts.overlay_written(overlaid, written) if written else overlaid

    def find_unconfirmed(
        self, nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget
    ) -> tuple[node_facts.NodeFacts, ...]:
        """Return the nodes whose write of this target is unconfirmed."""
        with self._lock:
            return tuple(
                node
                for node in nodes
                if (expected := self._by_node.get(node.name)) is not None
                and (expected.is_confirmed, expected.target) == (False, target)
            )

    def forget_node(self, name: str) -> None:
        """Forget a deleted node."""
        with self._lock:
            self._by_node.pop(name, None)
            self._prestage_by_node.pop(name, None)

    def _overlay_prestage(
        self, nodes: tuple[node_facts.NodeFacts, ...]
    ) -> tuple[node_facts.NodeFacts, ...]:
        with self._lock:
            if not self._prestage_by_node:
                return nodes
            overlaid = []
            for node in nodes:
                version, target = self._prestage_by_node.get(node.name, ("", None))
                if version == node.resource_version:
                    overlaid.append(replace(node, prestage_target=target))
                else:
                    self._prestage_by_node.pop(node.name, None)
                    overlaid.append(node)
        return tuple(overlaid)


class ExpectedPools:
    """Pools as the controller last wrote them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, tuple[frozenset[str], MachineConfigPool]] = {}

    def record_write(
        self, previous: MachineConfigPool, written: MachineConfigPool
    ) -> MachineConfigPool:
        """Store and return the pool from the response to a write over ``previous``."""
        with self._lock:
            older, _ = self._by_name.get(previous.name, (frozenset[str](), previous))
            self._by_name[previous.name] = (older | {previous.metadata.resource_version}, written)
        return written

    def get_latest(self, cached: MachineConfigPool) -> MachineConfigPool:
        """Return the written pool while the cache still shows an older version, else ``cached``."""
        with self._lock:
            older, written = self._by_name.get(cached.name, (frozenset[str](), cached))
            if cached.metadata.resource_version in older:
                return written
            self._by_name.pop(cached.name, None)
            return cached

    def forget_pool(self, name: str) -> None:
        """Forget a deleted pool."""
        with self._lock:
            self._by_name.pop(name, None)
