"""MachineOSConfig: a request to build the OS image of a pool in the cluster."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from treenail.api import annotations as key
from treenail.api import decode, object_meta, pullspec
from treenail.encoding import codec

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineOSConfig"

CONTAINERFILE_LIMIT = 4096
"""Maximum characters of one Containerfile."""


class ContainerfileArch(StrEnum):
    """Architectures of an entry in ``spec.containerFile``."""

    ARM64 = "ARM64"
    AMD64 = "AMD64"
    PPC64LE = "PPC64LE"
    S390X = "S390X"
    NO_ARCH = "NoArch"
    """Every architecture without an entry of its own."""


class ImageConfigCondition(StrEnum):
    """Condition types of a MachineOSConfig."""

    ACCEPTED = "Accepted"
    """False while the object cannot be built."""
    IMAGE_READY = "ImageReady"
    """True while the image of the pool's rendered config exists."""
    BUILD_PROGRESSING = "BuildProgressing"
    """True while a build runs or is retried automatically."""
    BASE_RESOLVED = "BaseImageResolved"
    """False while the tag of the base image is not followed."""


@dataclass(frozen=True, slots=True)
class ContainerfileEntry(codec.JsonObject):
    """The user's Containerfile for one architecture."""

    architecture: Annotated[
        str,
        codec.Key("containerfileArch"),
        codec.Via(lambda architecture: architecture or ContainerfileArch.NO_ARCH),
    ]
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class MachineOSConfig(codec.JsonObject, kind=KIND, api_version=API_VERSION):
    """Snapshot of a MachineOSConfig; an empty name of a Secret or object is unset."""

    metadata: object_meta.ObjectMeta
    pool: Annotated[str, codec.Key("spec.machineConfigPool.name")] = ""
    containerfiles: Annotated[tuple[ContainerfileEntry, ...], codec.Key("spec.containerFile")] = ()
    push_spec: Annotated[str, codec.Key("spec.renderedImagePushSpec")] = ""
    """Where images are pushed to; each build replaces the tag by its own name."""
    push_secret: Annotated[str, codec.Key("spec.renderedImagePushSecret.name")] = ""
    base_pull_secret: Annotated[str, codec.Key("spec.baseImagePullSecret.name")] = ""
    builder_type: Annotated[str, codec.Key("spec.imageBuilder.imageBuilderType")] = ""
    pull_spec: Annotated[str, codec.Key("status.currentImagePullSpec")] = ""
    """The last built image by digest; empty before the first build."""
    observed_generation: Annotated[int, codec.Key("status.observedGeneration")] = 0
    conditions: object_meta.StatusConditions = ()
    spec: codec.Json = field(default_factory=dict, repr=False)
    """The original spec: names of builds contain its hash."""
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
    def current_build(self) -> str:
        """Name of the MachineOSBuild that the build controller works towards or has finished."""
        return self.metadata.annotations.get(key.CURRENT_BUILD, "")

    @property
    def problem(self) -> str:
        """Why the build controller does not accept the object; empty when it does."""
        rejections = (
            condition.message or condition.reason
            for condition in self.conditions
            if (condition.type, condition.status) == (ImageConfigCondition.ACCEPTED, "False")
        )
        return next(rejections, "")

    @property
    def needs_rebuild(self) -> bool:
        """True while a user requests another build of unchanged inputs."""
        return key.REBUILD in self.metadata.annotations

    @property
    def sees_config(self) -> bool:
        """True when the user's Containerfile reads files of the rendered config."""
        return self.metadata.annotations.get(key.BUILD_SEES_CONFIG) == "true"

    @property
    def context_name(self) -> str:
        """Name of the ConfigMap with files for COPY; empty for none."""
        return self.metadata.annotations.get(key.BUILD_CONTEXT, "")

    @property
    def base_image(self) -> str:
        """Pull spec of the base image, by digest or by tag; empty for that of the config."""
        return self.metadata.annotations.get(key.BASE_IMAGE, "")

    @property
    def pre_built_image(self) -> str:
        """Pull spec of the first image, without a tag beside the digest; empty for none."""
        image = self.metadata.annotations.get(key.PRE_BUILT_IMAGE, "")
        _, at, digest = image.partition("@")
        return f"{pullspec.strip_tag(image)}{at}{digest}"

    def find_containerfile(self, architecture: str) -> ContainerfileEntry | None:
        """Return the entry of an architecture, or the one of every other architecture."""
        by_architecture = {entry.architecture: entry for entry in reversed(self.containerfiles)}
        return by_architecture.get(architecture) or by_architecture.get(ContainerfileArch.NO_ARCH)


def reject_unknown_image_config_fields(document: object) -> None:
    """Raise `ConfigError` for a field of the spec that no MachineOSConfig has.

    An API server drops such a field, and a build without it succeeds with another image.
    """
    spec = decode.Fields.from_json(document, "").values.get("spec")
    codec.read_value(MachineOSConfig, {"spec": spec}, "", is_strict=True)
