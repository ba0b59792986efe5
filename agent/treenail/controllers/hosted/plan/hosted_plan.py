"""Plan a change of NodePools that HyperShift manages: which machines it replaces or reboots.

Pure. HyperShift rolls a pool when the hash of its inputs changes (nodepool/config.go); the plan
compares the inputs. A field whose effect is not computed counts as one that may roll.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from treenail.api import decode, disruptionpolicy, documents, kinds, machineconfig
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.api.ignition.parser import parse_ignition
from treenail.config import reconcilable, wanted_state
from treenail.controllers.hosted.config import config_documents
from treenail.controllers.pools.node_facts import RolloutTarget
from treenail.controllers.render import render
from treenail.controllers.status import causes, rollout_plan
from treenail.errors import ConfigError

NODE_POOL, HOSTED_CLUSTER, CONFIG_MAP = "NodePool", "HostedCluster", "ConfigMap"
_VERSIONS = dict.fromkeys((NODE_POOL, HOSTED_CLUSTER), nodepool.API_VERSION) | {CONFIG_MAP: "v1"}
_EXPECTED = ", ".join(f"{kind} of {version}" for kind, version in _VERSIONS.items())
Key = tuple[str, str, str]
"""Kind, namespace and name."""
Objects = Mapping[Key, decode.Json]
Machines = Mapping[str, Sequence[clusterapi.ClusterMachine]]
"""By `nodepool.NodePool.full_name`."""

MAX_SHOWN = 20
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POOL_FIELDS = {
    "management", "replicas", "autoScaling", "nodeDrainTimeout", "nodeVolumeDetachTimeout",
    "nodeLabels", "taints", "pausedUntil", "config", "release", "osImageStream",
}  # fmt: skip
"""They replace nothing, or are compared by themselves."""
# HyperShift hashes the names of Secrets, ConfigMaps of sshKey to fips, and the last from 4.23 on.
_CLUSTER_INPUTS = (
    "pullSecret", "additionalTrustBundle", "configuration.proxy", "configuration.image",
    "sshKey", "imageContentSources", "fips", "configuration.apiServer.tlsSecurityProfile",
)  # fmt: skip
_CLUSTER_FIELDS = {
    "release", "controlPlaneRelease", "channel", "updateService", "autoscaling", "etcd", "labels",
    "nodeSelector", "tolerations", "pausedUntil", "secretEncryption", "auditWebhook",
    "operatorConfiguration", "monitoring", "serviceAccountSigningKey", "olmCatalogPlacement",
    "controllerAvailabilityPolicy", "infrastructureAvailabilityPolicy",
    *(path.partition(".")[0] for path in _CLUSTER_INPUTS),
}  # fmt: skip
_CONFIG, _PLATFORM = "spec.config", "spec.platform"
_CLUSTER_RELEASE = "HostedCluster spec.release, because of its proxy"

# Of the Machine Config Daemon (calculatePostConfigChangeActionFromMCDiffs); the rest and all units
# reboot. A path that ends with / stands for the files in it, but not for those of its directories.
_NONE = (disruptionpolicy.NonePolicyAction(),)
_RELOAD = (disruptionpolicy.ReloadPolicyAction(disruptionpolicy.CRIO),)
_PATH_ACTIONS: Mapping[str, disruptionpolicy.PolicyActions] = {
    "/etc/kubernetes/kubelet-ca.crt": _NONE,
    "/var/lib/kubelet/config.json": _NONE,
    "/etc/nmstate/openshift/": _NONE,
    # The daemon computes a restart of CRI-O, and never does it in this mode (daemon.go).
    "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt": _NONE,
    "/etc/containers/registries.conf": (disruptionpolicy.SpecialPolicyAction(),),
    "/etc/machine-config-daemon/no-reboot/containers-gpg.pub": _RELOAD,
    "/etc/containers/policy.json": _RELOAD,
    "/etc/containers/registries.d/": _RELOAD,
}
_EFFECTS = {
    "Nothing": "no machine is replaced or rebooted: the input of its hash is the same",
    "Blocked": "HyperShift changes nothing until the problems are corrected",
    "Create": "is new: {} created",
    "Replace": "{} replaced",
    "UpdateInPlace": "{} updated in place",
}


@dataclass(frozen=True, slots=True)
class HostedPlan:
    """Plan of one NodePool."""

    pool: str
    """``NAMESPACE/NAME``."""
    effect: str
    """One of `_EFFECTS`."""
    upgrade_type: str = ""
    machine_count: int = 0
    causes: tuple[str, ...] = ()
    """Changed inputs of HyperShift's hash."""
    uncertain: tuple[str, ...] = ()
    """Changed fields that may replace machines; without a cause the plan assumes it."""
    change: rollout_plan.NodeChange | None = None
    pace: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_objects(texts: Iterable[tuple[str, str | bytes]]) -> dict[Key, decode.Json]:
    """Read the objects to apply; raise `ConfigError` for other kinds, and for duplicates."""
    objects: dict[Key, decode.Json] = {}
    for where, text in texts:
        for number, document in enumerate(documents.load_documents(text, where=where), start=1):
            fields = decode.Fields.from_json(document, f"{where}, document {number}")
            for item in kinds.list_items(fields) or (fields,):
                _add_object(item, objects)
    if not objects:
        raise ConfigError(f"cannot plan: expected one of {_EXPECTED}, found no object")
    return objects


def _add_object(fields: decode.Fields, objects: dict[Key, decode.Json]) -> None:
    kind, version = fields.get_text("kind"), fields.get_text("apiVersion")
    if _VERSIONS.get(kind) != version:
        raise ConfigError(
            f"{fields.path}: expected one of {_EXPECTED}, found {kind or 'no kind':.80} of "
            f"{version or 'no apiVersion':.80}",
            remedy="remove it: new contents of a pull secret replace no machine, because "
            "HyperShift hashes its name; those of the Secret in spec.sshKey replace all"
            if kind == "Secret"
            else "plan other kinds without --hosted",
        )
    metadata = fields.get_object("metadata")
    key = kind, metadata.get_required_text("namespace"), metadata.get_required_text("name")
    if key in objects:
        raise ConfigError(f"{fields.path}: {'/'.join(key):.600} is a duplicate; remove one of them")
    objects[key] = fields.values


def apply_objects(before: Objects, changes: Objects) -> dict[Key, decode.Json]:
    """Return the objects after ``kubectl apply``: lists are replaced, other fields merged."""
    after = dict(before)
    for key, document in changes.items():
        live = before.get(key, {})
        notes = decode.Fields(live, "").get_object("metadata").get_text_map("annotations")
        last = documents.load_document(notes.get(_LAST_APPLIED, "{}"), where=_LAST_APPLIED)
        applied = {name: value for name, value in document.items() if name != "status"}
        after[key] = decode.Fields.from_json(_merge(live, last, applied), "").values
    return after


def _merge(live: object, last: object, new: object) -> object:
    """Merge a value of a manifest; what was applied ``last`` and is not in ``new`` goes away."""
    if not isinstance(live, dict) or not isinstance(new, dict):
        return new
    former = last if isinstance(last, dict) else {}
    merged = {name: value for name, value in live.items() if name in new or name not in former}
    for name, value in new.items():
        merged[name] = _merge(merged.get(name), former.get(name), value)
    return {name: value for name, value in merged.items() if value is not None}


def find_pools(objects: Objects, changed: Iterable[Key]) -> dict[Key, tuple[Key, ...]]:
    """Return the NodePools that the changes reach, with their HostedCluster and ConfigMaps."""
    pools, keys = {}, {*changed}
    for pool, document in sorted(objects.items()):
        if pool[0] == NODE_POOL:
            spec = decode.Fields(document, "/".join(pool)).get_object("spec")
            cluster = HOSTED_CLUSTER, pool[1], spec.get_text("clusterName")
            maps = [(CONFIG_MAP, pool[1], e.get_text("name")) for e in spec.iter_objects("config")]
            references = cluster, *maps[: config_documents.MAX_CONFIG_MAPS]
            if not keys.isdisjoint((pool, *references)):
                pools[pool] = references
    return pools


def list_unused(objects: Objects, changes: Objects) -> list[str]:
    """Return a sentence for each changed object that no NodePool depends on."""
    pools = find_pools(objects, changes)
    used = {*pools, *(key for references in pools.values() for key in references)}
    return [
        f"{kind} {namespace}/{name} changes no node: no NodePool of the namespace names it"
        for kind, namespace, name in sorted(changes.keys() - used)
    ]


def plan_pools(
    before: Objects, changes: Objects, machines: Machines, *, now: float
) -> tuple[HostedPlan, ...]:
    """Plan every NodePool that the changes reach."""
    after, plans = apply_objects(before, changes), []
    for key in find_pools(after, changes):
        try:
            planned = _plan_pool(key, before, after, machines, now)
        except ConfigError as error:
            problem = f"{error}; {error.remedy or 'correct the field'}"
            planned = HostedPlan("/".join(key[1:]), "Blocked", problems=(problem,))
        plans.append(planned)
    return tuple(plans)


@dataclass(frozen=True, slots=True)
class _PoolState:
    """A NodePool and the objects that it depends on, at one time."""

    pool: nodepool.NodePool
    pool_fields: decode.Fields
    cluster_fields: decode.Fields
    cluster: decode.Fields
    config: config_documents.PoolDocuments


def _read_state(key: Key, objects: Objects, after: Objects) -> _PoolState:
    pool = nodepool.NodePool.from_json(objects[key])
    cluster_key = HOSTED_CLUSTER, key[1], pool.cluster_name
    cluster = objects.get(cluster_key) or after.get(cluster_key)
    if cluster is None:
        raise ConfigError(
            f"{' '.join(cluster_key)} does not exist", remedy="correct spec.clusterName"
        )
    maps = {name: objects.get((CONFIG_MAP, key[1], name)) for name in pool.configs}
    found = config_documents.read_config_maps(maps, len(pool.configs))
    fields = decode.Fields(cluster, HOSTED_CLUSTER)
    pool_fields = decode.Fields(objects[key], NODE_POOL)
    return _PoolState(pool, pool_fields, fields, fields.get_object("spec"), found)


def _plan_pool(
    key: Key, before: Objects, after: Objects, machines: Machines, now: float
) -> HostedPlan:
    new = _read_state(key, after, after)
    pool, old = new.pool, _read_state(key, before, after) if key in before else None
    if pool.replicas is not None and pool.autoscaling is not None:
        raise ConfigError("spec: expected replicas or autoScaling, found both; remove one of them")
    present = [one for one in machines.get(pool.full_name, ()) if not one.is_deleting]
    pace = _describe_pace(pool, len(present))
    rendered = _render(new)
    pauses = {NODE_POOL: pool.paused_until, HOSTED_CLUSTER: new.cluster.get_text("pausedUntil")}
    notes = [
        f"paused: HyperShift changes nothing while the {kind} has spec.pausedUntil {text:.40}"
        for kind, text in pauses.items()
        if nodepool.is_paused(text, now)
    ]
    problems = [*new.config.problems, *rendered.problems]
    hashed, uncertain = ([], []) if old is None else _compare_states(old, new)
    effect, count, change, titles = "Nothing", 0, None, {}
    if not new.config.is_readable:
        effect, hashed, uncertain = "Blocked", [], []
    elif old is None:
        effect, count = "Create", pool.replicas or 0
    elif hashed or uncertain:
        effect, count = "UpdateInPlace" if pool.is_in_place else "Replace", len(present)
        if pool.is_in_place:
            nodes = tuple(sorted(one.node_name or f"{one.name} (no node)" for one in present))
            change, refused = _plan_in_place(old, new, rendered, nodes, [*hashed, *uncertain])
            problems += refused
        differing = (*_find_changed(new.config, old.config), *_find_changed(old.config, new.config))
        titles = {one.title: f"{one.title} ({one.location})" for one in differing}
    return HostedPlan(
        pool.full_name, effect, pool.upgrade_type, count,
        (*(n for n in hashed if n != _CONFIG or not titles), *sorted(titles.values())[:MAX_SHOWN]),
        tuple(uncertain), change, pace if hashed or uncertain else "", tuple(notes),
        tuple(problems[:MAX_SHOWN]),
    )  # fmt: skip


def _compare_states(old: _PoolState, new: _PoolState) -> tuple[list[str], list[str]]:
    """Return the changed inputs of the hash, and the changed fields that may replace machines."""
    skipped = {_PLATFORM} if new.pool.is_in_place else set()  # A MachineSet keeps its machines.
    if not _get_value(new.cluster, "configuration.proxy.httpsProxy"):
        skipped.add(_CLUSTER_RELEASE)
    hashed, uncertain = (
        [name for name in sorted({*was, *now} - skipped) if was.get(name) != now.get(name)]
        for was, now in zip(_list_fields(old), _list_fields(new), strict=True)
    )
    if not old.config.is_readable:
        uncertain.append("the present documents, which HyperShift refuses")
    return hashed, uncertain


def _list_fields(state: _PoolState) -> tuple[decode.Json, decode.Json]:
    """Return the inputs of the hash by field, and the fields that may be in a machine template.

    HyperShift hashes the version of the release. Another image counts as another version.
    """
    pool, cluster, names = state.pool, state.cluster, state.pool.configs
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", pool.version)
    version = (int(match[1]), int(match[2])) if match else None
    paths = _CLUSTER_INPUTS[: None if version is None or version >= (4, 23) else -1]
    inputs = {f"HostedCluster spec.{path}": _get_value(cluster, path) for path in paths}
    # A name twice in spec.config gives each of its documents twice.
    texts = [document.text for document in state.config.documents]
    inputs[_CONFIG] = len(names) - len({*names}), texts
    inputs["spec.release.image"] = pool.release_image
    # With runc the default stays rhel-9: then the plan may name a rollout that does not come.
    default = version and ("rhel-10" if version >= (5, 0) else "rhel-9")
    inputs["spec.osImageStream"] = pool.os_image_stream.removeprefix(default or "")
    others: decode.Json = {"spec.management.upgradeType": pool.upgrade_type}
    # With a proxy the nodes run a pod of the control plane operator's image (haproxy.go).
    others[_CLUSTER_RELEASE] = [cluster.values.get(n) for n in ("release", "controlPlaneRelease")]
    parts = ("", state.pool_fields, _POOL_FIELDS), (
        "HostedCluster ", state.cluster_fields, _CLUSTER_FIELDS
    )  # fmt: skip
    for title, fields, known in parts:
        spec = fields.get_object("spec").values
        others |= {f"{title}spec.{name}": spec[name] for name in spec.keys() - known}
        for name, text in fields.get_object("metadata").get_text_map("annotations").items():
            if name.startswith(hosted_key.PREFIX):
                others[f"{title}annotation {name}"] = text
    return inputs, others


def _get_value(fields: decode.Fields, path: str) -> object:
    *parents, last = path.split(".")
    for parent in parents:
        fields = fields.get_object(parent)
    return fields.values.get(last)


def _find_changed(
    old: config_documents.PoolDocuments, new: config_documents.PoolDocuments
) -> list[config_documents.ConfigDocument]:
    texts = {one.text for one in old.documents}
    return [one for one in new.documents if one.text not in texts]


def _render(state: _PoolState) -> config_documents.RenderedDocuments:
    cluster = render.ControllerConfig(release_image=state.pool.release_image)
    return config_documents.render_documents(state.config, cluster)


def _plan_in_place(
    old: _PoolState,
    new: _PoolState,
    rendered: config_documents.RenderedDocuments,
    nodes: tuple[str, ...],
    changed: Sequence[str],
) -> tuple[rollout_plan.NodeChange, list[str]]:
    """Return what happens on each node, and what HyperShift's daemon refuses."""
    current, target = RolloutTarget(old.pool.current_hash or old.pool.version), RolloutTarget("")
    former = _render(old)
    if former.config is None or rendered.config is None:
        reason = "the documents cannot be rendered"
        return rollout_plan.NodeChange(nodes, current, unknown_reason=reason), []
    before, after = former.config, rendered.config
    policy = build_daemon_policy(before, after)
    change = rollout_plan.plan_change(current, before, target, after, policy, nodes=nodes)
    titles = {one.title.replace(" ", "/", 1) for one in _find_changed(old.config, new.config)}
    configs = {**former.configs, **rendered.configs}
    change = rollout_plan.name_causes(change, causes.CauseNames(configs, before, after, titles))
    refused = [
        f"the daemon refuses it, and HyperShift stops the pool: {one.reason}; {one.remedy}"
        for one in reconcilable.find_irreconcilable_changes(
            wanted_state.ParsedConfig(before), wanted_state.ParsedConfig(after)
        )
    ]
    others = [name for name in changed if name != _CONFIG]
    if others and not change.needs_reboot:
        reason = f"files of the release that depend on {', '.join(others):.500} are not computed"
        change = rollout_plan.NodeChange(nodes, current, unknown_reason=reason)
    return change, refused


def build_daemon_policy(
    *configs: machineconfig.MachineConfig,
) -> disruptionpolicy.DisruptionPolicy:
    """Return the rules of HyperShift's daemon for the files of these configs."""
    paths = {file.path for config in configs for file in parse_ignition(config.config).files}
    rules = tuple(
        disruptionpolicy.FileDisruptionPolicy(path, actions)
        for path in paths
        if (actions := _PATH_ACTIONS.get(path, _PATH_ACTIONS.get(path[: path.rfind("/") + 1])))
    )
    return disruptionpolicy.DisruptionPolicy(rules)


def _describe_pace(pool: nodepool.NodePool, count: int) -> str:
    """Return how many machines change at a time and who decides; raise `ConfigError`."""
    policy = f"treenail, by RolloutPolicy {pool.rollout_policy}," if pool.rollout_policy else ""
    if pool.is_in_place:
        value = 1 if pool.in_place_max_unavailable is None else pool.in_place_max_unavailable
        # HyperShift takes the percentage of spec.replicas, which an autoscaled pool lacks.
        limit = math.floor(_compute_share(value, pool.replicas or 0)) or 1
        if limit < 0:
            who = policy or "nothing else"
            return f"maxUnavailable {value}: HyperShift selects no node; {who} selects nodes"
        return f"{limit} at a time, selected by HyperShift (maxUnavailable {value})"
    if pool.replace_strategy == "OnDelete":
        less = "the pool then has one machine less until the new one is ready"
        return f"OnDelete: nothing happens until {policy or 'a user'} deletes a Machine; {less}"
    total = count if pool.replicas is None else pool.replicas
    surge = 1 if pool.max_surge is None else pool.max_surge
    missing = pool.max_unavailable or 0
    added = max(math.ceil(_compute_share(surge, total)), 0)
    # Cluster API makes progress possible when both round to 0 (ResolveFenceposts).
    fewer = max(math.floor(_compute_share(missing, total)), 0 if added else 1)
    limits = f"maxSurge {surge}, maxUnavailable {missing}"
    return f"RollingUpdate: at most {added} more and {fewer} fewer machines at a time ({limits})"


def _compute_share(value: int | str, total: int) -> float:
    if isinstance(value, int):
        return value
    if not (percent := re.fullmatch(r"([-+]?[0-9]{1,9})%", value)):
        raise ConfigError(f"spec.management: expected a count or a percentage, found {value!r:.40}")
    return total * int(percent[1]) / 100


def format_plan(plan: HostedPlan) -> Iterator[str]:
    """Yield the lines of a plan."""
    title = f"NodePool {plan.pool}" + (f" ({plan.upgrade_type})" if plan.upgrade_type else "")
    machines = f"{plan.machine_count} machine" + (" is" if plan.machine_count == 1 else "s are")
    assumed = "assume that " if plan.uncertain and not plan.causes else ""
    yield f"{title}: {assumed}{_EFFECTS[plan.effect].format(machines)}"
    yield from (f"  problem: {text}" for text in plan.problems)
    yield from (f"  because of {text}" for text in plan.causes)
    yield from (f"  not computed, may replace machines: {text}" for text in plan.uncertain)
    if plan.change is not None and plan.change.nodes:
        yield from rollout_plan.format_change(plan.change)
    yield from (f"  {text}" for text in (plan.pace, *plan.notes) if text)
