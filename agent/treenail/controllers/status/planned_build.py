"""The image build that a pool needs before its nodes can move: a step of the plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import machineconfig, machineconfigpool, machineosbuild, machineosconfig, node
from treenail.controllers.pools import image_tags, node_facts, os_image
from treenail.image import build_inputs, input_checks

UNBUILT_IMAGE = "(built first)"
"""In place of the pull spec of an image that does not exist yet."""
ASSUMED_BUILD_S = 300.0
"""Assumed duration of the first build of a pool with a Job."""
ASSUMED_LAYER_S = 5.0
"""Assumed duration of the first build without a Job."""
_BUILT_AGAIN_BY = (key.BUILD_SEES_CONFIG, key.BUILD_CONTEXT)
"""Annotations of a MachineOSConfig whose change causes a new build."""


@dataclass(frozen=True, slots=True)
class PlannedBuild:
    """A build that must succeed first."""

    image_config: str
    duration_s: float
    last_build: str = ""
    """The build whose duration is assumed; empty before the first one."""
    needs_job: bool = True
    """False if only the layer with the config is new."""
    name: str = ""
    """Name of the MachineOSBuild; empty while the tag of its base is not resolved."""


@dataclass(frozen=True, slots=True)
class PoolBuildFacts:
    """A pool and what decides about its image."""

    pool: machineconfigpool.MachineConfigPool
    rendered: machineconfig.MachineConfig | None
    """The rendered config of the pool; None if it does not exist."""
    architectures: frozenset[str]
    """Those of the pool's nodes."""
    configs: Mapping[str, machineconfig.MachineConfig]
    """Rendered configs of earlier builds, among others."""
    image_configs: tuple[machineosconfig.MachineOSConfig, ...]
    builds: tuple[machineosbuild.MachineOSBuild, ...]


@dataclass(frozen=True, slots=True)
class PoolImagePlan:
    """The pool's target, the build that it needs, and what prevents that build."""

    target: node_facts.RolloutTarget
    build: PlannedBuild | None = None
    problems: tuple[str, ...] = ()
    source: str = ""
    """What requests the image, for users; empty if the target has none."""
    is_built: bool = False
    """The cluster builds the image, with the files and units of the config in it."""


def apply_image_config(
    known: machineosconfig.MachineOSConfig | None, wanted: machineosconfig.MachineOSConfig
) -> machineosconfig.MachineOSConfig:
    """Return the MachineOSConfig after ``kubectl apply``; its status stays if nothing changes."""
    if known is None:
        return wanted
    notes = dict(known.metadata.annotations) | dict(wanted.metadata.annotations)
    if any(notes.get(name) != known.metadata.annotations.get(name) for name in _BUILT_AGAIN_BY):
        notes[key.REBUILD] = ""
    metadata = replace(known.metadata, annotations=notes)
    is_same = build_inputs.complete_spec(known) == build_inputs.complete_spec(wanted)
    if is_same and notes.get(key.BASE_IMAGE) == known.metadata.annotations.get(key.BASE_IMAGE):
        return replace(known, metadata=metadata)
    return replace(wanted, metadata=metadata, pull_spec="", conditions=(), status={})


def plan_pool_build(facts: PoolBuildFacts) -> PoolImagePlan:
    """Return the pool's target, and the build that it needs; raise `ConfigError`."""
    pool_build = os_image.find_pool_build(facts.pool, facts.image_configs, facts.builds)
    if pool_build.config is None:
        target = _read_target(facts.pool)
        field = "osImageTag" if facts.pool.os_image_tag is not None else "osImage"
        return PoolImagePlan(target, source=f"spec.{field} of the pool" if target.image else "")
    name = facts.pool.configuration.name
    config = image_tags.pin_base_image(pool_build.config)
    source = f"MachineOSConfig {config.name}"
    problems = tuple(dict.fromkeys(_find_problems(facts, pool_build, config)))
    if problems:
        return PoolImagePlan(
            node_facts.RolloutTarget(name, UNBUILT_IMAGE),
            problems=problems,
            source=source,
            is_built=True,
        )
    build_name = _compute_name(facts, config)
    build = pool_build.build
    if not config.pull_spec:
        # A user may revert a change: the build of these inputs exists then.
        build = next((build for build in facts.builds if build.name == build_name), None)
    if build is not None and _is_current(build, config):
        return PoolImagePlan(
            node_facts.RolloutTarget(name, build.pull_spec), source=source, is_built=True
        )
    planned = replace(_estimate_build(facts, config), name=build_name)
    return PoolImagePlan(
        node_facts.RolloutTarget(name, UNBUILT_IMAGE), planned, source=source, is_built=True
    )


def _find_problems(
    facts: PoolBuildFacts, pool_build: os_image.PoolBuild, config: machineosconfig.MachineOSConfig
) -> Iterator[str]:
    for image_config in facts.image_configs:
        if image_config.pool == facts.pool.name and _is_unanswered(image_config):
            for finding in (
                *input_checks.find_config_findings(image_config),
                *input_checks.find_pool_findings(image_config, facts.pool, pool_build.config),
                *input_checks.find_architecture_findings(image_config, facts.architectures),
            ):
                yield f"MachineOSConfig {image_config.name}: {finding}"
    if (
        _is_unanswered(config)
        and facts.rendered is not None
        and not image_tags.is_tag(config.base_image)
    ):
        yield from map(
            str, input_checks.find_rendered_findings(facts.rendered, base_image=config.base_image)
        )
    verdict = os_image.decide_pool_image(facts.pool, pool_build)
    if isinstance(verdict, os_image.GateBlocked):
        yield verdict.reason


def _is_unanswered(config: machineosconfig.MachineOSConfig) -> bool:
    """Whether no build controller has accepted or refused the object as it is."""
    return not config.conditions and not config.pull_spec


def _is_current(
    build: machineosbuild.MachineOSBuild, config: machineosconfig.MachineOSConfig
) -> bool:
    """Whether the build has made the image that the MachineOSConfig requests."""
    return (
        build.state is machineosbuild.BuildState.SUCCEEDED
        and not config.needs_rebuild
        and build.pull_spec == (config.pull_spec or build.pull_spec)
    )


def _compute_name(facts: PoolBuildFacts, config: machineosconfig.MachineOSConfig) -> str:
    if facts.rendered is None or image_tags.is_tag(config.base_image) or config.context_name:
        # The name covers the files of the context, which only the build controller reads.
        return ""
    return build_inputs.compute_build_name(config, facts.pool, facts.rendered)


def _estimate_build(facts: PoolBuildFacts, config: machineosconfig.MachineOSConfig) -> PlannedBuild:
    succeeded = sorted(
        (
            build
            for build in facts.builds
            if build.image_config == config.name
            and build.state is machineosbuild.BuildState.SUCCEEDED
        ),
        key=lambda build: build.end,
        reverse=True,
    )
    needs_job = _needs_job(facts, config, succeeded[0] if succeeded else None)
    last = next((build for build in succeeded if bool(build.job) == needs_job), None)
    assumed_s = ASSUMED_BUILD_S if needs_job else ASSUMED_LAYER_S
    if last is None or (seconds := _measure_s(last)) is None:
        return PlannedBuild(config.name, assumed_s, needs_job=needs_job)
    return PlannedBuild(config.name, seconds, last.name, needs_job)


def _needs_job(
    facts: PoolBuildFacts,
    config: machineosconfig.MachineOSConfig,
    last: machineosbuild.MachineOSBuild | None,
) -> bool:
    """Whether the system part must be built; that of the last build serves the same inputs."""
    if facts.rendered is None:
        return True
    wanted = _list_inputs(facts, config, facts.rendered)
    if not any(system.needs_job for system in wanted):
        return False
    before = facts.configs.get(last.config) if last is not None else None
    if before is None or not config.pull_spec or config.needs_rebuild or config.sees_config:
        return True
    return _list_inputs(facts, config, before) != wanted


def _list_inputs(
    facts: PoolBuildFacts,
    config: machineosconfig.MachineOSConfig,
    rendered: machineconfig.MachineConfig,
) -> list[build_inputs.BuildInputs]:
    architectures = sorted(facts.architectures) or [node.DEFAULT_ARCHITECTURE]
    return [
        build_inputs.BuildInputs.from_objects(config, rendered, architecture)
        for architecture in architectures
    ]


def _measure_s(build: machineosbuild.MachineOSBuild) -> float | None:
    began, ended = clocks.parse_rfc3339(build.start), clocks.parse_rfc3339(build.end)
    return None if began is None or ended is None else max(ended - began, 0.0)


def _read_target(pool: machineconfigpool.MachineConfigPool) -> node_facts.RolloutTarget:
    verdict = os_image.read_pool_target(pool)
    if isinstance(verdict, os_image.GateOpen):
        return verdict.target
    raise errors.ConfigError(
        f"cannot find the OS image of pool {pool.name}: {verdict.reason}",
        remedy="compare with a cluster that has resolved the tag, or name the image by digest in "
        "spec.osImage",
    )
