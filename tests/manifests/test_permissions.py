"""The service account has exactly the permissions that the controllers need."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.controllers.drain.site import Wire
from tests.controllers.installed import (
    OPTIONS,
    account_kubeconfig,
    apply,
    denied,
    used,
    without,
)
from tests.granted_verbs import iter_granted_verbs
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.controllers.drain.controller import DrainController
from treenail.controllers.render.controller import RenderController
from treenail.controllers.rollout.controller import RolloutController
from treenail.controllers.rollout.external_gates import GateClient
from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.runtime.runtime import ControllerRuntime
from treenail.controllers.runtime.web import WebClient
from treenail.controllers.runtime.workers import ControllerSettings
from treenail.kube.api_client import Client, Json
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.lease import LeaderElectionConfig, LeaderElector
from treenail.kube.request import ApiRequest
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    DAEMONSETS,
    EVENTS,
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
    ROLLOUTPOLICIES,
    Resource,
    get_object,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.manifests.installation import NAME, build_documents, load_crds
from treenail_lab.apiserver.serving.server import LabServer

CLOCK = SystemClock()
ROLE = "machineconfiguration.openshift.io/role"

# The lab's server does not check this: it needs an optional admission plugin.
# The second one is for a policy that names a Secret, the third one for a pool with a tag.
ASKED_ELSEWHERE = {
    ("machineconfigpools/finalizers", "update"),
    ("secrets", "get"),
    ("controllerconfigs", "get"),
}


class Cluster:
    """Actions of users and an agent, with administrator credentials."""

    def __init__(self, server: LabServer) -> None:
        self._transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), CLOCK)
        self.client = Client(self._transport)

    def close(self) -> None:
        self._transport.close()

    def make(self, resource: Resource, name: str, *, namespace: str = "", **more: object) -> None:
        metadata: Json = {"name": name, **more.pop("metadata", {})}  # type: ignore[dict-item]  # a dict
        body: Json = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": metadata,
            **more,
        }
        self.client.create(resource, body, namespace=namespace)

    def arrange(self) -> None:
        """Create a pool with an idle node and pods on it."""
        labels = {"node-role.kubernetes.io/worker": ""}
        notes = {key.CURRENT_CONFIG: "old", key.DESIRED_CONFIG: "old", key.STATE: "Done"}
        self.make(NODES, "a", metadata={"labels": labels, "annotations": notes})
        ready = [{"type": "Ready", "status": "True", "reason": "x", "message": "x"}]
        self.client.patch(NODES, "a", {"status": {"conditions": ready}}, subresource="status")
        self.make(CONTROLLERCONFIGS, "machine-config-controller", spec={})
        self.config(0)
        selector = {"matchLabels": {ROLE: "worker"}}
        nodes = {"matchLabels": labels}
        self.make(
            MACHINECONFIGPOOLS,
            "worker",
            spec={
                "machineConfigSelector": selector,
                "nodeSelector": nodes,
                "rolloutPolicy": "careful",
            },
        )
        self.make(ROLLOUTPOLICIES, "careful", spec={"rebootTimeout": "30m"})
        template: Json = {"selector": {}, "template": {}}
        self.make(DAEMONSETS, "agents", namespace="default", spec=template)
        uid = self.client.get(DAEMONSETS, "agents", namespace="default")["metadata"]["uid"]  # type: ignore[index]  # a dict
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agents", "uid": uid}
        self.pod("agent", ownerReferences=[{**owner, "controller": True}])
        self.pod("web", labels={"app": "web"})
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
        self.make(PODDISRUPTIONBUDGETS, "keep", namespace="default", spec=spec)

    def config(self, version: int) -> None:
        """Create or change the MachineConfig of the workers."""
        spec: Json = {
            "config": {"ignition": {"version": "3.5.0"}},
            "kernelArguments": [f"version={version}"],
        }
        if version:
            self.client.patch(MACHINECONFIGS, "00-worker", {"spec": spec})
        else:
            metadata = {"labels": {ROLE: "worker"}}
            self.make(MACHINECONFIGS, "00-worker", metadata=metadata, spec=spec)

    def pod(self, name: str, **metadata: object) -> None:
        spec = {
            "nodeName": "a",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "i"}],
        }
        self.make(PODS, name, namespace="default", metadata=metadata, spec=spec)
        wait_until(lambda: self.phase(name) == "Running")

    def phase(self, pod: str) -> object:
        status = self.client.get(PODS, pod, namespace="default")["status"]
        return status.get("phase")  # type: ignore[attr-defined]  # a dict

    def note(self, **notes: str) -> None:
        """Write the annotations of the agent."""
        named = {key.PREFIX + name: value for name, value in notes.items()}
        self.client.patch(NODES, "a", {"metadata": {"annotations": named}})

    def notes(self) -> dict[str, str]:
        return self.client.get(NODES, "a")["metadata"]["annotations"]  # type: ignore[index,no-any-return]  # a dict

    def rendered(self) -> str:
        spec = self.client.get(MACHINECONFIGPOOLS, "worker")["spec"]
        return str(spec.get("configuration", {}).get("name", ""))  # type: ignore[attr-defined]  # a dict

    def configs(self) -> int:
        return len(self.client.list(MACHINECONFIGS).items)

    def ask(self, request: str) -> None:
        self.note(desiredDrain=request)

    def applied(self, request: str) -> bool:
        return self.notes().get(key.LAST_APPLIED_DRAIN) == request

    def live_a_life(self) -> None:
        """Run an update of the node from rendering to uncordon."""
        wait_until(self.rendered)
        wait_until(lambda: self.notes()[key.DESIRED_CONFIG] == self.rendered())
        wait_until(lambda: self.client.get(MACHINECONFIGNODES, "a"))
        self.ask("drain-x")
        wait_until(lambda: self.client.get(NODES, "a")["spec"].get("unschedulable"))  # type: ignore[attr-defined]  # a dict
        self.client.delete(PODDISRUPTIONBUDGETS, "keep", namespace="default")
        wait_until(lambda: self.applied("drain-x"), limit_s=20)
        self.ask("uncordon-x")
        wait_until(lambda: self.applied("uncordon-x"))
        self.note(currentConfig=self.rendered())
        for times in (1, 2):
            self.ask("reboot-x")
            wait_until(lambda times=times: self.said("UnknownDrainRequest") >= times)  # type: ignore[misc]
            self.ask("uncordon-x")
            wait_until(lambda: self.applied("uncordon-x"))
        for version in range(1, 9):
            before = self.rendered()
            self.config(version)
            wait_until(lambda before=before: self.rendered() != before)  # type: ignore[misc]
        wait_until(lambda: self.configs() <= 9)

    def said(self, reason: str) -> int:
        """Return the count of an Event."""
        found = self.client.list(EVENTS, namespace="default").items
        return sum(int(str(each["count"])) for each in found if each["reason"] == reason)


@contextmanager
def controllers(server: LabServer, kubeconfig: Path) -> Iterator[None]:
    """Run all controllers with the service account."""
    wire = Wire(server, kubeconfig)
    client = Client(wire)
    recorder = EventRecorder(client, NAME, "test", CLOCK)
    metrics = ControllerMetrics()
    rollout = RolloutController(client, CLOCK, GateClient(WebClient()), recorder, RolloutSettings())
    candidacy = LeaderElectionConfig(OPTIONS.namespace, NAME, "test", retry_period_s=0.1)
    runtime = ControllerRuntime(
        [
            ControllerSettings(
                RenderController(client, CLOCK, recorder, settle_s=0.0),
                first_retry_s=0.05,
                max_retry_s=0.2,
            ),
            ControllerSettings(rollout, first_retry_s=0.05, max_retry_s=0.2),
            ControllerSettings(
                MachineConfigNodeController(client, CLOCK), first_retry_s=0.05, max_retry_s=0.2
            ),
            ControllerSettings(
                DrainController(client, recorder, CLOCK, metrics),
                first_retry_s=0.05,
                max_retry_s=0.2,
            ),
        ],
        InformerSet(client, CLOCK),
        CLOCK,
        metrics,
        make_elector=lambda gain, loss: LeaderElector(
            client, candidacy, CLOCK, on_started_leading=gain, on_stopped_leading=loss
        ),
    )
    admin = Cluster(server)
    beats = iter(range(100))

    def heartbeat(request: ApiRequest) -> None:
        # Makes a write of the drain controller conflict, so that it reads the Node again.
        if request.method == "PATCH" and b"lastAppliedDrain" in request.body:
            wire.before = lambda _: None
            admin.client.patch(NODES, "a", {"metadata": {"labels": {"beat": str(next(beats))}}})

    wire.before = heartbeat
    stop = threading.Event()
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
        wire.close()
        admin.close()


@pytest.fixture
def cluster(server: LabServer) -> Iterator[Cluster]:
    found = Cluster(server)
    yield found
    found.close()


def test_service_account_may_do_exactly_what_the_controllers_do(
    server: LabServer, cluster: Cluster, tmp_path: Path
) -> None:
    apply(server, build_documents(OPTIONS))
    cluster.arrange()
    with controllers(server, account_kubeconfig(server)):
        cluster.live_a_life()

    assert denied(server) == frozenset()
    kinds = {str(get_object(each, "metadata")["name"]).partition(".")[0] for each in load_crds()}
    # The lists of kinds that the cluster lacks fail, so nothing watches them.
    optional = {
        "machineosbuilds", "machineosconfigs", "kubeletconfigs", "containerruntimeconfigs",
    }  # fmt: skip
    absent = {(name, "watch") for name in optional - kinds}
    assert used(server) == _granted_to_controllers() - ASKED_ELSEWHERE - absent


@pytest.mark.parametrize(
    ("resource", "verb"),
    [
        ("leases", "create"),
        ("machineconfigs", "create"),
        ("machineconfigpools/status", "patch"),
        ("pods/eviction", "create"),
        ("pods", "list"),
        ("events", "create"),
    ],
)
def test_missing_permission_is_detected(
    server: LabServer, cluster: Cluster, tmp_path: Path, resource: str, verb: str
) -> None:
    apply(server, without(resource, verb))
    cluster.arrange()
    cluster.ask("drain-x")
    with controllers(server, account_kubeconfig(server)):
        wait_until(lambda: denied(server))

    assert denied(server) == {(resource, verb)}


def test_service_account_may_not_touch_other_objects(server: LabServer) -> None:
    found = {(resource.partition(".")[0], verb) for resource, verb in _granted_to_controllers()}
    assert not {resource for resource, _ in found} & {"configmaps", "pods/exec"}
    assert {verb for resource, verb in found if resource == "secrets"} == {"get"}
    (role,) = (
        document["kind"]
        for document in build_documents(OPTIONS)
        if "secrets" in str(document.get("rules"))
    )
    assert role == "Role"
    assert not {verb for _, verb in found} & {"*", "impersonate", "bind", "escalate"}
    assert ("nodes", "delete") not in found
    assert ("pods", "delete") not in found


def _granted_to_controllers() -> frozenset[tuple[str, str]]:
    rules = [
        rule
        for document in build_documents(OPTIONS)
        if document["kind"] in ("Role", "ClusterRole")
        and str(document["metadata"]["name"]).startswith(installation.NAME)  # type: ignore[index]  # a dict
        for rule in document["rules"]  # type: ignore[attr-defined]  # a list
    ]
    return frozenset(
        (resource.partition(".")[0], verb) for resource, verb in iter_granted_verbs(rules)
    )
