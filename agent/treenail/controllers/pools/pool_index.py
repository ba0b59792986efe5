"""Index of nodes by pool, so that the cost of a reconciliation grows with its pool alone."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from treenail import label_selector
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools import node_facts, node_selection, pool_membership
from treenail.errors import ConfigError

_NO_LABELS: Mapping[str, str] = {}
_ANY_LABEL = ""
"""Key of the selectors that require no label. No label has an empty name."""


class SelectedPools:
    """Pools by a label that their selector requires, so that few selectors are evaluated.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, pool_membership.ObservedPool] = {}
        self._by_label: dict[str, list[MachineConfigPool]] = {}

    def set_pool(self, name: str, pool: pool_membership.ObservedPool | None) -> bool:
        """Store a pool, None removes it; return True if nodes may belong to another pool now."""
        with self._lock:
            before = self._pools.get(name)
            if pool is None:
                self._pools.pop(name, None)
            else:
                self._pools[name] = pool
            if before and pool and before.selection_key == pool.selection_key:
                return False
            self._by_label = _group_by_label(observed.pool for observed in self._pools.values())
            return before is not None or pool is not None

    def find(self, name: str) -> pool_membership.ObservedPool | None:
        """Return the stored pool."""
        with self._lock:
            return self._pools.get(name)

    def get_names(self) -> frozenset[str]:
        """Return the names of all pools."""
        with self._lock:
            return frozenset(self._pools)

    def find_unreadable(self) -> tuple[str, ...]:
        """Return the names of the pools with an invalid spec, sorted."""
        with self._lock:
            return tuple(sorted(name for name, observed in self._pools.items() if observed.error))

    def find_candidates(self, labels: Mapping[str, str]) -> list[MachineConfigPool]:
        """Return the pools that may select a node with these labels."""
        with self._lock:
            labelled = [pool for label in labels for pool in self._by_label.get(label, ())]
            return labelled + self._by_label.get(_ANY_LABEL, [])

    def find_primary(self, node: str, labels: Mapping[str, str]) -> str | None:
        """Return the pool that determines the config of a node; None without exactly one."""
        membership = pool_membership.try_find_membership(node, labels, self.find_candidates(labels))
        return membership.primary if isinstance(membership, pool_membership.Membership) else None


def _group_by_label(pools: Iterable[MachineConfigPool]) -> dict[str, list[MachineConfigPool]]:
    grouped: dict[str, list[MachineConfigPool]] = {}
    for pool in pools:
        if (selector := pool.node_selector) is not None and not selector.is_empty:
            grouped.setdefault(_find_required_label(selector), []).append(pool)
    return grouped


def _find_required_label(selector: label_selector.LabelSelector) -> str:
    """Return a label without which the selector matches nothing, else `_ANY_LABEL`."""
    for requirement in selector.requirements:
        if requirement.operator in (
            label_selector.SelectorOperator.IN,
            label_selector.SelectorOperator.EXISTS,
        ):
            return requirement.key
    return _ANY_LABEL


class PoolIndex:
    """The pools and the names of their nodes. Thread-safe.

    ``find_pool`` and ``find_node`` return the objects as the watches show them. A change of a
    node's labels costs one lookup. A change of a selector assigns all nodes again, at the next
    read.
    """

    def __init__(
        self,
        find_pool: Callable[[str], pool_membership.ObservedPool | None],
        find_node: Callable[[str], node_facts.NodeFacts | None],
    ) -> None:
        self._find_pool = find_pool
        self._find_node = find_node
        self._lock = threading.RLock()
        self._pools = SelectedPools()
        self._labels: dict[str, Mapping[str, str]] = {}
        self._memberships: dict[str, pool_membership.Membership | ConfigError | None] = {}
        self._members: dict[str, set[str]] = {}
        self._failed: dict[str, dict[str, ConfigError]] = {}
        self._etcd_members: set[str] = set()
        self._is_outdated = False

    def set_pool(self, name: str, pool: pool_membership.ObservedPool | None) -> None:
        """Store a pool; None removes it."""
        with self._lock:
            self._is_outdated |= self._pools.set_pool(name, pool)

    def set_node(self, name: str, labels: Mapping[str, str] | None) -> frozenset[str]:
        """Store the labels of a node; None removes it. Return the pools that this affects.

        A member of etcd affects all pools with members.
        """
        with self._lock:
            before = self._find_pools(name)
            was_member = name in self._etcd_members
            if labels is not None and node_selection.is_etcd_member(labels):
                self._etcd_members.add(name)
            else:
                self._etcd_members.discard(name)
            if was_member or name in self._etcd_members:
                before = before.union(*map(self._find_pools, self._etcd_members))
            if labels is None:
                self._remove_membership(name)
                self._labels.pop(name, None)
            elif self._is_outdated or self._labels.get(name) != labels:
                self._labels[name] = labels
                self._add_membership(name)
            return before | self._find_pools(name)

    def find_pools(self, name: str, labels: Mapping[str, str]) -> frozenset[str]:
        """Return the pools that a node with these labels belongs to now.

        `set_node` also returns those that it belonged to before, such as a deleted pool.
        """
        with self._lock:
            self.set_node(name, labels)
            return self._find_pools(name)

    def list_etcd_members(self) -> tuple[node_facts.NodeFacts, ...]:
        """Return the nodes of all pools, and of none, that count as members of etcd."""
        with self._lock:
            names = sorted(self._etcd_members)
        return tuple(node for node in map(self._find_node, names) if node is not None)

    def describe_strays(self, nodes: Iterable[node_facts.NodeFacts]) -> tuple[str, ...]:
        """Describe the nodes with an agent whose pool is none or not the expected one."""
        with self._lock:
            if self._is_outdated:
                self._assign_all()
            found = [
                pool_membership.describe_stray(
                    node.name, node.current_config, self._find_membership(node)
                )
                for node in nodes
            ]
        return tuple(filter(None, found))

    def _find_membership(
        self, node: node_facts.NodeFacts
    ) -> pool_membership.Membership | ConfigError | None:
        # The watch may already show other labels, while its handler waits for the lock.
        if self._labels.get(node.name) != node.labels:
            self.set_node(node.name, node.labels)
        return self._memberships.get(node.name)

    def has_one_node(self) -> bool:
        """Return whether the cluster has one node only."""
        with self._lock:
            return len(self._labels) == 1

    def get_pool_names(self) -> frozenset[str]:
        """Return the names of all pools."""
        return self._pools.get_names()

    def read_pool(self, name: str) -> pool_membership.PoolSnapshot | None:
        """Return the pool and its nodes, sorted by name; None when it does not exist."""
        observed = self._find_pool(name)
        with self._lock:
            # The watch may already show another pool, while its handler waits for the lock.
            self.set_pool(name, observed)
            if observed is None:
                return None
            if self._is_outdated:
                self._assign_all()
            nodes = tuple(self._iter_nodes(name))
            errors = sorted(self._failed.get(name, {}).items())
            unreadable = tuple(other for other in self._pools.find_unreadable() if other != name)
            return pool_membership.PoolSnapshot(
                observed, nodes, tuple(error for _node, error in errors), unreadable
            )

    def _iter_nodes(self, pool: str) -> Iterator[node_facts.NodeFacts]:
        for name in sorted(self._members.get(pool, ())):
            node = self._find_node(name)
            if node is None:
                continue
            # The watch may already show other labels, while its handler waits for the lock.
            if node.labels != self._labels[name]:
                self._labels[name] = node.labels
                self._add_membership(name)
            if name in self._members.get(pool, ()):
                yield node

    def _assign_all(self) -> None:
        self._memberships, self._members, self._failed = {}, {}, {}
        for name in self._labels:
            self._add_membership(name)
        self._is_outdated = False

    def _add_membership(self, name: str) -> None:
        self._remove_membership(name)
        labels = self._labels[name]
        candidates = self._pools.find_candidates(labels)
        membership = pool_membership.try_find_membership(name, labels, candidates)
        self._memberships[name] = membership
        if isinstance(membership, pool_membership.Membership):
            self._members.setdefault(membership.primary, set()).add(name)
        elif membership is not None:
            for pool in pool_membership.find_selecting_pools(labels, candidates):
                self._failed.setdefault(pool, {})[name] = membership

    def _remove_membership(self, name: str) -> None:
        membership = self._memberships.pop(name, None)
        if isinstance(membership, pool_membership.Membership):
            self._members[membership.primary].discard(name)
        elif membership is not None:
            for failed in self._failed.values():
                failed.pop(name, None)

    def _find_pools(self, name: str) -> frozenset[str]:
        """Return the pools to reconcile when the node changes."""
        match self._memberships.get(name):
            case pool_membership.Membership() as membership:
                return frozenset(membership.pools)
            case ConfigError():
                labels = self._labels.get(name, _NO_LABELS)
                return frozenset(
                    pool_membership.find_selecting_pools(
                        labels, self._pools.find_candidates(labels)
                    )
                )
            case _:
                return frozenset()
