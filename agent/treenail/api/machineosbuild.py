"""MachineOSBuild: one build of the OS image of one rendered MachineConfig."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from treenail.api import annotations as key
from treenail.api import object_meta
from treenail.encoding import codec

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineOSBuild"


class BuildState(StrEnum):
    """State of a MachineOSBuild: the type of the condition that is True."""

    INITIAL = ""
    PREPARED = "Prepared"
    BUILDING = "Building"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"

    @property
    def has_ended(self) -> bool:
        """True for a state that never changes: the API server refuses other conditions then."""
        return self in (BuildState.SUCCEEDED, BuildState.FAILED, BuildState.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class MachineOSBuild(codec.JsonObject, kind=KIND, api_version=API_VERSION):
    """Snapshot of a MachineOSBuild."""

    metadata: object_meta.ObjectMeta
    config: Annotated[str, codec.Key("spec.machineConfig.name")] = ""
    """The rendered config in the image."""
    image_config: Annotated[str, codec.Key("spec.machineOSConfig.name")] = ""
    """Name of the MachineOSConfig."""
    push_spec: Annotated[str, codec.Key("spec.renderedImagePushSpec")] = ""
    conditions: object_meta.StatusConditions = ()
    pull_spec: Annotated[str, codec.Key("status.digestedImagePushSpec")] = ""
    """The pushed image by digest; empty until the build succeeds."""
    start: Annotated[str, codec.Key("status.buildStart")] = ""
    """Time in RFC 3339; empty before the build starts."""
    end: Annotated[str, codec.Key("status.buildEnd")] = ""
    """Time in RFC 3339; empty until the build ends."""
    job: Annotated[str, codec.Key("status.builder.job.name")] = ""
    """Name of the Job; empty for a build without one."""
    status: codec.Json = field(default_factory=dict, repr=False)
    """The original status, with the fields of other writers."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def is_deleting(self) -> bool:
        return self.metadata.is_deleting

    @property
    def created(self) -> str:
        """Creation time in RFC 3339, to order the objects."""
        return self.metadata.created

    @property
    def state(self) -> BuildState:
        true = {condition.type for condition in self.conditions if condition.status == "True"}
        return next((state for state in _STATES_LATEST_FIRST if state in true), BuildState.INITIAL)

    @property
    def condition(self) -> object_meta.Condition | None:
        """The condition that is True: the state with its reason and message."""
        state = self.state
        matches = (
            condition
            for condition in self.conditions
            if (condition.type, condition.status) == (state, "True")
        )
        return next(matches, None)

    @property
    def message(self) -> str:
        """Message of the condition that is True."""
        condition = self.condition
        return condition.message if condition else ""

    @property
    def content_key(self) -> str:
        """Key of what the image is built from; empty for a build of the MCO."""
        return self.metadata.annotations.get(key.CONTENT_KEY, "")


_STATES_LATEST_FIRST = (
    BuildState.SUCCEEDED,
    BuildState.FAILED,
    BuildState.INTERRUPTED,
    BuildState.BUILDING,
    BuildState.PREPARED,
)
