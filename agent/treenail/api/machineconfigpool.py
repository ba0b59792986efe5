"""MachineConfigPool: nodes with the same configuration, and limits of their update."""

from dataclasses import dataclass, field

from treenail.api.decode import Fields, Json
from treenail.api.meta import Condition, ObjectMeta
from treenail.errors import ConfigError
from treenail.label_selector import LabelSelector, parse_optional_selector

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineConfigPool"

MASTER = "master"
WORKER = "worker"
ARBITER = "arbiter"


@dataclass(frozen=True, slots=True)
class PoolConfiguration:
    """Name of a rendered MachineConfig, and its sources in merge order."""

    name: str = ""
    source: tuple[str, ...] = ()

    @classmethod
    def from_fields(cls, fields: Fields) -> "PoolConfiguration":
        source = fields.map_objects("source", lambda reference: reference.get_text("name"))
        return cls(fields.get_text("name"), source)


@dataclass(frozen=True, slots=True)
class MachineConfigPool:
    """Snapshot of a MachineConfigPool."""

    metadata: ObjectMeta
    machine_config_selector: LabelSelector | None = None
    """Selects MachineConfigs; None selects none."""
    node_selector: LabelSelector | None = None
    """Selects nodes; None and an empty selector select none."""
    paused: bool = False
    max_unavailable: int | str | None = None
    """A count, a percentage, or None for the default."""
    configuration: PoolConfiguration = PoolConfiguration()
    """Desired configuration of the nodes."""
    os_image_stream: str = ""
    status_configuration: PoolConfiguration = PoolConfiguration()
    """The last configuration that all nodes had."""
    conditions: tuple[Condition, ...] = ()
    status: Json = field(default_factory=dict, repr=False)
    """The original status, with the fields of other writers."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def is_deleting(self) -> bool:
        return self.metadata.others.get("deletionTimestamp") is not None

    @classmethod
    def from_json(cls, document: object) -> "MachineConfigPool":
        """Read an API object or a file; raise `ConfigError`."""
        fields = Fields.from_json(document, "")
        kind = fields.get_text("kind")
        if kind not in ("", KIND):
            raise ConfigError(f"kind: expected {KIND}, found {kind!r:.60}")
        spec, status = fields.get_object("spec"), fields.get_object("status")
        return cls(
            metadata=ObjectMeta.from_fields(fields.get_object("metadata")),
            machine_config_selector=_parse_selector(spec, "machineConfigSelector"),
            node_selector=_parse_selector(spec, "nodeSelector"),
            paused=spec.get_bool("paused"),
            max_unavailable=_parse_max_unavailable(spec),
            configuration=PoolConfiguration.from_fields(spec.get_object("configuration")),
            os_image_stream=spec.get_object("osImageStream").get_text("name"),
            status_configuration=PoolConfiguration.from_fields(status.get_object("configuration")),
            conditions=status.map_objects("conditions", Condition.from_fields),
            status=status.get_other_fields(),
        )


def _parse_selector(spec: Fields, name: str) -> LabelSelector | None:
    return parse_optional_selector(spec.values.get(name), spec.path_of(name))


def _parse_max_unavailable(spec: Fields) -> int | str | None:
    value = spec.values.get("maxUnavailable")
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if value is None:
        return None
    raise spec.make_error("maxUnavailable", "a count or a percentage")
