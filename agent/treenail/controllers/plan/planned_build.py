"""The image build that a pool needs before its nodes can move: a step of the plan."""

from collections.abc import Iterable
from dataclasses import dataclass

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clock import parse_rfc3339
from treenail.controllers.rollout.gates.os_image import find_pool_build, read_pool_image
from treenail.controllers.rollout.nodes import RolloutTarget

UNBUILT_IMAGE = "(built first)"
"""In place of the pull spec of an image that does not exist yet."""
ASSUMED_BUILD_S = 300.0
"""Assumed duration of the first build of a pool."""


@dataclass(frozen=True, slots=True)
class PlannedBuild:
    """A build that must succeed first."""

    image_config: str
    duration_s: float
    last_build: str = ""
    """The build whose duration is assumed; empty before the first one."""


def plan_pool_build(
    pool: MachineConfigPool,
    configs: Iterable[MachineOSConfig],
    builds: Iterable[MachineOSBuild],
) -> tuple[RolloutTarget, PlannedBuild | None]:
    """Return the pool's target, and the build that it needs; raise `ConfigError`."""
    builds = tuple(builds)
    found = find_pool_build(pool, configs, builds)
    if found.config is None:
        return read_pool_image(pool).target, None
    name, build = pool.configuration.name, found.build
    is_built = build is not None and build.state is BuildState.SUCCEEDED
    if is_built and build is not None and build.pull_spec == found.config.pull_spec:
        return RolloutTarget(name, build.pull_spec), None
    last = max(
        (
            each
            for each in builds
            if each.image_config == found.config.name and each.state is BuildState.SUCCEEDED
        ),
        key=lambda each: each.end,
        default=None,
    )
    planned = PlannedBuild(found.config.name, _measure_s(last), last.name if last else "")
    return RolloutTarget(name, UNBUILT_IMAGE), planned


def _measure_s(build: MachineOSBuild | None) -> float:
    began = None if build is None else parse_rfc3339(build.start)
    ended = None if build is None else parse_rfc3339(build.end)
    return ASSUMED_BUILD_S if began is None or ended is None else max(ended - began, 0.0)
