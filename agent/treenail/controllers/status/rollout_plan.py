"""Plan the effect of a change on each pool and node, with the code of controllers and agents.

Pure: computes a plan from a snapshot of the cluster and the manifests to apply. For each node, the
plan has the actions, their causes and the MachineConfigs behind them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treenail.api import (
    disruptionpolicy,
    machineconfig,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
    object_meta,
)
from treenail.config import diff, image_content, reconcilable, wanted_state
from treenail.controllers.pools import (
    disruption_budgets,
    maintenance_windows,
    node_facts,
    node_selection,
    pool_membership,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.render import render
from treenail.controllers.status import planned_build
from treenail.errors import ConfigError
from treenail.update.impact import impact

NODE_WITHOUT_DRAIN_S = 60.0
"""Assumed duration of an update without a drain."""


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One action and all its causes."""

    action: str
    reasons: tuple[impact.DisruptionCause, ...]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Change of the nodes that have the same current target."""

    nodes: tuple[str, ...]
    before: node_facts.RolloutTarget
    steps: tuple[PlannedAction, ...] = ()
    """Actions, the least disruptive first; empty when none is needed."""
    undisruptive: tuple[impact.DisruptionCause, ...] = ()
    """Differences that need no action."""
    needs_drain: bool = True
    needs_reboot: bool = True
    in_image: tuple[str, ...] = ()
    """Paths and units that the image must contain; each agent checks that before its drain."""
    unknown_reason: str = ""
    """Why the impact is unknown; then the plan assumes drain and reboot."""


def plan_change(
    before: node_facts.RolloutTarget,
    old: machineconfig.MachineConfig | None,
    after: node_facts.RolloutTarget,
    new: machineconfig.MachineConfig | None,
    policy: disruptionpolicy.DisruptionPolicy,
    *,
    nodes: tuple[str, ...],
    writes_image_files: bool = False,
    image_source: str = "",
) -> NodeChange:
    """Compute the change of these nodes.

    ``writes_image_files``: in image mode the agents write the files that the image lacks.
    ``image_source`` names what requests the image of ``after``, if it has one.
    """
    for name, config in ((before.config, old), (after.config, new)):
        if config is None:
            return NodeChange(
                nodes, before, unknown_reason=f"MachineConfig {name or '?'} does not exist"
            )
    assert old is not None
    assert new is not None
    try:
        was, will_be = (
            _apply_image(wanted_state.read_wanted_state(old), before),
            _apply_image(wanted_state.read_wanted_state(new), after),
        )
        former, provided = frozenset[str](), frozenset[str]()
        if not writes_image_files:
            former = image_content.assume_provided(was).provided if before.image else former
            provided = image_content.assume_provided(will_be).provided if after.image else provided
        changes = diff.compare_configs(
            image_content.drop_provided(was, former | provided),
            image_content.drop_provided(will_be, provided),
        )
        cost = impact.compute_disruption(changes, policy)
        because = impact.ConfigSources(changes, old, new, image_source=image_source).find_cause
    except ConfigError as error:
        return NodeChange(nodes, before, unknown_reason=str(error))

    return NodeChange(
        nodes,
        before,
        steps=tuple(
            PlannedAction(
                impact.describe_action(effect.action), tuple(map(because, effect.reasons))
            )
            for effect in cost.costs
        ),
        undisruptive=tuple(map(because, cost.harmless)),
        needs_drain=cost.needs_drain,
        needs_reboot=cost.needs_reboot,
        in_image=image_content.list_provided(will_be, provided),
    )


def _apply_image(
    state: wanted_state.WantedState, target: node_facts.RolloutTarget
) -> wanted_state.WantedState:
    return replace(state, os=replace(state.os, image=target.image)) if target.image else state


@dataclass(frozen=True, slots=True)
class RolloutPlanInput:
    """Snapshot of the cluster; objects by name."""

    pools: Mapping[str, pool_membership.ObservedPool]
    nodes: Mapping[str, node_facts.NodeFacts]
    configs: Mapping[str, machineconfig.MachineConfig]
    controller_config: render.ControllerConfig = field(default_factory=render.ControllerConfig)
    disruption_policy: disruptionpolicy.DisruptionPolicy = disruptionpolicy.DEFAULT_POLICY
    budgets: tuple[disruption_budgets.BlockingBudget, ...] = ()
    policies: Mapping[str, rollout_policy.ObservedPolicy] = field(default_factory=dict)
    image_configs: Mapping[str, machineosconfig.MachineOSConfig] = field(default_factory=dict)
    image_builds: Mapping[str, machineosbuild.MachineOSBuild] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Nodes that update at the same time."""

    wave: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Plan of one pool."""

    pool: str
    target: node_facts.RolloutTarget
    node_count: int = 0
    sources: tuple[str, ...] = ()
    changes: tuple[NodeChange, ...] = ()
    """One change for each current target of the nodes."""
    batches: tuple[PlannedBatch, ...] = ()
    max_unavailable: int = 1
    prestage_max_parallel: int | None = None
    """Number of nodes that pre-stage the image at the same time, before the first drain."""
    duration_s: float | None = None
    """None when the maintenance windows are too short for the rollout."""
    build: planned_build.PlannedBuild | None = None
    """The image build before the first node; None without one. ``duration_s`` contains it."""
    image_builder: str = ""
    """What builds the image with the config's files in it; empty for another image."""
    waiting_reason: str = ""
    problems: tuple[str, ...] = ()
    """Errors that prevent the rollout."""
    budgets: tuple[disruption_budgets.BlockingBudget, ...] = ()

    @property
    def needs_drain(self) -> bool:
        return any(change.needs_drain for change in self.changes)


def apply_manifests(before: RolloutPlanInput, documents: render.InputManifests) -> RolloutPlanInput:
    """Return the snapshot with the manifests applied."""
    pools = dict(before.pools)
    for name, pool in documents.pools.items():
        known = before.pools.get(name)
        pools[name] = pool_membership.ObservedPool(
            pool if known is None else _apply_pool(known.pool, pool)
        )
    cluster = next(iter(documents.controller_configs.values()), before.controller_config)
    configs = {**before.configs, **documents.configs}
    policies = {**before.policies, **documents.policies}
    applied = {
        name: planned_build.apply_image_config(before.image_configs.get(name), config)
        for name, config in documents.image_configs.items()
    }
    return replace(
        before,
        pools=pools,
        configs=configs,
        controller_config=cluster,
        policies=policies,
        image_configs={**before.image_configs, **applied},
    )


def plan_pools(
    snapshot: RolloutPlanInput, *, now: float, only: str | None = None
) -> tuple[RolloutPlan, ...]:
    """Plan every pool in the order of names, or only one."""
    grouping = pool_membership.group_nodes(snapshot.pools, snapshot.nodes)
    plans = []
    for name in sorted(snapshot.pools):
        if only not in (None, name):
            continue
        nodes = grouping.members.get(name, ())
        disputes = tuple(_format_error(node.error) for node in grouping.disputed.get(name, ()))
        try:
            planned = _plan_pool(snapshot, snapshot.pools[name], nodes, now)
        except ConfigError as error:
            planned = RolloutPlan(
                name, node_facts.RolloutTarget(""), len(nodes), problems=(_format_error(error),)
            )
        plans.append(replace(planned, problems=planned.problems + disputes))
    return tuple(plans)


def _plan_pool(
    snapshot: RolloutPlanInput,
    observed: pool_membership.ObservedPool,
    nodes: Sequence[node_facts.NodeFacts],
    now: float,
) -> RolloutPlan:
    if observed.error is not None:
        raise observed.error
    pool, config, sources = _render_target(snapshot, observed.pool)
    pool_membership.check_supported_fields(pool)
    image = planned_build.plan_pool_build(
        planned_build.PoolBuildFacts(
            pool,
            config,
            frozenset(
                architecture
                for node in nodes
                if (architecture := node.labels.get(node_facts.ARCHITECTURE_LABEL))
            ),
            snapshot.configs,
            tuple(snapshot.image_configs.values()),
            tuple(snapshot.image_builds.values()),
        )
    )
    target, build = image.target, image.build
    policy = rollout_policy.find_policy(pool, snapshot.policies)
    limit = node_selection.compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    limit = node_selection.limit_to_quorum(limit, nodes)
    outdated = [node for node in nodes if not node.is_updated_to(target)]
    writes_files = pool.image_files is machineconfigpool.PoolImageFiles.WRITE
    changes = tuple(
        _plan_changes(
            snapshot,
            outdated,
            target,
            config,
            writes_image_files=writes_files,
            image_source=image.source,
        )
    )
    is_written = not target.image or writes_files
    batches = tuple(_plan_batches(outdated, nodes, target, policy, limit))
    needs_drain = any(change.needs_drain for change in changes)
    build_s = build.duration_s if build is not None else 0.0
    rollout_s = _estimate_duration_s(
        batches, nodes, target, policy, now + build_s, needs_drain=needs_drain
    )
    return RolloutPlan(
        pool=pool.name,
        target=target,
        node_count=len(nodes),
        sources=sources,
        changes=changes,
        batches=batches,
        max_unavailable=limit,
        prestage_max_parallel=policy.prestage_max_parallel
        if needs_drain and target.image
        else None,
        duration_s=None if rollout_s is None else rollout_s + build_s,
        build=build,
        image_builder=image.source if image.is_built else "",
        waiting_reason=_find_waiting_reason(pool, policy, now) if outdated else "",
        problems=(
            *image.problems,
            *(
                f"{finding.reason} ({finding.place}); {finding.remedy}"
                for finding in (
                    reconcilable.find_read_only_paths(wanted_state.ParsedConfig(config))
                    if config and is_written
                    else ()
                )
            ),
        ),
        budgets=tuple(
            budget
            for budget in snapshot.budgets
            if needs_drain and budget.blocks(node.name for node in outdated)
        ),
    )


def _render_target(
    snapshot: RolloutPlanInput, pool: machineconfigpool.MachineConfigPool
) -> tuple[
    machineconfigpool.MachineConfigPool, machineconfig.MachineConfig | None, tuple[str, ...]
]:
    """Return the pool with its rendered config, that config, and its sources."""
    if pool.machine_config_selector is None:
        name = pool.configuration.name
        return pool, snapshot.configs.get(name), pool.configuration.source
    chosen = [config for config in snapshot.configs.values() if not render.is_rendered(config)]
    current = snapshot.configs.get(pool.configuration.name)
    rendered = render.render_pool(pool, chosen, snapshot.controller_config, current=current)
    configuration = replace(pool.configuration, name=rendered.name, source=rendered.sources)
    return replace(pool, configuration=configuration), rendered.config, rendered.sources


def _plan_changes(
    snapshot: RolloutPlanInput,
    outdated: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    config: machineconfig.MachineConfig | None,
    *,
    writes_image_files: bool,
    image_source: str,
) -> Iterator[NodeChange]:
    groups: dict[node_facts.RolloutTarget, list[str]] = {}
    for node in outdated:
        current = node_facts.RolloutTarget(node.current_config, node.current_image)
        groups.setdefault(current, []).append(node.name)
    for current, names in groups.items():
        old = snapshot.configs.get(current.config)
        yield plan_change(
            current,
            old,
            target,
            config,
            snapshot.disruption_policy,
            nodes=tuple(names),
            writes_image_files=writes_image_files,
            image_source=image_source,
        )


def _plan_batches(
    outdated: Sequence[node_facts.NodeFacts],
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    policy: rollout_policy.RolloutPolicy,
    limit: int,
) -> Iterator[PlannedBatch]:
    """Yield the batches wave by wave, in the node order of the rollout."""
    remaining = {node.name: node for node in outdated}
    assigned = sum(node.is_assigned(target) for node in nodes)
    for number, wave in enumerate((*policy.waves, None), start=1):
        matched = rollout_record.find_wave_members(wave, nodes)
        members = node_selection.sort_nodes(
            policy.order, (node for node in matched if node.name in remaining)
        )
        if wave is not None:
            members = members[: max(wave.share.compute_count(len(nodes)) - assigned, 0)]
        assigned += len(members)
        for start in range(0, len(members), limit):
            names = tuple(node.name for node in members[start : start + limit])
            yield PlannedBatch(number, names)
        for node in members:
            del remaining[node.name]


def _estimate_duration_s(
    batches: Sequence[PlannedBatch],
    nodes: Sequence[node_facts.NodeFacts],
    target: node_facts.RolloutTarget,
    policy: rollout_policy.RolloutPolicy,
    now: float,
    *,
    needs_drain: bool,
) -> float | None:
    if not batches:
        return 0.0
    each_s = rollout_record.estimate_node_s(nodes, target) if needs_drain else NODE_WITHOUT_DRAIN_S
    took_s = rollout_record.estimate_remaining_s(len(batches), 1, each_s, policy.windows, now)
    return None if took_s is None else took_s + sum(wave.soak_s for wave in policy.waves)


def _find_waiting_reason(
    pool: machineconfigpool.MachineConfigPool, policy: rollout_policy.RolloutPolicy, now: float
) -> str:
    if pool.paused:
        return "the pool is paused"
    window = maintenance_windows.find_window_state(policy.windows, now)
    if isinstance(window, maintenance_windows.WindowClosed):
        return f"the maintenance window opens at {window.opens_at}"
    return ""


def _apply_pool(
    known: machineconfigpool.MachineConfigPool, pool: machineconfigpool.MachineConfigPool
) -> machineconfigpool.MachineConfigPool:
    """Merge a manifest into the known pool, as ``kubectl apply`` does."""
    metadata = object_meta.ObjectMeta(
        name=known.name,
        uid=known.metadata.uid,
        resource_version=known.metadata.resource_version,
        generation=known.metadata.generation,
        labels={**known.metadata.labels, **pool.metadata.labels},
        annotations={**known.metadata.annotations, **pool.metadata.annotations},
    )
    configuration = pool.configuration if pool.configuration.name else known.configuration
    return replace(
        pool,
        metadata=metadata,
        configuration=configuration,
        status_configuration=known.status_configuration,
        conditions=known.conditions,
        status=known.status,
    )


def _format_error(error: ConfigError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)
