"""The generate controller with real watches on the lab's API server."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.config.generated.random_policies import make_key
from tests.controllers.image_build.site import MovableClock
from tests.controllers.installed import OPTIONS, account_kubeconfig, apply, denied, used
from tests.fixtures.controllers import CLOCK, open_client, run_controllers
from tests.fixtures.objects import ROLE, install_kinds, make_config, make_file, make_object
from tests.granted_verbs import iter_granted_verbs
from tests.waiting import wait_until
from treenail.controllers.generate.controller import GenerateController
from treenail.controllers.render.controller import RenderController
from treenail.errors import NotFoundError, UnreachableError
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    CONTAINERRUNTIMECONFIGS,
    CUSTOMRESOURCEDEFINITIONS,
    DEPLOYMENTS,
    EVENTS,
    GENERATOR_SOURCES,
    KUBELETCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSCONFIGS,
    NAMESPACES,
    Resource,
)
from treenail.manifests import installation
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
SUFFIX = "machineconfiguration.openshift.io/mc-name-suffix"
FROM = "treenail.io/generated-from"
K = "99-worker-generated-kubelet"
C = "99-worker-generated-containerruntime"
R = "99-worker-generated-registries"
BASE = "01-worker-kubelet"
KINDS = {resource.kind: resource for resource in GENERATOR_SOURCES}
MIRRORS, POLICIES = KINDS["ImageDigestMirrorSet"], KINDS["ClusterImagePolicy"]
BUILD = {
    "machineConfigPool": {"name": "worker"},
    "imageBuilder": {"imageBuilderType": "Job"},
    "renderedImagePushSecret": {"name": "push"},
    "renderedImagePushSpec": "built.example.com/os:latest",
}
BAD_MIRRORS = {"imageDigestMirrors": [{"source": "a.example.com/b:tag", "mirrors": ["c"]}]}
SELECT = {"machineConfigPoolSelector": {"matchLabels": {"pool": "worker"}}}


@pytest.fixture
def client(server: LabServer) -> Iterator[Client]:
    with open_client(server.admin_kubeconfig) as found:
        prepare(found)
        yield found


def prepare(client: Client) -> None:
    """Install all kinds, a pool, and its kubelet.conf."""
    install_kinds(client)
    for document in installation.load_crds("crds/generate"):
        client.create(CUSTOMRESOURCEDEFINITIONS, document)
    add_base(client)


def add_base(client: Client) -> None:
    add_pool(client)
    kubelet = "{apiVersion: kubelet.config.k8s.io/v1beta1, kind: KubeletConfiguration}"
    file = make_file("/etc/kubernetes/kubelet.conf", quote(kubelet))
    client.create(MACHINECONFIGS, make_config(BASE, file, role="worker"))


class KilledTransport:
    """The transport of a process that ends after its first write, before the response."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.killed_at = ""

    def send(self, request: ApiRequest) -> ApiResponse:
        if self.killed_at:
            raise UnreachableError("this process is dead")
        if request.method != "GET" and "/events" not in request.path:
            self.killed_at = request.path
            self._transport.send(request)
            raise UnreachableError("this process is dead")
        return self._transport.send(request)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> Any:
        return self._transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        self._transport.close()


@contextmanager
def running(
    server: LabServer,
    wrap: Callable[[Any], Any] | None = None,
    kubeconfig: Path | None = None,
) -> Iterator[Any]:
    """Run the controller; ``wrap`` replaces its transport."""
    kubeconfig = kubeconfig or server.write_kubeconfig("generate", ["system:masters"])
    with open_client(kubeconfig) as client:
        transport = wrap(client._transport) if wrap else client._transport
        client._transport = transport
        recorder = EventRecorder(client, "generate", "here", CLOCK)
        controller = GenerateController(client, CLOCK, recorder, settle_s=0.0)
        with run_controllers(client, controller, workers=1):
            yield transport


def add_pool(client: Client, name: str = "worker") -> None:
    spec = {"machineConfigSelector": {"matchLabels": {ROLE: name}}, "nodeSelector": {}}
    client.create(
        MACHINECONFIGPOOLS, make_object(MACHINECONFIGPOOLS, name, spec, labels={"pool": name})
    )


def add_kubelet(client: Client, name: str, fields: Json | None = None, **metadata: Any) -> None:
    spec = {**SELECT, "kubeletConfig": fields or {}}
    client.create(KUBELETCONFIGS, make_object(KUBELETCONFIGS, name, spec, **metadata))


def add_runtime(client: Client) -> None:
    spec = {**SELECT, "containerRuntimeConfig": {"pidsLimit": 30}}
    client.create(CONTAINERRUNTIMECONFIGS, make_object(CONTAINERRUNTIMECONFIGS, "pids", spec))


def list_configs(client: Client) -> list[str]:
    items: Any = client.list(MACHINECONFIGS).items
    return [item["metadata"]["name"] for item in items]


def find_text(client: Client, name: str) -> str:
    """Return the contents of the first file of a MachineConfig; empty without one."""
    config: Any = client.find(MACHINECONFIGS, name)
    if config is None:
        return ""
    return str(config["spec"]["config"]["storage"]["files"][0]["contents"]["source"])


def read_conditions(client: Client, resource: Resource, name: str) -> list[tuple[str, str, str]]:
    found: Any = client.get(resource, name)
    return [
        (entry["type"], entry["status"], entry["message"])
        for entry in found.get("status", {}).get("conditions", [])
    ]


def wait_observed(client: Client, name: str, resource: Resource = KUBELETCONFIGS) -> Json:
    """Wait until the status is of the latest generation, and return the object."""

    def is_observed() -> Json | None:
        found: Any = client.get(resource, name)
        observed = found.get("status", {}).get("observedGeneration")
        return found if observed == found["metadata"]["generation"] else None

    return wait_until(is_observed)


def read_outcome(client: Client) -> Json:
    """Return everything that the controller writes, without times and versions."""
    items: Any = [
        item
        for resource in (MACHINECONFIGS, *GENERATOR_SOURCES)
        for item in client.list(resource).items
    ]
    return {
        f"{item['kind']} {item['metadata']['name']}": {
            "annotations": item["metadata"].get("annotations"),
            "owners": [owner["name"] for owner in item["metadata"].get("ownerReferences") or []],
            "finalizers": item["metadata"].get("finalizers"),
            "config": (item.get("spec") or {}).get("config"),
            "observed": item.get("status", {}).get("observedGeneration"),
            "conditions": [
                (entry["type"], entry["status"], entry["message"])
                for entry in item.get("status", {}).get("conditions", [])
            ],
        }
        for item in items
    }


def test_objects_become_machineconfigs_and_get_conditions(
    server: LabServer, client: Client
) -> None:
    add_kubelet(client, "slow-pods", {"maxPods": 9})
    add_runtime(client)
    client.create(MIRRORS, make_object(MIRRORS, "m", {}))
    with running(server):
        found = wait_observed(client, "slow-pods")
        wait_observed(client, "pids", CONTAINERRUNTIMECONFIGS)
        wait_until(lambda: find_text(client, R))
        assert found["metadata"]["annotations"] == {SUFFIX: ""}
        config: Any = client.get(MACHINECONFIGS, K)
        assert config["metadata"]["labels"] == {ROLE: "worker"}
        (owner,) = config["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (found["metadata"]["uid"], True)
        assert read_conditions(client, KUBELETCONFIGS, "slow-pods") == [
            ("Accepted", "True", "Success"),
            ("Success", "True", "Success"),
        ]
        assert read_conditions(client, CONTAINERRUNTIMECONFIGS, "pids") == [
            ("Success", "True", "Success")
        ]
        before = find_text(client, K)
        client.patch(KUBELETCONFIGS, "slow-pods", {"spec": {"kubeletConfig": {"maxPods": 8}}})
        wait_until(lambda: find_text(client, K) != before)
        wait_observed(client, "slow-pods")
        for resource, name in (
            (KUBELETCONFIGS, "slow-pods"), (CONTAINERRUNTIMECONFIGS, "pids"), (MIRRORS, "m"),
        ):  # fmt: skip
            client.delete(resource, name)
        wait_until(lambda: list_configs(client) == [BASE])


def test_bad_object_changes_nothing_and_says_why(server: LabServer, client: Client) -> None:
    add_kubelet(client, "a", {"maxPods": 9})
    with running(server):
        wait_observed(client, "a")
        text = find_text(client, K)
        client.patch(KUBELETCONFIGS, "a", {"spec": {"kubeletConfig": {"bad": 1}}})
        wait_observed(client, "a")
        accepted, legacy = read_conditions(client, KUBELETCONFIGS, "a")
        assert (accepted[:2], legacy[:2]) == (("Accepted", "False"), ("Failure", "True"))
        assert accepted[2] == legacy[2]
        assert accepted[2].startswith("Error: spec.kubeletConfig.bad")
        assert find_text(client, K) == text
        client.create(
            POLICIES,
            make_object(
                POLICIES,
                "p",
                {
                    "scopes": ["example.com"],
                    "policy": {
                        "rootOfTrust": {"policyType": "PublicKey", "publicKey": {"keyData": "YQ=="}}
                    },
                },
            ),
        )
        wait_until(lambda: read_conditions(client, POLICIES, "p"))
        assert read_conditions(client, POLICIES, "p")[0][:2] == ("Pending", "True")
        body = {"spec": {"policy": {"rootOfTrust": {"publicKey": {"keyData": make_key()}}}}}
        client.patch(POLICIES, "p", body)
        wait_until(lambda: read_conditions(client, POLICIES, "p")[0][1] == "False")
        client.patch(KUBELETCONFIGS, "a", {"spec": {"kubeletConfig": {"bad": None}}})
        wait_until(lambda: read_conditions(client, KUBELETCONFIGS, "a")[1][0] == "Success")


def test_problem_of_a_mirror_set_is_an_event(server: LabServer, client: Client) -> None:
    client.create(MIRRORS, make_object(MIRRORS, "m", BAD_MIRRORS))
    with running(server):
        events: Any = wait_until(lambda: client.list(EVENTS).items)
    assert events[0]["involvedObject"]["kind"] == "ImageDigestMirrorSet"
    assert events[0]["message"].startswith("Error: spec.imageDigestMirrors[0].source")
    assert (events[0]["type"], events[0]["reason"]) == ("Warning", "Generate")


def test_registry_of_built_images_is_not_blocked(server: LabServer, client: Client) -> None:
    client.create(MACHINEOSCONFIGS, make_object(MACHINEOSCONFIGS, "worker", BUILD))
    built = {"status": {"currentImagePullSpec": f"built.example.com/os@sha256:{'1' * 64}"}}
    client.patch(MACHINEOSCONFIGS, "worker", built, subresource="status")
    image = KINDS["Image"]
    spec = {"registrySources": {"blockedRegistries": ["built.example.com"]}}
    client.create(image, make_object(image, "cluster", spec))
    with running(server):
        events: Any = wait_until(lambda: client.list(EVENTS).items)
        assert "the nodes could never update again" in events[0]["message"]
    assert find_text(client, R) == ""


def test_foreign_config_is_not_overwritten(server: LabServer, client: Client) -> None:
    client.create(MACHINECONFIGS, make_config(K, make_file("/etc/a", "mine"), role="worker"))
    add_kubelet(client, "a")
    with running(server):
        wait_observed(client, "a")
        (_, _, message), _ = read_conditions(client, KUBELETCONFIGS, "a")
    assert f"{K}: expected KubeletConfig a as its owner" in message
    assert find_text(client, K) == "data:,mine"


def test_refused_write_is_in_the_condition_and_is_retried(
    server: LabServer, client: Client
) -> None:
    add_kubelet(client, "a")
    add_kubelet(client, "b")
    refused = [f"{K}-1"]

    class Refusing(KilledTransport):
        def send(self, request: ApiRequest) -> ApiResponse:
            if request.method == "POST" and refused and refused[0] in str(request.body):
                status = {"kind": "Status", "code": 403, "message": "denied by policy small"}
                return ApiResponse(403, json.dumps(status).encode())
            answer: ApiResponse = self._transport.send(request)
            return answer

    with running(server, Refusing):
        wait_observed(client, "a")
        wait_observed(client, "b")
        message = read_conditions(client, KUBELETCONFIGS, "a")[0][2]
        assert f"cannot write {K}-1" in message
        assert "denied by policy small" in message
        assert read_conditions(client, KUBELETCONFIGS, "b")[0][1] == "True"
        refused.clear()
        wait_until(lambda: read_conditions(client, KUBELETCONFIGS, "a")[0][1] == "True")


def test_mco_that_runs_keeps_the_controller_from_writing(
    server: LabServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, name = "openshift-machine-config-operator", "machine-config-controller"
    client.create(NAMESPACES, make_object(NAMESPACES, namespace))
    pod: Json = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    spec: Json = {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": pod}
    client.create(
        DEPLOYMENTS, make_object(DEPLOYMENTS, name, spec, namespace=namespace), namespace=namespace
    )
    add_kubelet(client, "a")
    with running(server):
        wait_until(lambda: "the Machine Config Operator runs its controllers" in caplog.text)
        assert list_configs(client) == [BASE]
        client.patch(DEPLOYMENTS, name, {"spec": {"replicas": 0}}, namespace=namespace)
        add_kubelet(client, "b")
        wait_observed(client, "b")


def test_finalizers_of_the_mco_go_after_the_configs(server: LabServer, client: Client) -> None:
    add_kubelet(client, "a", finalizers=[K, "99-infra-generated-kubelet", "example.com/keep"])
    with running(server):
        wait_observed(client, "a")
        client.delete(KUBELETCONFIGS, "a")
        wait_until(
            lambda: (
                client.get(KUBELETCONFIGS, "a")["metadata"]["finalizers"]  # type: ignore[index]
                == ["example.com/keep"]
            )
        )
        # The watch may show the config later than the object.
        wait_until(lambda: client.find(MACHINECONFIGS, K) is None)
        client.patch(KUBELETCONFIGS, "a", {"metadata": {"finalizers": []}})
        with pytest.raises(NotFoundError):
            client.get(KUBELETCONFIGS, "a")


def test_taken_over_objects_are_not_written(server: LabServer, client: Client) -> None:
    """Same contents, conditions and annotations as from the MCO: only our annotation is added."""
    add_kubelet(client, "a", {"maxPods": 9})
    with running(server):
        found = wait_observed(client, "a")
    config: Any = client.get(MACHINECONFIGS, K)
    version = "machineconfiguration.openshift.io/generated-by-controller-version"
    annotations = {version: "0123abc", FROM: None}
    # Go does not write all empty fields.
    config = client.patch(
        MACHINECONFIGS, K, {"metadata": {"annotations": annotations}, "spec": {"extensions": None}}
    )
    with running(server):
        wait_until(
            lambda: FROM in client.get(MACHINECONFIGS, K)["metadata"]["annotations"]  # type: ignore[index]
        )
        add_kubelet(client, "b", {"maxPods": 9})
        wait_observed(client, "b")
    after: Any = client.get(MACHINECONFIGS, K)
    assert after["metadata"]["annotations"][version] == "0123abc"
    assert after["metadata"]["generation"] == config["metadata"]["generation"]
    assert after["spec"] == config["spec"]
    unchanged: Any = client.get(KUBELETCONFIGS, "a")
    assert unchanged["status"]["conditions"][1] == found["status"]["conditions"][1]


def arrange_all(client: Client) -> None:
    """Objects whose generation takes one write of each sort."""
    add_kubelet(client, "a", {"maxPods": 1})
    owner: Any = client.get(KUBELETCONFIGS, "a")
    # The name of older versions of the MCO.
    old = make_config("99-worker-1-kubelet", make_file("/etc/a", "old"), role="worker")
    old["metadata"]["ownerReferences"] = [
        {
            "apiVersion": KUBELETCONFIGS.api_version,
            "kind": "KubeletConfig",
            "name": "a",
            "uid": owner["metadata"]["uid"],
        }
    ]
    client.create(MACHINECONFIGS, old)
    add_kubelet(client, "b", {"maxPods": 2})
    add_kubelet(client, "gone", finalizers=[f"{K}-7"])
    client.delete(KUBELETCONFIGS, "gone")
    client.create(MIRRORS, make_object(MIRRORS, "m", {}))


@pytest.fixture
def expected(tmp_path: Any) -> Json:
    """Return the outcome of an undisturbed controller."""
    with LabServer(tmp_path / "expected") as server, open_client(server.admin_kubeconfig) as client:
        prepare(client)
        arrange_all(client)
        with running(server):
            wait_settled(client)
        return read_outcome(client)


def wait_settled(client: Client) -> None:
    for name in ("a", "b"):
        wait_observed(client, name)
    wait_until(lambda: client.find(KUBELETCONFIGS, "gone") is None)
    wait_until(lambda: find_text(client, R))


def test_kill_after_any_write_changes_nothing_in_the_end(
    server: LabServer, client: Client, expected: Json
) -> None:
    arrange_all(client)
    writes: list[str] = []
    while read_outcome(client) != expected:
        # Each process ends after its first write.
        assert len(writes) < 20, writes
        with running(server, KilledTransport) as transport:
            wait_until(lambda: transport.killed_at or read_outcome(client) == expected)
        writes.append(transport.killed_at)
    assert [text.rpartition("/")[2] for text in writes if text] == [
        "a", "b", "machineconfigs", "machineconfigs", "machineconfigs",
        "99-worker-1-kubelet", "gone", "status", "status",
    ]  # fmt: skip
    with running(server):
        wait_settled(client)
    assert read_outcome(client) == expected


def test_service_account_may_do_what_the_controller_does_and_no_more(server: LabServer) -> None:
    options = installation.InstallOptions(("generate",), OPTIONS.namespace)
    documents = installation.build_documents(options)
    apply(server, documents)
    with open_client(server.admin_kubeconfig) as client:
        add_base(client)
        arrange_all(client)
        with running(server, kubeconfig=account_kubeconfig(server)):
            wait_settled(client)
            # Each further write: an update, a patch, an Event, and statuses of policies.
            client.patch(MACHINECONFIGS, f"{K}-1", {"metadata": {"annotations": {FROM: None}}})
            wait_until(
                lambda: FROM in client.get(MACHINECONFIGS, f"{K}-1")["metadata"]["annotations"]  # type: ignore[index]
            )
            client.patch(KUBELETCONFIGS, "a", {"spec": {"kubeletConfig": {"maxPods": 7}}})
            client.patch(MIRRORS, "m", {"spec": BAD_MIRRORS})
            add_runtime(client)
            wait_observed(client, "pids", CONTAINERRUNTIMECONFIGS)
            root = {"policyType": "PublicKey", "publicKey": {"keyData": make_key()}}
            spec: Json = {"scopes": ["example.com"], "policy": {"rootOfTrust": root}}
            client.create(POLICIES, make_object(POLICIES, "p", spec))
            own = KINDS["ImagePolicy"]
            client.create(
                own, make_object(own, "p", spec, namespace="default"), namespace="default"
            )
            wait_until(lambda: read_conditions(client, POLICIES, "p"))
            wait_until(lambda: client.list(EVENTS).items)
            wait_until(lambda: client.get(own, "p", namespace="default").get("status"))
    assert denied(server) == frozenset()
    granted = {
        (resource.partition(".")[0], verb)
        for document in documents
        if document["kind"] in ("Role", "ClusterRole")
        and str(document["metadata"]["name"]).startswith(installation.NAME)  # type: ignore[index]
        for resource, verb in iter_granted_verbs(document["rules"])  # type: ignore[arg-type]
    }
    # Of leader election, which this test has not; of a plugin that checks blockOwnerDeletion.
    unused = {
        pair for pair in granted if pair[0] in ("leases", "secrets") or "finalizers" in pair[0]
    }
    unused.add(("events", "patch"))
    assert used(server) | unused == granted


@pytest.mark.parametrize("is_generating", [True, False])
def test_pool_waits_for_the_config_of_a_changed_object(
    server: LabServer, client: Client, *, is_generating: bool
) -> None:
    client.create(MACHINECONFIGS, make_config("00-base", make_file("/a", "1"), role="worker"))
    add_kubelet(client, "a")

    def is_rendered(count: int) -> Callable[[], bool]:
        return lambda: (
            count
            == sum(
                "rendered-" in item["metadata"]["name"]  # type: ignore[index]
                for item in client.list(MACHINECONFIGS).items
            )
        )

    with open_client(server.write_kubeconfig("render", ["system:masters"])) as own:
        recorder = EventRecorder(own, "render", "here", CLOCK)
        render = RenderController(own, CLOCK, recorder, settle_s=0.0, is_generating=is_generating)
        with run_controllers(own, render):
            if is_generating:
                wait_until(lambda: render._unobserved_since)
                assert is_rendered(0)()
            status = {"status": {"observedGeneration": 1}}
            client.patch(KUBELETCONFIGS, "a", status, subresource="status")
            wait_until(is_rendered(1))
            client.patch(KUBELETCONFIGS, "a", {"spec": {"kubeletConfig": {"maxPods": 1}}})
            wait_until(lambda: render._sources[0].find("a").metadata.generation == 2)  # type: ignore[union-attr]
            body = {"spec": make_config("00-base", make_file("/a", "2"))["spec"]}
            client.patch(MACHINECONFIGS, "00-base", body)
            wait_until(lambda: render._unobserved_since)
            assert is_rendered(1)()
            client.patch(
                KUBELETCONFIGS, "a", {"status": {"observedGeneration": 2}}, subresource="status"
            )
            wait_until(is_rendered(2))


def test_wait_for_a_controller_that_does_not_come_ends_with_a_warning(
    server: LabServer, client: Client
) -> None:
    add_kubelet(client, "a")
    clock = MovableClock()
    with open_client(server.write_kubeconfig("render", ["system:masters"])) as own:
        recorder = EventRecorder(own, "render", "here", CLOCK)
        render = RenderController(own, clock, recorder, settle_s=0.0, is_generating=True)
        with run_controllers(own, render):
            wait_until(lambda: render._unobserved_since)
            clock.move(61.0)
            events: Any = wait_until(lambda: client.list(EVENTS).items)
            # The next edit does not begin another wait.
            client.patch(KUBELETCONFIGS, "a", {"spec": {"kubeletConfig": {"maxPods": 1}}})
            wait_until(lambda: render._sources[0].find("a").metadata.generation == 2)  # type: ignore[union-attr]
            client.create(
                MACHINECONFIGS, make_config("00-base", make_file("/a", "1"), role="worker")
            )
            wait_until(lambda: sum(n.startswith("rendered-") for n in list_configs(client)) == 2)
    assert "KubeletConfig a: no MachineConfig contains its generation 1 yet" in str(events)
    assert any(name.startswith("rendered-") for name in list_configs(client))
