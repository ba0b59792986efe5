"""The image build of each pool, for users who watch a rollout: a pure function of the objects."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clock import parse_rfc3339
from treenail.controllers.pools.os_image import find_pool_owner

REJECTED, PENDING = "Rejected", "Pending"


@dataclass(frozen=True, slots=True)
class BuildRow:
    """The build that a pool's MachineOSConfig works towards, or has finished."""

    name: str
    """Of the MachineOSBuild; of the MachineOSConfig if there is none."""
    state: str
    """Type of the condition that is true; ``Pending`` before it, ``Rejected`` without a build."""
    message: str = ""
    seconds: float | None = None
    """Duration up to now, or of the whole build; None before it starts."""


def find_pool_builds(
    configs: Mapping[str, MachineOSConfig], builds: Mapping[str, MachineOSBuild], now: float
) -> dict[str, BuildRow]:
    """Return the builds by pool; ``now`` is in seconds since the epoch."""
    owners = (
        find_pool_owner(pool, configs.values()) for pool in {each.pool for each in configs.values()}
    )
    return {
        each.pool: _describe(each, builds.get(each.current_build), now)
        for each in owners
        if each is not None
    }


def _describe(config: MachineOSConfig, build: MachineOSBuild | None, now: float) -> BuildRow:
    if config.problem:
        return BuildRow(config.name, REJECTED, config.problem)
    if build is None:
        return BuildRow(config.name, PENDING)
    began, ended = parse_rfc3339(build.start), parse_rfc3339(build.end)
    seconds = None if began is None else max((ended or now) - began, 0.0)
    return BuildRow(build.name, build.state or PENDING, build.message, seconds)
