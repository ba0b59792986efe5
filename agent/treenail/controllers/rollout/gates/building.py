"""Pool conditions while the OS image is built in the cluster.

The messages are those of the Machine Config Operator, word for word.
"""

from collections.abc import Iterator

from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.meta import Condition

IMAGE_BUILD_DEGRADED = "ImageBuildDegraded"


def is_build_unfinished(config: MachineOSConfig | None, build: MachineOSBuild | None) -> bool:
    """True while the image that the pool waits for is not built yet."""
    if config is None or build is None:
        return False
    if build.state is BuildState.SUCCEEDED:
        return build.pull_spec not in ("", config.pull_spec)
    return build.state in (BuildState.PREPARED, BuildState.BUILDING, BuildState.FAILED)


def compute_build_updating(
    config: MachineOSConfig | None,
    build: MachineOSBuild | None,
    *,
    is_complete: bool,
    is_paused: bool,
    is_degraded: bool,
) -> tuple[str, str, str] | None:
    """Compute status, reason and message of Updating; None when no build determines them."""
    if config is None:
        return None
    if not is_paused and is_degraded:
        return ("False", "Degraded", "Pool update paused due to degraded condition")
    if build is None:
        waiting = "waiting for a new OS image build to start"
        lead = "Pool is paused; " if is_paused else "Pool is "
        return ("True", "WaitingForBuild", f"{lead}{waiting} (mosc: {config.name})")
    if build.state is BuildState.SUCCEEDED and is_complete and not is_paused:
        return None
    status, reason, message = (_PAUSED_BY_STATE if is_paused else _UPDATING_BY_STATE)[build.state]
    return (status, reason, f"{message} (mosb: {build.name})")


def compute_build_degraded(
    config: MachineOSConfig | None, build: MachineOSBuild | None, previous: Condition | None
) -> Iterator[Condition]:
    """Yield the ImageBuildDegraded condition if it must change.

    The build controller sets it to True. This function resets it when the failed build is over.
    """
    has_failed = previous is not None and previous.status == "True"
    if build is not None and build.state in (BuildState.PREPARED, BuildState.BUILDING):
        yield Condition(IMAGE_BUILD_DEGRADED, "False", "Building", "New build started")
    elif build is not None and build.state is BuildState.SUCCEEDED:
        yield Condition(
            IMAGE_BUILD_DEGRADED, "False", "BuildSuccess", "Build completed successfully"
        )
    elif build is None and has_failed and not (config is not None and config.problem):
        reason, message = (
            ("NoLayeredObjects", "No layered pool objects found")
            if config is None
            else ("BuildPending", "Waiting for a new OS image build")
        )
        yield Condition(IMAGE_BUILD_DEGRADED, "False", reason, message)


_UPDATING_BY_STATE = {
    BuildState.INITIAL: (
        "True", "WaitingForBuild", "Pool is waiting for OS image build to start",
    ),
    BuildState.PREPARED: (
        "True", "WaitingForBuild", "Pool is waiting for OS image build to start",
    ),
    BuildState.BUILDING: (
        "True", "Building", "Pool is waiting for OS image build to complete",
    ),
    BuildState.SUCCEEDED: (
        "True", "RollingOut", "Pool is waiting for nodes to apply OS image",
    ),
    BuildState.FAILED: (
        "False", "BuildFailed", "Pool update stopped due to OS image build failure",
    ),
    BuildState.INTERRUPTED: (
        "False", "BuildInterrupted", "Pool update stopped due to OS image build being interrupted",
    ),
}  # fmt: skip

_PAUSED_BY_STATE = {
    BuildState.INITIAL: (
        "True", "Paused", "Pool is paused; OS image build has been created but not yet started",
    ),
    BuildState.PREPARED: (
        "True", "Paused", "Pool is paused; OS image build has been prepared but will not rollout",
    ),
    BuildState.BUILDING: (
        "True", "Paused", "Pool is paused; OS image build in progress",
    ),
    BuildState.SUCCEEDED: (
        "False", "Paused", "Pool is paused; OS image build completed successfully",
    ),
    BuildState.FAILED: (
        "False", "Paused", "Pool is paused; OS image build failed",
    ),
    BuildState.INTERRUPTED: (
        "False", "Paused", "Pool is paused; OS image build was interrupted",
    ),
}  # fmt: skip
