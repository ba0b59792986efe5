"""Conditions and status of a NodePool that treenail owns, and who else writes them. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from treenail import clocks, sanitize
from treenail.api import decode, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.config import pool_config
from treenail.controllers.hosted.owning import machines
from treenail.kube import discovery, resources

AS_EXPECTED = "AsExpected"
_OWN = "treenail"
_MAX_TEXT = 2000
_SETTLE_S = 60.0
"""Time for the last write of the previous owner after a change of the scope."""
_Type = nodepool.NodePoolCondition
_CHECKED = (
    _Type.VALID_MACHINE_CONFIG, _Type.VALID_GENERATED_PAYLOAD, _Type.VALID_MACHINE_TEMPLATE,
    _Type.UPDATE_MANAGEMENT_ENABLED, _Type.AUTOSCALING_ENABLED,
)  # fmt: skip
"""Conditions that a problem makes False."""


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """One NodePool after a sync."""

    pool: nodepool.NodePool
    owner: machines.Owner | None
    members: Sequence[clusterapi.ClusterMachine] = ()
    config: pool_config.PoolConfig | None = None
    """None with a problem."""
    problem: pool_config.PoolConfigError | None = None
    is_paused: bool = False
    is_reached: bool = False
    """A machine has fetched its config."""
    sets: Sequence[clusterapi.MachineSet] = ()
    """MachineSets of the MachineDeployment."""

    @property
    def is_updated(self) -> bool:
        """Whether all machines, or for InPlace all nodes, have what the owner says."""
        owner = self.owner
        if not isinstance(owner, clusterapi.MachineDeployment):
            return owner is not None and "" != owner.own_target == owner.updated_config
        counts = {
            owner.replicas, owner.current_replicas, owner.updated_replicas,
            owner.available_replicas,
        }  # fmt: skip
        # Cluster API observes another template before it counts the machines that lack it.
        used = [each for each in self.sets if each.replicas or each.current_replicas]
        return (
            len(counts) == 1
            and owner.observed_generation >= owner.metadata.generation > 0
            and {_read_template(each) for each in used} <= {_read_template(owner)}
            and {each.data_secret for each in self.members} <= {owner.data_secret}
        )


def _read_template(owner: machines.Owner) -> tuple[str, str, str]:
    return owner.data_secret, owner.version, owner.infrastructure_name


def list_finalizers(pool: nodepool.NodePool) -> list[str]:
    found = pool.metadata.others.get("finalizers")
    return [str(each) for each in found] if isinstance(found, list) else []


def build_seed(pool: nodepool.NodePool, config: pool_config.PoolConfig) -> decode.Json:
    """Return the metadata of a NodePool that treenail sees for the first time."""
    seed: decode.Json = {}
    # HyperShift's own finalizer: either owner may end what the other began.
    finalizers = list_finalizers(pool)
    if hosted_key.FINALIZER not in finalizers:
        seed["finalizers"] = [*finalizers, hosted_key.FINALIZER]
    if not pool.current_rollout_hash:
        seed["annotations"] = {hosted_key.CURRENT_ROLLOUT_CONFIG: config.rollout_hash}
    return seed


def build_marks(facts: StatusFacts) -> decode.Json:
    """Return the annotations of a NodePool that record what all its machines have."""
    pool, owner = facts.pool, facts.owner
    if owner is None or not facts.is_updated:
        return {}
    value = pool.read_secret_hash(owner.data_secret)
    if pool.is_in_place:
        value = owner.metadata.annotations[hosted_key.UPDATED_CONFIG]
    marks: decode.Json = {hosted_key.PLATFORM_TEMPLATE: owner.infrastructure_name}
    # HyperShift compares its own hashes again after a hand-back.
    if value != pool.current_hash:
        marks |= dict.fromkeys(
            (hosted_key.CURRENT_CONFIG, hosted_key.CURRENT_CONFIG_VERSION), value
        )
    if rolled := owner.metadata.annotations.get(hosted_key.ROLLOUT_CONFIG):
        marks[hosted_key.CURRENT_ROLLOUT_CONFIG] = rolled
    return marks


def build_status(facts: StatusFacts, document: decode.Json, *, now: float) -> decode.Json:
    """Return the status fields that treenail writes; other conditions stay as they are."""
    pool, owner = facts.pool, facts.owner
    stored = resources.get_object(document, "status").get("conditions")
    conditions = {str(each.get("type")): each for each in discovery.iter_objects(stored)}
    for condition in object_meta.merge_conditions(
        pool.conditions, _build_conditions(facts), now=clocks.format_rfc3339(now)
    ):
        present = conditions.get(condition.type, {})
        if any(present.get(name) != value for name, value in condition.to_json().items()):
            generation = {"observedGeneration": pool.metadata.generation}
            conditions[condition.type] = {**present, **condition.to_json(), **generation}
    status: decode.Json = {"conditions": [*conditions.values()]}
    if owner is not None:
        status["replicas"] = owner.available_replicas
        if owner.version and facts.is_updated:
            status["version"] = owner.version
    return status


def _build_conditions(facts: StatusFacts) -> Iterator[object_meta.Condition]:
    pool, owner, problem = facts.pool, facts.owner, facts.problem
    states: dict[str, tuple[object, str, str]] = {
        _Type.RECONCILIATION_ACTIVE: (
            not facts.is_paused, "Paused" if facts.is_paused else AS_EXPECTED, ""
        ),
        "AutorepairEnabled": (pool.auto_repair, AS_EXPECTED, ""),
    }  # fmt: skip
    if problem is not None:
        text = "; ".join(filter(None, (str(problem), problem.remedy)))
        states[problem.condition] = (False, problem.reason, text)
    elif facts.config is not None:
        states |= dict.fromkeys(_CHECKED, (True, AS_EXPECTED, ""))
        states[_Type.AUTOSCALING_ENABLED] = (pool.autoscaling is not None, AS_EXPECTED, "")
    if facts.is_reached:
        states[_Type.REACHED_IGNITION] = (True, AS_EXPECTED, "")
    elif pool.find_condition(_Type.REACHED_IGNITION) is None:
        states[_Type.REACHED_IGNITION] = (False, "IgnitionNotReached", "")
    if owner is not None:
        states |= _describe_machines(facts, owner)
    for kind, (status, reason, text) in states.items():
        message = sanitize.sanitize_text(text, limit=_MAX_TEXT)
        yield object_meta.Condition(kind, str(status), reason, message)


def _describe_machines(
    facts: StatusFacts, owner: machines.Owner
) -> dict[str, tuple[object, str, str]]:
    pool, config = facts.pool, facts.config
    starting = ", ".join(sorted(each.name for each in facts.members if not each.node_name)[:5])
    counts = f"{owner.available_replicas} of {owner.replicas} machines are available"
    states: dict[str, tuple[object, str, str]] = {
        "AllMachinesReady": (True, AS_EXPECTED, ""), "Ready": (True, AS_EXPECTED, "")
    }  # fmt: skip
    if starting:
        states["AllMachinesReady"] = (False, "MachinesStarting", f"without a node: {starting}")
    if owner.available_replicas < (owner.replicas or 0):
        states["Ready"] = (False, "MachinesUnavailable", counts)
    if config is None:
        return states
    # The annotations change when all machines have the config, and not before.
    rolls = config.rollout_hash != pool.current_rollout_hash
    is_older = pool.version not in ("", config.version)
    done = pool.read_secret_hash(owner.data_secret)
    if pool.allows_refresh:
        done = owner.metadata.annotations.get(hosted_key.UPDATED_CONFIG, done)
    is_pending = not rolls and config.target_hash != done
    used = pool.metadata.annotations.get(hosted_key.PLATFORM_TEMPLATE, owner.infrastructure_name)
    return states | {
        _Type.UPDATING_CONFIG: (rolls, AS_EXPECTED, f"to {config.target_hash}: {counts}"),
        _Type.UPDATING_VERSION: (is_older, AS_EXPECTED, f"to {config.version}: {counts}"),
        _Type.UPDATING_TEMPLATE: (used != owner.infrastructure_name, AS_EXPECTED, ""),
        _Type.CONFIG_UPDATE_PENDING: (
            is_pending,
            "ManagementConfigDrift" if is_pending else AS_EXPECTED,
            "new machines get the config, and those that exist with the next rollout",
        ),
    }


def find_other_manager(pool: object_meta.ObjectMeta, cluster: object_meta.ObjectMeta) -> str:
    """Name the program that writes the status of a NodePool beside treenail; empty for none.

    A write from before treenail's own last one, or before the cluster got its scope, is history.
    """
    writes = _read_writes(pool, lambda entry: entry.get("subresource") == "status")
    own = max((at for name, at in writes if name.startswith(_OWN)), default=0.0)
    scoped = _read_writes(cluster, lambda entry: hosted_key.SCOPE in str(entry.get("fieldsV1")))
    since = max((at for _, at in scoped), default=0.0)
    since = own if own > since else since + _SETTLE_S
    others = (name for name, at in writes if not name.startswith(_OWN) and at > since)
    return next(others, "")


def was_owned(pool: object_meta.ObjectMeta) -> bool:
    """Return whether treenail wrote the status of a NodePool last."""
    writes = _read_writes(pool, lambda entry: entry.get("subresource") == "status")
    return max(((at, name) for name, at in writes), default=(0.0, ""))[1].startswith(_OWN)


def _read_writes(
    metadata: object_meta.ObjectMeta, is_meant: Callable[[decode.Json], bool]
) -> list[tuple[str, float]]:
    """Return name and time of the writers of some fields."""
    return [
        (str(entry.get("manager")), clocks.parse_rfc3339(str(entry.get("time"))) or 0.0)
        for entry in discovery.iter_objects(metadata.others.get("managedFields"))
        if is_meant(entry)
    ]
