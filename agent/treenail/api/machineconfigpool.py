"""MachineConfigPool: nodes with the same configuration, and limits of their update."""

from dataclasses import dataclass, field
from enum import StrEnum

from treenail import errors, label_selector
from treenail.api import decode, object_meta

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineConfigPool"

MASTER = "master"
WORKER = "worker"
ARBITER = "arbiter"
CONTROL_PLANE_POOLS = (MASTER, ARBITER)
"""Pools of etcd's members; the bootstrap host of an installation serves their machines."""

SPEC_FIELDS = frozenset({
    "configuration", "imageFiles", "machineConfigSelector", "maxUnavailable", "nodeSelector",
    "osImage", "osImageStream", "osImageTag", "paused", "pinnedImageSets", "rolloutPolicy",
})  # fmt: skip
_TAG_FIELDS = frozenset({"follow", "name", "pullSecret"})
_SELECTOR_FIELDS = frozenset({"matchLabels", "matchExpressions"})


class PoolImageFiles(StrEnum):
    """Where the files of the config come from in image mode."""

    BAKED = "Baked"
    """The image contains them."""
    WRITE = "Write"
    """The agent writes them."""


@dataclass(frozen=True, slots=True)
class PoolConfiguration:
    """Name of a rendered MachineConfig, and its sources in merge order."""

    name: str = ""
    source: tuple[str, ...] = ()
    document: decode.Json = field(default_factory=dict, repr=False, compare=False)
    """The original object: names of image builds contain its hash."""

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "PoolConfiguration":
        source = fields.map_objects("source", lambda reference: reference.get_text("name"))
        return cls(fields.get_text("name"), source, fields.get_other_fields())


@dataclass(frozen=True, slots=True)
class PoolImageTag:
    """Tag of the OS image of a pool. A controller resolves it; nodes get digests only."""

    name: str
    """The tag with its registry and repository."""
    is_followed: bool = False
    """A new digest is assigned; otherwise the tag is resolved once."""
    pull_secret: str = ""
    """Secret in the namespace of the controller; empty for the cluster's pull secret."""

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "PoolImageTag":
        """Read the object; raise `ConfigError`."""
        return cls(
            fields.get_required_text("name"),
            fields.get_bool("follow"),
            fields.get_text("pullSecret"),
        )


@dataclass(frozen=True, slots=True)
class MachineConfigPool:
    """Snapshot of a MachineConfigPool."""

    metadata: object_meta.ObjectMeta
    machine_config_selector: label_selector.LabelSelector | None = None
    """Selects MachineConfigs; None selects none."""
    node_selector: label_selector.LabelSelector | None = None
    """Selects nodes; None and an empty selector select none."""
    paused: bool = False
    max_unavailable: int | str | None = None
    """A count, a percentage, or None for the default."""
    configuration: PoolConfiguration = PoolConfiguration()
    """Desired configuration of the nodes."""
    os_image: str | None = None
    """Pull spec of the OS image of the nodes; None for the image that the config names."""
    os_image_tag: PoolImageTag | None = None
    """Names the OS image by tag, in place of ``os_image``."""
    image_files: PoolImageFiles | None = None
    """None leaves the choice to the settings of each node."""
    rollout_policy: str = ""
    """Name of the RolloutPolicy; empty for none."""
    os_image_stream: str = ""
    pinned_image_sets: tuple[str, ...] = ()
    """Names of the PinnedImageSets."""
    status_configuration: PoolConfiguration = PoolConfiguration()
    """The last configuration that all nodes had."""
    conditions: tuple[object_meta.Condition, ...] = ()
    status: decode.Json = field(default_factory=dict, repr=False)
    """The original status, with the fields of other writers."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def is_deleting(self) -> bool:
        return self.metadata.is_deleting

    @classmethod
    def from_json(cls, document: object) -> "MachineConfigPool":
        """Read an API object or a file; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        kind = fields.get_text("kind")
        if kind not in ("", KIND):
            raise errors.ConfigError(f"kind: expected {KIND}, found {kind!r:.60}")
        spec, status = fields.get_object("spec"), fields.get_object("status")
        return cls(
            metadata=object_meta.ObjectMeta.from_fields(fields.get_object("metadata")),
            machine_config_selector=_parse_selector(spec, "machineConfigSelector"),
            node_selector=_parse_selector(spec, "nodeSelector"),
            paused=spec.get_bool("paused"),
            max_unavailable=_parse_max_unavailable(spec),
            configuration=PoolConfiguration.from_fields(spec.get_object("configuration")),
            os_image=spec.get_optional_text("osImage"),
            os_image_tag=(
                PoolImageTag.from_fields(spec.get_object("osImageTag"))
                if spec.values.get("osImageTag") is not None
                else None
            ),
            image_files=_parse_image_files(spec),
            rollout_policy=spec.get_text("rolloutPolicy"),
            os_image_stream=spec.get_object("osImageStream").get_text("name"),
            pinned_image_sets=spec.map_objects(
                "pinnedImageSets", lambda image_set: image_set.get_text("name")
            ),
            status_configuration=PoolConfiguration.from_fields(status.get_object("configuration")),
            conditions=status.map_objects("conditions", object_meta.Condition.from_fields),
            status=status.get_other_fields(),
        )


def reject_unknown_pool_fields(document: object) -> None:
    """Raise `ConfigError` for a field of the spec that no MachineConfigPool has."""
    spec = decode.Fields.from_json(document, "").get_object("spec")
    decode.reject_unknown_fields(spec, SPEC_FIELDS)
    decode.reject_unknown_fields(spec.get_object("osImageTag"), _TAG_FIELDS)
    for name in ("machineConfigSelector", "nodeSelector"):
        decode.reject_unknown_fields(spec.get_object(name), _SELECTOR_FIELDS)


def _parse_selector(spec: decode.Fields, name: str) -> label_selector.LabelSelector | None:
    return label_selector.parse_optional_selector(spec.values.get(name), spec.path_of(name))


def _parse_image_files(spec: decode.Fields) -> PoolImageFiles | None:
    text = spec.get_optional_text("imageFiles")
    if text is None:
        return None
    try:
        return PoolImageFiles(text)
    except ValueError as error:
        raise spec.error(
            f"{spec.path_of('imageFiles')}: expected {' or '.join(PoolImageFiles)}, "
            f"found {text!r:.40}"
        ) from error


def _parse_max_unavailable(spec: decode.Fields) -> int | str | None:
    value = spec.values.get("maxUnavailable")
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if value is None:
        return None
    raise spec.make_error("maxUnavailable", "a count or a percentage")
