"""One row for each NodePool of HyperShift, and the JSON document of them: pure functions of facts.

A pool at rest has the state Updated. It is never Updated while something was not looked at that
could deny it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated

from treenail import sanitize
from treenail.api import annotations as key
from treenail.api.hosted import clusterapi
from treenail.controllers.hosted.status import causes as pool_causes
from treenail.controllers.hosted.status import facts
from treenail.encoding import codec

_MAX_TEXT = 253
DOCUMENT_KIND = "HostedPoolStatusList"


class PoolState(StrEnum):
    """State of a pool."""

    UPDATED = "Updated"
    UPDATING = "Updating"
    BLOCKED = "Blocked"
    """The first cause says why, and what helps."""
    PAUSED = "Paused"
    UNKNOWN = "Unknown"
    """Too little could be read."""


class MachineState(StrEnum):
    """State of a machine of a pool, the best first."""

    UPDATED = "updated"
    OLD = "old"
    JOINED = "joined"
    """In place, and its node was not read: updated or old."""
    UPDATING = "updating"
    DEGRADED = "degraded"
    STARTING = "starting"
    NOT_READY = "not ready"
    DELETING = "deleting"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class NodePoolRow(codec.WrittenObject):
    """One NodePool; an empty text is unknown."""

    namespace: str
    name: str
    state: PoolState
    cluster: str = ""
    platform: str = ""
    upgrade_type: str = ""
    current_hash: Annotated[str, codec.Key("hash.current")] = ""
    wanted_hash: Annotated[str, codec.Key("hash.wanted")] = ""
    current_version: Annotated[str, codec.Key("version.current")] = ""
    wanted_version: Annotated[str, codec.Key("version.wanted")] = ""
    replicas: int | None = None
    """None with autoscaling."""
    machines: Mapping[str, MachineState] = field(default_factory=dict)
    causes: tuple[pool_causes.Cause, ...] = ()
    unread: Annotated[tuple[str, ...], codec.Key("notRead")] = ()
    """What was not looked at, and why."""

    @property
    def since(self) -> str:
        """Since when the first cause holds, in RFC 3339; empty if no object says it."""
        return self.causes[0].since if self.causes else ""

    @property
    def counts(self) -> dict[str, int]:
        """How many machines are in each state, the best states first."""
        counts = Counter(self.machines.values())
        return {state.value: counts[state] for state in MachineState if counts[state]}


def build_rows(
    pools: Iterable[facts.PoolFacts | facts.UnreadPool], *, now: float
) -> tuple[NodePoolRow, ...]:
    """Return the rows, in the order of namespaces, clusters and names."""
    rows = [_build_row(pool, now) for pool in pools]
    return tuple(sorted(rows, key=lambda row: (row.namespace, row.cluster, row.name)))


def build_document(rows: Sequence[NodePoolRow]) -> dict[str, object]:
    """Return the content of the JSON document."""
    return {"pools": [{**row.to_json(), "counts": row.counts} for row in rows]}


def _build_row(pool_facts: facts.PoolFacts | facts.UnreadPool, now: float) -> NodePoolRow:
    if isinstance(pool_facts, facts.UnreadPool):
        text = f"cannot read the NodePool: {pool_facts.problem}"
        cause = pool_causes.Cause("Unreadable", text, "", "update treenail, or correct the object")
        namespace, name = pool_facts.namespace, pool_facts.name
        return NodePoolRow(namespace, name, PoolState.UNKNOWN, causes=(cause,))
    pool = pool_facts.pool
    machines = {each.name: _find_machine_state(pool_facts, each) for each in pool_facts.machines}
    found = pool_causes.find_causes(pool_facts, now)
    bound = partial(sanitize.sanitize_text, limit=_MAX_TEXT)
    return NodePoolRow(
        pool.namespace,
        pool.name,
        _find_state(pool_facts, machines, found),
        cluster=bound(pool.cluster_name),
        platform=bound(pool.platform),
        upgrade_type=pool.upgrade_type,
        current_hash=bound(pool_facts.current_hash),
        wanted_hash=bound(pool_facts.wanted_hash),
        current_version=bound(pool.version),
        wanted_version=bound(pool_facts.wanted_version),
        replicas=None if pool.autoscaling else pool.replicas,
        machines=machines,
        causes=found,
        unread=pool_facts.unread,
    )


def _find_state(
    pool_facts: facts.PoolFacts,
    machines: Mapping[str, MachineState],
    found: Sequence[pool_causes.Cause],
) -> PoolState:
    kinds = [cause.kind for cause in found if cause.is_blocking]
    if "Paused" in kinds:
        return PoolState.PAUSED
    if kinds:
        return PoolState.BLOCKED
    if not pool_facts.wanted_hash:
        return PoolState.UNKNOWN if pool_facts.unread else PoolState.UPDATING
    is_at_rest = pool_facts.wanted_hash == pool_facts.current_hash and not pool_facts.is_refreshing
    if pool_facts.owner == "treenail":
        # One controller updates the nodes, another one writes the version and makes machines.
        pool = pool_facts.pool
        is_at_rest &= pool_facts.wanted_version in ("", pool.version)
        is_at_rest &= pool.autoscaling is not None or len(machines) == (pool.replicas or 0)
    if not is_at_rest or set(machines.values()) - {MachineState.UPDATED, MachineState.JOINED}:
        return PoolState.UPDATING
    return PoolState.UNKNOWN if pool_facts.unread else PoolState.UPDATED


def _find_machine_state(
    pool_facts: facts.PoolFacts, machine: clusterapi.ClusterMachine
) -> MachineState:
    if machine.phase == "Failed" or machine.failure:
        return MachineState.FAILED
    if machine.is_deleting:
        return MachineState.DELETING
    if not machine.node_name:
        return MachineState.STARTING
    if pool_facts.pool.is_in_place:
        state = _find_node_state(pool_facts, machine.node_name)
    else:
        is_new = machine.data_secret.endswith(f"-{pool_facts.wanted_hash}")
        state = MachineState.UPDATED if is_new else MachineState.OLD
    is_settled = state in {MachineState.UPDATED, MachineState.OLD, MachineState.JOINED}
    if is_settled and pool_causes.find_bad_condition(machine) is not None:
        return MachineState.NOT_READY
    return state


def _find_node_state(pool_facts: facts.PoolFacts, name: str) -> MachineState:
    """Return the state of a node that is updated in place.

    A node has no config annotation before its first update in place.
    """
    wanted = pool_facts.wanted_hash
    node = (pool_facts.nodes or {}).get(name)
    if node is None:
        is_done = pool_facts.nodes is None and wanted == pool_facts.current_hash
        return MachineState.UPDATED if is_done else MachineState.JOINED
    current = node.annotations.get(key.CURRENT_CONFIG, "") or pool_facts.current_hash
    desired = node.annotations.get(key.DESIRED_CONFIG, "") or current
    if node.annotations.get(key.STATE) == key.NodeState.DEGRADED:
        return MachineState.DEGRADED
    if desired != current:
        return MachineState.UPDATING
    return MachineState.UPDATED if current == wanted else MachineState.OLD
