"""MachineOSBuild: one build of the OS image of one rendered MachineConfig."""

from dataclasses import dataclass, field
from enum import StrEnum

from treenail.api import annotations as key
from treenail.api import decode, object_meta
from treenail.errors import ConfigError

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
class MachineOSBuild:
    """Snapshot of a MachineOSBuild."""

    metadata: object_meta.ObjectMeta
    config: str = ""
    """The rendered config in the image."""
    image_config: str = ""
    """Name of the MachineOSConfig."""
    push_spec: str = ""
    conditions: tuple[object_meta.Condition, ...] = ()
    pull_spec: str = ""
    """The pushed image by digest; empty until the build succeeds."""
    start: str = ""
    """Time in RFC 3339; empty before the build starts."""
    end: str = ""
    """Time in RFC 3339; empty until the build ends."""
    job: str = ""
    """Name of the Job; empty for a build without one."""
    status: decode.Json = field(default_factory=dict, repr=False)
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

    @classmethod
    def from_json(cls, document: object) -> "MachineOSBuild":
        """Read an API object or a file; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        kind = fields.get_text("kind")
        if kind not in ("", KIND):
            raise ConfigError(f"kind: expected {KIND}, found {kind!r:.60}")
        spec, status = fields.get_object("spec"), fields.get_object("status")
        return cls(
            metadata=object_meta.ObjectMeta.from_fields(fields.get_object("metadata")),
            config=spec.get_object("machineConfig").get_text("name"),
            image_config=spec.get_object("machineOSConfig").get_text("name"),
            push_spec=spec.get_text("renderedImagePushSpec"),
            conditions=status.map_objects("conditions", object_meta.Condition.from_fields),
            pull_spec=status.get_text("digestedImagePushSpec"),
            start=status.get_text("buildStart"),
            end=status.get_text("buildEnd"),
            job=status.get_object("builder").get_object("job").get_text("name"),
            status=status.get_other_fields(),
        )


_STATES_LATEST_FIRST = (
    BuildState.SUCCEEDED,
    BuildState.FAILED,
    BuildState.INTERRUPTED,
    BuildState.BUILDING,
    BuildState.PREPARED,
)
