"""An API server with a kubelet whose pods reach one port."""

import socketserver
import threading
from pathlib import Path
from typing import Any, Self

from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES, PODS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail_lab.apiserver.controllers.pods import BUILDER_LABEL
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.kubelet.kubelet import Kubelet
from treenail_lab.kubelet.pod_worker import LOGS, KubeletPlaces
from treenail_lab.kubelet.runtime import PortForward

NODE = "builder-0"
NAMESPACE = "default"
ENDED = {"Succeeded", "Failed"}


class _Greeter(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"hello\n")


class ContainerCluster:
    """Runs pods while entered; a server on loopback stands for the registry."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = LabServer(directory / "api")
        self._listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Greeter)
        self._transports: list[HttpTransport] = []

    @property
    def port(self) -> int:
        """The only port of the host that pods reach."""
        return int(self._listener.server_address[1])

    def __enter__(self) -> Self:
        self.server.start()
        self.server.api.controllers.jobs.first_backoff_s = 0.2
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()
        self.client = self._open_client(self.server.admin_kubeconfig)
        labels: Json = {BUILDER_LABEL: "", "kubernetes.io/arch": "amd64"}
        node: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": labels},
        }
        self.client.create(NODES, node)
        places = KubeletPlaces(
            self.directory / NODE,
            (self.directory,),
            (PortForward(self.directory / "forward.sock", self.port),),
            {"/etc/treenail-image": "lab"},
        )
        credential = self.server.write_node_kubeconfig(NODE)
        self.kubelet = Kubelet(NODE, self._open_client(credential), places, SystemClock())
        self.kubelet.start()
        self.server.api.pod_logs.directories.append(self.directory / NODE / LOGS)
        return self

    def __exit__(self, *_: object) -> None:
        self.kubelet.stop()
        self._listener.shutdown()
        self._listener.server_close()
        for transport in self._transports:
            transport.close()
        self.server.stop()

    def _open_client(self, kubeconfig: Path) -> Client:
        transport = HttpTransport(read_kubeconfig(str(kubeconfig)), SystemClock())
        self._transports.append(transport)
        return Client(transport)

    def create_pod(self, name: str, script: str, /, container: Any = None, **spec: Any) -> None:
        """Create a pod that runs a shell script."""
        main = {"name": "main", "image": "i", "command": ["sh", "-c", script]} | (container or {})
        self.create(name, [main], **spec)

    def create(self, name: str, containers: list[Any], **spec: Any) -> None:
        pod: Json = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", "containers": containers} | spec,
        }
        self.client.create(PODS, pod, namespace=NAMESPACE)

    def read_status(self, name: str) -> Json:
        pod: Json = self.client.get(PODS, name, namespace=NAMESPACE)
        return pod["status"]

    def wait_end(self, name: str) -> Json:
        """The status of a pod after its end."""
        wait_until(lambda: self.read_status(name).get("phase") in ENDED, limit_s=30)
        return self.read_status(name)

    def run(self, name: str, script: str, /, container: Any = None, **spec: Any) -> Json:
        """The state in which the container of a pod ended."""
        self.create_pod(name, script, container, **spec)
        status = self.wait_end(name)
        return status["containerStatuses"][0]["state"]["terminated"]

    def read_log(self, name: str, container: str = "main") -> str:
        return self.kubelet.find_log(NAMESPACE, name, container).read_text("utf-8")

    def wait_log(self, name: str, text: str) -> None:
        """Wait until the log of a pod contains the text."""

        def has_text() -> bool:
            path = self.kubelet.find_log(NAMESPACE, name, "main")
            return path.exists() and text in path.read_text("utf-8")

        wait_until(has_text, limit_s=20)
