"""MachineDeployment, MachineSet and MachineHealthCheck of a NodePool that treenail owns. Pure.

Names, labels and annotations are those of HyperShift, so that either can take over from the other.
A document has only the fields that treenail decides; `resources.find_changes` leaves others alone.
"""

import hashlib
import re
from dataclasses import dataclass, field

from treenail.api import decode
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.config import pool_config
from treenail.controllers.pools import node_selection
from treenail.kube import resources

Owner = clusterapi.MachineDeployment | clusterapi.MachineSet

_CAPACITY = "capacity.cluster-autoscaler.kubernetes.io/"
_CAPACITY_NAMES = {"ephemeral-storage": "ephemeral-disk", "pods": "maxPods"} | {
    name: name for name in ("cpu", "memory", "gpu-type", "gpu-count")
}
"""Resources in the annotation of a NodePool, and their names for the autoscaler."""
_CAPACITY_PART = re.compile(r"([a-z-]+)=([A-Za-z0-9][A-Za-z0-9./-]{0,62})")
_SIZE = hosted_key.CAPI_PREFIX + "cluster-api-autoscaler-node-group-"
_ON_DELETE = "OnDelete"
_LABEL_LIMIT = 43
_STARTUP_S, _UNHEALTHY_S, _UNHEALTHY_BARE_S, _MAX_UNHEALTHY = 1200, 480, 960, 2
_Type = nodepool.NodePoolCondition


@dataclass(frozen=True, slots=True)
class MachineTemplate:
    """The infrastructure template of a user."""

    api_version: str
    kind: str
    name: str
    has_capacity: bool = False
    """The provider reports the resources of a machine, which the autoscaler needs at zero."""


@dataclass(frozen=True, slots=True)
class MachineInputs:
    """Sources of the objects of one NodePool."""

    pool: nodepool.NodePool
    namespace: str
    cluster_name: str
    """Name of Cluster API's Cluster."""
    config: pool_config.PoolConfig
    template: MachineTemplate | None = None
    """None keeps the template of an object that exists."""
    found: decode.Json = field(default_factory=dict)
    """The MachineDeployment or MachineSet as an API object; empty before it exists."""
    capi_version: str = clusterapi.VERSIONS[0]
    is_refresh: bool = False
    """Another rollout hash needs neither drain nor reboot: an SSH key, or one mirror more."""
    holds_target: bool = False
    """The same rollout hash needs a drain or a reboot, as a computed default: nodes do not get the
    config before the next rollout, because agents refuse it as a refresh."""

    @property
    def is_v1beta1(self) -> bool:
        return self.capi_version != clusterapi.VERSIONS[0]

    @property
    def owner(self) -> Owner | None:
        """The object in ``found``; raises `ConfigError`."""
        return read_owner(self.pool, self.found)


def read_owner(pool: nodepool.NodePool, found: decode.Json) -> Owner | None:
    """Read the MachineDeployment or MachineSet of a NodePool; raise `PoolConfigError`."""
    if not found:
        return None
    kind = clusterapi.MachineSet if pool.is_in_place else clusterapi.MachineDeployment
    owner = kind.from_json(found)
    if owner.node_pool == pool.full_name:
        return owner
    title = f"{found.get('kind')} {owner.namespace}/{owner.name}"
    raise pool_config.PoolConfigError(
        f"{title} is of NodePool {owner.node_pool or 'of no name'}, not of {pool.full_name}",
        reason="OtherNodePool",
        condition=_Type.VALID_MACHINE_TEMPLATE,
        remedy="rename the NodePool, or let it have the object: kubectl annotate --overwrite "
        f"-n {owner.namespace} {found.get('kind')} {owner.name} "
        f"{hosted_key.NODE_POOL}={pool.full_name}",
    )


def read_data_secret(found: decode.Json) -> str:
    """Return the Secret that the template in an API object names; empty for none."""
    for name in ("spec", "template", "spec", "bootstrap"):
        found = resources.get_object(found, name)
    return str(found.get("dataSecretName") or "")


def has_other_hash(inputs: MachineInputs) -> bool:
    """Return whether existing machines may have to be replaced or updated in place.

    An object without treenail's annotation was taken over: its template is what the NodePool had on
    first sight.
    """
    owner, pool = inputs.owner, inputs.pool
    if owner is None:
        return False
    rolled = owner.metadata.annotations.get(hosted_key.ROLLOUT_CONFIG, pool.current_rollout_hash)
    return rolled not in ("", inputs.config.rollout_hash)


def needs_rollout(inputs: MachineInputs) -> bool:
    """Return whether existing machines must be replaced or updated in place."""
    return has_other_hash(inputs) and not inputs.is_refresh


def find_rolled_hash(inputs: MachineInputs, *, can_roll: bool = True) -> str:
    """Return the hash in the name of the Secret that new machines boot from.

    It keeps its value until a rollout, so that no machine is replaced before.
    """
    owner = inputs.owner
    if owner is None or (can_roll and needs_rollout(inputs)):
        return inputs.config.target_hash
    return inputs.pool.read_secret_hash(owner.data_secret) or inputs.config.target_hash


def check_pool(pool: nodepool.NodePool) -> None:
    """Raise `PoolConfigError` for fields that no machine may follow."""
    read_capacity(pool)
    edit = f"kubectl edit nodepool {pool.name} -n {pool.namespace}"
    if pool.replicas is not None and pool.autoscaling is not None:
        raise pool_config.PoolConfigError(
            "spec.replicas and spec.autoScaling are both set",
            reason="ReplicasAndAutoscaling",
            condition=_Type.AUTOSCALING_ENABLED,
            remedy=f"remove one of them: {edit}",
        )
    # A RolloutPolicy has its own limit, and HyperShift selects no node with a negative one.
    if pool.replace_strategy == _ON_DELETE or pool.rollout_policy:
        return
    surge, unavailable = pool.max_surge, pool.max_unavailable
    limits = {"replace.rollingUpdate.maxUnavailable": unavailable,
              "replace.rollingUpdate.maxSurge": surge}  # fmt: skip
    # Cluster API's default of maxUnavailable is 0, of maxSurge 1.
    is_stuck = _is_zero(surge) and (unavailable is None or _is_zero(unavailable))
    if pool.is_in_place:
        limits = {"inPlace.maxUnavailable": pool.in_place_max_unavailable}
        is_stuck = _is_zero(pool.in_place_max_unavailable)
    for name, value in limits.items():
        if is_stuck or not (value is None or _is_limit(value)):
            raise pool_config.PoolConfigError(
                f"spec.management.{name} is {value!r:.40}",
                reason="InvalidMaxUnavailable",
                condition=_Type.UPDATE_MANAGEMENT_ENABLED,
                remedy=f"set a count of at least 1, or a percentage from 1% to 100%: {edit}",
            )


def _is_limit(value: object) -> bool:
    percent = node_selection.PERCENTAGE.fullmatch(value) if isinstance(value, str) else None
    return int(percent[1]) <= 100 if percent else isinstance(value, int) and value >= 0


def _is_zero(value: object) -> bool:
    return str(value).strip("+%") in ("0", "00", "000")


def read_capacity(pool: nodepool.NodePool) -> dict[str, str]:
    """Return the annotations for the autoscaler; raise `PoolConfigError`."""
    text, found = pool.metadata.annotations.get(hosted_key.CAPACITY, ""), {}
    for part in filter(None, text.split(",")):
        match = _CAPACITY_PART.fullmatch(part.strip())
        if match is None or match[1] not in _CAPACITY_NAMES:
            raise pool_config.PoolConfigError(
                f"annotation {hosted_key.CAPACITY} has {part!r:.80}, expected RESOURCE=QUANTITY "
                f"with one of {', '.join(_CAPACITY_NAMES)}",
                reason="InvalidCapacity",
                condition=_Type.AUTOSCALING_ENABLED,
                remedy=f"correct it: kubectl annotate nodepool {pool.name} -n {pool.namespace} "
                f"--overwrite {hosted_key.CAPACITY}=cpu=4,memory=16Gi",
            )
        found[_CAPACITY + _CAPACITY_NAMES[match[1]]] = match[2]
    return found


def build_owner(inputs: MachineInputs, rolled_hash: str) -> decode.Json:
    """Build the fields of the MachineDeployment or MachineSet; None removes a field.

    Cluster API replaces machines for another Secret, version or infrastructure template, and for
    nothing else in it. Of an object that exists these stay while ``rolled_hash`` stays.
    """
    pool, owner, config = inputs.pool, inputs.owner, inputs.config
    rolls = owner is None or (needs_rollout(inputs) and rolled_hash == config.target_hash)
    capacity = read_capacity(pool)
    least, most, replicas = _find_bounds(inputs, has_capacity=bool(capacity))
    annotations: decode.Json = {
        hosted_key.NODE_POOL: pool.full_name,
        # HyperShift pauses the objects of a paused pool.
        hosted_key.CAPI_PREFIX + "paused": None,
        f"{_SIZE}min-size": str(least),
        f"{_SIZE}max-size": str(most),
        **capacity,
        **_build_targets(inputs, rolled_hash),
    }
    machine = {**_build_drain_timeout(inputs), **_build_reference(inputs)}
    metadata: decode.Json = {"annotations": {hosted_key.NODE_POOL: pool.full_name}}
    spec: decode.Json = {"replicas": replicas}
    if rolls:
        secret = f"{nodepool.USER_DATA_PREFIX}{pool.name}-{rolled_hash}"
        machine |= {"bootstrap": {"dataSecretName": secret}, "version": config.version}
    if (
        rolls
        or inputs.is_refresh
        or owner is None
        or hosted_key.ROLLOUT_CONFIG not in owner.metadata.annotations
    ):
        rolled = config.rollout_hash if rolls or inputs.is_refresh else pool.current_rollout_hash
        annotations[hosted_key.ROLLOUT_CONFIG] = rolled
    cluster = inputs.cluster_name if owner is None else owner.cluster_name
    if owner is None:
        label = build_label(cluster, pool.cluster_name, pool.name)
        labels = {label: label, hosted_key.CLUSTER_NAME: cluster}
        selector = {label: label} if pool.is_in_place else labels
        spec |= {"clusterName": cluster, "selector": {"matchLabels": selector}}
        metadata["labels"], machine["clusterName"] = labels, cluster
    if not pool.is_in_place:
        spec |= _build_strategy(inputs)
    return {
        "metadata": {"labels": {hosted_key.CLUSTER_NAME: cluster}, "annotations": annotations},
        "spec": {**spec, "template": {"metadata": metadata, "spec": machine}},
    }


def _build_targets(inputs: MachineInputs, rolled_hash: str) -> decode.Json:
    """Build the annotations for nodes that get a config in place, also without drain and reboot.

    Nodes of HyperShift keep its config until a rollout: the difference may need a reboot.
    """
    owner, target = inputs.owner, inputs.config.target_hash
    before = current = rolled_hash
    if isinstance(owner, clusterapi.MachineSet):
        # A record that a user removed: the nodes are looked at again.
        is_own = hosted_key.ROLLOUT_CONFIG in owner.metadata.annotations
        known = "" if is_own else inputs.pool.current_hash or before
        before, current = owner.target_hash or before, owner.current_hash or known
    if len(rolled_hash) == nodepool.HASH_DIGITS:
        target = before
    if owner is not None:
        if inputs.holds_target:
            target = owner.own_target or target
        current = owner.metadata.annotations.get(hosted_key.UPDATED_CONFIG, current)
    return {hosted_key.TARGET_CONFIG: target, hosted_key.UPDATED_CONFIG: current}


def _find_bounds(inputs: MachineInputs, *, has_capacity: bool) -> tuple[int, int, int]:
    """Return the limits of the autoscaler, 0 without it, and the number of machines.

    The autoscaler decides within its limits. It never leaves zero without the resources of a
    machine.
    """
    pool, owner = inputs.pool, inputs.owner
    if (scaling := pool.autoscaling) is None:
        return 0, 0, pool.replicas or 0
    can_be_zero = has_capacity or (inputs.template is not None and inputs.template.has_capacity)
    least = max(1 if scaling.min is None else scaling.min, 0 if can_be_zero else 1)
    present = (owner.replicas or 0) if owner else 0
    return least, scaling.max, min(max(present, least), scaling.max)


def _build_drain_timeout(inputs: MachineInputs) -> decode.Json:
    wanted, owner = inputs.pool.drain_timeout_s or None, inputs.owner
    if owner is not None and (owner.drain_timeout_s or None) == wanted:
        return {}
    if inputs.is_v1beta1:
        return {"nodeDrainTimeout": wanted and f"{wanted:g}s"}
    return {"deletion": {"nodeDrainTimeoutSeconds": wanted and max(round(wanted), 1)}}


def _build_reference(inputs: MachineInputs) -> decode.Json:
    template, found = inputs.template, inputs.found
    for name in ("spec", "template", "spec", "infrastructureRef"):
        found = resources.get_object(found, name)
    if template is None or (template.kind, template.name) == (found.get("kind"), found.get("name")):
        return {}
    names: decode.Json = {"kind": template.kind, "name": template.name}
    if inputs.is_v1beta1:
        names |= {"apiVersion": template.api_version, "namespace": inputs.namespace}
    else:
        names["apiGroup"] = template.api_version.partition("/")[0]
    return {"infrastructureRef": names}


def _build_strategy(inputs: MachineInputs) -> decode.Json:
    pool = inputs.pool
    limits = {"maxSurge": pool.max_surge, "maxUnavailable": pool.max_unavailable}
    strategy: decode.Json = {
        "type": pool.replace_strategy or "RollingUpdate",
        "rollingUpdate": {name: value for name, value in limits.items() if value is not None},
    }
    if pool.replace_strategy == _ON_DELETE:
        strategy["rollingUpdate"] = None
    return {"strategy": strategy} if inputs.is_v1beta1 else {"rollout": {"strategy": strategy}}


def build_health_check(inputs: MachineInputs) -> decode.Json:
    """Build the MachineHealthCheck of a MachineDeployment or MachineSet that exists."""
    pool, spec = inputs.pool, resources.get_object(inputs.found, "spec")
    limit_s = _UNHEALTHY_BARE_S if pool.platform in ("Agent", "None") else _UNHEALTHY_S
    timeout: decode.Json = {"timeoutSeconds": limit_s}
    if inputs.is_v1beta1:
        timeout = {"timeout": f"{limit_s}s"}
    checks = [{"type": "Ready", "status": status, **timeout} for status in ("False", "Unknown")]
    limits: decode.Json = {
        "checks": {"nodeStartupTimeoutSeconds": _STARTUP_S, "unhealthyNodeConditions": checks},
        "remediation": {"triggerIf": {"unhealthyLessThanOrEqualTo": _MAX_UNHEALTHY}},
    }
    if inputs.is_v1beta1:
        limits = {"maxUnhealthy": _MAX_UNHEALTHY, "nodeStartupTimeout": f"{_STARTUP_S}s",
                  "unhealthyConditions": checks}  # fmt: skip
    copied = {name: spec.get(name) for name in ("clusterName", "selector")}
    notes = {hosted_key.NODE_POOL: pool.full_name}
    return {"metadata": {"annotations": notes}, "spec": {**copied, **limits}}


def build_label(infra_id: str, cluster: str, pool: str) -> str:
    """Return the label of the machines of a pool; up to 43 characters as HyperShift names it."""
    name = f"{infra_id}-{cluster}-{pool}"
    if len(name) <= _LABEL_LIMIT:
        return name
    return f"{name[: _LABEL_LIMIT - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
