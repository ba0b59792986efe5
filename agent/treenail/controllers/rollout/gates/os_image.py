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
from treenail.controllers.rollout.nodes import NodeFacts, Target

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
class ImageConfig:
    """A MachineOSConfig: the pool's image is built in the cluster."""

    name: str
    pull_spec: str = ""
    """The image it last got, empty before the first one."""

    @classmethod
    def from_json(cls, document: object) -> "ImageConfig":
        """The MachineOSConfig in an API object; raises `ConfigError`."""
        fields = Fields.of(document, "MachineOSConfig")
        return cls(
            ObjectMeta.from_fields(fields.nested("metadata")).name,
            fields.nested("status").text("currentImagePullSpec"),
        )


@dataclass(frozen=True, slots=True)
class ImageBuild:
    """A MachineOSBuild: one attempt to make an image of one rendered config."""

    name: str
    config: str = ""
    """The rendered config that is built into the image."""
    pull_spec: str = ""
    state: BuildState = BuildState.INITIAL

    @classmethod
    def from_json(cls, document: object) -> "ImageBuild":
        """The MachineOSBuild in an API object; raises `ConfigError`."""
        fields = Fields.of(document, "MachineOSBuild")
        spec, status = fields.nested("spec"), fields.nested("status")
        true = {
            found.type
            for found in status.each("conditions", Condition.from_fields)
            if found.status == "True"
        }
        return cls(
            ObjectMeta.from_fields(fields.nested("metadata")).name,
            spec.nested("machineConfig").text("name"),
            status.text("digestedImagePushSpec"),
            next((state for state in _LATEST_FIRST if state in true), BuildState.INITIAL),
        )


@dataclass(frozen=True, slots=True)
class Proceed:
    """The nodes may be given this."""

    target: Target
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Not yet; somebody is at work."""

    reason: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """Not before a person has done something."""

    reason: str
    kind: str = "Blocked"
    """The reason as a CamelCase word."""


Verdict = Proceed | Hold | Blocked


def annotated(pool: MachineConfigPool) -> Proceed:
    """The pool's config, with the image that its annotation names, if it names one.

    Raises `ConfigError` when that is no pull spec by digest.
    """
    image = pool.metadata.annotations.get(OS_IMAGE)
    if image is None:
        return Proceed(Target(pool.configuration.name), "the config names the image")
    pullspec.parse(image, where=f"annotation {OS_IMAGE} of pool {pool.name}")
    return Proceed(Target(pool.configuration.name, image), f"the pool names the image {image}")


def built(pool: MachineConfigPool, config: ImageConfig | None, build: ImageBuild | None) -> Verdict:
    """The pool's config with the image that was built for it, once it is there."""
    if config is None and build is not None:
        return Blocked(
            f'orphaned MachineOSBuild "{build.name}" found, but no MachineOSConfig for pool '
            f"{pool.name}"
        )
    if config is None or build is None:
        return Hold("No MachineOSConfig or MachineOSBuild for this pool")
    if not config.pull_spec:
        return Hold("Desired image not set in MachineOSConfig")
    match build.state:
        case BuildState.SUCCEEDED:
            return _succeeded(pool, config, build)
        case BuildState.PREPARED | BuildState.BUILDING:
            return Hold("Image build pending")
        case BuildState.FAILED:
            return Blocked(f"image build {build.name} for MachineConfigPool {pool.name} failed")
        case BuildState.INTERRUPTED | BuildState.INITIAL:
            return Hold("Image is not ready yet")


def wanted(pool: MachineConfigPool, config: ImageConfig | None, build: ImageBuild | None) -> Target:
    """What the pool is after, whether or not the gate is open yet; for counting and reporting."""
    name = pool.configuration.name
    if config is None and build is None:
        return Target(name)
    if config is None or build is None or build.config != name:
        return Target(name, "")
    return Target(name, config.pull_spec)


def control_plane(
    pool: str, masters: Iterable[NodeFacts], arbiters: Iterable[NodeFacts], masters_want: Target
) -> Hold | None:
    """Why a pool with members of etcd has to wait for the other one, None when it need not.

    For clusters with an arbiter: two masters and it are all that etcd has, so masters wait while
    an arbiter is out of service, and arbiters wait until every master is through.
    """
    if pool == MASTER:
        out = [node.name for node in arbiters if node.unavailable]
        return Hold(f"arbiter {out[0]} is unavailable") if out else None
    if pool == ARBITER:
        behind = [node.name for node in masters if node.unavailable or not node.has(masters_want)]
        return Hold(f"master {behind[0]} goes first") if behind else None
    return None


_LATEST_FIRST = (
    BuildState.SUCCEEDED,
    BuildState.FAILED,
    BuildState.INTERRUPTED,
    BuildState.BUILDING,
    BuildState.PREPARED,
)


def _succeeded(pool: MachineConfigPool, config: ImageConfig, build: ImageBuild) -> Verdict:
    done = f"Image built successfully, pullspec: {config.pull_spec}"
    if build.pull_spec != config.pull_spec:
        return Hold(f'{done}, but MachineOSConfig "{config.name}" has not updated yet')
    return Proceed(Target(pool.configuration.name, config.pull_spec), done)
