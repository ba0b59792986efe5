"""What a NodePool of HyperShift waits for, since when, and the next step: pure functions of facts.

Texts of objects are bounded and without credentials. Names in commands are quoted for a shell: the
administrators of a hosted cluster choose the names of its nodes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from shlex import quote

from treenail import clocks, sanitize
from treenail.api import annotations as key
from treenail.api import node as node_api
from treenail.api import object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
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
    "ValidMachineConfig": "correct the ConfigMaps that spec.config names: {edit}",
    "ValidReleaseImage": "name a release that the cluster supports: {edit}",
    "SupportedVersionSkew": "name a release that the cluster supports: {edit}",
    "ValidTuningConfig": "correct the ConfigMaps that spec.tuningConfig names: {edit}",
    "AutoscalingEnabled": "correct spec.autoScaling: {edit}",
    "UpdateManagementEnabled": "correct spec.management: {edit}",
    "IgnitionEndpointAvailable": "run: {plane} get deployments,services",
    "ClusterNetworkCIDRConflict": "correct the networks of machines and cluster",
    "AWSResourceTagConflict": "correct the tags: {edit}",
}
"""Conditions of a NodePool beside those whose type begins with Valid."""
_WARNINGS = frozenset(
    {"SupportedVersionSkew", "ClusterNetworkCIDRConflict", "AWSResourceTagConflict"}
)
"""HyperShift goes on."""
_BAD_WHEN_TRUE = frozenset({"ClusterNetworkCIDRConflict", "AWSResourceTagConflict"})
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


def find_bad_condition(machine: clusterapi.Machine) -> object_meta.Condition | None:
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
        self._home = f"kubectl -n {quote(self._pool.namespace)}"
        self._edit = f"{self._home} edit nodepool {quote(self._pool.name)}"
        self._plane = f"kubectl -n {quote(pool_facts.control_plane)}"
        self._guest = f"kubectl --kubeconfig {quote(self._pool.cluster_name)}.kubeconfig"
        starting = [machine for machine in pool_facts.machines if not machine.node_name]
        is_changing = pool_facts.wanted_hash != pool_facts.current_hash
        self._needs_payload = bool(starting) or (self._pool.is_in_place and is_changing)

    def find(self) -> Iterator[Cause]:
        yield from self._find_pauses()
        yield from self._find_cluster_problem()
        yield from self._find_missing_core_config()
        yield from self._find_conditions()
        yield from self._find_node_problems()
        yield from self._find_token_problem()
        yield from self._find_stale_copies()
        yield from _limit(self._find_deletions())
        yield from _limit(self._find_starts())
        yield from _limit(self._find_unready())
        yield from self._find_rollout()

    def _find_pauses(self) -> Iterator[Cause]:
        owners: list[tuple[str, nodepool.NodePool | nodepool.HostedCluster]]
        owners = [("nodepool", self._pool)]
        owners += [("hostedcluster", self._cluster)] if self._cluster else []
        for kind, owner in owners:
            place = f"spec.pausedUntil of {kind} {owner.name}"
            patch = f"{self._home} patch {kind} {quote(owner.name)} --type merge -p"
            resume = f'run: {patch} \'{{"spec":{{"pausedUntil":null}}}}\''
            if nodepool.is_paused(owner.paused_until, self._now):
                active = owner.find_condition(nodepool.NodePoolCondition.RECONCILIATION_ACTIVE)
                since = active.last_transition_time if active and active.status == "False" else ""
                yield Cause("Paused", _bound(f"{place} is {owner.paused_until}"), since, resume)
            elif not nodepool.is_valid_pause(owner.paused_until):
                text = f"HyperShift ignores {place}: {owner.paused_until} is no RFC 3339 time"
                yield Cause("InvalidPause", _bound(text), "", resume, is_blocking=False)

    def _find_cluster_problem(self) -> Iterator[Cause]:
        pool, cluster = self._pool, self._cluster
        if cluster is None:
            if not any(text.startswith("HostedCluster") for text in self._facts.unread):
                text = f"HostedCluster {pool.namespace}/{pool.cluster_name} does not exist"
                step = f"create it, or run: {self._home} delete nodepool {quote(pool.name)}"
                yield Cause("ClusterMissing", _bound(text), "", step)
            return
        progress = cluster.find_condition("Progressing")
        is_held = progress is not None and (progress.status, progress.reason) == (
            "False",
            "Blocked",
        )
        # A NodePool may not be newer than its cluster, so that the pool waits for the cluster.
        is_same = pool.release_image == cluster.release_image != cluster.desired_image
        if progress is None or not is_held or not is_same:
            return
        text = f"HyperShift holds the upgrade of cluster {cluster.name}: {progress.message}"
        upgradeable = cluster.find_condition("ClusterVersionUpgradeable")
        if upgradeable is not None and upgradeable.status != "True":
            text += f" ({upgradeable.reason}: {upgradeable.message})"
        force = f"hypershift.openshift.io/force-upgrade-to={quote(cluster.release_image)}"
        step = f"{self._home} annotate hostedcluster {quote(cluster.name)} {force}"
        step = f"resolve it; to upgrade all the same run: {step}"
        yield Cause("UpgradeHeld", _bound(text), progress.last_transition_time, step)

    def _find_missing_core_config(self) -> Iterator[Cause]:
        """Find a missing ConfigMap of the control plane; HyperShift expects an exact count."""
        count = self._facts.core_configs
        condition = self._pool.find_condition(nodepool.NodePoolCondition.VALID_MACHINE_CONFIG)
        match = _CORE_COUNT.search(condition.message if condition else "")
        if condition is not None and condition.status == "False" and match:
            text = (
                f"{match[2]} ConfigMaps with the core of the config, HyperShift expects {match[1]}"
            )
            text += "" if count is None else f"; now there are {count}"
            since = condition.last_transition_time
        else:
            # FIPS and SSH keys; one for mirrors. The third one depends on the release.
            least = 2 + bool(self._cluster and self._cluster.image_content_sources)
            if self._cluster is None or count is None or count >= least:
                return
            text, since = f"{count} ConfigMaps with the core of the config", ""
            text += f", HyperShift expects at least {least}"
        label = f"{hosted_key.CORE_CONFIG}=true"
        step = f"run: {self._plane} get configmaps -l {label}; {self._plane} logs "
        step += "deployment/control-plane-operator"
        yield Cause("MissingCoreConfig", text, since, step)

    def _find_conditions(self) -> Iterator[Cause]:
        pool = self._pool
        for condition in pool.conditions:
            kind = condition.type
            is_bad = condition.status == ("True" if kind in _BAD_WHEN_TRUE else "False")
            if not is_bad or not (kind.startswith("Valid") or kind in _STEPS):
                continue
            is_seen = kind == nodepool.NodePoolCondition.VALID_GENERATED_PAYLOAD
            # AutoscalingEnabled is False with this reason when a pool has no autoscaling.
            is_seen |= condition.reason == _AS_EXPECTED
            if not is_seen and not _CORE_COUNT.search(condition.message):
                describe = f"{self._home} describe nodepool {quote(pool.name)}"
                step = _STEPS.get(kind, f"run: {describe}")
                step = step.format(edit=self._edit, plane=self._plane)
                is_blocking = kind not in _WARNINGS
                yield _make_cause(_bound(kind), condition, step, is_blocking=is_blocking)
        pending = pool.find_condition(nodepool.NodePoolCondition.CONFIG_UPDATE_PENDING)
        if pending is not None and pending.status == "True":
            yield _make_cause(pending.type, pending, "", is_blocking=False)
        if pool.replicas is not None and pool.autoscaling is not None:
            text = "spec.replicas and spec.autoScaling are set; HyperShift ignores the replicas"
            step = f"remove one of them: {self._edit}"
            yield Cause("ReplicasAndAutoscaling", text, "", step, is_blocking=False)

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
        conditions = (self._pool.find_condition(each) for each in _UPDATING)
        failed = (each for each in conditions if each and each.reason == "InplaceUpgradeFailed")
        since = next((condition.last_transition_time for condition in failed), "")
        if (match := _DEGRADED.fullmatch(stopped)) and self._facts.nodes is None:
            degraded = {match[1]: match[2]}
        elif stopped and not match:
            yield Cause("UpgradeStopped", _bound(stopped), since)
        for name, reason in [*degraded.items()][:_MAX_NAMED]:
            # The in-place upgrader stops before it delivers the next config, maybe the fix.
            step = "correct the config or the node, then let HyperShift go on: "
            step += f"{self._guest} annotate node {quote(name)} {key.STATE}-"
            text = f"node {name} is degraded, so that HyperShift updates no node: {reason}"
            yield Cause("NodeDegraded", _bound(text), since, step)
        if drained := [name for name, node in nodes if _is_drained(node)]:
            text = f"{_name_all('node', drained)} drained; HyperShift has no time limit for this"
            step = f"run: {self._guest} get poddisruptionbudgets -A"
            yield Cause("Draining", _bound(text), "", step, is_blocking=False)

    def _find_token_problem(self) -> Iterator[Cause]:
        """Find why the Ignition server answers 511 instead of a config."""
        token, needed = self._facts.token, self._needs_payload
        logs = f"run: {self._plane} logs deployment/ignition-server"
        payload = self._pool.find_condition(nodepool.NodePoolCondition.VALID_GENERATED_PAYLOAD)
        is_bad = payload is not None and payload.status != "True"
        reason, message = (payload.reason, payload.message) if payload else ("", "")
        since = payload.last_transition_time if payload and is_bad else ""
        if token is None:
            name = f"{nodepool.TOKEN_PREFIX}{self._pool.name}-{self._facts.wanted_hash}"
            if self._facts.has_secrets and self._facts.wanted_hash:
                step = "run: kubectl -n hypershift logs deployment/operator"
                yield Cause("TokenMissing", f"Secret {name} does not exist", since, step, needed)
                return
        else:
            end = clocks.parse_rfc3339(token.expires_at)
            made = clocks.parse_rfc3339(re.sub(r"\.\d+", "", token.rotated_at))
            if token.expires_at is not None and (end is None or end <= self._now):
                text = f"the token in Secret {token.name} has expired"
                step = f"run: {self._plane} delete secret {quote(token.name)}; HyperShift makes a "
                step += "new one"
                yield Cause("TokenExpired", text, _format_time(end), step, needed)
                return
            if made is not None and self._now - made > _TOKEN_LIFETIME_S:
                text = f"the Ignition server did not renew the token in Secret {token.name}"
                began = _format_time(made + _TOKEN_LIFETIME_S)
                yield Cause("TokenExpired", text, began, logs, needed)
                return
            is_missing = self._pool.is_in_place and not token.has_payload
            is_bad = token.reason != _AS_EXPECTED or is_missing or not token.has_token
            reason = token.reason or "the Ignition server has not made it yet"
            message, since = token.message, since or _format_time(made)
        if is_bad:
            text = f"machines get no config (511) without a payload: {reason}: {message}"
            yield Cause("PayloadMissing", _bound(text.rstrip(": ")), since, logs, needed)

    def _find_stale_copies(self) -> Iterator[Cause]:
        for name, copy in sorted(self._facts.copies.items()):
            if copy is facts.UserDataCopy.STALE:
                text = f"Secret {name} has an old token: new machines get no config (511)"
                step = f"run: {self._plane} delete secret {quote(name)}; the KubeVirt provider "
                step += "copies it again"
                yield Cause("StaleUserData", _bound(text), "", step, self._needs_payload)

    def _find_deletions(self) -> Iterator[Cause]:
        for machine in self._facts.machines:
            if not machine.is_deleting:
                continue
            since = machine.drain_began or machine.deleting_since
            new = nodepool.find_condition(machine.conditions, "Deleting")
            old = nodepool.find_condition(machine.old_conditions, "DrainingSucceeded")
            is_drain = new is not None and new.reason == "DrainingNode"
            is_drain |= old is not None and old.status == "False"
            text = f"machine {machine.name} is {'drained' if is_drain else 'deleted'}"
            text += " without a time limit" if is_drain and not machine.drain_timeout_s else ""
            if (
                said := next((each for each in (new, old) if each and each.message), None)
            ) is not None:
                text += f": {said.reason}: {said.message}"
            step = self._describe(machine)
            if is_drain:
                exclude = "machine.cluster.x-k8s.io/exclude-node-draining="
                step = f"{self._plane} annotate machine {quote(machine.name)} {exclude}"
                step = f"end what holds the pods; to skip the drain run: {step}"
            kind = "Draining" if is_drain else "Deleting"
            yield self._make_aged(kind, text, since, step, _DELETION_LIMIT_S)

    def _find_starts(self) -> Iterator[Cause]:
        reached = self._pool.find_condition(nodepool.NodePoolCondition.REACHED_IGNITION)
        is_unreached = reached is not None and reached.status == "False"
        for machine in self._facts.machines:
            since, step = machine.metadata.created, self._describe(machine)
            condition = find_bad_condition(machine)
            if machine.phase == "Failed" or machine.failure:
                text = f"machine {machine.name} failed: {machine.failure or machine.phase}"
                yield Cause("MachineFailed", _bound(text), since, step)
            elif not machine.node_name and not machine.is_deleting:
                text, kind = f"machine {machine.name} has not joined yet", "MachineStarting"
                text += f": {condition.reason}: {condition.message}" if condition else ""
                if is_unreached and self._cluster and self._is_older(since, _JOIN_LIMIT_S):
                    text += "; no machine of the pool has fetched its config"
                    kind, endpoint = "IgnitionNotReached", self._cluster.ignition_endpoint
                    step = f"curl -k {quote(f'https://{endpoint}/ignition')}"
                    step = f"from the network of the machines run: {step}"
                yield self._make_aged(kind, text, since, step, _JOIN_LIMIT_S)

    def _find_unready(self) -> Iterator[Cause]:
        for machine in self._facts.machines:
            condition = find_bad_condition(machine)
            is_seen = not machine.node_name or machine.is_deleting or machine.phase == "Failed"
            if condition is not None and not is_seen:
                text = f"machine {machine.name}: {condition.type} is {condition.status}: "
                text += f"{condition.reason}: {condition.message}"
                step, since = self._describe(machine), condition.last_transition_time
                yield self._make_aged("MachineNotReady", text, since, step, _UNREADY_LIMIT_S)

    def _find_rollout(self) -> Iterator[Cause]:
        """Say what a rollout waits for that no object reports as a problem."""
        wanted, template, policy = self._facts.wanted_hash, self._template, ""
        if not wanted or wanted == self._facts.current_hash or template is None:
            return
        conditions = (self._pool.find_condition(each) for each in _UPDATING)
        running = (each for each in conditions if each is not None and each.status == "True")
        since = next((condition.last_transition_time for condition in running), "")
        if self._pool.rollout_policy:
            policy = f"RolloutPolicy {self._pool.rollout_policy} conducts the rollout: "
        machines = [each for each in self._facts.machines if each.data_secret]
        old = [each.name for each in machines if not each.data_secret.endswith(f"-{wanted}")]
        kind, step = "Updating", ""
        if isinstance(template, clusterapi.MachineSet):
            text = template.metadata.annotations.get(hosted_key.UPGRADE_RUNNING, "")
            if template.max_unavailable.startswith("-"):
                kind, step = "NoNodeSelected", f"correct spec.management: {self._edit}"
                text = "HyperShift selects no node, because maxUnavailable is negative"
        elif template.strategy == "OnDelete":
            kind = "WaitsForDeletion"
            text = (
                f"OnDelete replaces a machine when it is deleted; {_name_all('machine', old)} old"
            )
            step = f"run: {self._plane} delete machine {quote(old[0])}" if old else ""
        else:
            text = f"{_name_all('machine', old)} to be replaced" if old else ""
        is_blocking = kind != "Updating" and not policy
        text = _bound(policy + (text or "the update begins"))
        yield Cause(kind, text, since, "" if policy else step, is_blocking)

    def _make_aged(self, kind: str, text: str, since: str, step: str, limit_s: float) -> Cause:
        """Make a cause that blocks, and has a next step, when it is older than the limit."""
        is_long = self._is_older(since, limit_s)
        return Cause(kind, _bound(text.rstrip(": ")), since, step if is_long else "", is_long)

    def _is_older(self, since: str, limit_s: float) -> bool:
        began = clocks.parse_rfc3339(since)
        return began is not None and self._now - began > limit_s

    def _describe(self, machine: clusterapi.Machine) -> str:
        return f"run: {self._plane} describe machine {quote(machine.name)}"


_UPDATING = (
    nodepool.NodePoolCondition.UPDATING_CONFIG,
    nodepool.NodePoolCondition.UPDATING_VERSION,
    nodepool.NodePoolCondition.UPDATING_TEMPLATE,
)


def _is_drained(node: node_api.Node) -> bool:
    desired = node.annotations.get(key.DESIRED_DRAIN, "")
    is_done = desired == node.annotations.get(key.LAST_APPLIED_DRAIN, "")
    return desired.startswith("drain-") and not is_done


def _make_cause(
    kind: str, condition: object_meta.Condition, step: str, *, is_blocking: bool
) -> Cause:
    text = f"{condition.reason}: {condition.message}".strip(": ") or "no reason"
    return Cause(kind, _bound(text), condition.last_transition_time, step, is_blocking)


def _limit(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield the first causes, those that block first, and count the others."""
    listed = sorted(causes, key=lambda cause: (not cause.is_blocking, cause.since))
    yield from listed[:_MAX_NAMED]
    if rest := listed[_MAX_NAMED:]:
        first, text = rest[0], f"and {len(rest)} more machines"
        yield Cause(first.kind, text, first.since, "", first.is_blocking)


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
