"""What kubelets do to pods: they start those bound to their node and end those being deleted.

A kubelet can be made to be gone, as when its machine is off: its pods then stay as they are.
"""

from treenail.lab.apiserver.deletion import DeleteOptions, delete
from treenail.lab.apiserver.disruption import PODS
from treenail.lab.apiserver.kinds import Storage
from treenail.lab.apiserver.objects import Json, deleting, dig, uid
from treenail.lab.apiserver.registry import Registry, Write
from treenail.lab.apiserver.users import MASTERS, User

NODES: Storage = ("", "nodes")
# On a pod: how long it takes to stop. Without it, a pod uses all of its grace period.
STOP_SECONDS = "lab.treenail/stop-seconds"
_WRITE = Write(User("system:kubelet", (MASTERS,)), "kubelet")


class Kubelets:
    """One for every Node there is."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._gone: set[str] = set()
        self._ends: dict[str, float] = {}

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
        now = self._registry.clock.monotonic()
        pods = self._registry.store.list(PODS)
        self._ends = {pod_uid: end for pod_uid, end in self._ends.items() if end > now - 3600}
        waits = [wait for pod in pods if (wait := self._sync_pod(pod, now)) is not None]
        return min(waits, default=None)

    def _sync_pod(self, pod: Json, now: float) -> float | None:
        node = dig(pod, "spec", "nodeName")
        if not node or node in self._gone:
            return None
        there = self._registry.store.get(NODES, ("", node)) is not None
        if not deleting(pod):
            if there and dig(pod, "status", "phase") == "Pending":
                self._start(pod)
            return None
        if not pod["metadata"].get("deletionGracePeriodSeconds"):
            return None
        end = self._ends.setdefault(uid(pod), now + _stop_s(pod)) if there else now
        if end > now:
            return end - now
        self._ends.pop(uid(pod), None)
        kind = self._registry.kinds.find("", "v1", "pods")
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        delete(self._registry, kind, namespace, name, DeleteOptions(grace_s=0), _WRITE.user)
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


def _stop_s(pod: Json) -> float:
    grace_s = float(pod["metadata"]["deletionGracePeriodSeconds"])
    said = (pod["metadata"].get("annotations") or {}).get(STOP_SECONDS)
    try:
        return min(float(said), grace_s) if said is not None else grace_s
    except ValueError:
        return grace_s
