"""What a change would do to each pool and node, worked out by what the controllers and agents run.

Pure: a snapshot of the cluster, and documents that would be applied to it, to a plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treenail.api.disruptionpolicy import DEFAULT_POLICY, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import ObjectMeta
from treenail.controllers.plan.budgets import BlockingBudget
from treenail.controllers.plan.change import NodeChange, plan_change
from treenail.controllers.render.offline import InputManifests
from treenail.controllers.render.render import ControllerConfig, is_rendered, render_pool
from treenail.controllers.rollout import estimate, order
from treenail.controllers.rollout.gates import os_image, windows
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.observe import ObservedPool, PoolGrouping
from treenail.controllers.rollout.policy import NodeOrder, RolloutPolicy, Wave, parse_policy
from treenail.controllers.rollout.progress import find_wave_members
from treenail.controllers.rollout.select import compute_max_unavailable
from treenail.errors import ConfigError

NODE_WITHOUT_DRAIN_S = 60.0
"""What a node is taken to need that is not rebooted."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The cluster as it was read, by name."""

    pools: Mapping[str, ObservedPool]
    nodes: Mapping[str, NodeFacts]
    configs: Mapping[str, MachineConfig]
    controller_config: ControllerConfig = field(default_factory=ControllerConfig)
    disruption_policy: DisruptionPolicy = DEFAULT_POLICY
    budgets: tuple[BlockingBudget, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Nodes that go at the same time."""

    wave: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What happens in one pool."""

    pool: str
    target: RolloutTarget
    node_count: int = 0
    sources: tuple[str, ...] = ()
    changes: tuple[NodeChange, ...] = ()
    """One for each state that nodes are in now."""
    batches: tuple[PlannedBatch, ...] = ()
    max_unavailable: int = 1
    prestage_max_parallel: int | None = None
    """How many nodes stage the image at the same time, before the first one is drained."""
    duration_s: float | None = None
    """None when it would never end: the maintenance windows are too short."""
    waiting_reason: str = ""
    problems: tuple[str, ...] = ()
    """Why it would not happen at all."""
    budgets: tuple[BlockingBudget, ...] = ()

    @property
    def needs_drain(self) -> bool:
        return any(each.needs_drain for each in self.changes)


def apply_manifests(before: PlanInput, documents: InputManifests) -> PlanInput:
    """The cluster as it is once the documents are applied."""
    pools = dict(before.pools)
    for name, pool in documents.pools.items():
        known = before.pools.get(name)
        pools[name] = ObservedPool(pool if known is None else _apply_pool(known.pool, pool))
    cluster = next(iter(documents.controller_configs.values()), before.controller_config)
    configs = {**before.configs, **documents.configs}
    return replace(before, pools=pools, configs=configs, controller_config=cluster)


def plan_pools(found: PlanInput, *, now: float, only: str | None = None) -> tuple[PoolPlan, ...]:
    """The plan of every pool, by name, or of one."""
    picture = PoolGrouping().group_nodes(found.pools, found.nodes)
    plans = []
    for name in sorted(found.pools):
        if only not in (None, name):
            continue
        nodes = picture.members.get(name, ())
        disputes = tuple(map(_format_error, picture.membership_errors.get(name, ())))
        try:
            planned = _plan_pool(found, found.pools[name], nodes, now)
        except ConfigError as error:
            planned = PoolPlan(
                name, RolloutTarget(""), len(nodes), problems=(_format_error(error),)
            )
        plans.append(replace(planned, problems=planned.problems + disputes))
    return tuple(plans)


def _plan_pool(
    found: PlanInput, seen: ObservedPool, nodes: Sequence[NodeFacts], now: float
) -> PoolPlan:
    if seen.error is not None:
        raise seen.error
    pool, config, sources = _render_target(found, seen.pool)
    target = os_image.read_annotated_image(pool).target
    careful = parse_policy(pool)
    limit = compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    todo = [node for node in nodes if not node.is_updated_to(target)]
    changes = tuple(_plan_changes(found, todo, target, config))
    batches = tuple(_plan_batches(todo, nodes, target, careful, limit))
    drains = any(each.needs_drain for each in changes)
    return PoolPlan(
        pool=pool.name,
        target=target,
        node_count=len(nodes),
        sources=sources,
        changes=changes,
        batches=batches,
        max_unavailable=limit,
        prestage_max_parallel=careful.prestage_max_parallel if drains and target.image else None,
        duration_s=_estimate_duration_s(batches, nodes, target, careful, now, drains=drains),
        waiting_reason=_find_waiting_reason(pool, careful, now) if todo else "",
        budgets=tuple(
            budget
            for budget in found.budgets
            if drains and budget.blocks(each.name for each in todo)
        ),
    )


def _render_target(
    found: PlanInput, pool: MachineConfigPool
) -> tuple[MachineConfigPool, MachineConfig | None, tuple[str, ...]]:
    """The pool with its rendered config, that config, and the MachineConfigs it is from."""
    if pool.machine_config_selector is None:
        name = pool.configuration.name
        return pool, found.configs.get(name), pool.configuration.source
    chosen = [config for config in found.configs.values() if not is_rendered(config)]
    current = found.configs.get(pool.configuration.name)
    rendered = render_pool(pool, chosen, found.controller_config, current=current)
    configuration = replace(pool.configuration, name=rendered.name, source=rendered.sources)
    return replace(pool, configuration=configuration), rendered.config, rendered.sources


def _plan_changes(
    found: PlanInput, todo: Sequence[NodeFacts], target: RolloutTarget, config: MachineConfig | None
) -> Iterator[NodeChange]:
    groups: dict[RolloutTarget, list[str]] = {}
    for node in todo:
        at = RolloutTarget(node.current_config, node.current_image)
        groups.setdefault(at, []).append(node.name)
    for at, names in groups.items():
        old = found.configs.get(at.config)
        yield plan_change(at, old, target, config, found.disruption_policy, nodes=tuple(names))


def _plan_batches(
    todo: Sequence[NodeFacts],
    nodes: Sequence[NodeFacts],
    target: RolloutTarget,
    careful: RolloutPolicy,
    limit: int,
) -> Iterator[PlannedBatch]:
    """Wave by wave, each in the order in which the rollout takes nodes."""
    left = {node.name: node for node in todo}
    given = sum(node.is_assigned(target) for node in nodes)
    for number, wave in enumerate((*careful.waves, None), start=1):
        inside = [node for node in _filter_wave(wave, nodes) if node.name in left]
        inside = list(_order_nodes(careful, inside))
        if wave is not None:
            inside = inside[: max(wave.share.compute_count(len(nodes)) - given, 0)]
        given += len(inside)
        for start in range(0, len(inside), limit):
            names = tuple(node.name for node in inside[start : start + limit])
            yield PlannedBatch(number, names)
        for node in inside:
            del left[node.name]


def _filter_wave(wave: Wave | None, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    return nodes if wave is None else find_wave_members(wave, nodes)


def _order_nodes(careful: RolloutPolicy, nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
    if careful.order is NodeOrder.SPREAD:
        return order.spread_over_zones(nodes, ())
    return order.sort_by_zone(nodes)


def _estimate_duration_s(
    batches: Sequence[PlannedBatch],
    nodes: Sequence[NodeFacts],
    target: RolloutTarget,
    careful: RolloutPolicy,
    now: float,
    *,
    drains: bool,
) -> float | None:
    if not batches:
        return 0.0
    each_s = estimate.estimate_node_s(nodes, target) if drains else NODE_WITHOUT_DRAIN_S
    took_s = estimate.estimate_remaining_s(len(batches), 1, each_s, careful.windows, now)
    return None if took_s is None else took_s + sum(wave.soak_s for wave in careful.waves)


def _find_waiting_reason(pool: MachineConfigPool, careful: RolloutPolicy, now: float) -> str:
    if pool.paused:
        return "the pool is paused"
    seen = windows.find_window_state(careful.windows, now)
    if isinstance(seen, windows.WindowClosed):
        return f"the maintenance window opens at {seen.opens_at}"
    return ""


def _apply_pool(known: MachineConfigPool, pool: MachineConfigPool) -> MachineConfigPool:
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
        status_configuration=known.status_configuration,
        conditions=known.conditions,
        status=known.status,
    )


def _format_error(error: ConfigError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)
