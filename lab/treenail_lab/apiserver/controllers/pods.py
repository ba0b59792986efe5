"""Pods: the scheduler binds pending ones to Nodes, and kubelets start and end them.

The scheduler binds to Nodes that run containers as processes. A kubelet can be stopped, as when its
machine is off: then its pods stay unchanged. Nodes of the role ``builder`` have a kubelet of their
own, in `treenail_lab.kubelet`.
"""

from collections.abc import Iterator

from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.objects import (
    Json,
    ObjectKey,
    find_value,
    is_deleting,
    read_key,
    read_labels,
)
from treenail_lab.apiserver.registry.deletion import DeleteOptions, delete_object
from treenail_lab.apiserver.registry.disruption_budgets import PODS, is_ready
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.store import StoreEvent

BUILDER_LABEL = "node-role.kubernetes.io/builder"
NODES: StorageKey = ("", "nodes")
_SCHEDULER = "default-scheduler"


class Scheduler:
    """Binds pods: `note_event` records changes, `sync` acts on them."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self._registry = registry
        self._pending: dict[ObjectKey, None] = {}

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Record the pods to bind; return whether there may be any."""
        if storage == NODES:
            return bool(self._pending) and BUILDER_LABEL in read_labels(event.object)
        if storage != PODS:
            return False
        where = read_key(event.object)
        if event.type == "DELETED" or not _needs_node(event.object):
            self._pending.pop(where, None)
            return False
        self._pending[where] = None
        return True

    def reload(self) -> None:
        """Record all pods, after the store was loaded."""
        pods = self._registry.store.list_objects(PODS)
        self._pending = {read_key(pod): None for pod in pods if _needs_node(pod)}

    def sync(self) -> None:
        """Bind the recorded pods that a Node can take, and report why others wait."""
        nodes = [
            node
            for node in self._registry.store.list_objects(NODES)
            if BUILDER_LABEL in read_labels(node)
        ]
        for where in list(self._pending):
            pod = self._registry.store.find_object(PODS, where)
            if pod is None or not nodes:
                continue
            refusals = {node["metadata"]["name"]: _find_refusal(pod, node) for node in nodes}
            fitting = [name for name, why in refusals.items() if not why]
            if fitting:
                self._bind_pod(pod, min(fitting, key=self._count_pods))
            else:
                self._report_unschedulable(pod, sorted(set(refusals.values())))

    def _count_pods(self, node: str) -> int:
        pods = self._registry.store.list_objects(PODS)
        return sum(1 for pod in pods if find_value(pod, "spec", "nodeName") == node)

    def _bind_pod(self, pod: Json, node: str) -> None:
        # Stored directly: only the subresource pods/binding, which the lab lacks, may set the node.
        bound = pod | {"spec": pod["spec"] | {"nodeName": node}}
        self._store_condition(bound, {"status": "True"})

    def _report_unschedulable(self, pod: Json, reasons: list[str]) -> None:
        message = f"0 nodes of the role builder are available: {', '.join(reasons)}."
        unschedulable = {"status": "False", "reason": "Unschedulable", "message": message}
        for condition in find_value(pod, "status", "conditions") or []:
            if condition.get("message") == message:
                return
        self._store_condition(pod, unschedulable)

    def _store_condition(self, pod: Json, condition: Json) -> None:
        named = {"type": "PodScheduled", "lastTransitionTime": self._registry.now} | condition
        status = pod.get("status") or {}
        kept = [
            present
            for present in status.get("conditions") or []
            if present["type"] != named["type"]
        ]
        self._registry.store.put_object(
            PODS, pod | {"status": status | {"conditions": [*kept, named]}}
        )


def _needs_node(pod: Json) -> bool:
    spec = pod["spec"]
    is_ours = spec.get("schedulerName") == _SCHEDULER and not spec.get("nodeName")
    return bool(
        is_ours and find_value(pod, "status", "phase") == "Pending" and not is_deleting(pod)
    )


def _find_refusal(pod: Json, node: Json) -> str:
    """Return why a pod cannot run on a Node; empty if it can."""
    if not is_ready(node):
        return _find_unready_message(node) or "node(s) were not ready"
    if find_value(node, "spec", "unschedulable"):
        return "node(s) were unschedulable"
    labels, spec = read_labels(node), pod["spec"]
    wanted = spec.get("nodeSelector") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    if not _matches_affinity(spec, labels):
        return "node(s) didn't match Pod's node affinity/selector"
    for taint in find_value(node, "spec", "taints") or []:
        if taint.get("effect") != "PreferNoSchedule" and not _is_tolerated(spec, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    return ""


def _find_unready_message(node: Json) -> str:
    """Return why a Node is not ready: that of a lab names the package that its host lacks."""
    for condition in find_value(node, "status", "conditions") or []:
        if condition.get("type") == "Ready":
            return str(condition.get("message", ""))
    return ""


def _matches_affinity(spec: Json, labels: dict[str, str]) -> bool:
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = find_value(spec, "affinity", "nodeAffinity", rule, "nodeSelectorTerms")
    return terms is None or any(all(_match_expressions(term, labels)) for term in terms)


def _match_expressions(term: Json, labels: dict[str, str]) -> Iterator[bool]:
    for expression in term.get("matchExpressions") or []:
        value, values = labels.get(expression.get("key", "")), expression.get("values") or []
        match expression.get("operator"):
            case "In":
                yield value in values
            case "NotIn":
                yield value not in values
            case "Exists":
                yield value is not None
            case "DoesNotExist":
                yield value is None
            case _:
                yield False


def _is_tolerated(spec: Json, taint: Json) -> bool:
    for toleration in spec.get("tolerations") or []:
        if toleration.get("effect") not in {None, "", taint.get("effect")}:
            continue
        if toleration.get("operator") == "Exists" and toleration.get("key") in {
            None,
            "",
            taint["key"],
        }:
            return True
        if toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get(
            "value", ""
        ):
            return True
    return False


# Annotation of a pod: seconds that it takes to stop (default: its whole grace period).
STOP_SECONDS_ANNOTATION = "lab.treenail/stop-seconds"
_WRITE_CONTEXT = WriteContext(ApiUser("system:kubelet", (MASTERS,)), "kubelet")


class KubeletEmulator:
    """The kubelets of all Nodes."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self._registry = registry
        self._stopped: set[str] = set()
        # Pods that need work, and the time at which those that are stopping will have stopped.
        self._pending: dict[ObjectKey, float | None] = {}

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Record a pod that needs work; return whether there may be any."""
        if storage == NODES:
            # Nodes report their status all the time; that does not affect their pods.
            return event.type != "MODIFIED"
        if storage != PODS:
            return False
        where = read_key(event.object)
        if event.type == "DELETED" or not _needs_work(event.object):
            self._pending.pop(where, None)
            return False
        self._pending.setdefault(where, None)
        return True

    def reload(self) -> None:
        """Record all pods, after the store was loaded."""
        pods = self._registry.store.list_objects(PODS)
        self._pending = {read_key(pod): None for pod in pods if _needs_work(pod)}

    @property
    def stopped_nodes(self) -> frozenset[str]:
        """Return the nodes whose kubelet is stopped."""
        return frozenset(self._stopped)

    def stop_kubelet(self, node: str) -> None:
        """Stop the kubelet of a node until `start_kubelet`."""
        self._stopped.add(node)

    def start_kubelet(self, node: str) -> None:
        self._stopped.discard(node)

    def sync(self) -> float | None:
        """Start and end pods; return the seconds until the next pod ends, None if there is none."""
        waits = [
            wait for where in list(self._pending) if (wait := self._sync_pod(where)) is not None
        ]
        return min(waits, default=None)

    def _sync_pod(self, where: ObjectKey) -> float | None:
        pod = self._registry.store.find_object(PODS, where)
        if pod is None:
            return None
        node = find_value(pod, "spec", "nodeName")
        if node in self._stopped:
            return None
        stored = self._registry.store.find_object(NODES, ("", node))
        if stored is not None and BUILDER_LABEL in read_labels(stored):
            return None
        is_node_present = stored is not None
        if not is_deleting(pod):
            if is_node_present:
                self._start_pod(pod)
            return None
        now = self._registry.clock.monotonic()
        end = self._pending[where]
        if end is None:
            end = self._pending[where] = now + _compute_stop_s(pod) if is_node_present else now
        if end > now:
            return end - now
        kind = self._registry.kinds.find_kind("", "v1", "pods")
        delete_object(self._registry, kind, *where, DeleteOptions(grace_s=0), _WRITE_CONTEXT.user)
        return None

    def _start_pod(self, pod: Json) -> None:
        now = self._registry.now
        conditions = [
            {"type": name, "status": "True", "lastTransitionTime": now}
            for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        status = {"phase": "Running", "startTime": now, "conditions": conditions}
        kind = self._registry.kinds.find_kind("", "v1", "pods")
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._registry.update_object(
            kind, namespace, name, lambda old: old | {"status": status}, _WRITE_CONTEXT, "status"
        )


def _needs_work(pod: Json) -> bool:
    """Return whether a pod must be started or ended."""
    if not find_value(pod, "spec", "nodeName"):
        return False
    if is_deleting(pod):
        return bool(pod["metadata"].get("deletionGracePeriodSeconds"))
    return bool(find_value(pod, "status", "phase") == "Pending")


def _compute_stop_s(pod: Json) -> float:
    grace_s = float(pod["metadata"]["deletionGracePeriodSeconds"])
    seconds = (pod["metadata"].get("annotations") or {}).get(STOP_SECONDS_ANNOTATION)
    try:
        return min(float(seconds), grace_s) if seconds is not None else grace_s
    except ValueError:
        return grace_s
