"""MachineConfigPool: nodes with the same configuration, and limits of their update.

A PinnedImageSet names images that the nodes of pools keep, whether or not a pod uses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from treenail import label_selector
from treenail.api import decode, object_meta
from treenail.encoding import codec

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineConfigPool"

MASTER = "master"
WORKER = "worker"
ARBITER = "arbiter"
CONTROL_PLANE_POOLS = (MASTER, ARBITER)
"""Pools of etcd's members; the bootstrap host of an installation serves their machines."""


class PoolImageFiles(StrEnum):
    """Where the files of the config come from in image mode."""

    BAKED = "Baked"
    """The image contains them."""
    WRITE = "Write"
    """The agent writes them."""


def _is_count_or_text(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _make_references(names: tuple[str, ...]) -> list[codec.Json]:
    return [{"apiVersion": API_VERSION, "kind": "MachineConfig", "name": name} for name in names]


@dataclass(frozen=True, slots=True)
class PoolConfiguration(codec.JsonObject, omits_defaults=True):
    """Name of a rendered MachineConfig, and its sources in merge order."""

    name: str = ""
    source: Annotated[object_meta.ObjectNames, codec.Via(write=_make_references)] = ()
    document: Annotated[codec.Json, codec.WHOLE] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The original object: names of image builds contain its hash."""


@dataclass(frozen=True, slots=True)
class PoolImageTag(codec.JsonObject):
    """Tag of the OS image of a pool. A controller resolves it; nodes get digests only."""

    name: codec.NonEmptyText
    """The tag with its registry and repository."""
    is_followed: Annotated[bool, codec.Key("follow")] = False
    """A new digest is assigned; otherwise the tag is resolved once."""
    pull_secret: str = ""
    """Secret in the namespace of the controller; empty for the cluster's pull secret."""


@dataclass(frozen=True, slots=True)
class MachineConfigPool(codec.JsonObject, kind=KIND, api_version=API_VERSION):
    """Snapshot of a MachineConfigPool."""

    metadata: object_meta.ObjectMeta
    machine_config_selector: Annotated[
        label_selector.SelectorField | None, codec.Key("spec.machineConfigSelector")
    ] = None
    """Selects MachineConfigs; None selects none."""
    node_selector: Annotated[
        label_selector.SelectorField | None, codec.Key("spec.nodeSelector")
    ] = None
    """Selects nodes; None and an empty selector select none."""
    paused: Annotated[bool, codec.Key("spec.paused")] = False
    max_unavailable: Annotated[
        int | str | None,
        codec.Key("spec.maxUnavailable"),
        codec.require("a count or a percentage", _is_count_or_text, wire=object),
    ] = None
    """A count, a percentage, or None for the default."""
    configuration: Annotated[PoolConfiguration, codec.Key("spec.configuration")] = (
        PoolConfiguration()
    )
    """Desired configuration of the nodes."""
    os_image: Annotated[str | None, codec.Key("spec.osImage")] = None
    """Pull spec of the OS image of the nodes; None for the image that the config names."""
    os_image_tag: Annotated[PoolImageTag | None, codec.Key("spec.osImageTag")] = None
    """Names the OS image by tag, in place of ``os_image``."""
    image_files: Annotated[PoolImageFiles | None, codec.Key("spec.imageFiles")] = None
    """None leaves the choice to the settings of each node."""
    rollout_policy: Annotated[str, codec.Key("spec.rolloutPolicy")] = ""
    """Name of the RolloutPolicy; empty for none."""
    os_image_stream: Annotated[str, codec.Key("spec.osImageStream.name")] = ""
    pinned_image_sets: Annotated[object_meta.ObjectNames, codec.Key("spec.pinnedImageSets")] = ()
    """Names of the PinnedImageSets, which the MCO writes; treenail looks at the sets."""
    status_configuration: Annotated[PoolConfiguration, codec.Key("status.configuration")] = (
        PoolConfiguration()
    )
    """The last configuration that all nodes had."""
    status_os_image_stream: Annotated[str, codec.Key("status.osImageStream.name")] = ""
    """The OS image stream that all nodes run; empty for none, and during a rollout."""
    conditions: object_meta.StatusConditions = ()
    status: codec.Json = field(default_factory=dict, repr=False)
    """The original status, with the fields of other writers."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def is_deleting(self) -> bool:
        return self.metadata.is_deleting

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether a MachineConfig or PinnedImageSet with these labels is for the pool."""
        selector = self.machine_config_selector
        return selector is not None and selector.matches(labels)


def reject_unknown_pool_fields(document: object) -> None:
    """Raise `ConfigError` for a field of the spec that no MachineConfigPool has."""
    spec = decode.Fields.from_json(document, "").values.get("spec")
    codec.read_value(MachineConfigPool, {"spec": spec}, "", is_strict=True)


@dataclass(frozen=True, slots=True)
class PinnedImageSet(codec.JsonObject, kind="PinnedImageSet", api_version=API_VERSION):
    """Snapshot of a PinnedImageSet."""

    metadata: object_meta.ObjectMeta
    images: Annotated[object_meta.ObjectNames, codec.Key("spec.pinnedImages")] = ()
    """Pull specs, which the CRD requires to have a digest."""
