"""Machine, MachineSet and MachineDeployment of Cluster API, read from v1beta2 or v1beta1.

A value is the same for both versions. ``conditions`` are those of v1beta2, which an object of
v1beta1 has in ``status.v1beta2``; ``old_conditions`` are those of v1beta1, which an object of
v1beta2 has in ``status.deprecated.v1beta1``. Either may be empty.
"""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self, cast

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


class MachineCondition:
    """Condition types of Machines."""

    NODE_HEALTHY = "NodeHealthy"
    DELETING = "Deleting"
    DRAINING_SUCCEEDED = "DrainingSucceeded"
    """Of v1beta1; v1beta2 has the reason DrainingNode of Deleting."""


_Conditions = tuple[object_meta.Condition, ...]
_SPEC, _TEMPLATE = "spec.", "spec.template.spec."
_DRAIN, _DRAIN_IN_V1BETA1 = "deletion.nodeDrainTimeoutSeconds", "nodeDrainTimeout"


class NamedObject(codec.JsonObject):
    """Base of the objects of Cluster API and HyperShift."""

    __slots__ = ()
    metadata: object_meta.ObjectMeta

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace


class _PoolObject(NamedObject):
    """Base of the objects of Cluster API in a hosted cluster."""

    __slots__ = ()

    @classmethod
    def from_json(cls, document: object, where: str = "") -> Self:
        """Read an object of either version; raise `ConfigError`."""
        version = decode.Fields.from_json(document, where).get_text("apiVersion")
        if version == f"{GROUP}/{VERSIONS[0]}":
            return cast("Self", codec.read_value(cls, document, where))
        if version != f"{GROUP}/{VERSIONS[1]}":
            expected = f"expected {' or '.join(VERSIONS)} of {GROUP}, found {version!r:.60}"
            raise ConfigError(f"{json_values.join_path(where, 'apiVersion')}: {expected}")
        value = codec.read_value(_IN_V1BETA1[cls], document, where)
        return cls(**{each.name: getattr(value, each.name) for each in fields(cast("Any", cls))})

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
class ClusterMachine(_PoolObject, kind="Machine"):
    """Snapshot of a Machine."""

    metadata: object_meta.ObjectMeta
    data_secret: Annotated[str, codec.Key("spec.bootstrap.dataSecretName")] = ""
    """Secret with the user data that the machine booted from; for Replace its name has the hash."""
    drain_timeout_s: Annotated[float | None, codec.Key(_SPEC + _DRAIN)] = None
    """None and 0 mean no limit."""
    node_name: Annotated[str, codec.Key("status.nodeRef.name")] = ""
    """Node in the hosted cluster; empty until the machine joined."""
    phase: Annotated[str, codec.Key("status.phase")] = ""
    """Pending, Provisioning, Provisioned, Running, Updating, Deleting, Deleted, Failed, Unknown."""
    drain_began: Annotated[str, codec.Key("status.deletion.nodeDrainStartTime")] = ""
    failure: Annotated[str, codec.Key("status.deprecated.v1beta1.failureMessage")] = ""
    conditions: object_meta.StatusConditions = ()
    old_conditions: Annotated[_Conditions, codec.Key("status.deprecated.v1beta1.conditions")] = ()


@dataclass(frozen=True, slots=True)
class _MachineV1Beta1(ClusterMachine, kind="Machine"):
    drain_timeout_s: Annotated[GoDuration | None, codec.Key(_SPEC + _DRAIN_IN_V1BETA1)] = None
    failure: Annotated[str, codec.Key("status.failureMessage")] = ""
    conditions: Annotated[_Conditions, codec.Key("status.v1beta2.conditions")] = ()
    old_conditions: object_meta.StatusConditions = ()


@dataclass(frozen=True, slots=True)
class _MachineOwner(_PoolObject):
    """Fields that a MachineSet and a MachineDeployment have."""

    metadata: object_meta.ObjectMeta
    cluster_name: Annotated[str, codec.Key("spec.clusterName")] = ""
    replicas: Annotated[int | None, codec.Key("spec.replicas")] = None
    data_secret: Annotated[str, codec.Key(_TEMPLATE + "bootstrap.dataSecretName")] = ""
    version: Annotated[str, codec.Key(_TEMPLATE + "version")] = ""
    infrastructure_name: Annotated[str, codec.Key(_TEMPLATE + "infrastructureRef.name")] = ""
    drain_timeout_s: Annotated[float | None, codec.Key(_TEMPLATE + _DRAIN)] = None
    current_replicas: Annotated[int, codec.Key("status.replicas")] = 0
    available_replicas: Annotated[int, codec.Key("status.availableReplicas")] = 0
    observed_generation: Annotated[int, codec.Key("status.observedGeneration")] = 0

    @property
    def own_target(self) -> str:
        """Hash that treenail works towards; empty for an object that it does not own."""
        return self.metadata.annotations.get(hosted_key.TARGET_CONFIG, "")

    @property
    def updated_config(self) -> str | None:
        """Hash that all nodes have, empty while they differ; None before it is known."""
        return self.metadata.annotations.get(hosted_key.UPDATED_CONFIG)

    @property
    def updated_rollout(self) -> str:
        """Hash in the name of the user data that belongs to the config of all nodes."""
        known = self.metadata.annotations.get(hosted_key.UPDATED_ROLLOUT)
        return self.updated_config or "" if known is None else known


_TemplateDrainInV1Beta1 = Annotated[GoDuration | None, codec.Key(_TEMPLATE + _DRAIN_IN_V1BETA1)]


@dataclass(frozen=True, slots=True)
class MachineSet(_MachineOwner, kind="MachineSet"):
    """Snapshot of a MachineSet; for InPlace HyperShift makes one with the name of the pool."""

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
    drain_timeout_s: _TemplateDrainInV1Beta1 = None


@dataclass(frozen=True, slots=True)
class MachineDeployment(_MachineOwner, kind="MachineDeployment"):
    """Snapshot of a MachineDeployment; for Replace HyperShift makes one with the pool's name."""

    strategy: Annotated[str, codec.Key("spec.rollout.strategy.type")] = ""
    """``RollingUpdate`` or ``OnDelete``; empty for the default, which is RollingUpdate."""
    updated_replicas: Annotated[int, codec.Key("status.upToDateReplicas")] = 0
    """Machines that have the template of the deployment."""


@dataclass(frozen=True, slots=True)
class _MachineDeploymentV1Beta1(MachineDeployment, kind="MachineDeployment"):
    strategy: Annotated[str, codec.Key("spec.strategy.type")] = ""
    drain_timeout_s: _TemplateDrainInV1Beta1 = None
    updated_replicas: Annotated[int, codec.Key("status.updatedReplicas")] = 0


_IN_V1BETA1: dict[type, type] = {
    ClusterMachine: _MachineV1Beta1,
    MachineSet: _MachineSetV1Beta1,
    MachineDeployment: _MachineDeploymentV1Beta1,
}
"""The fields of each class as v1beta1 has them."""
