"""An actor in the place of the Machine Config Daemons and kubelets of a hosted cluster.

Each upgrade pod is a daemon in HyperShift's mode: it remembers nothing but the config on its
node's disk, and writes the annotations of its Node. The kubelets end evicted pods.
"""

import queue
import threading
from collections import defaultdict
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Self

from tests.fixtures.controllers import CLOCK
from tests.fixtures.objects import Json
from tests.hosted.clusters import HostedClusters, get_pod_node
from treenail.api import annotations as key
from treenail.errors import NotFoundError
from treenail.kube.informer import Informer
from treenail.kube.resources import CONFIGMAPS, NODES, PODS
from treenail.kube.watch import WatchScope

UPGRADER = "inplace"
"""The field manager of HyperShift's upgrader and drainer, as the program is called."""
_UPGRADE_SUFFIX = "-upgrade"
_RETRY_S = 3.0
"""Between two attempts of a failed node. The daemon waits 5 s after a change of its Node, so that
the upgrader has written the ConfigMap of the next target before."""
_DELAY_S = 0.3
"""After a change of a Node. The daemon takes seconds; at once, the drainer's cache is behind: it
drains again, and writes the uncordon that was requested meanwhile as done."""
_POLL_S = 0.05
_DRAIN_KEYS = (key.DESIRED_DRAIN, key.LAST_APPLIED_DRAIN)


@dataclass(frozen=True, slots=True)
class NodeState:
    """The fields of a Node that the actor and the test follow."""

    name: str
    notes: dict[str, str]
    is_cordoned: bool
    desired_by: str
    """Field manager that wrote desiredConfig last; empty without one."""

    @classmethod
    def from_json(cls, document: Json) -> Self:
        metadata = document["metadata"]
        return cls(
            name=metadata["name"],
            notes=metadata.get("annotations") or {},
            is_cordoned=bool((document.get("spec") or {}).get("unschedulable")),
            desired_by=_find_manager(metadata, key.DESIRED_CONFIG),
        )

    @property
    def current(self) -> str:
        return self.notes.get(key.CURRENT_CONFIG, "")

    @property
    def desired(self) -> str:
        return self.notes.get(key.DESIRED_CONFIG, "")

    @property
    def state(self) -> str:
        return self.notes.get(key.STATE, "")

    @property
    def drains(self) -> tuple[str, str]:
        """The drain that the daemon requested, and the last one of the drainer."""
        requested, applied = (self.notes.get(name, "") for name in _DRAIN_KEYS)
        return requested, applied


@dataclass(frozen=True, slots=True)
class NodeChange:
    """One version of a Node, and the one before; None when it was created."""

    before: NodeState | None
    after: NodeState

    @property
    def is_selection(self) -> bool:
        """Whether desiredConfig was written."""
        return self.before is not None and self.before.desired != self.after.desired


def _find_manager(metadata: Json, annotation: str) -> str:
    for entry in metadata.get("managedFields") or []:
        owned = entry.get("fieldsV1") or {}
        if f"f:{annotation}" in owned.get("f:metadata", {}).get("f:annotations", {}):
            return str(entry.get("manager", ""))
    return ""


class NodeDaemons(AbstractContextManager["NodeDaemons"]):
    """Runs while entered; ``failing`` holds the hashes of configs that no node can apply."""

    def __init__(self, clusters: HostedClusters) -> None:
        self._client = clusters.guest
        self.failing: set[str] = set()
        self.applied: dict[str, list[str]] = defaultdict(list)
        """Hashes that each node's disk got, in their order."""
        self.changes: list[NodeChange] = []
        """Of all Nodes, in the order of the API server."""
        self._disks: dict[str, str] = {}
        self._due: dict[str, float] = {}
        """Time of the next step of each node, and of the end of each evicted pod."""
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pods: dict[str, tuple[str, str]] = {}
        self._is_stopping = threading.Event()
        self._nodes = Informer(self._client, WatchScope(NODES), CLOCK, NodeState.from_json)
        self._nodes.add_handler(self._note_node)
        self._watch = Informer(self._client, WatchScope(PODS), CLOCK, lambda pod: pod)
        self._watch.add_handler(self._note_pod)
        self._thread = threading.Thread(target=self._run, name="node-daemons", daemon=True)

    def __enter__(self) -> Self:
        for informer in (self._nodes, self._watch):
            informer.start()
            assert informer.wait_until_synced(30.0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._queue.put("")
        self._thread.join(30.0)
        for informer in (self._nodes, self._watch):
            informer.stop()

    def get_node(self, name: str) -> NodeState:
        """Return a Node as the actor knows it."""
        node = self._nodes.find(name)
        assert node is not None, name
        return node

    def list_selections(self) -> list[NodeChange]:
        return [change for change in self.changes if change.is_selection]

    def list_cordons(self) -> list[str]:
        """Return the nodes in the order in which they were cordoned."""
        return [
            change.after.name
            for change in self.changes
            if change.after.is_cordoned
            and not (change.before is not None and change.before.is_cordoned)
        ]

    def _note_node(self, name: str, before: NodeState | None, after: NodeState | None) -> None:
        if after is None:
            return
        self.changes.append(NodeChange(before, after))
        self._queue.put(name)

    def _note_pod(self, _: str, before: Json | None, after: Json | None) -> None:
        pod = after or before
        assert pod is not None
        namespace = pod["metadata"]["namespace"]
        if not namespace.endswith(_UPGRADE_SUFFIX):
            if after is not None and "deletionTimestamp" in after["metadata"]:
                self._queue.put(f"{namespace}/{after['metadata']['name']}")
            return
        node = get_pod_node(pod)
        if after is None:
            self._pods.pop(node, None)
        else:
            self._pods[node] = (namespace, after["metadata"]["uid"])
            self._queue.put(node)

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            for informer in (self._nodes, self._watch):
                informer.check_if_silent()
            with suppress(queue.Empty):
                for _ in range(max(self._queue.qsize(), 1)):
                    name = self._queue.get(timeout=_POLL_S)
                    self._due.setdefault(name, CLOCK.monotonic() + _DELAY_S)
            self._due.pop("", None)
            due = [name for name, at in self._due.items() if CLOCK.monotonic() >= at]
            for each in due:
                del self._due[each]
                try:
                    self._end_pod(each) if "/" in each else self._sync(each)
                except NotFoundError:
                    continue  # the object is gone, or nothing made the ConfigMap yet

    def _end_pod(self, name: str) -> None:
        namespace, _, pod = name.partition("/")
        self._client.delete(PODS, pod, namespace=namespace, grace_s=0)

    def _sync(self, name: str) -> None:
        """Do the next step of a daemon, as each change of its Node makes it do."""
        pod = self._pods.get(name)
        if pod is None:
            return
        node = NodeState.from_json(self._client.get(NODES, name))
        requested, applied = node.drains
        if requested != applied or node.desired in {"", node.current}:
            return
        namespace = pod[0]
        config_map = self._client.get(CONFIGMAPS, namespace, namespace=namespace)
        target = str(config_map["data"]["hash"])
        if self._disks.get(name) == target:
            self._write(name, key.NodeState.DONE, target, f"uncordon-{target}")
        elif requested != f"drain-{target}":
            self._write(name, key.NodeState.WORKING, "", f"drain-{target}")
        elif target in self.failing:
            self._due[name] = CLOCK.monotonic() + _RETRY_S
            notes = {key.STATE: key.NodeState.DEGRADED, key.REASON: f"cannot apply {target}"}
            if node.state != key.NodeState.DEGRADED:
                self._client.patch(NODES, name, {"metadata": {"annotations": notes}})
        else:
            self._disks[name] = target
            self.applied[name].append(target)
            self._write(name, key.NodeState.DONE, target, f"uncordon-{target}")

    def _write(self, name: str, state: str, current: str, drain: str) -> None:
        notes = {key.STATE: state, key.REASON: "", key.DESIRED_DRAIN: drain}
        if current:
            notes[key.CURRENT_CONFIG] = current
        self._client.patch(NODES, name, {"metadata": {"annotations": notes}})
