"""treenail's build controller, and a Node that runs its Jobs, beside the MCO's controllers."""

import json
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import yaml

from tests.contract.client import Cluster
from tests.fixtures.objects import resource_of
from tests.mco.operator import CONTROLLER_CONFIG, NAMESPACE, Json
from tests.realcluster import RealCluster
from treenail.clocks import SystemClock
from treenail.errors import AlreadyExistsError
from treenail.kube.api_client import Client
from treenail.kube.resources import SECRETS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.manifests.installation import NAME, InstallOptions
from treenail.registry.names import Descriptor
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.image_builds import (
    BUILDER,
    BuilderNode,
    LabRegistry,
    build_controller_config,
    build_login_secret,
)
from treenail_lab.lifetime.owner import owner

PUSH, PULL = "push-secret", "pull-secret"
_LEFT_OUT = {"CustomResourceDefinition", "Deployment", "PodDisruptionBudget", "NetworkPolicy"}
_POLL_S = 0.2


class BuildSide:
    """Runs between start and stop, with the account of the manifests."""

    def __init__(self, directory: Path, server: RealCluster, registry: LabRegistry) -> None:
        self._directory, self._server, self._registry = directory, server, registry
        self._cluster = Cluster.of_kubeconfig(server.kubeconfig)
        self._transports: list[HttpTransport] = []
        self._client = self._open_client(server.kubeconfig)
        self._process: subprocess.Popen[bytes] | None = None
        self._builder: BuilderNode | None = None
        self._is_stopping = threading.Event()
        self._binder = threading.Thread(target=self._bind_pods, daemon=True)
        self.log = directory / "treenail-controller.log"

    def start(self) -> None:
        """Create logins and permissions, let the cluster trust the registry, start to build."""
        for name, login in ((PUSH, self._registry.push_login), (PULL, self._registry.pull_login)):
            secret = build_login_secret(name, NAMESPACE, login)
            self._client.create(SECRETS, secret, namespace=NAMESPACE)
        trust: Json = build_controller_config(self._registry)["spec"]  # type: ignore[assignment]
        spec = {"imageRegistryBundleUserData": trust["imageRegistryBundleUserData"]}
        self._cluster.patch(CONTROLLER_CONFIG, {"spec": spec}).ok()
        for document in installation.build_documents(InstallOptions(("build",), NAMESPACE)):
            metadata: Json = document["metadata"]  # type: ignore[assignment]
            if document["kind"] not in _LEFT_OUT:
                with suppress(AlreadyExistsError):
                    self._client.create(
                        resource_of(document), document, namespace=metadata.get("namespace", "")
                    )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *CONTROLLER_COMMAND,
                    "run",
                    "--enable=build",
                    f"--kubeconfig={self._write_account_kubeconfig()}",
                    "--metrics=127.0.0.1:0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env={
                    **owner.mark_environment(),
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "POD_NAME": "build",
                    "POD_NAMESPACE": NAMESPACE,
                },
                start_new_session=True,
            )

    def start_builder(self) -> None:
        """Start a kubelet for Jobs. The test binds their pods: no scheduler runs."""
        self._builder = BuilderNode(
            self._directory,
            self._client,
            self._registry.host,
            hidden=(self._registry.service.directory,),
        )
        self._builder.create_node()
        # The MCO does not expect a Node without annotations.
        notes = {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}
        body = {"metadata": {"annotations": notes}}
        self._cluster.patch(f"/api/v1/nodes/{BUILDER}", body).ok()
        self._builder.start(self._open_client(self._server.write_node_kubeconfig(BUILDER)))
        self._binder.start()

    def stop(self) -> None:
        self._is_stopping.set()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._builder is not None:
            self._binder.join(30.0)
            self._builder.stop()
            self._cluster.delete(f"/api/v1/nodes/{BUILDER}")
        for name in (PUSH, PULL):
            self._cluster.delete(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")
        spec = {"imageRegistryBundleUserData": None}
        self._cluster.patch(CONTROLLER_CONFIG, {"spec": spec})
        for transport in self._transports:
            transport.close()

    def _open_client(self, kubeconfig: Path) -> Client:
        transport = HttpTransport(read_kubeconfig(str(kubeconfig)), SystemClock())
        self._transports.append(transport)
        return Client(transport)

    def _write_account_kubeconfig(self) -> Path:
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{NAME}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self._cluster.post(path, request).ok()["status"]["token"]
        document = yaml.safe_load(self._server.kubeconfig.read_text("utf-8"))
        for user in document["users"]:
            user["user"] = {"token": token}
        found = self._directory / "account.kubeconfig"
        found.touch(mode=0o600)
        found.write_text(json.dumps(document), "utf-8")
        return found

    def _bind_pods(self) -> None:
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        while not self._is_stopping.wait(_POLL_S):
            for pod in self._cluster.get(pods).ok()["items"]:
                if not pod["spec"].get("nodeName"):
                    name = pod["metadata"]["name"]
                    target = {"apiVersion": "v1", "kind": "Node", "name": BUILDER}
                    self._cluster.post(
                        f"{pods}/{name}/binding", {"metadata": {"name": name}, "target": target}
                    )


def read_image_labels(registry: LabRegistry, pull_spec: str) -> dict[str, str]:
    """Return the labels of an image in the registry."""
    name, _, digest = pull_spec.partition("@")
    repository = name.partition("/")[2]
    client = registry.open_client()
    try:
        manifest = json.loads(client.get_manifest(repository, digest).content)
        content: list[bytes] = []
        config = manifest["config"]
        descriptor = Descriptor(config["mediaType"], config["digest"], config["size"])
        client.read_blob(repository, descriptor, content.append)
    finally:
        client.close()
    labels: dict[str, str] = json.loads(b"".join(content))["config"]["Labels"]
    return labels
