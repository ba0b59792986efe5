"""Writes that `decide` requests. Each can be repeated: the process may end before or after it."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api.machineosbuild import BuildState
from treenail.api.meta import Condition
from treenail.controllers.image_build.facts import (
    BuildReport,
    JobFacts,
    Question,
    SystemFacts,
    WantedBuild,
    WantedSystem,
)


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
    state: BuildState
    reason: str = ""
    """Empty for the reason of the state."""
    message: str = ""
    digest: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class SetConfigStatus:
    """Write the status of the MachineOSConfig."""

    conditions: tuple[Condition, ...]
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
class AskRegistry:
    """Ask a registry; the answer is a fact of a later decision."""

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
    | AskRegistry
    | ReportPool
)
