"""Pools and their nodes, by the rules of the Machine Config Operator (helpers.go)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treenail.api import decode, machineconfigpool
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.errors import ConfigError

OS_LABEL = "kubernetes.io/os"


@dataclass(frozen=True, slots=True)
class Membership:
    """The pools of one node, by name."""

    primary: str
    """The pool that determines the node's config."""
    secondary: str | None = None
    """The worker pool in addition to a custom one. It is reconciled when the node changes."""
    ignored: str | None = None
    """A custom pool that matched but lost against the master pool."""

    @property
    def pools(self) -> tuple[str, ...]:
        return (self.primary,) if self.secondary is None else (self.primary, self.secondary)


def find_membership(
    node: str, labels: Mapping[str, str], pools: Iterable[machineconfigpool.MachineConfigPool]
) -> Membership | None:
    """Find the pools of the node; None when no pool selects it.

    The master pool wins over custom pools, and a custom pool wins over the worker pool. Windows
    nodes belong to no pool. Raises `ConfigError` for a node that two custom pools select.
    """
    if labels.get(OS_LABEL) == "windows":
        return None
    names = sorted(pool.name for pool in pools if _is_selected_by(pool, labels))
    custom = [
        name for name in names if name not in (machineconfigpool.MASTER, machineconfigpool.WORKER)
    ]
    if len(custom) > 1:
        raise ConfigError(
            f"node {node} is selected by {len(custom)} custom pools: {', '.join(custom)}",
            remedy="change the labels of the node or the nodeSelector of a pool, so that only one "
            "custom pool selects it; until then the node keeps its configuration",
        )
    worker = machineconfigpool.WORKER if machineconfigpool.WORKER in names else None
    if custom:
        if machineconfigpool.MASTER in names:
            return Membership(machineconfigpool.MASTER, worker, ignored=custom[0])
        return Membership(custom[0], worker)
    if machineconfigpool.MASTER in names:
        return Membership(machineconfigpool.MASTER)
    return Membership(machineconfigpool.WORKER) if worker else None


def describe_stray(
    node: str, current_config: str, membership: Membership | ConfigError | None
) -> str:
    """Describe a node that has an agent, and whose pool is none or not the expected one.

    Empty for any other node. Two custom pools that select a node are an error of both pools.
    """
    if not current_config:
        return ""
    if membership is None:
        return (
            f"node {node} has an agent and the config {current_config}, and belongs to no pool, so "
            "that nothing updates it: correct its labels, or the nodeSelector of a pool"
        )
    if isinstance(membership, Membership) and membership.ignored is not None:
        return (
            f"node {node} belongs to pool {membership.primary}, although pool "
            f"{membership.ignored} selects it too: remove one of the labels"
        )
    return ""


def _is_selected_by(pool: machineconfigpool.MachineConfigPool, labels: Mapping[str, str]) -> bool:
    # In the Kubernetes API an empty selector matches everything; the MCO lets it match no node.
    selector = pool.node_selector
    return selector is not None and not selector.is_empty and selector.matches(labels)


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """A pool from the cache, possibly with an invalid spec."""

    pool: machineconfigpool.MachineConfigPool
    error: ConfigError | None = None
    """Why the spec is invalid; then ``pool`` has no spec."""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedPool":
        """Parse a pool; raises `ConfigError` only for invalid metadata or status."""
        try:
            return cls(machineconfigpool.MachineConfigPool.from_json(document))
        except ConfigError as error:
            if not isinstance(document, Mapping):
                raise
            rest = {name: value for name, value in document.items() if name != "spec"}
            return cls(machineconfigpool.MachineConfigPool.from_json(rest), error)

    @property
    def selection_key(self) -> tuple[object, ...]:
        """The fields that determine the membership of nodes."""
        return self.pool.node_selector, self.error is None

    @property
    def decision_key(self) -> tuple[object, ...]:
        """The fields that determine a decision or the pool's conditions."""
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
    """One pool and its nodes, from the caches."""

    observed: ObservedPool
    nodes: tuple[NodeFacts, ...]
    membership_errors: tuple[ConfigError, ...] = ()
    """One for each node that this and another custom pool select."""
    unreadable_pools: tuple[str, ...] = ()
    """Other pools with an invalid spec: their nodes are unknown."""


def is_unusable(snapshot: PoolSnapshot) -> bool:
    """Return whether the nodes of the pool cannot be determined."""
    selector = snapshot.observed.pool.node_selector
    return snapshot.observed.error is not None or (selector is not None and selector.is_empty)


def validate_pool(snapshot: PoolSnapshot) -> None:
    """Raise `ConfigError` for a pool whose nodes cannot be determined."""
    if snapshot.observed.error is not None:
        raise snapshot.observed.error
    if is_unusable(snapshot):
        raise ConfigError(
            f"spec.nodeSelector of pool {snapshot.observed.pool.name} is empty, so the pool "
            "selects no node",
            remedy="write a nodeSelector with at least one requirement",
        )


@dataclass(frozen=True, slots=True)
class DisputedNode:
    """A node that two custom pools select, so that it is a member of none."""

    node: NodeFacts
    error: ConfigError


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All pools with their nodes."""

    pools: Mapping[str, ObservedPool]
    members: Mapping[str, tuple[NodeFacts, ...]]
    disputed: Mapping[str, tuple[DisputedNode, ...]] = field(default_factory=dict)
    """By each pool that selects the node."""

    def find_pool(self, pool: str) -> PoolSnapshot | None:
        """Return the snapshot of the pool; None when it does not exist."""
        if (observed := self.pools.get(pool)) is None:
            return None
        unreadable = sorted(
            name for name, other in self.pools.items() if other.error is not None and name != pool
        )
        return PoolSnapshot(
            observed,
            self.members.get(pool, ()),
            tuple(node.error for node in self.disputed.get(pool, ())),
            tuple(unreadable),
        )


def group_nodes(
    pools: Mapping[str, ObservedPool], nodes: Mapping[str, NodeFacts]
) -> ClusterSnapshot:
    """Group the nodes by the pool that determines their config, sorted by name."""
    readable = [observed.pool for observed in pools.values()]
    members: dict[str, list[NodeFacts]] = {}
    disputed: dict[str, list[DisputedNode]] = {}
    for name, node in sorted(nodes.items(), key=_get_name):
        match try_find_membership(name, node.labels, readable):
            case Membership() as membership:
                members.setdefault(membership.primary, []).append(node)
            case ConfigError() as error:
                for pool in find_selecting_pools(node.labels, readable):
                    disputed.setdefault(pool, []).append(DisputedNode(node, error))
            case None:
                pass
    return ClusterSnapshot(
        pools,
        {pool: tuple(group) for pool, group in members.items()},
        {pool: tuple(group) for pool, group in disputed.items()},
    )


def _get_name(item: tuple[str, NodeFacts]) -> str:
    return item[0]


def try_find_membership(
    node: str, labels: Mapping[str, str], pools: Iterable[machineconfigpool.MachineConfigPool]
) -> Membership | ConfigError | None:
    """Find the pools of the node, or the error of `find_membership`."""
    try:
        return find_membership(node, labels, pools)
    except ConfigError as error:
        return error


def list_strays(
    pools: Mapping[str, ObservedPool], nodes: Iterable[tuple[str, Mapping[str, str], str]]
) -> tuple[str, ...]:
    """Describe the strays among nodes, each with its name, labels and current config."""
    readable = [observed.pool for observed in pools.values()]
    found = (
        describe_stray(name, config, try_find_membership(name, labels, readable))
        for name, labels, config in nodes
    )
    return tuple(filter(None, found))


def find_selecting_pools(
    labels: Mapping[str, str], pools: Iterable[machineconfigpool.MachineConfigPool]
) -> tuple[str, ...]:
    """Return every pool whose selector matches the labels."""
    return tuple(pool.name for pool in pools if _is_selected_by(pool, labels))
