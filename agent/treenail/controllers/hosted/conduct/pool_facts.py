"""A NodePool as a MachineConfigPool value, and its nodes or Machines as nodes of it. Pure.

The rollout of a MachineConfigPool then decides for it. The name of the config is the hash of
HyperShift, for Replace together with the infrastructure template.

With InPlace a member is a Node of the hosted cluster. With Replace it is a place in the pool: an
old Machine, which a deletion empties, and later the Machine that Cluster API creates for it.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from treenail import clocks
from treenail.api import decode, machineconfigpool
from treenail.api.annotations import OWN_PREFIX, NodeState
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.drain import decide
from treenail.controllers.pools import (
    node_facts,
    node_selection,
    os_image,
    rollout_policy,
    rollout_record,
)
from treenail.errors import ConfigError
from treenail.kube import event_recorder

MAX_UNAVAILABLE = OWN_PREFIX + "max-unavailable"
"""Annotation of a NodePool: treenail's limit, because HyperShift's own must select no node."""
REFRESH_LIMIT = 10
"""Nodes that get a config at the same time which needs neither drain nor reboot."""
REFRESH_SUFFIX = "_refresh"  # no object has this sign in its name
_ON_DELETE = "OnDelete"
_NO_CREATION = clusterapi.GROUP + "/disable-machine-create"
"""Annotation of an older MachineSet, from Cluster API for OnDelete."""
_UNREACHABLE_S = 300.0
"""Longest drain of a node without a kubelet, as Cluster API and HyperShift have it."""
_NAMED_NODES = 5
_CLOCK_SKEW_S = 5.0
"""By which the API server's clock may be behind: a replacement is younger than the deletion."""


@dataclass(frozen=True, slots=True)
class PoolObjects:
    """A NodePool and what HyperShift and Cluster API made from it."""

    pool: nodepool.NodePool
    cluster: nodepool.HostedCluster
    owner: clusterapi.MachineSet | clusterapi.MachineDeployment | None = None
    """The MachineSet of InPlace, the MachineDeployment of Replace."""
    template_sets: tuple[clusterapi.MachineSet, ...] = ()
    """For Replace: the MachineSets of the deployment."""
    machines: tuple[clusterapi.ClusterMachine, ...] = ()
    """Those that one of these MachineSets controls."""
    is_owned: bool = False
    """treenail manages the HostedCluster, HyperShift's operators do not."""

    @property
    def has_own_update(self) -> bool:
        """Whether treenail gives nodes of the pool another config, without any other operator."""
        if self.gives_nodes:
            return self._is_pending
        # Machines that were replaced since have the config, and what a refresh left is removed.
        is_covered = self.owner is not None and self.rolled_hash == self.owner.own_target
        return self._is_pending and self.pool.allows_refresh and is_covered and self._is_replaced

    @property
    def gives_nodes(self) -> bool:
        """Whether nodes get the target; else replaced machines have it, and only an end is left."""
        return self.pool.is_in_place or self.is_refresh

    @property
    def is_refresh(self) -> bool:
        """Whether the target needs neither drain nor reboot: the name of the user data stays.

        All nodes must have a config of this name. After an interrupted rollout in place they have
        not, and in a Replace pool not until each Machine is replaced.
        """
        owner, rolled = self.owner, self.rolled_hash
        if owner is None or not self._is_pending or rolled in ("", owner.own_target):
            return False
        if self.pool.is_in_place:
            return owner.updated_rollout == rolled
        return self.pool.allows_refresh and self._is_replaced

    @property
    def _is_pending(self) -> bool:
        owner = self.owner
        if not self.is_owned or owner is None or not owner.own_target:
            return False
        return owner.updated_config not in (None, owner.own_target)

    @property
    def rolled_hash(self) -> str:
        """The hash in the name of the machines' user data."""
        return "" if self.owner is None else self.pool.read_secret_hash(self.owner.data_secret)

    @property
    def _is_replaced(self) -> bool:
        """Whether each Machine has the template of the MachineDeployment."""
        wanted = "" if self.owner is None else self.owner.data_secret
        return all(machine.data_secret == wanted for machine in self.machines)

    @property
    def writes_nodes(self) -> bool:
        """Whether the members are Nodes of the hosted cluster; else they are Machines."""
        return self.pool.is_in_place or self.has_own_update

    @property
    def record_name(self) -> str:
        """Key of the record; a refresh of a Replace pool has its own."""
        is_other = self.writes_nodes and not self.pool.is_in_place
        return f"{self.pool.name}{REFRESH_SUFFIX}" if is_other else self.pool.name

    @property
    def namespace(self) -> str:
        """Namespace of the control plane."""
        return self.cluster.control_plane_namespace

    @property
    def target(self) -> str:
        """Hash or template that the members should have; empty before it is known."""
        if self.is_owned and self.writes_nodes:
            return "" if self.owner is None else self.owner.own_target
        if isinstance(self.owner, clusterapi.MachineSet):
            return self.owner.target_hash
        return "" if self.owner is None else _name_template(self.pool, self.owner)

    @property
    def needs_guest(self) -> bool:
        """Whether treenail selects nodes of the pool in the hosted cluster now."""
        owner = self.owner
        if self.is_owned:
            return self.has_own_update
        if not isinstance(owner, clusterapi.MachineSet) or owner.current_hash == owner.target_hash:
            return False
        return isinstance(find_target(self), os_image.GateOpen)


def find_target(objects: PoolObjects) -> os_image.GateVerdict:
    """Return the target of the pool, or why treenail may select no node for it now."""
    pool, owner = objects.pool, objects.owner
    if objects.is_owned and objects.writes_nodes:
        if objects.target and owner is not None and owner.updated_config is not None:
            return os_image.GateOpen(node_facts.RolloutTarget(objects.target), "of the MachineSet")
        return os_image.GateWaiting(
            "waiting: the controller nodepools has not recorded the config of the nodes yet"
        )
    if pool.is_in_place and isinstance(owner, clusterapi.MachineSet) and owner.target_hash:
        limit = owner.max_unavailable
        if not (limit.startswith("-") and limit[1:].isdecimal() and int(limit) < 0):
            fact = (
                f"annotation {hosted_key.MAX_UNAVAILABLE} of its MachineSet is {limit or 'absent'}"
            )
            return _block_selection(
                pool, f"{fact}, expected a negative count", {"inPlace": {"maxUnavailable": -1}}
            )
        return os_image.GateOpen(node_facts.RolloutTarget(objects.target), "of the MachineSet")
    if pool.is_in_place or not isinstance(owner, clusterapi.MachineDeployment):
        return os_image.GateWaiting("waiting: HyperShift has set no target for the machines yet")
    if not pool.replace_strategy == owner.strategy == _ON_DELETE:
        fact = f"the strategy of its MachineDeployment is {owner.strategy or 'RollingUpdate'}"
        wanted = {"replace": {"strategy": _ON_DELETE, "rollingUpdate": None}}
        return _block_selection(pool, f"{fact}, expected {_ON_DELETE}", wanted)
    names = {each.name: _name_template(pool, each) for each in objects.template_sets}
    # Before, an older MachineSet would create the deleted Machine again.
    are_old_ready = all(
        each.metadata.annotations.get(_NO_CREATION) == "true"
        for each in objects.template_sets
        if each.replicas and names[each.name] != objects.target
    )
    is_seen = owner.observed_generation >= owner.metadata.generation
    if not (is_seen and are_old_ready and objects.target in names.values()):
        return os_image.GateWaiting(
            "waiting: Cluster API has not changed to the present template of the Machines yet"
        )
    return os_image.GateOpen(node_facts.RolloutTarget(objects.target), "of the MachineDeployment")


def _block_selection(
    pool: nodepool.NodePool, fact: str, management: Mapping[str, object]
) -> os_image.GateBlocked:
    patch = json.dumps({"spec": {"management": management}})
    return os_image.GateBlocked(
        f"HyperShift selects the nodes of NodePool {pool.full_name} itself: {fact}; run: kubectl "
        f"patch nodepool {pool.name} -n {pool.namespace} --type merge -p '{patch}', or remove the "
        f"annotation {hosted_key.ROLLOUT_POLICY}",
        "HyperShiftSelects",
    )


def _name_template(
    pool: nodepool.NodePool, owner: clusterapi.MachineSet | clusterapi.MachineDeployment
) -> str:
    """Name the template by what HyperShift changes in it to replace Machines."""
    secret = pool.read_secret_hash(owner.data_secret) or owner.data_secret
    return "/".join(filter(None, (secret, owner.infrastructure_name)))


def limit_drain(pool: nodepool.NodePool | None, node: decide.DrainNode) -> float | None:
    """Return how long the drain of a node may last, in seconds; None for no limit."""
    limits = [pool.drain_timeout_s] if pool is not None and pool.drain_timeout_s else []
    return min((*limits, *([_UNREACHABLE_S] if node.is_unreachable else [])), default=None)


def refer_to(pool: nodepool.NodePool) -> event_recorder.ObjectReference:
    """Return the NodePool for an Event."""
    return event_recorder.ObjectReference(
        "NodePool", pool.name, pool.metadata.uid, pool.namespace, nodepool.API_VERSION
    )


def describe_permission(objects: PoolObjects) -> str:
    """Return the command that permits the work; it replaces a Role, also that of nodepools."""
    owned = f"hosted,nodepools --node-pools {objects.pool.namespace}"
    return (
        f"run: treenail-controller manifests --only {owned if objects.is_owned else 'hosted'} "
        f"--control-plane {objects.namespace} | kubectl apply -f -"
    )


def find_degraded(
    nodes: Iterable[node_facts.NodeFacts], target: str
) -> os_image.GateBlocked | None:
    """Block the rollout of a target with which a node is degraded; another target may go on."""
    failed = [node for node in nodes if node.is_failing and node.desired_config == target]
    if not failed:
        return None
    names = ", ".join(node.name for node in failed[:_NAMED_NODES])
    return os_image.GateBlocked(
        f"node {failed[0].name} is degraded with {target}: {failed[0].reason or 'no reason'}; no "
        f"other node gets it. Correct the config of the NodePool, or repair {names}",
        "NodeDegraded",
    )


def build_pool(
    objects: PoolObjects, status: decode.Json, version: str, *, now: float
) -> machineconfigpool.MachineConfigPool:
    """Build the MachineConfigPool value of a NodePool; ``status`` is that of the record."""
    pool = objects.pool
    limit = _read_limit(objects)
    return machineconfigpool.MachineConfigPool.from_json(
        {
            "metadata": {
                "name": f"{pool.namespace}/{objects.record_name}",
                "uid": pool.metadata.uid,
                "resourceVersion": version,
                "generation": pool.metadata.generation,
                "deletionTimestamp": pool.metadata.others.get("deletionTimestamp"),
            },
            "spec": {
                "configuration": {"name": objects.target},
                "maxUnavailable": int(limit) if limit.isdecimal() else limit,
                "paused": nodepool.is_pool_paused(pool, objects.cluster, now),
                "rolloutPolicy": "" if objects.is_refresh else pool.rollout_policy,
            },
            "status": status,
        }
    )


def _read_limit(objects: PoolObjects) -> str:
    """Return the limit as text, which may be invalid: see `check_pool`."""
    if objects.is_refresh:
        return str(REFRESH_LIMIT)
    own = objects.pool.metadata.annotations.get(MAX_UNAVAILABLE)
    limit = objects.pool.in_place_max_unavailable
    # A negative limit is for HyperShift, which then selects no node.
    is_conducted = not objects.is_owned or (isinstance(limit, int) and limit < 0)
    if own is not None:
        return own
    return "1" if is_conducted or limit is None else str(limit)


def check_pool(
    objects: PoolObjects, policies: Mapping[str, rollout_policy.ObservedPolicy]
) -> ConfigError | None:
    """Return what is wrong with the settings of a NodePool for treenail; None for nothing."""
    pool = objects.pool
    where = f"of NodePool {pool.full_name}"
    is_optional = objects.is_owned and not pool.rollout_policy
    if pool.rollout_policy not in policies and not (is_optional or objects.is_refresh):
        return rollout_policy.MissingPolicyError(
            f"RolloutPolicy {pool.rollout_policy} does not exist, and annotation "
            f"{hosted_key.ROLLOUT_POLICY} {where} names it",
            remedy="create it, or correct the annotation; until then no node is assigned",
        )
    limit = _read_limit(objects)
    percent = node_selection.PERCENTAGE.fullmatch(limit)
    if MAX_UNAVAILABLE not in pool.metadata.annotations and objects.is_owned:
        if (percent and 1 <= int(percent[1]) <= 100) or (limit.isdecimal() and int(limit) > 0):
            return None
        return ConfigError(
            f"spec.management.inPlace.maxUnavailable {where} is {limit!r:.40}, expected a count of "
            "at least 1, or a percentage from 1% to 100%",
            remedy="correct it; until then no node is assigned",
        )
    if (limit.isdecimal() and len(limit) < 10) or percent:
        return None
    return ConfigError(
        f"annotation {MAX_UNAVAILABLE} {where} is {limit!r:.40}, which is neither a count nor a "
        "percentage",
        remedy="set it to a number such as 2, or to a percentage such as 10%",
    )


def list_in_place_nodes(
    objects: PoolObjects, nodes: Mapping[str, node_facts.NodeFacts] | None
) -> tuple[node_facts.NodeFacts, ...]:
    """Return a node for each Machine of the pool; ``nodes`` are those of the hosted cluster.

    None for a pool whose nodes are not watched: they are what the MachineSet reports. A Machine
    without its Node counts as unavailable.
    """
    owner, members = objects.owner, []
    current = owner.current_hash if isinstance(owner, clusterapi.MachineSet) else ""
    if objects.is_owned and owner is not None:
        current = owner.updated_config or ""
    for machine in objects.machines:
        node = node_facts.NodeFacts(
            machine.node_name or machine.name,
            current_config=current,
            desired_config=current,
            state=NodeState.DONE.value,
        )
        if nodes is not None:
            found = nodes.get(machine.node_name, node_facts.NodeFacts(node.name, is_healthy=False))
            # HyperShift assigns no image, and its nodes have no lock: a node could only pretend.
            node = replace(found, current_image=None, desired_image=None, locked_by="")
            if not objects.is_owned and needs_redirect(node, objects.target):
                # HyperShift does so once a user has cleared the state: no failure of the target.
                state = NodeState.WORKING.value if node.is_degraded else node.state
                node = replace(node, desired_config=objects.target, state=state)
        if not machine.is_deleting:
            members.append(node)
    return tuple(sorted(members, key=lambda node: node.name))


def needs_redirect(node: node_facts.NodeFacts, target: str) -> bool:
    """Return whether a node gets the target although no wave selects it now.

    HyperShift redirects every node that is updating to another target. A daemon may be faster: it
    applies the config that it finds, and then only the node's desired config is old. HyperShift
    would redirect such a node later, at once with the next target.
    """
    return node.current_config != node.desired_config != target and bool(node.desired_config)


def list_replace_places(
    objects: PoolObjects, status: decode.Json
) -> tuple[node_facts.NodeFacts, ...]:
    """Return the places of a Replace pool: Machines, and as many as are missing.

    A Machine that is being deleted fills a place that has no other one yet.
    """
    owner, pool = objects.owner, objects.pool
    if not isinstance(owner, clusterapi.MachineDeployment):
        return ()
    places = {machine.name: machine for machine in _list_machines(objects)}
    missing = max((owner.replicas or 0) - len(places), 0)
    record = read_record(status)
    names = dict.fromkeys(() if record is None else record.assigned_now)
    names |= dict.fromkeys(each.name for each in objects.machines if each.is_deleting)
    names |= dict.fromkeys(f"{pool.name} machine {number + 1}" for number in range(missing))
    empty = node_facts.NodeFacts(
        "",
        desired_config=objects.target,
        state=NodeState.WORKING.value,
        is_healthy=False,
    )
    for name in [name for name in names if name not in places][:missing]:
        places[name] = replace(empty, name=name)
    return tuple(places[name] for name in sorted(places))


def _list_machines(objects: PoolObjects) -> list[node_facts.NodeFacts]:
    """List the Machines that stay."""
    configs = {each.uid: _name_template(objects.pool, each) for each in objects.template_sets}
    return [
        _read_machine(machine, configs.get(owner.uid, ""))
        for machine in objects.machines
        if not machine.is_deleting and (owner := machine.get_controller()) is not None
    ]


def _read_machine(machine: clusterapi.ClusterMachine, config: str) -> node_facts.NodeFacts:
    healthy = nodepool.find_condition(
        (*machine.conditions, *machine.old_conditions), clusterapi.MachineCondition.NODE_HEALTHY
    )
    is_running = machine.phase == "Running" if healthy is None else healthy.status == "True"
    # A Machine that never joined may be replaced at once. One whose node is down uses capacity:
    # during an outage of the hosted API server all of them seem to be down.
    state = NodeState.DONE if machine.node_name else NodeState.WORKING
    if machine.phase == "Failed" or machine.failure:
        state = NodeState.DEGRADED
    return node_facts.NodeFacts(
        machine.name,
        labels=machine.metadata.labels,
        created_at=machine.metadata.created,
        is_healthy=is_running and bool(machine.node_name),
        ready_changed_at=clocks.parse_rfc3339(healthy.last_transition_time) if healthy else None,
        current_config=config,
        desired_config=config,
        state=state.value,
        reason=machine.failure,
        uid=machine.uid,
        resource_version=machine.metadata.resource_version,
    )


def follow_replacements(objects: PoolObjects, status: decode.Json) -> decode.Json:
    """Return the record in which the replacement of a deleted Machine has its place.

    So a wave waits for the replacement. The result is the same until the record is written.
    """
    if (record := read_record(status)) is None:
        return status
    places, assigned = _list_machines(objects), record.assigned_now
    present = {place.name for place in places}
    emptied = sorted((at, name) for name, at in assigned.items() if name not in present)
    # Once no place is empty, the youngest Machines are the replacements, whatever the clocks say.
    is_filled = len(places) >= (0 if objects.owner is None else objects.owner.replicas or 0)
    since = min(emptied, default=(0, ""))[0] - (math.inf if is_filled else _CLOCK_SKEW_S)
    young = sorted(
        (at, place.name)
        for place in places
        if place.current_config == objects.target
        and place.name not in assigned
        and (at := clocks.parse_rfc3339(place.created_at) or 0.0) >= since
    )[-len(emptied) :]
    names = {old: new for (_, old), (_, new) in zip(emptied, young, strict=False)}
    if not names:
        return status
    moved = {names.get(name, name): at for name, at in (record.assigned or {}).items()}
    return _replace_record(status, replace(record, assigned=moved))


def follow_redirects(
    objects: PoolObjects,
    nodes: Iterable[node_facts.NodeFacts],
    status: decode.Json,
    *,
    now: float,
) -> decode.Json:
    """Return the record in which nodes that HyperShift redirected are assigned.

    HyperShift gives a new target to nodes that are updating. treenail selected them for the
    previous target, so they belong to the waves of the new one.
    """
    record = read_record(status)
    if record is None or record.assigned is None or record.began_at is None:
        return status
    # The rollout of a new target begins with this sync, in the next second at the latest.
    since = record.began_at if record.target.config == objects.target else now + 2.0
    redirected = {
        node.name: int(since)
        for node in nodes
        if node.desired_config == objects.target
        and record.assigned.get(node.name, since) < int(since)
    }
    if not redirected:
        return status
    return _replace_record(status, replace(record, assigned={**record.assigned, **redirected}))


def read_record(status: decode.Json) -> rollout_record.RolloutRecord | None:
    """Read the record of the rollout; None without one, and for an invalid one."""
    try:
        return rollout_record.RolloutRecord.from_json(status[rollout_record.ROLLOUT_STATUS])
    except (KeyError, ConfigError):
        return None


def _replace_record(status: decode.Json, record: rollout_record.RolloutRecord) -> decode.Json:
    return {**status, rollout_record.ROLLOUT_STATUS: record.to_json()}
