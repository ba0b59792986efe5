"""NodePool, HostedCluster and HostedControlPlane: HyperShift's nodes and their control plane.

Hashes of the configuration are texts of HyperShift; treenail compares them and computes none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from treenail import clocks
from treenail.api import object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi
from treenail.encoding import codec

API_VERSION = "hypershift.openshift.io/v1beta1"

KUBEVIRT = "KubeVirt"
"""The platform whose provider copies user data."""

HASH_DIGITS = 8
"""Length of a hash of HyperShift."""

USER_DATA_PREFIX, TOKEN_PREFIX = "user-data-", "token-"

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})


class UpgradeType(StrEnum):
    """How a NodePool gets another release or config."""

    REPLACE = "Replace"
    IN_PLACE = "InPlace"


class NodePoolCondition(StrEnum):
    """Condition types of a NodePool that treenail looks for by name."""

    VALID_GENERATED_PAYLOAD = "ValidGeneratedPayload"
    VALID_MACHINE_CONFIG = "ValidMachineConfig"
    UPDATING_VERSION = "UpdatingVersion"
    UPDATING_CONFIG = "UpdatingConfig"
    UPDATING_TEMPLATE = "UpdatingPlatformMachineTemplate"
    CONFIG_UPDATE_PENDING = "ConfigUpdatePending"
    """hypershift#8698: a change that alone replaces no node."""
    RECONCILIATION_ACTIVE = "ReconciliationActive"
    REACHED_IGNITION = "ReachedIgnitionEndpoint"
    VALID_MACHINE_TEMPLATE = "ValidMachineTemplate"
    AUTOSCALING_ENABLED = "AutoscalingEnabled"
    UPDATE_MANAGEMENT_ENABLED = "UpdateManagementEnabled"


@dataclass(frozen=True, slots=True)
class AutoScaling(codec.JsonObject):
    """Limits of the autoscaler; ``min`` is None in older objects and for the default of 1."""

    min: int | None = None
    max: int = 0


class _ConditionOwner(clusterapi.NamedObject):
    """Base of the objects of HyperShift, which have conditions."""

    __slots__ = ()
    conditions: object_meta.StatusConditions

    def find_condition(self, condition_type: str) -> object_meta.Condition | None:
        """Return the condition of a type; None without it."""
        return find_condition(self.conditions, condition_type)


@dataclass(frozen=True, slots=True)
class NodePool(_ConditionOwner, kind="NodePool", api_version=API_VERSION):
    """Snapshot of a NodePool."""

    metadata: object_meta.ObjectMeta
    cluster_name: Annotated[str, codec.Key("spec.clusterName")]
    upgrade_type: Annotated[UpgradeType, codec.Key("spec.management.upgradeType")]
    release_image: Annotated[str, codec.Key("spec.release.image")] = ""
    platform: Annotated[str, codec.Key("spec.platform.type")] = ""
    replicas: Annotated[int | None, codec.Key("spec.replicas")] = None
    """None with ``autoscaling``; HyperShift refuses both together by a condition."""
    autoscaling: Annotated[AutoScaling | None, codec.Key("spec.autoScaling")] = None
    replace_strategy: Annotated[str, codec.Key("spec.management.replace.strategy")] = ""
    """``RollingUpdate`` or ``OnDelete``; empty for the default, which is RollingUpdate."""
    max_surge: Annotated[
        clusterapi.CountOrPercent | None,
        codec.Key("spec.management.replace.rollingUpdate.maxSurge"),
    ] = None
    max_unavailable: Annotated[
        clusterapi.CountOrPercent | None,
        codec.Key("spec.management.replace.rollingUpdate.maxUnavailable"),
    ] = None
    in_place_max_unavailable: Annotated[
        clusterapi.CountOrPercent | None,
        codec.Key("spec.management.inPlace.maxUnavailable"),
    ] = None
    auto_repair: Annotated[bool, codec.Key("spec.management.autoRepair")] = False
    configs: Annotated[object_meta.ObjectNames, codec.Key("spec.config")] = ()
    """Names of ConfigMaps in the namespace of the NodePool."""
    drain_timeout_s: Annotated[clusterapi.GoDuration | None, codec.Key("spec.nodeDrainTimeout")] = (
        None
    )
    """None and 0 mean no limit."""
    paused_until: Annotated[str, codec.Key("spec.pausedUntil")] = ""
    os_image_stream: Annotated[str, codec.Key("spec.osImageStream.name")] = ""
    version: Annotated[str, codec.Key("status.version")] = ""
    """The version that all nodes have."""
    conditions: object_meta.StatusConditions = ()

    @property
    def full_name(self) -> str:
        """The value of the annotation on objects of the pool."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_in_place(self) -> bool:
        return self.upgrade_type is UpgradeType.IN_PLACE

    @property
    def current_hash(self) -> str:
        """Hash of config and version that all nodes have; empty until the first nodes exist."""
        return self.metadata.annotations.get(hosted_key.CURRENT_CONFIG_VERSION, "")

    @property
    def current_rollout_hash(self) -> str:
        """Hash of what rolls nodes; empty for HyperShift's own (hypershift#8698)."""
        found = self.metadata.annotations.get(hosted_key.CURRENT_ROLLOUT_CONFIG, "")
        return "" if len(found) == HASH_DIGITS else found

    @property
    def rollout_policy(self) -> str:
        """Name of the RolloutPolicy that conducts the pool; empty for none."""
        return self.metadata.annotations.get(hosted_key.ROLLOUT_POLICY, "")

    @property
    def allows_refresh(self) -> bool:
        """Whether nodes get changes in place that need neither drain nor reboot."""
        is_set = self.metadata.annotations.get(hosted_key.REFRESH) == UpgradeType.IN_PLACE
        return self.is_in_place or is_set

    def read_secret_hash(self, secret: str) -> str:
        """Return the hash in the name of a token or user-data Secret of this pool, or nothing."""
        for prefix in (USER_DATA_PREFIX, TOKEN_PREFIX):
            if secret.startswith(start := f"{prefix}{self.name}-"):
                return secret.removeprefix(start)
        return ""


@dataclass(frozen=True, slots=True)
class ImageContentSource(codec.JsonObject, omits_defaults=True):
    """Mirrors of one source of images."""

    source: str
    mirrors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostedCluster(_ConditionOwner, kind="HostedCluster", api_version=API_VERSION):
    """Snapshot of a HostedCluster; an empty name of a Secret or ConfigMap is unset."""

    metadata: object_meta.ObjectMeta
    release_image: Annotated[str, codec.Key("spec.release.image")] = ""
    infra_id: Annotated[str, codec.Key("spec.infraID")] = ""
    pull_secret: Annotated[str, codec.Key("spec.pullSecret.name")] = ""
    trust_bundle: Annotated[str, codec.Key("spec.additionalTrustBundle.name")] = ""
    ssh_key: Annotated[str, codec.Key("spec.sshKey.name")] = ""
    fips: Annotated[bool, codec.Key("spec.fips")] = False
    image_content_sources: Annotated[
        tuple[ImageContentSource, ...], codec.Key("spec.imageContentSources")
    ] = ()
    configuration: Annotated[codec.Json, codec.Key("spec.configuration")] = field(
        default_factory=dict, repr=False
    )
    """Objects of ``config.openshift.io`` by field, as they are."""
    paused_until: Annotated[str, codec.Key("spec.pausedUntil")] = ""
    ignition_endpoint: Annotated[str, codec.Key("status.ignitionEndpoint")] = ""
    desired_image: Annotated[str, codec.Key("status.version.desired.image")] = ""
    """The release that the control plane works towards; the spec's one may be held."""
    conditions: object_meta.StatusConditions = ()

    @property
    def control_plane_namespace(self) -> str:
        """The namespace of the HostedControlPlane, its Secrets and its Machines."""
        return name_control_plane_namespace(self.namespace, self.name)

    @property
    def scope(self) -> str:
        """The operator that manages the cluster; empty for HyperShift's own."""
        return self.metadata.annotations.get(hosted_key.SCOPE, "")


@dataclass(frozen=True, slots=True)
class KubeconfigReference(codec.JsonObject):
    """A key of a Secret in the namespace of the control plane, which has a kubeconfig."""

    name: codec.NonEmptyText
    key: codec.NonEmptyText


@dataclass(frozen=True, slots=True)
class HostedControlPlane(
    clusterapi.NamedObject, kind="HostedControlPlane", api_version=API_VERSION
):
    """Snapshot of a HostedControlPlane."""

    metadata: object_meta.ObjectMeta
    infra_id: Annotated[str, codec.Key("spec.infraID")] = ""
    """Name of Cluster API's Cluster."""
    kubeconfig: Annotated[KubeconfigReference | None, codec.Key("status.kubeConfig")] = None


def name_control_plane_namespace(namespace: str, name: str) -> str:
    """Return the namespace of the control plane of a HostedCluster."""
    return f"{namespace}-{name.replace('.', '-')}"


def find_condition(
    conditions: Iterable[object_meta.Condition], condition_type: str
) -> object_meta.Condition | None:
    """Return the condition of a type; None without it."""
    return next((each for each in conditions if each.type == condition_type), None)


def is_paused(paused_until: str, now: float) -> bool:
    """Return whether ``pausedUntil`` stops HyperShift now: a boolean of Go or an RFC 3339 time.

    HyperShift ignores another text, so that object is not paused; see `is_valid_pause`.
    """
    until = clocks.parse_rfc3339(paused_until)
    return paused_until in _TRUE or (until is not None and now < until)


def is_pool_paused(pool: NodePool, cluster: HostedCluster, now: float) -> bool:
    """Return whether ``pausedUntil`` of the NodePool or its cluster stops HyperShift, and us."""
    return any(is_paused(each.paused_until, now) for each in (pool, cluster))


def is_valid_pause(paused_until: str) -> bool:
    """Return whether HyperShift can read ``pausedUntil``."""
    is_boolean = not paused_until or paused_until in _TRUE or paused_until in _FALSE
    return is_boolean or clocks.parse_rfc3339(paused_until) is not None
