"""Machine, MachineSet and MachineDeployment of Cluster API, read from v1beta2 or v1beta1.

A value is the same for both versions. ``conditions`` are those of v1beta2, which an object of
v1beta1 has in ``status.v1beta2``; ``old_conditions`` are those of v1beta1, which an object of
v1beta2 has in ``status.deprecated.v1beta1``. Either may be empty.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, TypeVar, cast

from treenail import label_selector
from treenail.api import decode, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.encoding import codec, json_values
from treenail.errors import ConfigError

GROUP = "cluster.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""The preferred version first. Cluster API no longer serves v1beta1 from v1.16 on."""

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(h|ms|m|s|us|µs|ns)"
_DURATION = re.compile(rf"0|(?:{_PART})+")
_PARTS = re.compile(_PART)

_T = TypeVar("_T")


def _read_duration(text: str) -> float:
    if not _DURATION.fullmatch(text):
        raise json_values.Mismatch("a duration such as 1h30m0s", text)
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(text))


GoDuration = Annotated[float, codec.Via(_read_duration, wire=str)]
"""Seconds; a text such as ``1h30m0s`` in JSON."""

CountOrPercent = Annotated[
    int | str,
    codec.require(
        "a count or a percentage",
        lambda value: isinstance(value, int | str) and not isinstance(value, bool),
        wire=object,
    ),
]
"""Number, or a text such as ``25%``. Signs and texts of other forms stay as they are."""


class ConditionType:
    """Condition types of Machines in v1beta2."""

    READY = "Ready"
    AVAILABLE = "Available"
    NODE_HEALTHY = "NodeHealthy"
    NODE_READY = "NodeReady"
    BOOTSTRAP_READY = "BootstrapConfigReady"
    INFRASTRUCTURE_READY = "InfrastructureReady"
    DELETING = "Deleting"
    DRAINING = "DrainingSucceeded"
    """Of v1beta1; v1beta2 has it as a reason of Deleting."""


_NewConditions = object_meta.StatusConditions
_OldConditions = Annotated[
    tuple[object_meta.Condition, ...], codec.Key("status.deprecated.v1beta1.conditions")
]
_NewConditionsInV1Beta1 = Annotated[
    tuple[object_meta.Condition, ...], codec.Key("status.v1beta2.conditions")
]
_TEMPLATE = "spec.template.spec."


class _PoolObject:
    """What all of these objects have in a hosted cluster."""

    __slots__ = ()
    metadata: object_meta.ObjectMeta

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def is_deleting(self) -> bool:
        return self.metadata.is_deleting

    @property
    def deleting_since(self) -> str:
        """Time of the deletion request in RFC 3339; empty without one."""
        return str(self.metadata.others.get("deletionTimestamp") or "")

    @property
    def node_pool(self) -> str:
        """``NAMESPACE/NAME`` of the NodePool; empty for an object without one."""
        return self.metadata.annotations.get(hosted_key.NODE_POOL, "")

    def get_controller(self) -> object_meta.OwnerReference | None:
        """Return the owner that controls the object."""
        owners = (owner for owner in self.metadata.owner_references if owner.controller)
        return next(owners, None)


@dataclass(frozen=True, slots=True)
class Machine(_PoolObject, codec.JsonObject, kind="Machine"):
    """Snapshot of a Machine."""

    metadata: object_meta.ObjectMeta
    cluster_name: Annotated[str, codec.Key("spec.clusterName")] = ""
    data_secret: Annotated[str, codec.Key("spec.bootstrap.dataSecretName")] = ""
    """Secret with the user data that the machine booted from; for Replace its name has the hash."""
    version: Annotated[str, codec.Key("spec.version")] = ""
    provider_id: Annotated[str, codec.Key("spec.providerID")] = ""
    infrastructure_kind: Annotated[str, codec.Key("spec.infrastructureRef.kind")] = ""
    infrastructure_name: Annotated[str, codec.Key("spec.infrastructureRef.name")] = ""
    drain_timeout_s: Annotated[float | None, codec.Key("spec.deletion.nodeDrainTimeoutSeconds")] = (
        None
    )
    """None and 0 mean no limit."""
    node_name: Annotated[str, codec.Key("status.nodeRef.name")] = ""
    """Node in the hosted cluster; empty until the machine joined."""
    phase: Annotated[str, codec.Key("status.phase")] = ""
    """Pending, Provisioning, Provisioned, Running, Updating, Deleting, Deleted, Failed, Unknown."""
    drain_began: Annotated[str, codec.Key("status.deletion.nodeDrainStartTime")] = ""
    failure: Annotated[str, codec.Key("status.deprecated.v1beta1.failureMessage")] = ""
    conditions: _NewConditions = ()
    old_conditions: _OldConditions = ()

    @classmethod
    def from_json(cls, document: object, where: str = "Machine") -> "Machine":
        """Read an object of either version; raise `ConfigError`."""
        return _read_version(Machine, _MachineV1Beta1, document, where)


@dataclass(frozen=True, slots=True)
class _MachineV1Beta1(Machine, kind="Machine"):
    drain_timeout_s: Annotated[GoDuration | None, codec.Key("spec.nodeDrainTimeout")] = None
    failure: Annotated[str, codec.Key("status.failureMessage")] = ""
    conditions: _NewConditionsInV1Beta1 = ()
    old_conditions: object_meta.StatusConditions = ()


@dataclass(frozen=True, slots=True)
class MachineSet(_PoolObject, codec.JsonObject, kind="MachineSet"):
    """Snapshot of a MachineSet; for InPlace HyperShift makes one with the name of the pool."""

    metadata: object_meta.ObjectMeta
    cluster_name: Annotated[str, codec.Key("spec.clusterName")] = ""
    replicas: Annotated[int | None, codec.Key("spec.replicas")] = None
    selector: Annotated[label_selector.SelectorField | None, codec.Key("spec.selector")] = None
    template_annotations: Annotated[
        Mapping[str, str], codec.Key("spec.template.metadata.annotations")
    ] = field(default_factory=dict)
    data_secret: Annotated[str, codec.Key(_TEMPLATE + "bootstrap.dataSecretName")] = ""
    version: Annotated[str, codec.Key(_TEMPLATE + "version")] = ""
    infrastructure_kind: Annotated[str, codec.Key(_TEMPLATE + "infrastructureRef.kind")] = ""
    infrastructure_name: Annotated[str, codec.Key(_TEMPLATE + "infrastructureRef.name")] = ""
    drain_timeout_s: Annotated[
        float | None, codec.Key(_TEMPLATE + "deletion.nodeDrainTimeoutSeconds")
    ] = None
    current_replicas: Annotated[int, codec.Key("status.replicas")] = 0
    ready_replicas: Annotated[int, codec.Key("status.readyReplicas")] = 0
    available_replicas: Annotated[int, codec.Key("status.availableReplicas")] = 0
    observed_generation: Annotated[int, codec.Key("status.observedGeneration")] = 0
    failure: Annotated[str, codec.Key("status.deprecated.v1beta1.failureMessage")] = ""
    conditions: _NewConditions = ()
    old_conditions: _OldConditions = ()

    @classmethod
    def from_json(cls, document: object, where: str = "MachineSet") -> "MachineSet":
        """Read an object of either version; raise `ConfigError`."""
        return _read_version(MachineSet, _MachineSetV1Beta1, document, where)

    @property
    def target_hash(self) -> str:
        """Hash that the in-place upgrader works towards; empty for a set that it ignores."""
        return self.metadata.annotations.get(hosted_key.TARGET_CONFIG_VERSION, "")

    @property
    def current_hash(self) -> str:
        """Hash that all nodes of the set have; empty before the first machines exist."""
        return self.metadata.annotations.get(hosted_key.CURRENT_CONFIG_VERSION, "")

    @property
    def max_unavailable(self) -> str:
        """HyperShift's limit in nodes, as the text of the annotation; negative selects no node."""
        return self.metadata.annotations.get(hosted_key.MAX_UNAVAILABLE, "")


@dataclass(frozen=True, slots=True)
class _MachineSetV1Beta1(MachineSet, kind="MachineSet"):
    drain_timeout_s: Annotated[GoDuration | None, codec.Key(_TEMPLATE + "nodeDrainTimeout")] = None
    failure: Annotated[str, codec.Key("status.failureMessage")] = ""
    conditions: _NewConditionsInV1Beta1 = ()
    old_conditions: object_meta.StatusConditions = ()


@dataclass(frozen=True, slots=True)
class MachineDeployment(_PoolObject, codec.JsonObject, kind="MachineDeployment"):
    """Snapshot of a MachineDeployment; for Replace HyperShift makes one with the pool's name."""

    metadata: object_meta.ObjectMeta
    cluster_name: Annotated[str, codec.Key("spec.clusterName")] = ""
    replicas: Annotated[int | None, codec.Key("spec.replicas")] = None
    selector: Annotated[label_selector.SelectorField | None, codec.Key("spec.selector")] = None
    is_paused: Annotated[bool, codec.Key("spec.paused")] = False
    strategy: Annotated[str, codec.Key("spec.rollout.strategy.type")] = ""
    """``RollingUpdate`` or ``OnDelete``; empty for the default, which is RollingUpdate."""
    max_surge: Annotated[
        CountOrPercent | None, codec.Key("spec.rollout.strategy.rollingUpdate.maxSurge")
    ] = None
    max_unavailable: Annotated[
        CountOrPercent | None, codec.Key("spec.rollout.strategy.rollingUpdate.maxUnavailable")
    ] = None
    data_secret: Annotated[str, codec.Key(_TEMPLATE + "bootstrap.dataSecretName")] = ""
    version: Annotated[str, codec.Key(_TEMPLATE + "version")] = ""
    infrastructure_kind: Annotated[str, codec.Key(_TEMPLATE + "infrastructureRef.kind")] = ""
    infrastructure_name: Annotated[str, codec.Key(_TEMPLATE + "infrastructureRef.name")] = ""
    drain_timeout_s: Annotated[
        float | None, codec.Key(_TEMPLATE + "deletion.nodeDrainTimeoutSeconds")
    ] = None
    current_replicas: Annotated[int, codec.Key("status.replicas")] = 0
    ready_replicas: Annotated[int, codec.Key("status.readyReplicas")] = 0
    available_replicas: Annotated[int, codec.Key("status.availableReplicas")] = 0
    updated_replicas: Annotated[int, codec.Key("status.upToDateReplicas")] = 0
    """Machines that have the template of the deployment."""
    observed_generation: Annotated[int, codec.Key("status.observedGeneration")] = 0
    phase: Annotated[str, codec.Key("status.phase")] = ""
    """ScalingUp, ScalingDown, Running, Failed or Unknown."""
    conditions: _NewConditions = ()
    old_conditions: _OldConditions = ()

    @classmethod
    def from_json(cls, document: object, where: str = "MachineDeployment") -> "MachineDeployment":
        """Read an object of either version; raise `ConfigError`."""
        return _read_version(MachineDeployment, _MachineDeploymentV1Beta1, document, where)


@dataclass(frozen=True, slots=True)
class _MachineDeploymentV1Beta1(MachineDeployment, kind="MachineDeployment"):
    strategy: Annotated[str, codec.Key("spec.strategy.type")] = ""
    max_surge: Annotated[
        CountOrPercent | None, codec.Key("spec.strategy.rollingUpdate.maxSurge")
    ] = None
    max_unavailable: Annotated[
        CountOrPercent | None, codec.Key("spec.strategy.rollingUpdate.maxUnavailable")
    ] = None
    drain_timeout_s: Annotated[GoDuration | None, codec.Key(_TEMPLATE + "nodeDrainTimeout")] = None
    updated_replicas: Annotated[int, codec.Key("status.updatedReplicas")] = 0
    conditions: _NewConditionsInV1Beta1 = ()
    old_conditions: object_meta.StatusConditions = ()


def _read_version(cls: type[_T], old: type[_T], document: object, where: str) -> _T:
    version = decode.Fields.from_json(document, where).get_text("apiVersion")
    if version == f"{GROUP}/{VERSIONS[0]}":
        return cast("_T", codec.read_value(cls, document, where))
    if version != f"{GROUP}/{VERSIONS[1]}":
        expected = f"{where}.apiVersion: expected {' or '.join(VERSIONS)} of {GROUP}"
        raise ConfigError(f"{expected}, found {version!r:.60}")
    value = codec.read_value(old, document, where)
    return cls(**{each.name: getattr(value, each.name) for each in fields(cast("type", cls))})
