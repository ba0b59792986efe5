"""Progress of the pools of a new cluster towards their first image. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.pools.os_image import find_pool_owner
from treenail.controllers.pools.pool_status import DEGRADED, read_reported_counts


@dataclass(frozen=True, slots=True)
class PoolProgress:
    """Pools without their image, and failed builds, each in a sentence."""

    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def describe_pool_progress(
    pools: Sequence[MachineConfigPool],
    configs: Mapping[str, MachineOSConfig],
    builds: Mapping[str, MachineOSBuild],
) -> PoolProgress:
    """Describe the pools with a MachineOSConfig; without one there is nothing to wait for."""
    missing, failed = [], []
    for pool in sorted(pools, key=lambda each: each.name):
        config = find_pool_owner(pool.name, configs.values())
        if config is None:
            continue
        build = builds.get(config.current_build)
        failure = build.message if build and build.state is BuildState.FAILED else config.problem
        if failure:
            failed.append(f"the image of pool {pool.name} cannot be built: {failure}")
        elif build is None or build.state is not BuildState.SUCCEEDED:
            missing.append(_describe_build(pool.name, build))
        elif text := _describe_nodes(pool):
            missing.append(text)
    return PoolProgress(tuple(missing), tuple(failed))


def parse_objects(
    pools: Iterable[Json], configs: Iterable[Json], builds: Iterable[Json]
) -> PoolProgress:
    """Describe the pools of these documents; raise `ConfigError`."""
    found_configs = [MachineOSConfig.from_json(each) for each in configs]
    found_builds = [MachineOSBuild.from_json(each) for each in builds]
    return describe_pool_progress(
        [MachineConfigPool.from_json(each) for each in pools],
        {each.name: each for each in found_configs if not each.is_deleting},
        {each.name: each for each in found_builds if not each.is_deleting},
    )


def _describe_build(pool: str, build: MachineOSBuild | None) -> str:
    if build is None:
        return f"pool {pool} waits for its image: its build has not begun"
    message = f": {build.message}" if build.message else ""
    return f"pool {pool} waits for its image: {build.name} is {build.state or 'new'}{message}"


def _describe_nodes(pool: MachineConfigPool) -> str:
    """Return which nodes lack the image; empty when all have it, also when there is none."""
    counts = read_reported_counts(pool)
    if counts is None:
        return f"pool {pool.name} has no status yet"
    if counts.updated >= counts.total:
        return ""
    degraded = next((each for each in pool.conditions if each.type == DEGRADED), None)
    why = f"; {degraded.message}" if degraded and degraded.status == "True" else ""
    return f"pool {pool.name}: {counts.updated} of {counts.total} nodes have the image{why}"
