"""Plan the effect of a change on each pool and node, with the code of controllers and agents.

Pure: computes a plan from a snapshot of the cluster and the manifests to apply. For each node, the
plan has the actions, their causes and the MachineConfigs behind them. `format_plans` prints it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from treenail.api import (
    decode,
    disruptionpolicy,
    machineconfig,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
    object_meta,
)
from treenail.config import diff, image_content, reconcilable, wanted_state
from treenail.config.generated import sources
from treenail.controllers.pools import (
    disruption_budgets,
    maintenance_windows,
    node_facts,
    node_selection,
    os_image,
    pool_membership,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.render import render
from treenail.controllers.status import causes, planned_build
from treenail.errors import ConfigError
from treenail.update.impact import impact

NODE_WITHOUT_DRAIN_S = 60.0
"""Assumed duration of an update without a drain."""


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One action and all its causes."""

    action: str
    reasons: tuple[impact.DisruptionReason, ...]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Change of the nodes that have the same current target."""

    nodes: tuple[str, ...]
    before: node_facts.RolloutTarget
    steps: tuple[PlannedAction, ...] = ()
    """Actions, the least disruptive first; empty when none is needed."""
    undisruptive: tuple[impact.DisruptionReason, ...] = ()
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
    image_stream: os_image.OSImageStream | None = None
    source_objects: sources.Sources = field(default_factory=dict)
    kubeadm: decode.Json = field(default_factory=dict)
    changed_objects: frozenset[str] = frozenset()
    """``KIND/NAME`` of the objects in the manifests that become MachineConfigs."""
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
    limit_note: str = ""
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
    outage: str = ""
    """What the cluster does without during a reboot; empty if nothing."""

    @property
    def needs_drain(self) -> bool:
        return any(change.needs_drain for change in self.changes)


def apply_manifests(before: RolloutPlanInput, documents: render.InputManifests) -> RolloutPlanInput:
    """Return the snapshot with the manifests applied, and what they generate.

    Adds warnings about objects that generate nothing to ``documents``.
    """
    pools = dict(before.pools)
    for name, pool in documents.pools.items():
        known = before.pools.get(name)
        pools[name] = pool_membership.ObservedPool(
            pool if known is None else _apply_pool(known.pool, pool)
        )
    cluster = next(iter(documents.controller_configs.values()), before.controller_config)
    stream = _apply_stream(before.image_stream, documents.image_streams)
    changed = documents.source_objects
    inputs = render.InputManifests(
        pools={name: observed.pool for name, observed in pools.items()},
        configs={**before.configs, **documents.configs},
        controller_configs={"": cluster},
        image_streams={os_image.STREAM_NAME: stream} if stream else {},
        source_objects={**before.source_objects, **changed},
        kubeadm=documents.kubeadm or before.kubeadm,
    )
    results = inputs.generate_configs()
    documents.report_results(result for result in results if result.source.key in changed)
    policies = {**before.policies, **documents.policies}
    applied = {
        name: planned_build.apply_image_config(before.image_configs.get(name), config)
        for name, config in documents.image_configs.items()
    }
    return replace(
        before,
        pools=pools,
        configs=inputs.configs,
        controller_config=cluster,
        image_stream=stream,
        source_objects=inputs.source_objects,
        changed_objects=frozenset("/".join(filter(None, source)) for source in changed),
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
    nodes = rollout_record.apply_record(observed.pool.status, nodes)
    pool, config, sources = _render_target(snapshot, observed.pool)
    image = planned_build.plan_pool_build(
        planned_build.PoolBuildFacts(
            pool,
            config,
            node_facts.find_architectures(node.architecture for node in nodes),
            snapshot.configs,
            tuple(snapshot.image_configs.values()),
            tuple(snapshot.image_builds.values()),
        )
    )
    target, build = image.target, image.build
    policy = rollout_policy.find_policy(pool, snapshot.policies)
    limit = node_selection.compute_max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    members = [
        node for node in snapshot.nodes.values() if node_selection.is_etcd_member(node.labels)
    ]
    limit = max(1, node_selection.limit_to_quorum(limit, nodes, members))
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
        limit_note=node_selection.describe_zero_limit(pool.max_unavailable),
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
            if needs_drain
            and len(snapshot.nodes) > 1
            and budget.blocks(node.name for node in outdated)
        ),
        outage=_describe_outage(nodes, members, len(snapshot.nodes))
        if any(change.needs_reboot or change.unknown_reason for change in changes)
        else "",
    )


def _describe_outage(
    nodes: Sequence[node_facts.NodeFacts], members: Sequence[node_facts.NodeFacts], count: int
) -> str:
    """Describe the outage while one of the nodes reboots."""
    if count == 1:
        return "the only node updates without a drain: all pods and the API server stop meanwhile"
    names = {member.name for member in members}
    if len(names) < node_selection.SMALLEST_QUORUM and any(node.name in names for node in nodes):
        return (
            f"etcd has {'one member' if len(names) == 1 else '2 members'}: the API server does not "
            "answer while one reboots"
        )
    return ""


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
    pools = {name: observed.pool for name, observed in snapshot.pools.items()}
    cluster = snapshot.controller_config
    images = os_image.select_base_images(pool, pools, snapshot.image_stream, cluster.base_images)
    cluster = replace(cluster, base_images=images)
    rendered = render.render_pool(pool, chosen, cluster, current=current)
    if rendered.name != pool.configuration.name:
        render.check_appliable(rendered, chosen)
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
        change = plan_change(
            current,
            old,
            target,
            config,
            snapshot.disruption_policy,
            nodes=tuple(names),
            writes_image_files=writes_image_files,
            image_source=image_source,
        )
        known = causes.CauseNames(snapshot.configs, old, config, snapshot.changed_objects)
        yield name_causes(change, known)


def name_causes(change: NodeChange, names: causes.CauseNames) -> NodeChange:
    """Name the objects behind generated MachineConfigs in the reasons of a change."""
    steps = (replace(step, reasons=tuple(map(names.name, step.reasons))) for step in change.steps)
    undisruptive = tuple(map(names.name, change.undisruptive))
    return replace(change, steps=tuple(steps), undisruptive=undisruptive)


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


def _apply_stream(
    known: os_image.OSImageStream | None,
    applied: Mapping[str, os_image.OSImageStream],
) -> os_image.OSImageStream | None:
    """Merge the streams of a file into the known ones; a file without a status changes none."""
    stream = applied.get(os_image.STREAM_NAME)
    if known is None or stream is None or stream.streams:
        return stream or known
    return replace(known, requested_default=stream.requested_default)


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


MAX_REASONS = 20
MAX_BATCHES = 12
MAX_NODES = 8


def format_plans(plans: Sequence[RolloutPlan]) -> Iterator[str]:
    """Yield the lines of each pool's plan, with an empty line between pools."""
    for index, plan in enumerate(plans):
        if index:
            yield ""
        yield from _format_pool(plan)


def convert_to_json(plans: Sequence[RolloutPlan]) -> decode.Json:
    """Convert the complete plan, with every node."""
    return {
        "pools": [
            {**convert_fields(asdict(plan)), "needsDrain": plan.needs_drain} for plan in plans
        ]
    }


def convert_fields(fields: dict[str, object]) -> decode.Json:
    """Spell the names of fields as Kubernetes does: ``nodeCount`` for ``node_count``."""
    return {_convert_name(name): _convert_value(value) for name, value in fields.items()}


def _convert_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _convert_value(value: object) -> object:
    match value:
        case dict():
            return convert_fields(value)
        case list() | tuple():
            return [_convert_value(item) for item in value]
        case _:
            return value


def _format_pool(plan: RolloutPlan) -> Iterator[str]:
    todo = sum(len(batch.nodes) for batch in plan.batches)
    count = _format_count(plan.node_count)
    if plan.problems and not plan.target.config:
        yield f"pool {plan.pool}: cannot be planned; no node changes"
    elif todo == 0:
        yield f"pool {plan.pool}: nothing to do, {count} at {plan.target}"
    else:
        yield f"pool {plan.pool}: {todo} of {count} to {plan.target}"
    for problem in plan.problems:
        yield f"  problem: {problem}"
    if plan.sources and todo:
        yield f"  rendered from {', '.join(plan.sources)}"
    if plan.build is not None:
        like = f", like {plan.build.last_build}" if plan.build.last_build else ""
        what = "builds" if plan.build.needs_job else "adds the config, without a Job, to"
        yield (
            f"  {what} the image of MachineOSConfig {plan.build.image_config} first, about "
            f"{rollout_record.format_limit(plan.build.duration_s)}{like}"
        )
    for change in plan.changes:
        yield from format_change(change, plan.image_builder)
    yield from _format_order(plan)
    if plan.outage:
        yield f"  {plan.outage}"
    for budget in plan.budgets:
        yield (
            f"  drain blocked: PodDisruptionBudget {budget.name} never allows an eviction "
            f"({budget.reason}), pods on {format_names(budget.nodes)}"
        )


def format_change(change: NodeChange, image_builder: str = "") -> Iterator[str]:
    """Yield the lines of a change; ``image_builder`` builds the image with the config's files."""
    before = str(change.before) if change.before.config else "nothing"
    yield f"  {_format_count(len(change.nodes))} from {before}:"
    if change.unknown_reason:
        yield f"    impact unknown, assuming drain and reboot: {change.unknown_reason}"
        return
    for step in change.steps:
        yield f"    {step.action}"
        yield from _format_reasons(step.reasons, "because ")
    if not change.steps:
        yield "    no disruption: files are written in place"
    if change.undisruptive:
        yield "    without disruption"
        yield from _format_reasons(change.undisruptive, "")
    if change.in_image:
        more = len(change.in_image) - MAX_REASONS
        named = ", ".join(change.in_image[:MAX_REASONS]) + (f" and {more} more" if more > 0 else "")
        if image_builder:
            yield f"    the build of {image_builder} puts into the image: {named}"
        else:
            yield f"    the image must contain {named}; each node checks that before its drain"


def _format_reasons(reasons: Sequence[impact.DisruptionReason], lead: str) -> Iterator[str]:
    for reason in reasons[:MAX_REASONS]:
        source = f", from {reason.source}" if reason.source else ""
        yield f"      {lead}{reason.subject} ({reason.rule}){source}"
    if len(reasons) > MAX_REASONS:
        yield f"      and {len(reasons) - MAX_REASONS} more"


def _format_order(plan: RolloutPlan) -> Iterator[str]:
    if not plan.batches:
        return
    if plan.prestage_max_parallel is not None:
        yield f"  pre-stage the image first, {plan.prestage_max_parallel} nodes at a time"
    yield f"  order, {plan.limit_note}{plan.max_unavailable} at a time:"
    has_waves = plan.batches[-1].wave > 1
    for number, batch in enumerate(plan.batches[:MAX_BATCHES], start=1):
        wave = f"  (wave {batch.wave})" if has_waves else ""
        yield f"    {number:>3}. {format_names(batch.nodes)}{wave}"
    if len(plan.batches) > MAX_BATCHES:
        rest = plan.batches[MAX_BATCHES:]
        yield f"    and {sum(len(batch.nodes) for batch in rest)} more nodes in {len(rest)} batches"
    if plan.duration_s is None:
        yield "  never completes: the maintenance windows are too short"
    else:
        yield f"  takes about {rollout_record.format_duration(plan.duration_s)} in total"
    if plan.waiting_reason:
        yield f"  does not start yet: {plan.waiting_reason}"


def _format_count(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def format_names(nodes: Sequence[str]) -> str:
    more = len(nodes) - MAX_NODES
    return ", ".join(nodes[:MAX_NODES]) + (f" and {more} more" if more > 0 else "")
