"""What a change would do to each pool and node, worked out by what the controllers and agents run.

Pure: a snapshot of the cluster, and documents that would be applied to it, to a plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treenail.api.disruptionpolicy import DEFAULTS, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import ObjectMeta
from treenail.controllers.plan.budgets import StuckBudget
from treenail.controllers.plan.change import Change, change
from treenail.controllers.render.offline import Documents
from treenail.controllers.render.render import ControllerConfig, is_rendered, render
from treenail.controllers.rollout import estimate, order
from treenail.controllers.rollout.gates import os_image, windows
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.observe import Grouping, SeenPool
from treenail.controllers.rollout.policy import Order, Policy, Wave, policy
from treenail.controllers.rollout.progress import members
from treenail.controllers.rollout.select import max_unavailable
from treenail.errors import ConfigError

QUIET_S = 60.0
"""What a node is taken to need that is not rebooted."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster as it was read, by name."""

    pools: Mapping[str, SeenPool]
    nodes: Mapping[str, NodeFacts]
    configs: Mapping[str, MachineConfig]
    cluster: ControllerConfig = field(default_factory=ControllerConfig)
    policy: DisruptionPolicy = DEFAULTS
    budgets: tuple[StuckBudget, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Nodes that go at the same time."""

    wave: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What happens in one pool."""

    pool: str
    target: Target
    total: int = 0
    sources: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    """One for each state that nodes are in now."""
    batches: tuple[Batch, ...] = ()
    max_unavailable: int = 1
    staged_at_once: int | None = None
    """How many nodes stage the image at the same time, before the first one is drained."""
    duration_s: float | None = None
    """None when it would never end: the maintenance windows are too short."""
    waiting: str = ""
    problems: tuple[str, ...] = ()
    """Why it would not happen at all."""
    budgets: tuple[StuckBudget, ...] = ()

    @property
    def drains(self) -> bool:
        return any(each.drains for each in self.changes)


def applied(before: Snapshot, documents: Documents) -> Snapshot:
    """The cluster as it is once the documents are applied."""
    pools = dict(before.pools)
    for name, pool in documents.pools.items():
        known = before.pools.get(name)
        pools[name] = SeenPool(pool if known is None else _over(known.pool, pool))
    cluster = next(iter(documents.clusters.values()), before.cluster)
    configs = {**before.configs, **documents.configs}
    return replace(before, pools=pools, configs=configs, cluster=cluster)


def plan(found: Snapshot, *, now: float, only: str | None = None) -> tuple[PoolPlan, ...]:
    """The plan of every pool, by name, or of one."""
    picture = Grouping().look(found.pools, found.nodes)
    plans = []
    for name in sorted(found.pools):
        if only not in (None, name):
            continue
        nodes = picture.members.get(name, ())
        disputes = tuple(map(_sentence, picture.disputes.get(name, ())))
        try:
            planned = _planned(found, found.pools[name], nodes, now)
        except ConfigError as error:
            planned = PoolPlan(name, Target(""), len(nodes), problems=(_sentence(error),))
        plans.append(replace(planned, problems=planned.problems + disputes))
    return tuple(plans)


def _planned(found: Snapshot, seen: SeenPool, nodes: Sequence[NodeFacts], now: float) -> PoolPlan:
    if seen.error is not None:
        raise seen.error
    pool, config, sources = _target(found, seen.pool)
    target = os_image.annotated(pool).target
    careful = policy(pool)
    limit = max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    todo = [node for node in nodes if not node.has(target)]
    changes = tuple(_changes(found, todo, target, config))
    batches = tuple(_batches(todo, nodes, target, careful, limit))
    drains = any(each.drains for each in changes)
    return PoolPlan(
        pool=pool.name,
        target=target,
        total=len(nodes),
        sources=sources,
        changes=changes,
        batches=batches,
        max_unavailable=limit,
        staged_at_once=careful.staged_at_once if drains and target.image else None,
        duration_s=_duration_s(batches, nodes, target, careful, now, drains=drains),
        waiting=_waiting(pool, careful, now) if todo else "",
        budgets=tuple(
            budget
            for budget in found.budgets
            if drains and budget.blocks(each.name for each in todo)
        ),
    )


def _target(
    found: Snapshot, pool: MachineConfigPool
) -> tuple[MachineConfigPool, MachineConfig | None, tuple[str, ...]]:
    """The pool with its rendered config, that config, and the MachineConfigs it is from."""
    if pool.machine_config_selector is None:
        name = pool.configuration.name
        return pool, found.configs.get(name), pool.configuration.source
    chosen = [config for config in found.configs.values() if not is_rendered(config)]
    current = found.configs.get(pool.configuration.name)
    rendered = render(pool, chosen, found.cluster, current=current)
    configuration = replace(pool.configuration, name=rendered.name, source=rendered.sources)
    return replace(pool, configuration=configuration), rendered.config, rendered.sources


def _changes(
    found: Snapshot, todo: Sequence[NodeFacts], target: Target, config: MachineConfig | None
) -> Iterator[Change]:
    groups: dict[Target, list[str]] = {}
    for node in todo:
        at = Target(node.current_config, node.current_image)
        groups.setdefault(at, []).append(node.name)
    for at, names in groups.items():
        old = found.configs.get(at.config)
        yield change(at, old, target, config, found.policy, nodes=tuple(names))


def _batches(
    todo: Sequence[NodeFacts],
    nodes: Sequence[NodeFacts],
    target: Target,
    careful: Policy,
    limit: int,
) -> Iterator[Batch]:
    """Wave by wave, each in the order in which the rollout takes nodes."""
    left = {node.name: node for node in todo}
    given = sum(node.asked_for(target) for node in nodes)
    for number, wave in enumerate((*careful.waves, None), start=1):
        inside = [node for node in _inside(wave, nodes) if node.name in left]
        inside = list(_ordered(careful, inside))
        if wave is not None:
            inside = inside[: max(wave.share.of(len(nodes)) - given, 0)]
        given += len(inside)
        for start in range(0, len(inside), limit):
            names = tuple(node.name for node in inside[start : start + limit])
            yield Batch(number, names)
        for node in inside:
            del left[node.name]


def _inside(wave: Wave | None, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    return nodes if wave is None else members(wave, nodes)


def _ordered(careful: Policy, nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
    if careful.order is Order.SPREAD:
        return order.spread(nodes, ())
    return order.by_zone(nodes)


def _duration_s(
    batches: Sequence[Batch],
    nodes: Sequence[NodeFacts],
    target: Target,
    careful: Policy,
    now: float,
    *,
    drains: bool,
) -> float | None:
    if not batches:
        return 0.0
    each_s = estimate.node_s(nodes, target) if drains else QUIET_S
    took_s = estimate.left_s(len(batches), 1, each_s, careful.windows, now)
    return None if took_s is None else took_s + sum(wave.soak_s for wave in careful.waves)


def _waiting(pool: MachineConfigPool, careful: Policy, now: float) -> str:
    if pool.paused:
        return "the pool is paused"
    seen = windows.look(careful.windows, now)
    if isinstance(seen, windows.Closed):
        return f"the maintenance window opens at {seen.opens_at}"
    return ""


def _over(known: MachineConfigPool, pool: MachineConfigPool) -> MachineConfigPool:
    """As applying the file leaves it: its fields, and what it does not speak of."""
    metadata = ObjectMeta(
        name=known.name,
        uid=known.metadata.uid,
        resource_version=known.metadata.resource_version,
        generation=known.metadata.generation,
        labels={**known.metadata.labels, **pool.metadata.labels},
        annotations={**known.metadata.annotations, **pool.metadata.annotations},
    )
    named = pool.configuration if pool.configuration.name else known.configuration
    return replace(
        pool,
        metadata=metadata,
        configuration=named,
        reported=known.reported,
        conditions=known.conditions,
        status=known.status,
    )


def _sentence(error: ConfigError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)
