"""OS image gate: which image the pool's nodes get, and whether they may get it now.

The image comes from the spec of the pool or from a build in the cluster, which a
MachineOSConfig requests and a MachineOSBuild runs. Order and messages of the build checks are those
of the Machine Config Operator (canLayeredContinue in node_controller.go).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from treenail.api import pullspec
from treenail.api.decode import Fields
from treenail.api.machineconfigpool import ARBITER, MASTER, MachineConfigPool
from treenail.api.meta import Condition, ObjectMeta
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget


class BuildState(StrEnum):
    """State of a MachineOSBuild: the type of the condition that is True."""

    INITIAL = ""
    PREPARED = "Prepared"
    BUILDING = "Building"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"


@dataclass(frozen=True, slots=True)
class MachineOSConfig:
    """A MachineOSConfig, which requests image builds for a pool."""

    name: str
    pull_spec: str = ""
    """The last built image; empty before the first build."""

    @classmethod
    def from_json(cls, document: object) -> "MachineOSConfig":
        """Parse a MachineOSConfig; raises `ConfigError`."""
        fields = Fields.from_json(document, "MachineOSConfig")
        return cls(
            ObjectMeta.from_fields(fields.get_object("metadata")).name,
            fields.get_object("status").get_text("currentImagePullSpec"),
        )


@dataclass(frozen=True, slots=True)
class MachineOSBuild:
    """A MachineOSBuild: one image build of one rendered config."""

    name: str
    config: str = ""
    """The rendered config in the image."""
    pull_spec: str = ""
    state: BuildState = BuildState.INITIAL

    @classmethod
    def from_json(cls, document: object) -> "MachineOSBuild":
        """Parse a MachineOSBuild; raises `ConfigError`."""
        fields = Fields.from_json(document, "MachineOSBuild")
        spec, status = fields.get_object("spec"), fields.get_object("status")
        true = {
            found.type
            for found in status.map_objects("conditions", Condition.from_fields)
            if found.status == "True"
        }
        return cls(
            ObjectMeta.from_fields(fields.get_object("metadata")).name,
            spec.get_object("machineConfig").get_text("name"),
            status.get_text("digestedImagePushSpec"),
            next((state for state in _STATES_LATEST_FIRST if state in true), BuildState.INITIAL),
        )


@dataclass(frozen=True, slots=True)
class GateOpen:
    """Nodes may get the target."""

    target: RolloutTarget
    reason: str


@dataclass(frozen=True, slots=True)
class GateWaiting:
    """Nodes must wait for an event that needs no user."""

    reason: str


@dataclass(frozen=True, slots=True)
class GateBlocked:
    """Nodes must wait until a user fixes a problem."""

    reason: str
    kind: str = "Blocked"
    """CamelCase reason for the pool's condition."""


@dataclass(frozen=True, slots=True)
class GatePending:
    """The gate was asked and has not answered yet."""


GateVerdict = GateOpen | GateWaiting | GateBlocked
GateAnswer = GateWaiting | GateBlocked | GatePending | None
"""Answer of an external gate; None means that it is open."""


def read_pool_image(pool: MachineConfigPool) -> GateOpen:
    """Return the pool's config with the image from its spec, if it names one.

    Raises `ConfigError` when ``spec.osImage`` is not a pull spec by digest.
    """
    image = pool.os_image
    if image is None:
        return GateOpen(RolloutTarget(pool.configuration.name), "the config names the image")
    pullspec.parse_pull_spec(image, where=f"spec.osImage of pool {pool.name}")
    return GateOpen(
        RolloutTarget(pool.configuration.name, image), f"the pool names the image {image}"
    )


def decide_built_image(
    pool: MachineConfigPool, config: MachineOSConfig | None, build: MachineOSBuild | None
) -> GateVerdict:
    """Return the pool's config with the image built for it, or why nodes must wait."""
    if config is None and build is not None:
        return GateBlocked(
            f'orphaned MachineOSBuild "{build.name}" found, but no MachineOSConfig for pool '
            f"{pool.name}"
        )
    if config is None or build is None:
        return GateWaiting("No MachineOSConfig or MachineOSBuild for this pool")
    if not config.pull_spec:
        return GateWaiting("Desired image not set in MachineOSConfig")
    match build.state:
        case BuildState.SUCCEEDED:
            return _check_succeeded_build(pool, config, build)
        case BuildState.PREPARED | BuildState.BUILDING:
            return GateWaiting("Image build pending")
        case BuildState.FAILED:
            return GateBlocked(f"image build {build.name} for MachineConfigPool {pool.name} failed")
        case BuildState.INTERRUPTED | BuildState.INITIAL:
            return GateWaiting("Image is not ready yet")


def compute_build_target(
    pool: MachineConfigPool, config: MachineOSConfig | None, build: MachineOSBuild | None
) -> RolloutTarget:
    """Compute the pool's target, whether or not the gate is open, for counts and messages."""
    name = pool.configuration.name
    if config is None and build is None:
        return RolloutTarget(name)
    if config is None or build is None or build.config != name:
        return RolloutTarget(name, "")
    return RolloutTarget(name, config.pull_spec)


def check_control_plane(
    pool: str,
    masters: Iterable[NodeFacts],
    arbiters: Iterable[NodeFacts],
    masters_target: RolloutTarget,
) -> GateWaiting | None:
    """Return why the master or arbiter pool must wait for the other one, or None.

    In a cluster with an arbiter, two masters and the arbiter are all members of etcd. Masters wait
    while an arbiter is unavailable. Arbiters wait until every master is updated.
    """
    if pool == MASTER:
        unavailable = [node.name for node in arbiters if node.is_unavailable]
        if unavailable:
            return GateWaiting(f"waiting: arbiter {unavailable[0]} is unavailable")
    if pool == ARBITER:
        outdated = [
            node.name
            for node in masters
            if node.is_unavailable or not node.is_updated_to(masters_target)
        ]
        if outdated:
            return GateWaiting(f"waiting: master {outdated[0]} updates first")
    return None


_STATES_LATEST_FIRST = (
    BuildState.SUCCEEDED,
    BuildState.FAILED,
    BuildState.INTERRUPTED,
    BuildState.BUILDING,
    BuildState.PREPARED,
)


def _check_succeeded_build(
    pool: MachineConfigPool, config: MachineOSConfig, build: MachineOSBuild
) -> GateVerdict:
    done = f"Image built successfully, pullspec: {config.pull_spec}"
    if build.pull_spec != config.pull_spec:
        return GateWaiting(f'{done}, but MachineOSConfig "{config.name}" has not updated yet')
    return GateOpen(RolloutTarget(pool.configuration.name, config.pull_spec), done)
