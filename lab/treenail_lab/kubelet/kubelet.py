"""A kubelet: it runs the pods that are bound to its Node as processes of this host."""

import logging
import os
import threading
from pathlib import Path

from treenail.clocks import Clock, format_rfc3339
from treenail.errors import ClusterError
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES, PODS
from treenail_lab.apiserver.objects import Json, find_value, is_deleting, read_uid
from treenail_lab.images import ARCHITECTURE
from treenail_lab.kubelet import runtime
from treenail_lab.kubelet.pod_worker import LOGS, KubeletPlaces, PodWorker

log = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_TIMEOUT_S = 10.0


class Kubelet:
    """Runs pods between `start` and `stop`; ``client`` has the Node's credential."""

    def __init__(self, node: str, client: Client, places: KubeletPlaces, clock: Clock) -> None:
        self.node = node
        self._client = client
        self._places = places
        self._clock = clock
        self._workers: dict[str, PodWorker] = {}
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name=f"kubelet-{node}", daemon=True)

    def start(self) -> None:
        """Report the Node ready, and run its pods."""
        runtime.remove_leftovers()
        self._places.directory.mkdir(parents=True, exist_ok=True)
        for forward in self._places.forwards:
            forward.start()
        self._report_ready()
        self._thread.start()

    def stop(self) -> None:
        """Kill all containers, as when the machine loses its power."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        for worker in self._workers.values():
            worker.stop()
        for forward in self._places.forwards:
            forward.stop()

    def kill_container(self, pod_uid: str, container: str) -> bool:
        """Kill a container with SIGKILL; return whether it ran."""
        worker = self._workers.get(pod_uid)
        return worker is not None and worker.kill_container(container)

    def find_log(self, namespace: str, pod: str, container: str) -> Path:
        """Return the path of a container's log."""
        return self._places.directory / LOGS / namespace / pod / f"{container}.log"

    def _run_loop(self) -> None:
        while not self._stop_event.wait(_POLL_S):
            try:
                self._sync()
            except ClusterError as error:
                log.debug("kubelet %s retries: %s", self.node, error)

    def _sync(self) -> None:
        selector = {"fieldSelector": f"spec.nodeName={self.node}"}
        pods: tuple[Json, ...] = self._client.list(PODS, params=selector).items
        pods_by_uid = {read_uid(pod): pod for pod in pods}
        for uid, pod in pods_by_uid.items():
            worker = self._workers.get(uid)
            has_ended = find_value(pod, "status", "phase") in {"Succeeded", "Failed"}
            if worker is None and not has_ended:
                worker = self._workers[uid] = PodWorker(
                    self._client, pod, self._places, self._clock
                )
                if is_deleting(pod):
                    worker.terminate(0.0)
                worker.start()
            elif worker is not None and is_deleting(pod):
                worker.terminate(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        for uid in self._workers.keys() - pods_by_uid.keys():
            # Deleted without waiting for this kubelet.
            self._workers[uid].terminate(0.0)
        self._workers = {
            uid: worker
            for uid, worker in self._workers.items()
            if uid in pods_by_uid or worker.is_alive
        }

    def _report_ready(self) -> None:
        now = format_rfc3339(self._clock.now())
        conditions = [
            {
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "message": "kubelet is posting ready status",
                "lastTransitionTime": now,
                "lastHeartbeatTime": now,
            }
        ]
        status: Json = {
            "conditions": conditions,
            "nodeInfo": {"architecture": ARCHITECTURE, "operatingSystem": "linux"},
            "capacity": {"cpu": str(os.cpu_count() or 1), "pods": "10"},
        }
        self._client.patch(NODES, self.node, {"status": status}, subresource="status")
