"""Causes why a NodePool of HyperShift waits, with their next steps: pure functions of facts.

Texts of objects are bounded and without credentials. Names in commands are quoted for a shell: the
administrators of a hosted cluster choose the names of its nodes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from shlex import quote

from treenail import clocks, sanitize
from treenail.api import annotations as key
from treenail.api import node as node_api
from treenail.api import object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted import rollout_store
from treenail.controllers.hosted.owning import conditions as owned_conditions
from treenail.controllers.hosted.status import facts
from treenail.encoding import codec

MAX_CAUSES = 20
"""Causes of a pool; those that block come first."""
_MAX_NAMED = 3
_MAX_TEXT = 400
# A drain, a reboot, and the two boots of a new machine usually take less.
_DELETION_LIMIT_S, _UNREADY_LIMIT_S, _JOIN_LIMIT_S = 600.0, 600.0, 1800.0
_TOKEN_LIFETIME_S = 11 * 3600.0
"""Lifetime of a payload in the Ignition server, which replaces a token after half of it."""
_AS_EXPECTED = "AsExpected"
_CORE_COUNT = re.compile(r"expected (\d{1,3}) core ignition configs, found (\d{1,3})")
_DEGRADED = re.compile(r"Node (\S{1,253}) in nodepool degraded: (.*)", re.DOTALL)
_STEPS = {
    "Paused": "run: {home} patch {owner} {name} --type merge -p "
    '\'{{"spec":{{"pausedUntil":null}}}}\'',
    "InvalidPause": "correct it: {home} edit {owner} {name}",
    "ClusterMissing": "create it, or run: {home} delete nodepool {pool}",
    "UpgradeHeld": "resolve it; to upgrade all the same run: {home} annotate hostedcluster "
    "{cluster} hypershift.openshift.io/force-upgrade-to={image}",
    "MissingCoreConfig": "run: {plane} get configmaps -l "
    "hypershift.openshift.io/core-ignition-config=true; {plane} logs "
    "deployment/control-plane-operator",
    "ValidMachineConfig": "correct the ConfigMaps that spec.config names: {edit}",
    "ValidTuningConfig": "correct the ConfigMaps that spec.tuningConfig names: {edit}",
    "ValidReleaseImage": "name a release that the cluster supports: {edit}",
    "SupportedVersionSkew": "name a release that the cluster supports: {edit}",
    "AutoscalingEnabled": "correct spec.autoScaling: {edit}",
    "UpdateManagementEnabled": "correct spec.management: {edit}",
    "IgnitionEndpointAvailable": "run: {plane} get deployments,services",
    "ReplicasAndAutoscaling": "remove one of them: {edit}",
    # The in-place upgrader stops before it delivers the next config, which may be the fix.
    "NodeDegraded": "correct the config or the node, then let HyperShift go on: {guest} annotate "
    f"node {{name}} {key.STATE}-",
    "NodeDraining": "run: {guest} get poddisruptionbudgets -A",
    "TokenMissing": "run: kubectl -n hypershift logs deployment/operator",
    "TokenExpired": "run: {plane} delete secret {name}; HyperShift makes a new one",
    "TokenNotRenewed": "run: {plane} logs deployment/ignition-server",
    "PayloadMissing": "run: {plane} logs deployment/ignition-server",
    "StaleUserData": "run: {plane} delete secret {name}; the KubeVirt provider copies it again",
    "MachineFailed": "run: {plane} describe machine {name}",
    "MachineNotReady": "run: {plane} describe machine {name}",
    "MachineStarting": "run: {plane} describe machine {name}",
    "IgnitionNotReached": "from the network of the machines run: curl -k {endpoint}",
    "Deleting": "run: {plane} describe machine {name}",
    "Draining": "end what holds the pods; to skip the drain run: {plane} annotate machine {name} "
    "machine.cluster.x-k8s.io/exclude-node-draining=",
    "NoNodeSelected": "correct spec.management: {edit}",
    "NotConducted": "run the controller: treenail-controller manifests --enable hosted | kubectl "
    "apply -f -",
    "RolloutStopped": "do what the message says; see: kubectl describe rolloutpolicy {name}",
    "WaitsForDeletion": "run: {plane} delete machine {name}",
}
"""The next step of each kind of cause; the names in it are quoted for a shell."""
_CONTROLLER_LOG = "run: kubectl -n treenail logs deployment/treenail-controller"
_OWNED_STEPS = {
    "ManagedElsewhere": "restrict it to its own scope, then remove annotation "
    "hypershift.openshift.io/scope from hostedcluster {cluster}, and set it again",
    "NodeDegraded": "correct the config or the node; a new config goes to degraded nodes first",
    rollout_store.DRAIN_EXPIRED: "",
    "RolloutStopped": "do what the message says",
    "ConfigRefreshDegraded": "correct the config or the node that the message names: {edit}",
    "NotConducted": _CONTROLLER_LOG,
    **dict.fromkeys(
        ("PayloadMissing", "TokenMissing", "TokenExpired", "TokenNotRenewed"), _CONTROLLER_LOG
    ),
}
"""The same for pools that treenail owns, where it differs."""
_VALID_STEP = "run: {home} describe nodepool {pool}"
_PROGRESS = frozenset(
    {"Updating", "ConfigUpdatePending", "UpgradeStopped", "ConfigRefreshProgressing"}
)
"""Kinds without a next step."""
_MACHINE_CONDITIONS = (
    "InfrastructureReady", "BootstrapConfigReady", "NodeHealthy", "NodeReady", "Ready",
)  # fmt: skip
"""The ones that say most about a machine which is not ready come first."""


@dataclass(frozen=True, slots=True)
class Cause(codec.WrittenObject):
    """One thing that a pool waits for."""

    kind: str
    """A word of docs/guides/hosted-clusters.md, or the type of a condition of the NodePool."""
    message: str
    since: str = ""
    """RFC 3339; empty if no object says it."""
    next_step: str = ""
    """A command or a change; empty if one can only wait."""
    is_blocking: bool = True
    """False for progress, and for what only a later change meets."""


def find_causes(pool_facts: facts.PoolFacts, now: float) -> tuple[Cause, ...]:
    """Return what the pool waits for, what blocks it first; empty for an updated pool."""
    causes = sorted(_Finder(pool_facts, now).find(), key=lambda cause: not cause.is_blocking)
    return tuple(causes[:MAX_CAUSES])


def find_bad_condition(machine: clusterapi.ClusterMachine) -> object_meta.Condition | None:
    """Return the condition that says most about a machine which is not ready; None if it is."""
    for conditions in (machine.conditions, machine.old_conditions):
        for condition_type in _MACHINE_CONDITIONS:
            condition = nodepool.find_condition(conditions, condition_type)
            if condition is not None and condition.status != "True":
                return condition
    return None


class _Finder:
    """Finds the causes of one pool."""

    def __init__(self, pool_facts: facts.PoolFacts, now: float) -> None:
        self._facts = pool_facts
        self._pool = pool_facts.pool
        self._cluster = pool_facts.cluster
        self._template = pool_facts.template
        self._now = now
        self._is_owned = pool_facts.owner == "treenail"
        home = f"kubectl -n {quote(self._pool.namespace)}"
        pool, cluster = quote(self._pool.name), quote(self._pool.cluster_name)
        self._words = {
            "home": home,
            "pool": pool,
            "cluster": cluster,
            "edit": f"{home} edit nodepool {pool}",
            "plane": f"kubectl -n {quote(pool_facts.control_plane)}",
            "guest": f"kubectl --kubeconfig {cluster}.kubeconfig",
        }
        starting = [machine for machine in pool_facts.machines if not machine.node_name]
        is_changing = pool_facts.wanted_hash != pool_facts.current_hash
        self._needs_payload = bool(starting) or (self._pool.is_in_place and is_changing)

    def find(self) -> Iterator[Cause]:
        if self._is_owned and self._cluster:
            pool, cluster = self._pool.metadata, self._cluster.metadata
            if other := owned_conditions.find_other_manager(pool, cluster):
                text = f"{other} wrote the status, so that treenail changes nothing"
                yield self._make("ManagedElsewhere", text)
        yield from self._find_pauses()
        yield from self._find_cluster_problem()
        yield from self._find_missing_core_config()
        yield from self._find_conditions()
        yield from self._find_node_problems()
        yield from self._find_token_problem()
        for name in self._facts.stale_copies:
            text = f"Secret {name} has an old token: new machines get no config (511)"
            yield self._make("StaleUserData", text, is_blocking=self._needs_payload, name=name)
        yield from _limit(filter(None, map(self._judge_machine, self._facts.machines)))
        yield from self._find_rollout()

    def _make(
        self, kind: str, text: str, since: str = "", *, is_blocking: bool = True, **names: str
    ) -> Cause:
        """Make a cause with the next step of its kind; ``names`` are words of the step."""
        words = {name: quote(word) for name, word in names.items()}
        steps = _STEPS | _OWNED_STEPS if self._is_owned else _STEPS
        template = steps.get(kind, "" if kind in _PROGRESS else _VALID_STEP)
        step = template.format_map(self._words | words)
        since = "" if clocks.parse_rfc3339(since) is None else since
        return Cause(_bound(kind), _bound(text.rstrip(": ")), since, step, is_blocking)

    def _make_aged(self, kind: str, text: str, since: str, limit_s: float, **names: str) -> Cause:
        """Make a cause that is progress, without a next step, until it is older than the limit."""
        cause = self._make(kind, text, since, is_blocking=self._is_older(since, limit_s), **names)
        return cause if cause.is_blocking else replace(cause, next_step="")

    def _is_older(self, since: str, limit_s: float) -> bool:
        began = clocks.parse_rfc3339(since)
        return began is not None and self._now - began > limit_s

    def _find_pauses(self) -> Iterator[Cause]:
        owners: list[nodepool.NodePool | nodepool.HostedCluster] = [self._pool]
        owners += [self._cluster] if self._cluster else []
        for owner in owners:
            kind = "nodepool" if owner is self._pool else "hostedcluster"
            text = f"spec.pausedUntil of {kind} {owner.name} is {owner.paused_until}"
            if nodepool.is_paused(owner.paused_until, self._now):
                active = owner.find_condition(nodepool.NodePoolCondition.RECONCILIATION_ACTIVE)
                since = active.last_transition_time if active and active.status == "False" else ""
                yield self._make("Paused", text, since, owner=kind, name=owner.name)
            elif not nodepool.is_valid_pause(owner.paused_until):
                text += f", which {self._facts.owner} ignores: it is no RFC 3339 time"
                names = {"owner": kind, "name": owner.name}
                yield self._make("InvalidPause", text, "", is_blocking=False, **names)

    def _find_cluster_problem(self) -> Iterator[Cause]:
        pool, cluster = self._pool, self._cluster
        if cluster is None:
            if not any(text.startswith("HostedCluster") for text in self._facts.unread):
                text = f"HostedCluster {pool.namespace}/{pool.cluster_name} does not exist"
                yield self._make("ClusterMissing", text)
            return
        progress = cluster.find_condition("Progressing")
        # A NodePool may not be newer than its cluster, so that the pool waits for the cluster.
        is_same = pool.release_image == cluster.release_image != cluster.desired_image
        if progress is None or progress.reason != "Blocked" or not is_same:
            return
        text = f"HyperShift holds the upgrade of cluster {cluster.name}: {progress.message}"
        upgradeable = cluster.find_condition("ClusterVersionUpgradeable")
        if upgradeable is not None and upgradeable.status != "True":
            text += f" ({upgradeable.reason}: {upgradeable.message})"
        since = progress.last_transition_time
        yield self._make("UpgradeHeld", text, since, image=cluster.release_image)

    def _find_missing_core_config(self) -> Iterator[Cause]:
        """Find a missing ConfigMap of the control plane; HyperShift expects an exact count."""
        cluster, count = self._cluster, self._facts.core_configs
        condition = self._pool.find_condition(nodepool.NodePoolCondition.VALID_MACHINE_CONFIG)
        match = _CORE_COUNT.search(condition.message if condition else "")
        # FIPS and SSH keys; one for mirrors. The third one depends on the release.
        least = 2 + bool(cluster and cluster.image_content_sources)
        text = "ConfigMaps with the core of the config: HyperShift expects"
        if condition is not None and condition.status == "False" and match:
            now = "" if count is None else f"; now there are {count}"
            text = f"{text} {match[1]}, and found {match[2]}{now}"
            yield self._make("MissingCoreConfig", text, condition.last_transition_time)
        elif self._is_owned:
            # Without HyperShift there are none; with it the condition above says it.
            return
        elif cluster is not None and count is not None and count < least:
            yield self._make("MissingCoreConfig", f"{text} at least {least}, and {count} exist")

    def _find_conditions(self) -> Iterator[Cause]:
        for condition in self._pool.conditions:
            kind = condition.type
            # AutoscalingEnabled is False with this reason when a pool has no autoscaling.
            is_bad = condition.status == "False" and condition.reason != _AS_EXPECTED
            is_seen = kind == nodepool.NodePoolCondition.VALID_GENERATED_PAYLOAD
            is_seen |= _CORE_COUNT.search(condition.message) is not None
            if is_bad and not is_seen and (kind.startswith("Valid") or kind in _STEPS):
                # HyperShift goes on with a NodePool that is too old for its cluster.
                is_blocking = kind != "SupportedVersionSkew"
                text, since = _say(condition), condition.last_transition_time
                yield self._make(kind, text, since, is_blocking=is_blocking)
        pending = self._pool.find_condition(nodepool.NodePoolCondition.CONFIG_UPDATE_PENDING)
        if pending is not None and pending.status == "True":
            text, since = _say(pending), pending.last_transition_time
            yield self._make(pending.type, text, since, is_blocking=False)
        has_both = self._pool.replicas is not None and self._pool.autoscaling is not None
        if has_both and not self._is_owned:
            text = "spec.replicas and spec.autoScaling are set; HyperShift ignores the replicas"
            yield self._make("ReplicasAndAutoscaling", text, is_blocking=False)

    def _find_node_problems(self) -> Iterator[Cause]:
        """Find degraded nodes of InPlace, and drains in the hosted cluster."""
        if not isinstance(self._template, clusterapi.MachineSet):
            return
        nodes = sorted((self._facts.nodes or {}).items())
        degraded = {
            name: node.annotations.get(key.REASON, "")
            for name, node in nodes
            if node.annotations.get(key.STATE) == key.NodeState.DEGRADED
        }
        stopped = self._template.metadata.annotations.get(hosted_key.UPGRADE_STOPPED, "")
        since = self._find_transition(lambda each: each.reason == "InplaceUpgradeFailed")
        if (match := _DEGRADED.fullmatch(stopped)) and self._facts.nodes is None:
            degraded = {match[1]: match[2]}
        elif stopped and not match:
            yield self._make("UpgradeStopped", stopped, since)
        for name, reason in [*degraded.items()][:_MAX_NAMED]:
            text = f"node {name} is degraded"
            # treenail goes on with another config, and with maxFailures of a RolloutPolicy.
            text += "" if self._is_owned else ", so that HyperShift updates no node"
            yield self._make("NodeDegraded", f"{text}: {reason}", since, name=name)
        if drained := [name for name, node in nodes if _is_drained(node)]:
            text = f"{_name_all('node', drained)} drained"
            text += "" if self._is_owned else "; HyperShift has no time limit for this"
            yield self._make("NodeDraining", text, is_blocking=False)

    def _find_token_problem(self) -> Iterator[Cause]:
        """Find why the Ignition server answers 511 instead of a config."""
        kind, is_blocking, token = "", self._needs_payload, self._facts.token
        payload = self._pool.find_condition(nodepool.NodePoolCondition.VALID_GENERATED_PAYLOAD)
        said, since = (payload, "") if payload and payload.status != "True" else (None, "")
        name = self._facts.token_name
        if said is not None:
            kind, text, since = "PayloadMissing", _say(said), said.last_transition_time
        if token is None and name:
            kind, text = "TokenMissing", f"Secret {name} does not exist"
        elif token is not None:
            end = clocks.parse_rfc3339(token.expires_at)
            made = clocks.parse_rfc3339(re.sub(r"\.\d+", "", token.rotated_at))
            is_missing = self._pool.is_in_place and not token.has_payload
            kind, since = "", since or _format_time(made)
            if token.expires_at is not None and (end is None or end <= self._now):
                kind, text = "TokenExpired", f"the token in Secret {name} has expired"
                since = _format_time(end)
            elif made is not None and self._now - made > _TOKEN_LIFETIME_S:
                kind, text = "TokenNotRenewed", f"the token in Secret {name} is too old"
                since = _format_time(made + _TOKEN_LIFETIME_S)
            elif token.reason != _AS_EXPECTED or is_missing or not token.has_token:
                reason = token.reason or "the Ignition server has not made the config yet"
                text = f"{reason}: {token.message}"
                kind, text = "PayloadMissing", text if token.has_token else f"{name} has no token"
        if kind:
            text = f"machines get no config (511): {text}"
            yield self._make(kind, text, since, is_blocking=is_blocking, name=name)

    def _judge_machine(self, machine: clusterapi.ClusterMachine) -> Cause | None:
        """Return what a machine waits for, or why it failed; None for one that is ready."""
        condition, name, since = find_bad_condition(machine), machine.name, machine.metadata.created
        said = f": {_say(condition)}" if condition else ""
        if machine.phase == "Failed" or machine.failure:
            text = f"machine {name} failed: {machine.failure or machine.phase}"
            return self._make("MachineFailed", text, since, name=name)
        if machine.is_deleting:
            return self._judge_deletion(machine)
        if machine.node_name:
            if condition is None:
                return None
            text = f"machine {name}: {condition.type} is {condition.status}{said}"
            since, limit_s = condition.last_transition_time, _UNREADY_LIMIT_S
            return self._make_aged("MachineNotReady", text, since, limit_s, name=name)
        kind, text, endpoint = "MachineStarting", f"machine {name} has not joined yet{said}", ""
        reached = self._pool.find_condition(nodepool.NodePoolCondition.REACHED_IGNITION)
        if (
            reached is not None
            and reached.status == "False"
            and self._is_older(since, _JOIN_LIMIT_S)
        ):
            kind, text = "IgnitionNotReached", f"{text}; no machine has fetched its config"
            endpoint = self._cluster.ignition_endpoint if self._cluster else ""
        names = {"name": name, "endpoint": f"https://{endpoint}/ignition"}
        return self._make_aged(kind, text, since, _JOIN_LIMIT_S, **names)

    def _judge_deletion(self, machine: clusterapi.ClusterMachine) -> Cause:
        new = nodepool.find_condition(machine.conditions, clusterapi.MachineCondition.DELETING)
        old_type = clusterapi.MachineCondition.DRAINING_SUCCEEDED
        old = nodepool.find_condition(machine.old_conditions, old_type)
        is_drain = new is not None and new.reason == "DrainingNode"
        is_drain |= old is not None and old.status == "False"
        text = f"machine {machine.name} is {'drained' if is_drain else 'deleted'}"
        text += " without a time limit" if is_drain and not machine.drain_timeout_s else ""
        said = [each for each in (new, old) if each is not None and each.message]
        text += f": {_say(said[0])}" if said else ""
        kind, since = "Draining" if is_drain else "Deleting", machine.drain_began
        since = since or machine.deleting_since
        return self._make_aged(kind, text, since, _DELETION_LIMIT_S, name=machine.name)

    def _find_rollout(self) -> Iterator[Cause]:
        """Say what a rollout waits for that no object reports as a problem."""
        wanted, template = self._facts.wanted_hash, self._template
        yield from self._find_refresh()
        if template is None and self._cluster and not self._facts.unread:
            text = f"{self._facts.owner} has made no machines yet"
            yield self._make("Updating", text, is_blocking=False)
        if not wanted or wanted == self._facts.current_hash or template is None:
            return
        since = self._find_transition(lambda each: each.status == "True")
        machines = [each for each in self._facts.machines if each.data_secret]
        old = [each.name for each in machines if not each.data_secret.endswith(f"-{wanted}")]
        kind, text = "Updating", f"{_name_all('machine', old)} old" if old else ""
        if isinstance(template, clusterapi.MachineSet):
            text = template.metadata.annotations.get(hosted_key.UPGRADE_RUNNING, "")
            if template.max_unavailable.startswith("-") and not self._is_owned:
                kind = "NoNodeSelected"
                text = "HyperShift selects no node, because maxUnavailable is negative"
        elif template.strategy == "OnDelete" and old:
            kind = "WaitsForDeletion"
            text = (
                f"OnDelete replaces a machine when it is deleted; {_name_all('machine', old)} old"
            )
        names, policy = {"name": old[0] if old else ""}, self._pool.rollout_policy
        text = text or "the update begins"
        if policy or (self._is_owned and self._pool.is_in_place):
            yield from self._describe_conducting(policy, text, since)
            return
        yield self._make(kind, text, since, is_blocking=kind != "Updating", **names)

    def _find_refresh(self) -> Iterator[Cause]:
        """Say what the controller ``hosted`` wrote of a config without drain and reboot."""
        if not self._facts.is_refreshing:
            return
        for kind in ("ConfigRefreshDegraded", "ConfigRefreshProgressing"):
            condition = self._pool.find_condition(kind)
            if condition is not None and condition.status == "True":
                text, since = _say(condition), condition.last_transition_time
                yield self._make(kind, text, since, is_blocking=kind.endswith("Degraded"))
                return

    def _describe_conducting(self, policy: str, text: str, since: str) -> Iterator[Cause]:
        """Say what the controller ``hosted`` recorded of the rollout."""
        conducted, start = self._facts.conducted, ""
        if policy:
            start = f"RolloutPolicy {policy} conducts the rollout: "
        drain = nodepool.find_condition(conducted or (), rollout_store.DRAIN_EXPIRED)
        if drain is not None:
            text, since = _say(drain), drain.last_transition_time
            yield self._make(drain.type, text, since, is_blocking=False)
        if conducted == ():
            start = f"treenail has not begun the rollout{policy and f' by RolloutPolicy {policy}'}"
            yield self._make("NotConducted", f"{start}: {text}", since, is_blocking=False)
            return
        for name in ("Degraded", "Updating"):
            condition = nodepool.find_condition(conducted or (), name)
            if condition is not None and condition.status == "True":
                kind = "RolloutStopped" if name == "Degraded" else "Updating"
                since, is_blocking = condition.last_transition_time, name == "Degraded"
                text = start + _say(condition)
                yield self._make(kind, text, since, is_blocking=is_blocking, name=policy)
                return
        yield self._make("Updating", start + text, since, is_blocking=False)

    def _find_transition(self, is_meant: Callable[[object_meta.Condition], bool]) -> str:
        """Return since when a condition of an update is as meant; empty for none."""
        conditions = (self._pool.find_condition(each) for each in _UPDATING)
        found = (each.last_transition_time for each in conditions if each and is_meant(each))
        return next(found, "")


_UPDATING = (
    nodepool.NodePoolCondition.UPDATING_CONFIG,
    nodepool.NodePoolCondition.UPDATING_VERSION,
    nodepool.NodePoolCondition.UPDATING_TEMPLATE,
)


def _is_drained(node: node_api.Node) -> bool:
    return any(
        (desired := node.annotations.get(request, "")).startswith("drain-")
        and desired != node.annotations.get(applied, "")
        for request, applied in (
            (key.DESIRED_DRAIN, key.LAST_APPLIED_DRAIN),
            (hosted_key.HOSTED_DRAIN, hosted_key.HOSTED_APPLIED_DRAIN),
        )
    )


def _say(condition: object_meta.Condition) -> str:
    return f"{condition.reason}: {condition.message}".strip(": ")


def _limit(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield the first causes of each kind, those that block first, and count the others."""
    by_kind = defaultdict(list)
    for cause in sorted(causes, key=lambda cause: (not cause.is_blocking, cause.since)):
        by_kind[cause.kind].append(cause)
    for kind, listed in by_kind.items():
        yield from listed[:_MAX_NAMED]
        if rest := listed[_MAX_NAMED:]:
            text = f"and {len(rest)} more machines"
            yield Cause(kind, text, rest[0].since, "", rest[0].is_blocking)


def _name_all(noun: str, names: list[str]) -> str:
    """Return "machine a is", or "machines a, b, c and 4 more are"."""
    if len(names) == 1:
        return f"{noun} {names[0]} is"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{noun}s {', '.join(names[:_MAX_NAMED]) or 'none'}{more} are"


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else clocks.format_rfc3339(seconds)


def _bound(text: str) -> str:
    return sanitize.escape_line(sanitize.sanitize_text(text, limit=_MAX_TEXT))
