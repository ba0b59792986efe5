"""Findings: inputs of a build that are wrong, before any Job runs."""

from dataclasses import dataclass
from enum import StrEnum

from treenail.image.build_reason import BuildReason


class InputReason(StrEnum):
    """Why a MachineOSConfig is not accepted: the reason of its condition ``Accepted``."""

    ANNOTATION_INVALID = "AnnotationInvalid"
    ARCHITECTURE_MISSING = "ArchitectureMissing"
    BASE_IMAGE_INVALID = "BaseImageInvalid"
    BASE_IMAGE_UNRESOLVED = "BaseImageUnresolved"
    BUILDER_UNSUPPORTED = "BuilderUnsupported"
    CONFIG_INVALID = "ConfigInvalid"
    CONFIG_NOT_BAKEABLE = "ConfigNotBakeable"
    CONFIG_TOO_LARGE = "ConfigTooLarge"
    CONTAINERFILE_INVALID = "ContainerfileInvalid"
    CONTEXT_INVALID = "ContextInvalid"
    EXTENSION_UNSUPPORTED = "ExtensionUnsupported"
    POOL_DEGRADED = "PoolDegraded"
    POOL_NOT_FOUND = "PoolNotFound"
    POOL_NOT_RENDERED = "PoolNotRendered"
    POOL_TAKEN = "PoolTaken"
    PUSH_SPEC_INVALID = "PushSpecInvalid"
    REQUEST_REFUSED = "RequestRefused"
    # Names of reasons, not passwords.
    SECRET_INVALID = "SecretInvalid"  # noqa: S105
    # Likewise.
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105

    @property
    def build_reason(self) -> BuildReason | None:
        """The reason of a build that fails for the same cause; None if no build can have it."""
        return BuildReason(self.value) if self.value in tuple(BuildReason) else None


@dataclass(frozen=True, slots=True)
class InputFinding:
    """One wrong input of a build."""

    reason: InputReason
    field: str
    """Where the input is: ``spec.renderedImagePushSpec``, or ``Secret builds/push``."""
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}; {self.remedy}"
