"""An application whose pods move when a node is drained.

It emulates a Deployment's controller, the scheduler and the kubelets: it keeps a number of ready
pods on schedulable nodes. Its PodDisruptionBudget limits what a drain may evict.
"""

import json
import logging
import threading
from collections import Counter

from treenail.errors import AlreadyExistsError, ClusterError, NotFoundError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import NODES, PODDISRUPTIONBUDGETS, PODS, REPLICASETS
from treenail_lab.apiserver.controllers.pods import BUILDER_LABEL

log = logging.getLogger(__name__)

NAMESPACE = "default"
APP = "web"
_POLL_S = 0.2


def format_budget_command(max_unavailable: int) -> str:
    """Return the command with which a user permits ``max_unavailable`` evictions at a time."""
    patch = json.dumps({"spec": {"maxUnavailable": max_unavailable}})
    return f"kubectl -n {NAMESPACE} patch pdb {APP} --type merge -p '{patch}'"


class Workload:
    """``replicas`` pods, of which at most ``max_unavailable`` may be unavailable at a time."""

    def __init__(self, client: Client, *, replicas: int, max_unavailable: int = 2) -> None:
        self._client = client
        self._replicas = replicas
        self._max_unavailable = max_unavailable
        self._created_count = 0
        self._owner = ""
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="lab-workload", daemon=True)

    def start(self) -> None:
        """Create the budget and the pods, then replace pods that were evicted."""
        self._owner = self._create_replica_set()
        budget: Json = {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": APP},
            "spec": {
                "maxUnavailable": self._max_unavailable,
                "selector": {"matchLabels": {"app": APP}},
            },
        }
        try:
            self._client.create(PODDISRUPTIONBUDGETS, budget, namespace=NAMESPACE)
        except AlreadyExistsError:
            log.debug("the PodDisruptionBudget already exists")
        self._ensure_replicas()
        self._thread.start()

    def stop(self) -> None:
        """Stop replacing pods; the pods stay."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run_loop(self) -> None:
        while not self._stop_event.wait(_POLL_S):
            try:
                self._ensure_replicas()
            except ClusterError as error:
                log.debug("retrying the workload: %s", error)

    def _ensure_replicas(self) -> None:
        nodes = [node for node in self._client.list(NODES).items if _is_schedulable(node)]
        selector = {"labelSelector": f"app={APP}"}
        pods = self._client.list(PODS, namespace=NAMESPACE, params=selector).items
        alive = [pod for pod in pods if not _read_object(pod, "metadata").get("deletionTimestamp")]
        for pod in alive:
            self._mark_running(pod)
        load = Counter({_read_name(node): 0 for node in nodes})
        load.update(str(_read_object(pod, "spec").get("nodeName")) for pod in alive)
        for _ in range(self._replicas - len(alive)):
            names = [_read_name(node) for node in nodes]
            if not names:
                return
            node = min(names, key=lambda name: (load[name], name))
            load[node] += 1
            self._create_pod(node)

    def _create_replica_set(self) -> str:
        """Create the ReplicaSet that owns the pods; return its uid."""
        labels = {"matchLabels": {"app": APP}}
        wanted: Json = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": APP},
            "spec": {"replicas": self._replicas, "selector": labels},
        }
        try:
            created = self._client.create(REPLICASETS, wanted, namespace=NAMESPACE)
        except AlreadyExistsError:
            created = self._client.get(REPLICASETS, APP, namespace=NAMESPACE)
        return str(_read_object(created, "metadata").get("uid"))

    def _create_pod(self, node: str) -> None:
        self._created_count += 1
        pod: Json = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{APP}-{self._created_count}",
                "labels": {"app": APP},
                "ownerReferences": [
                    {
                        "apiVersion": "apps/v1",
                        "kind": "ReplicaSet",
                        "name": APP,
                        "uid": self._owner,
                        "controller": True,
                    }
                ],
            },
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": APP, "image": "registry.lab.example/web:1"}],
            },
        }
        try:
            self._mark_running(self._client.create(PODS, pod, namespace=NAMESPACE))
        except AlreadyExistsError:
            log.debug("%s-%d already exists", APP, self._created_count)

    def _mark_running(self, pod: Json) -> None:
        if _read_object(pod, "status").get("phase") == "Running":
            return
        status: Json = {
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        }
        try:
            self._client.patch(
                PODS, _read_name(pod), status, namespace=NAMESPACE, subresource="status"
            )
        except NotFoundError:
            log.debug("%s was deleted before it ran", _read_name(pod))


def _is_schedulable(node: Json) -> bool:
    conditions = _read_object(node, "status").get("conditions")
    ready = isinstance(conditions, list) and any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in conditions
    )
    # Nodes for builds run no application: their pods are real processes.
    is_builder = BUILDER_LABEL in _read_object(_read_object(node, "metadata"), "labels")
    is_open = not _read_object(node, "spec").get("unschedulable")
    return ready and is_open and not is_builder


def _read_name(document: Json) -> str:
    return str(_read_object(document, "metadata").get("name"))


def _read_object(document: Json, key: str) -> Json:
    value = document.get(key)
    return value if isinstance(value, dict) else {}
