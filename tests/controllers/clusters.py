"""A cluster for tests of the controllers, the lab's or a real one, and its test objects."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.client import Cluster
from tests.fixtures.controllers import CLOCK, run_controllers
from tests.fixtures.objects import ROLE, make_config, make_object, make_ready_condition, resource_of
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.component_names import NAMESPACE as INSTALLATION
from treenail.builder.images.attachments import SigningKey
from treenail.clocks import Clock
from treenail.controllers.drain.controller import DrainController
from treenail.controllers.generate.controller import GenerateController
from treenail.controllers.handover.controller import InstallationGate, InstallController
from treenail.controllers.handover.image_mover import ImageMover
from treenail.controllers.hosted.conduct.controller import ConductController
from treenail.controllers.hosted.owning.controller import OwningController, OwningSettings
from treenail.controllers.image_build import controller
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.controller import BuildController
from treenail.controllers.image_build.job_builder import JobSettings
from treenail.controllers.render.controller import RenderController
from treenail.controllers.rollout.controller import RolloutController
from treenail.controllers.rollout.external_gates import GateClient
from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.runtime import ControllerRuntime
from treenail.controllers.runtime.web import WebClient
from treenail.controllers.runtime.workers import Controller
from treenail.errors import AlreadyExistsError, ClusterError, NotFoundError
from treenail.kube.api_client import Client, PatchType
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.lease import LeaderElectionConfig, LeaderElector
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
    ROLLOUTPOLICIES,
    Resource,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpStream, HttpTransport
from treenail.manifests import installation
from treenail.manifests.installation import NAME, InstallOptions
from treenail.manifests.permissions import DEFAULT_CONTROLLERS
from treenail.provisioning.approval.controller import ApprovalController
from treenail.registry.transport import RegistryLimits

Json = dict[str, Any]
LIMIT_S = 60.0


class Transport(HttpTransport):
    """Uses policy/v1beta1 for budgets and evictions with servers before 1.22."""

    def __init__(self, kubeconfig: Path, policy: str) -> None:
        super().__init__(read_kubeconfig(str(kubeconfig)), CLOCK, max_kept=16)
        self._policy = policy

    def send(self, request: ApiRequest) -> ApiResponse:
        return super().send(self._understood(request))

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> HttpStream:
        return super().open_stream(self._understood(request), duration_s=duration_s)

    def _understood(self, request: ApiRequest) -> ApiRequest:
        path = request.path.replace("/apis/policy/v1/", f"/apis/{self._policy}/")
        body = request.body.replace(b'"policy/v1"', f'"{self._policy}"'.encode())
        return replace(request, path=path, body=body)


@dataclass
class Place:
    """A pool with its own nodes in a cluster; all names start with ``prefix``."""

    kubeconfig: Path
    folder: Path
    controllers_run: tuple[str, ...] = DEFAULT_CONTROLLERS

    def __post_init__(self) -> None:
        self.prefix = f"treenail-test-{secrets.token_hex(3)}"
        self.options = InstallOptions(self.controllers_run, self.prefix)
        self._admin = Cluster.of_kubeconfig(self.kubeconfig)
        served = self._admin.get("/apis/policy").ok()["versions"]
        versions = [entry["groupVersion"] for entry in served]
        self._policy = "policy/v1" if "policy/v1" in versions else "policy/v1beta1"
        self._transport = Transport(self.kubeconfig, self._policy)
        self.client = Client(self._transport)
        self._made: list[tuple[Resource, str, str]] = []

    # Installation

    def install(self) -> None:
        """Create the manifests; skip kinds that the server does not know."""
        with suppress(NotFoundError):
            if self.client.list(MACHINECONFIGPOOLS).items:
                pytest.skip("the cluster has pools, which are not to be touched")
        for document in installation.build_documents(self.options):
            if document["kind"] == "Deployment":
                # Controllers run in this process.
                continue
            metadata: Any = document["metadata"]
            namespace = metadata.get("namespace", "")
            resource = resource_of(document)
            # Created, not applied: an older server then drops unknown fields.
            with suppress(NotFoundError, AlreadyExistsError):
                self.client.create(resource, document, namespace=namespace)
                self._made.append((resource, metadata["name"], namespace))
        wait_until(lambda: self._serves(MACHINECONFIGPOOLS), limit_s=LIMIT_S)
        if self._admin.has_controllers():
            account = f"/api/v1/namespaces/{self.prefix}/serviceaccounts/default"
            wait_until(lambda: self._admin.get(account).code == 200, limit_s=LIMIT_S)

    def remove(self) -> None:
        """Delete all created objects, and nothing else."""
        pods = self.client.list(PODS, namespace=self.prefix).items
        for pod in pods:
            with suppress(NotFoundError):
                self.client.delete(PODS, str(_meta(pod)["name"]), namespace=self.prefix, grace_s=0)
        for resource, name, namespace in reversed(self._made):
            with suppress(NotFoundError, ClusterError):
                self.client.delete(resource, name, namespace=namespace)
        self._transport.close()

    def _remember(self, resource: Resource, name: str, namespace: str) -> None:
        try:
            self.client.get(resource, name, namespace=namespace)
        except NotFoundError:
            self._made.append((resource, name, namespace))

    def _serves(self, resource: Resource) -> bool:
        try:
            self.client.list(resource)
        except NotFoundError:
            return False
        return True

    # Actions of users

    def pool(self, policy: str = "", **spec: Any) -> None:
        """Create or change the pool."""
        if policy:
            self._apply_policy(yaml.safe_load(policy))
            spec = {"rolloutPolicy": self.prefix, **spec}
        spec = {
            "machineConfigSelector": {"matchLabels": {ROLE: self.prefix}},
            "nodeSelector": {"matchLabels": {self.prefix: "node"}},
            **spec,
        }
        document = make_object(MACHINECONFIGPOOLS, self.prefix, spec)
        self._remember(MACHINECONFIGPOOLS, self.prefix, "")
        self.client.patch(MACHINECONFIGPOOLS, self.prefix, document, PatchType.APPLY)

    def _apply_policy(self, spec: Json) -> None:
        document = make_object(ROLLOUTPOLICIES, self.prefix, spec)
        self._remember(ROLLOUTPOLICIES, self.prefix, "")
        self.client.patch(ROLLOUTPOLICIES, self.prefix, document, PatchType.APPLY)

    def config(self, name: str, **spec: Any) -> str:
        """Create or change a MachineConfig of the pool; return its full name."""
        full = f"{name}-{self.prefix}"
        self._remember(MACHINECONFIGS, full, "")
        document = make_config(full, role=self.prefix, **spec)
        self.client.patch(MACHINECONFIGS, full, document, PatchType.APPLY)
        return full

    def node(self, name: str) -> str:
        """Create a ready Node without a machine and without annotations; return its full name."""
        full = f"{self.prefix}-{name}"
        metadata = {"name": full, "labels": {self.prefix: "node"}}
        self.client.create(NODES, {"metadata": metadata})
        self._made.append((NODES, full, ""))
        self.client.patch(
            NODES, full, {"status": {"conditions": [make_ready_condition()]}}, subresource="status"
        )
        return full

    def create(self, resource: Resource, name: str, document: Json) -> None:
        """Create an object, in the namespace of the test if the kind has one."""
        namespace = self.prefix if resource.namespaced else ""
        body = {"metadata": {"name": name}, **document}
        self.client.create(resource, body, namespace=namespace)
        self._made.append((resource, name, namespace))

    def pod(self, node: str, name: str, app: str) -> None:
        """Create a pod that runs on a node."""
        metadata = {"name": name, "labels": {"app": app}}
        spec = {
            "nodeName": node,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            # As the namespace of the controllers demands: Pod Security Standards, restricted.
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": "example.invalid/image",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        }
        self.client.create(PODS, {"metadata": metadata, "spec": spec}, namespace=self.prefix)
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.client.patch(
            PODS, name, {"status": status}, namespace=self.prefix, subresource="status"
        )

    def budget(self, name: str, app: str, keep: int) -> None:
        """Create a budget and wait until the cluster has counted its pods."""
        spec = {"minAvailable": keep, "selector": {"matchLabels": {"app": app}}}
        body: Json = {"metadata": {"name": name}, "spec": spec}
        self.client.create(PODDISRUPTIONBUDGETS, body, namespace=self.prefix)

        def counted() -> bool:
            found: Json = self.client.get(PODDISRUPTIONBUDGETS, name, namespace=self.prefix)
            return bool(found.get("status", {}).get("currentHealthy"))

        wait_until(counted, limit_s=LIMIT_S)

    # Observed state

    def condition(self, kind: str) -> Json:
        found: Json = self.client.get(MACHINECONFIGPOOLS, self.prefix)
        conditions = found.get("status", {}).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {})

    def rendered(self) -> str:
        """Return the desired config of the pool."""
        found: Json = self.client.get(MACHINECONFIGPOOLS, self.prefix)
        return str(found["spec"].get("configuration", {}).get("name", ""))

    def notes(self, node: str) -> dict[str, str]:
        found: Json = self.client.get(NODES, node)
        return dict(found["metadata"].get("annotations") or {})

    def cordoned(self, node: str) -> bool:
        found: Json = self.client.get(NODES, node)
        return bool(found["spec"].get("unschedulable"))

    def at(self, config: str) -> set[str]:
        """Return the nodes that have the config and are schedulable."""
        items = self.client.list(NODES, params={"labelSelector": self.prefix}).items
        return {
            str(_meta(node)["name"])
            for node in items
            if _meta(node).get("annotations", {}).get(key.CURRENT_CONFIG) == config
            and not _part(node, "spec").get("unschedulable")
        }

    def pods(self) -> set[str]:
        found = self.client.list(PODS, namespace=self.prefix).items
        return {str(_meta(pod)["name"]) for pod in found}

    # Controllers

    def account_kubeconfig(self) -> Path:
        """Return a client with a token of the controllers' service account."""
        path = f"/api/v1/namespaces/{self.prefix}/serviceaccounts/{NAME}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self._admin.post(path, request).ok()["status"]["token"]
        document = yaml.safe_load(self.kubeconfig.read_text("utf-8"))
        for user in document["users"]:
            user["user"] = {"token": token}
        found = self.folder / "account.kubeconfig"
        found.touch(mode=0o600)
        found.write_text(yaml.safe_dump(document), "utf-8")
        return found

    @contextmanager
    def controllers(self) -> Iterator[ControllerRuntime]:
        """Run all controllers with leader election and only their service account."""
        transport = Transport(self.account_kubeconfig(), self._policy)
        client = Client(transport)
        recorder = EventRecorder(client, NAME, "test", CLOCK)
        metrics = ControllerMetrics()
        candidacy = LeaderElectionConfig(self.prefix, NAME, "test", retry_period_s=0.5)
        known = make_controllers(client, recorder, metrics, self.prefix)
        with run_controllers(
            client,
            *(each for name in self.controllers_run for each in known[name]),
            metrics=metrics,
            max_retry_s=1.0,
            make_elector=lambda gain, loss: LeaderElector(
                client, candidacy, CLOCK, on_started_leading=gain, on_stopped_leading=loss
            ),
        ) as runtime:
            yield runtime
        transport.close()


def has_access(account: Cluster) -> bool:
    """Whether the role of a controller has effect: each one may list one of these kinds.

    A kind that the cluster lacks answers 404, and 403 without the permission.
    """
    paths = (
        "/api/v1/nodes",
        "/apis/machineconfiguration.openshift.io/v1/machineconfigpools",
        "/apis/treenail.io/v1alpha1/rolloutpolicies",
        "/apis/hypershift.openshift.io/v1beta1/nodepools",
    )
    return any(account.get(path).code in (200, 404) for path in paths)


def make_controllers(
    client: Client, recorder: EventRecorder, metrics: ControllerMetrics, namespace: str
) -> dict[str, list[Controller]]:
    """Make all controllers by the names of ``run --enable``, with their objects in a namespace."""
    gates = GateClient(WebClient())
    mover = ImageMover(ClusterReader(client, CLOCK, namespace=namespace), CLOCK)
    return {
        "render": [RenderController(client, CLOCK, recorder, settle_s=0.0)],
        "generate": [GenerateController(client, CLOCK, recorder, settle_s=0.0)],
        "rollout": [
            RolloutController(client, CLOCK, gates, recorder, RolloutSettings()),
            MachineConfigNodeController(client, CLOCK),
        ],
        "drain": [DrainController(client, recorder, CLOCK, metrics, report_after_s=1.0)],
        "build": [
            make_build_controller(client, recorder, namespace=namespace, hold_namespace=namespace)
        ],
        "install": [InstallController(client, CLOCK, recorder, mover, namespace=namespace)],
        "approve": [ApprovalController(client, CLOCK, recorder, namespace)],
        "hosted": [ConductController(client, CLOCK, gates, recorder, lambda: True)],
        "nodepools": [
            OwningController(
                client, CLOCK, recorder, OwningSettings("treenail", "https://127.0.0.1:1")
            )
        ],
    }


def make_build_controller(
    client: Client,
    recorder: EventRecorder,
    *,
    namespace: str,
    signing_key: SigningKey | None = None,
    clock: Clock = CLOCK,
    limits: RegistryLimits | None = None,
    metrics: ControllerMetrics | None = None,
    hold_namespace: str = INSTALLATION,
) -> BuildController:
    """Make a build controller whose Jobs are in a namespace.

    ``hold_namespace`` has the settings of an installation.
    """
    return controller.make_build_controller(
        client,
        clock,
        recorder,
        metrics or ControllerMetrics(),
        JobSettings(namespace=namespace),
        controller.BuildOptions(
            signing_key=signing_key,
            limits=limits,
            find_hold_reason=InstallationGate(
                client, clock, namespace=hold_namespace
            ).find_hold_reason,
        ),
    )


def _meta(found: Any) -> Json:
    return _part(found, "metadata")


def _part(found: Any, name: str) -> Json:
    return found.get(name) or {}
