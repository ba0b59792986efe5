"""What kubelets do to pods: they start those bound to their node and end those being deleted.

A kubelet can be made to be gone, as when its machine is off: its pods then stay as they are.
"""

from treenail_lab.apiserver.access.authentication import MASTERS, User
from treenail_lab.apiserver.objects import Json, Key, deleting, dig, key
from treenail_lab.apiserver.registry.deletion import DeleteOptions, delete
from treenail_lab.apiserver.registry.disruption_budgets import PODS
from treenail_lab.apiserver.registry.registry import Registry, Write
from treenail_lab.apiserver.schema.kinds import Storage
from treenail_lab.apiserver.storage.store import Event

NODES: Storage = ("", "nodes")
# On a pod: how long it takes to stop. Without it, a pod uses all of its grace period.
STOP_SECONDS = "lab.treenail/stop-seconds"
_WRITE = Write(User("system:kubelet", (MASTERS,)), "kubelet")


class Kubelets:
    """One for every Node there is."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._gone: set[str] = set()
        # Pods that a kubelet may have something to do for, and when those that stop will have.
        self._open: dict[Key, float | None] = {}

    def note(self, storage: Storage, event: Event) -> bool:
        """Remember what a change may be the reason to do; whether it is any."""
        if storage == NODES:
            # Nodes report their status all the time, which is of no interest to their pods.
            return event.type != "MODIFIED"
        if storage != PODS:
            return False
        where = key(event.object)
        if event.type == "DELETED" or not _is_open(event.object):
            self._open.pop(where, None)
            return False
        self._open.setdefault(where, None)
        return True

    def reload(self) -> None:
        """Look at all pods, after the store was loaded."""
        pods = self._registry.store.list(PODS)
        self._open = {key(pod): None for pod in pods if _is_open(pod)}

    @property
    def gone(self) -> frozenset[str]:
        """The nodes whose kubelet does nothing."""
        return frozenset(self._gone)

    def leave(self, node: str) -> None:
        """The kubelet of a node is gone until :meth:`come_back`."""
        self._gone.add(node)

    def come_back(self, node: str) -> None:
        self._gone.discard(node)

    def sync(self) -> float | None:
        """Start and end pods; in how many seconds there is more to do, None for never."""
        waits = [wait for where in list(self._open) if (wait := self._sync_pod(where)) is not None]
        return min(waits, default=None)

    def _sync_pod(self, where: Key) -> float | None:
        pod = self._registry.store.get(PODS, where)
        if pod is None:
            return None
        node = dig(pod, "spec", "nodeName")
        if node in self._gone:
            return None
        there = self._registry.store.get(NODES, ("", node)) is not None
        if not deleting(pod):
            if there:
                self._start(pod)
            return None
        now = self._registry.clock.monotonic()
        end = self._open[where]
        if end is None:
            end = self._open[where] = now + _stop_s(pod) if there else now
        if end > now:
            return end - now
        kind = self._registry.kinds.find("", "v1", "pods")
        delete(self._registry, kind, *where, DeleteOptions(grace_s=0), _WRITE.user)
        return None

    def _start(self, pod: Json) -> None:
        now = self._registry.now
        conditions = [
            {"type": name, "status": "True", "lastTransitionTime": now}
            for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        status = {"phase": "Running", "startTime": now, "conditions": conditions}
        kind = self._registry.kinds.find("", "v1", "pods")
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._registry.update(
            kind, namespace, name, lambda old: old | {"status": status}, _WRITE, "status"
        )


def _is_open(pod: Json) -> bool:
    """Whether a pod is to be started or ended."""
    if not dig(pod, "spec", "nodeName"):
        return False
    if deleting(pod):
        return bool(pod["metadata"].get("deletionGracePeriodSeconds"))
    return bool(dig(pod, "status", "phase") == "Pending")


def _stop_s(pod: Json) -> float:
    grace_s = float(pod["metadata"]["deletionGracePeriodSeconds"])
    said = (pod["metadata"].get("annotations") or {}).get(STOP_SECONDS)
    try:
        return min(float(said), grace_s) if said is not None else grace_s
    except ValueError:
        return grace_s
