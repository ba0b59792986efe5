"""What kubelets do to pods: they start those bound to their node and end those being deleted.

A kubelet can be made to be gone, as when its machine is off: its pods then stay as they are.
"""

from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.objects import Json, ObjectKey, find_value, is_deleting, read_key
from treenail_lab.apiserver.registry.deletion import DeleteOptions, delete_object
from treenail_lab.apiserver.registry.disruption_budgets import PODS
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.storage.store import StoreEvent

NODES: StorageKey = ("", "nodes")
# On a pod: how long it takes to stop. Without it, a pod uses all of its grace period.
STOP_SECONDS_ANNOTATION = "lab.treenail/stop-seconds"
_WRITE_CONTEXT = WriteContext(ApiUser("system:kubelet", (MASTERS,)), "kubelet")


class KubeletEmulator:
    """One for every Node there is."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self._registry = registry
        self._stopped: set[str] = set()
        # Pods that a kubelet may have something to do for, and when those that stop will have.
        self._pending: dict[ObjectKey, float | None] = {}

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Remember what a change may be the reason to do; whether it is any."""
        if storage == NODES:
            # Nodes report their status all the time, which is of no interest to their pods.
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
        """Look at all pods, after the store was loaded."""
        pods = self._registry.store.list_objects(PODS)
        self._pending = {read_key(pod): None for pod in pods if _needs_work(pod)}

    @property
    def stopped_nodes(self) -> frozenset[str]:
        """The nodes whose kubelet does nothing."""
        return frozenset(self._stopped)

    def stop_kubelet(self, node: str) -> None:
        """The kubelet of a node is gone until :meth:`start_kubelet`."""
        self._stopped.add(node)

    def start_kubelet(self, node: str) -> None:
        self._stopped.discard(node)

    def sync(self) -> float | None:
        """Start and end pods; in how many seconds there is more to do, None for never."""
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
        there = self._registry.store.find_object(NODES, ("", node)) is not None
        if not is_deleting(pod):
            if there:
                self._start_pod(pod)
            return None
        now = self._registry.clock.monotonic()
        end = self._pending[where]
        if end is None:
            end = self._pending[where] = now + _compute_stop_s(pod) if there else now
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
    """Whether a pod is to be started or ended."""
    if not find_value(pod, "spec", "nodeName"):
        return False
    if is_deleting(pod):
        return bool(pod["metadata"].get("deletionGracePeriodSeconds"))
    return bool(find_value(pod, "status", "phase") == "Pending")


def _compute_stop_s(pod: Json) -> float:
    grace_s = float(pod["metadata"]["deletionGracePeriodSeconds"])
    said = (pod["metadata"].get("annotations") or {}).get(STOP_SECONDS_ANNOTATION)
    try:
        return min(float(said), grace_s) if said is not None else grace_s
    except ValueError:
        return grace_s
