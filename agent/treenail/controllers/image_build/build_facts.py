"""Facts about the image builds of one MachineOSConfig, and actions: input and output of `decide`.

A build has two parts. The system part needs a Job where the MachineOSConfig has a Containerfile or
the config has extensions or another kernel; otherwise it is the base image. The config part is one
layer on top, added through the registry alone.

Each action can be repeated: the process may end before or after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from treenail.api import machineosbuild, node, object_meta
from treenail.controllers.pools import image_tags
from treenail.encoding import codec
from treenail.image.build_result import AttemptFailure

POOL_TAKEN = "PoolTaken"
"""Reason of a MachineOSConfig that lost its pool to another one."""
MAX_JOB_NAME = 63
"""Length limit of the name of a Job: its pods carry it in a label."""
_WARNING_LIMIT = 500
_MAX_PHASES = 16


def _limit_phases(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in list(seconds.items())[:_MAX_PHASES]}


@dataclass(frozen=True, slots=True)
class BuildReport(codec.JsonObject, where="build report", omits_defaults=True):
    """Attempts of a build; stored in an annotation of the build."""

    attempts: Annotated[int, codec.Via(lambda count: max(count, 0))] = 0
    """Failed attempts."""
    failure: Annotated[AttemptFailure | None, codec.Key(part="inline", fallback=None)] = None
    """Of the last failed attempt."""
    retry_at: object_meta.Timestamp | None = None
    """When the next attempt begins; None without another one."""
    jobs: Annotated[
        tuple[str, ...],
        codec.Key("job"),
        codec.Via(lambda names: tuple(filter(None, names.split(","))), ",".join, wire=str),
    ] = ()
    """Jobs of the last counted attempt that failed. A failure is counted once."""
    seconds: Annotated[Mapping[str, float], codec.Via(_limit_phases, _limit_phases)] = field(
        default_factory=dict
    )
    """Duration of each phase of the attempt that succeeded."""
    warning: Annotated[str, codec.Via(write=lambda warning: warning[:_WARNING_LIMIT])] = ""
    """What is missing beside the complete image, such as its provenance; empty for nothing."""


@dataclass(frozen=True, slots=True)
class ImageConfigFacts:
    """A MachineOSConfig."""

    name: str
    uid: str = ""
    generation: int = 0
    pool: str = ""
    current_build: str = ""
    """Name of the MachineOSBuild in the annotation."""
    rebuild_requested: bool = False
    rebuild_of: str = ""
    """UID of the build that a requested rebuild replaces; empty without a rebuild."""
    pull_spec: str = ""
    """The image that the pool gets."""
    pull_spec_build: str = ""
    """Name of the build in the status."""
    observed_generation: int = 0
    conditions: tuple[object_meta.Condition, ...] = ()
    pre_built: str = ""
    """Pull spec of the image that the pool gets before its first build; empty for none."""


@dataclass(frozen=True, slots=True)
class SystemFacts(codec.JsonObject):
    """System part of a build for one architecture."""

    content_key: str = ""
    share_key: str = ""
    job: str = ""
    """Name of its last Job; empty without one."""
    image: str = ""
    """Pull spec; empty while it is unknown."""


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """A MachineOSBuild."""

    name: str
    uid: str = ""
    image_config: str = ""
    config: str = ""
    """The rendered config."""
    push_spec: str = ""
    state: machineosbuild.BuildState = machineosbuild.BuildState.INITIAL
    reason: str = ""
    """Reason of the condition that is True."""
    message: str = ""
    created: str = ""
    share_key: str = ""
    report: BuildReport = BuildReport()
    systems: Mapping[str, SystemFacts] = field(default_factory=dict)
    """By architecture; an empty name if the build has only one."""
    architectures: tuple[str, ...] = ()
    """Empty for a build that does not record them."""
    digest: str = ""
    """Pull spec of the complete image."""
    job: str = ""
    """Name of the Job in the status."""
    rebuild_of: str = ""
    """UID of the build that it replaces; then no earlier image is used again."""
    started: str = ""
    """Begin in RFC 3339; empty before it."""
    is_deleting: bool = False

    @property
    def has_ended(self) -> bool:
        return self.state.has_ended

    @property
    def share_keys(self) -> frozenset[str]:
        """Share keys of the Jobs of this build."""
        return frozenset(system.share_key for system in self.systems.values())

    def get_system(self, name: str) -> SystemFacts:
        """Return the system part with this name; an empty one if it is unknown."""
        return self.systems.get(name) or SystemFacts()


class JobState(StrEnum):
    """State of a Job."""

    PREPARED = "Prepared"
    """No pod runs yet."""
    BUILDING = "Building"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A Job and what its pods reported."""

    name: str
    uid: str = ""
    resource_version: str = ""
    share_key: str = ""
    image_config: str = ""
    build: str = ""
    """The MachineOSBuild that created it."""
    architecture: str = ""
    """Of the system part; empty if the build has only one."""
    attempt: int = 1
    state: JobState = JobState.PREPARED
    is_deleting: bool = False
    owners: tuple[str, ...] = ()
    """UIDs of the builds that wait for it."""
    is_orphan: bool = False
    """None of these builds exists any longer, so the garbage collector deletes it."""
    digest: str = ""
    """Of the pushed system part, as the pod reported it."""
    failure: AttemptFailure | None = None
    """Of the last pod that failed; the Job may still run."""
    phase: str = ""
    """The container that runs."""
    unschedulable: str = ""
    """Why no node runs the newest pod, as the scheduler reports it; empty if one does."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    warning: str = ""
    """What is missing beside the pushed image; empty for nothing."""
    retries: int = 0
    """Pods that failed."""
    started_at: float | None = None

    @property
    def has_unknown_end(self) -> bool:
        """The Job has ended, and no pod says how."""
        if self.state is JobState.SUCCEEDED:
            return not self.digest
        return self.state is JobState.FAILED and self.failure is None

    @property
    def is_running(self) -> bool:
        return self.state in (JobState.PREPARED, JobState.BUILDING) and not self.is_deleting


@dataclass(frozen=True, slots=True)
class WantedSystem:
    """System part of the wanted build for one architecture."""

    architecture: str = node.DEFAULT_ARCHITECTURE
    name: str = ""
    """The architecture if the build has several ones, otherwise empty; part of the Job's name."""
    content_key: str = ""
    share_key: str = ""
    """Builds with the same one share a Job: content key, push repository and push Secret."""
    needs_job: bool = False
    push_spec: str = ""
    """Where the Job pushes it."""

    @property
    def initial(self) -> SystemFacts:
        """The facts at the begin of a build."""
        return SystemFacts(self.content_key, self.share_key)


@dataclass(frozen=True, slots=True)
class WantedBuild:
    """The build that config, pool and rendered config request now."""

    name: str
    config: str
    push_spec: str
    content_key: str = ""
    """Over the inputs of all architectures."""
    share_key: str = ""
    systems: tuple[WantedSystem, ...] = (WantedSystem(),)
    """One for each architecture of the pool's nodes."""
    base_image: str = ""
    push_secret: str = ""
    instruction_remedy: str = ""
    """What else may help when an instruction failed; empty for nothing."""

    @property
    def needs_job(self) -> bool:
        """True unless the system part of each architecture is the base image."""
        return any(system.needs_job for system in self.systems)

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(system.architecture for system in self.systems)

    @property
    def share_keys(self) -> frozenset[str]:
        """Share keys of the Jobs."""
        return frozenset(system.share_key for system in self.systems)


@dataclass(frozen=True, slots=True)
class CheckImage:
    """Question to a registry whether it has an image."""

    build: str
    """UID of the build."""
    image: str
    """Pull spec by digest."""
    attempt: int = 0
    """Another number asks again."""
    content_key: str = ""
    """Of a system part: an image without this label counts as missing, because a user may have
    written the annotation that names it."""


@dataclass(frozen=True, slots=True)
class CheckPush:
    """Question to a registry whether the login may push: a Job finds that out at its end."""

    build: str
    """UID of the build."""
    image: str
    """Push spec of the build."""
    attempt: int


@dataclass(frozen=True, slots=True)
class AppendConfig:
    """Order to a registry: add the config to the images, and push them under the tag of the build.

    Images of several architectures are pushed as a list of manifests.
    """

    build: str
    """UID of the build."""
    attempt: int
    sources: tuple[tuple[str, str], ...]
    """Architecture and pull spec of each system part."""
    push_spec: str
    config: str
    """The rendered config."""


Question = CheckImage | CheckPush | AppendConfig | image_tags.TagQuestion


@dataclass(frozen=True, slots=True)
class BuildSituation:
    """All inputs that determine the next writes for one MachineOSConfig."""

    config: ImageConfigFacts
    now: float
    wanted: WantedBuild | None = None
    """None while a problem leaves it unknown."""
    problem: image_tags.ImageProblem | None = None
    """Why no build may begin. A running build of the same inputs continues."""
    hold_reason: str = ""
    """Why the first build must wait for the installation, which may have built the image."""
    builds: tuple[BuildFacts, ...] = ()
    """Builds of this MachineOSConfig."""
    jobs: tuple[JobFacts, ...] = ()
    """Jobs of these builds, and Jobs with a share key of the wanted build."""
    needed_keys: frozenset[str] = frozenset()
    """Share keys that running builds of other MachineOSConfigs need."""
    system_images: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """System parts of earlier builds by share key of the wanted build, newest first."""
    answers: Mapping[Question, image_tags.ImageAnswer] = field(default_factory=dict)
    pool_condition: object_meta.Condition | None = None
    """ImageBuildDegraded of the pool."""
    base_condition: object_meta.Condition | None = None
    """BaseImageResolved of the MachineOSConfig; None leaves the present one."""
    refusal: str = ""
    """Why the API server refused the last write; empty when it did not."""


@dataclass(frozen=True, slots=True)
class CreateBuild:
    """Create the MachineOSBuild."""

    wanted: WantedBuild
    rebuild_of: str = ""
    previous_failure: str = ""
    """Why the build failed that it replaces."""


@dataclass(frozen=True, slots=True)
class DeleteBuild:
    """Delete a MachineOSBuild, unless it is another object of the same name."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class SetCurrentBuild:
    """Name the build in the annotation of the MachineOSConfig."""

    build: str


@dataclass(frozen=True, slots=True)
class AcceptRebuild:
    """Replace the user's annotation by one that names the build to replace, in one write."""

    build_uid: str


@dataclass(frozen=True, slots=True)
class FinishRebuild:
    """Remove the annotation that names the replaced build."""


@dataclass(frozen=True, slots=True)
class SetReport:
    """Write the report of a build."""

    build: str
    report: BuildReport


@dataclass(frozen=True, slots=True)
class SetSystems:
    """Record the system parts of a build."""

    build: str
    systems: Mapping[str, SystemFacts]
    """By architecture; an empty name for the only one, whose Job is in the status."""


@dataclass(frozen=True, slots=True)
class SetBuildStatus:
    """Write the conditions of a build, and what belongs to them."""

    build: str
    state: machineosbuild.BuildState
    reason: str = ""
    """Empty for the reason of the state."""
    message: str = ""
    digest: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class SetConfigStatus:
    """Write the status of the MachineOSConfig."""

    conditions: tuple[object_meta.Condition, ...]
    pull_spec: str = ""
    """Empty leaves the present one."""
    build: str = ""


@dataclass(frozen=True, slots=True)
class CreateJob:
    """Begin an attempt of the system part."""

    system: WantedSystem
    build: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AdoptJob:
    """Add the build to those that wait for a Job."""

    job: JobFacts
    build: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a Job that no build needs, unless it changed meanwhile."""

    job: JobFacts
    why: str
    has_inputs: bool = False
    """Delete also the inputs and logins of the build that created it."""


@dataclass(frozen=True, slots=True)
class CallRegistry:
    """Check an image of a registry, or push one, on another thread.

    The answer is a fact of a later decision.
    """

    question: Question


@dataclass(frozen=True, slots=True)
class ReportPool:
    """Write the condition ImageBuildDegraded of the pool."""

    reason: str
    message: str


BuildAction = (
    CreateBuild
    | DeleteBuild
    | SetCurrentBuild
    | AcceptRebuild
    | FinishRebuild
    | SetReport
    | SetSystems
    | SetBuildStatus
    | SetConfigStatus
    | CreateJob
    | AdoptJob
    | DeleteJob
    | CallRegistry
    | ReportPool
)


def make_job_name(build: str, attempt: int, architecture: str = "") -> str:
    """Return the name of the Job of an attempt: ``build-BUILD``, with a number from the second on.

    ``architecture`` is empty for a build with only one; otherwise it precedes the number. The hash
    at the end of a build's name stays whole when the name is too long.
    """
    suffix = f"-{architecture}" if architecture else ""
    suffix += "" if attempt == 1 else f"-{attempt}"
    room = MAX_JOB_NAME - len("build-") - len(suffix)
    if len(build) > room:
        head, _, tail = build.rpartition("-")
        build = f"{head[: max(room - len(tail) - 1, 0)].rstrip('-.')}-{tail}"[-room:].lstrip("-.")
    return f"build-{build}{suffix}"
