"""Kubelets: they start the pods bound to their node and end those that are being deleted.

A kubelet can be stopped, as when its machine is off: then its pods stay unchanged. Nodes of the
role ``builder`` have a kubelet of their own, in `treenail_lab.kubelet`.
"""

from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.controllers.scheduler import BUILDER_LABEL, NODES
from treenail_lab.apiserver.objects import (
    Json,
    ObjectKey,
    find_value,
    is_deleting,
    read_key,
    read_labels,
)
from treenail_lab.apiserver.registry.deletion import DeleteOptions, delete_object
from treenail_lab.apiserver.registry.disruption_budgets import PODS
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.storage.store import StoreEvent

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
        found = self._registry.store.find_object(NODES, ("", node))
        if found is not None and BUILDER_LABEL in read_labels(found):
            return None
        is_node_present = found is not None
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
