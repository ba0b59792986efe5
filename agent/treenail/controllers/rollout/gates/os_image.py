"""May the pool's nodes be given an OS image now, and which one.

An image comes from an annotation of the pool, or is built in the cluster: then a MachineOSConfig
asks for it and a MachineOSBuild makes it. The order of the questions and the sentences are those
of the Machine Config Operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from treenail.api import pullspec
from treenail.api.decode import Fields
from treenail.api.machineconfigpool import ARBITER, MASTER, MachineConfigPool
from treenail.api.meta import Condition, ObjectMeta
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget

OS_IMAGE = "treenail.io/os-image"
"""Annotation of a pool: the pull spec, by digest, of the OS image its nodes should have."""


class BuildState(StrEnum):
    """How far a MachineOSBuild got: the type of the condition that is True."""

    INITIAL = ""
    PREPARED = "Prepared"
    BUILDING = "Building"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"


@dataclass(frozen=True, slots=True)
class MachineOSConfig:
    """A MachineOSConfig: the pool's image is built in the cluster."""

    name: str
    pull_spec: str = ""
    """The image it last got, empty before the first one."""

    @classmethod
    def from_json(cls, document: object) -> "MachineOSConfig":
        """The MachineOSConfig in an API object; raises `ConfigError`."""
        fields = Fields.from_json(document, "MachineOSConfig")
        return cls(
            ObjectMeta.from_fields(fields.get_object("metadata")).name,
            fields.get_object("status").get_text("currentImagePullSpec"),
        )


@dataclass(frozen=True, slots=True)
class MachineOSBuild:
    """A MachineOSBuild: one attempt to make an image of one rendered config."""

    name: str
    config: str = ""
    """The rendered config that is built into the image."""
    pull_spec: str = ""
    state: BuildState = BuildState.INITIAL

    @classmethod
    def from_json(cls, document: object) -> "MachineOSBuild":
        """The MachineOSBuild in an API object; raises `ConfigError`."""
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
    """The nodes may be given this."""

    target: RolloutTarget
    reason: str


@dataclass(frozen=True, slots=True)
class GateWaiting:
    """Not yet; somebody is at work."""

    reason: str


@dataclass(frozen=True, slots=True)
class GateBlocked:
    """Not before a person has done something."""

    reason: str
    kind: str = "Blocked"
    """The reason as a CamelCase word."""


GateVerdict = GateOpen | GateWaiting | GateBlocked


def read_annotated_image(pool: MachineConfigPool) -> GateOpen:
    """The pool's config, with the image that its annotation names, if it names one.

    Raises `ConfigError` when that is no pull spec by digest.
    """
    image = pool.metadata.annotations.get(OS_IMAGE)
    if image is None:
        return GateOpen(RolloutTarget(pool.configuration.name), "the config names the image")
    pullspec.parse_pull_spec(image, where=f"annotation {OS_IMAGE} of pool {pool.name}")
    return GateOpen(
        RolloutTarget(pool.configuration.name, image), f"the pool names the image {image}"
    )


def decide_built_image(
    pool: MachineConfigPool, config: MachineOSConfig | None, build: MachineOSBuild | None
) -> GateVerdict:
    """The pool's config with the image that was built for it, once it is there."""
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
    """What the pool is after, whether or not the gate is open yet; for counting and reporting."""
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
    """Why a pool with members of etcd has to wait for the other one, None when it need not.

    For clusters with an arbiter: two masters and it are all that etcd has, so masters wait while
    an arbiter is out of service, and arbiters wait until every master is through.
    """
    if pool == MASTER:
        out = [node.name for node in arbiters if node.is_unavailable]
        return GateWaiting(f"arbiter {out[0]} is unavailable") if out else None
    if pool == ARBITER:
        behind = [
            node.name
            for node in masters
            if node.is_unavailable or not node.is_updated_to(masters_target)
        ]
        return GateWaiting(f"master {behind[0]} goes first") if behind else None
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
