"""``treenail-controller uninstall``, on the lab's API server and on a real cluster."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import APPLY, Cluster
from tests.contract.conftest import GADGET, definition
from tests.controllers.drain.site import Wire
from tests.fixtures.clusters import (
    controllers,
    is_served,
    kubeconfig,
    real_kubeconfig,
    server,
)
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import (
    add_pool,
    collection_of,
    make_config,
    make_node,
    make_object,
)
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.component_names import PART_OF_LABELS
from treenail.api.object_meta import read_metadata
from treenail.cli.controller import uninstall
from treenail.cli.controller.main import main
from treenail.clocks import SystemClock
from treenail.errors import NotFoundError, TreenailError
from treenail.kube import resources
from treenail.kube.api_client import Client
from treenail.kube.discovery import discover_resources
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.manifests import removal
from treenail.provisioning.machines.request_log import RequestStore
from treenail.provisioning.tokens import bootstrap_tokens
from treenail.provisioning.tokens.token_store import TokenStore
from treenail.provisioning.tokens.tokens import make_token
from treenail_lab.apiserver.serving.faults import FaultMatch, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
__all__ = ["controllers", "kubeconfig", "real_kubeconfig", "server"]

Run = Callable[..., tuple[int, str, str]]
MONITORING = [
    definition("monitoring.coreos.com", kind, f"{kind.lower()}s", GADGET, None)
    for kind in ("PodMonitor", "PrometheusRule")
]
TOKENS = "Secret treenail-ignition/treenail-ignition-tokens"
BOOTSTRAP = "Secret kube-system/bootstrap-token-"
CLOCK = SystemClock()


class Place:
    """A cluster with everything that treenail can create, and objects of others."""

    def __init__(self, kubeconfig: Path, client: Client) -> None:
        self.kubeconfig = kubeconfig
        self.client = client
        self.cluster = Cluster.of_kubeconfig(kubeconfig)

    def put(self, document: Any) -> None:
        name = document["metadata"]["name"]
        self.cluster.patch(
            f"{collection_of(document)}/{name}", document, APPLY, force="true", fieldManager="t"
        ).ok()

    def install(self) -> None:
        for document in MONITORING:
            self.put(document)
        for document in MONITORING:
            wait_until(lambda kind=document: is_served(self.cluster, kind), limit_s=30.0)  # type: ignore[misc]
        for document in removal.build_all_manifests():
            self.put(document)
        self.add_tokens()
        add_objects_of_controllers(self)

    def add_tokens(self) -> None:
        """Create an access token, and the bootstrap token of a machine that used it."""
        _, record = make_token("worker", expires=CLOCK.now() + 3600.0, uses=1)
        store = TokenStore(self.client, "treenail-ignition", CLOCK)
        store.change(lambda table: (table.put(record), None))
        target = bootstrap_tokens.JoinTarget("https://example.com:6443", lambda: b"")
        credentials = bootstrap_tokens.BootstrapCredentials(self.client, CLOCK, target)
        credentials.issue(f"tn_{record.name}_x", record, "10.0.0.1")

    def list_all(self) -> set[str]:
        """Titles of all objects but Events and the leases of the control plane."""
        served, failed = discover_resources(self.client)
        assert not failed
        return {
            removal.FoundObject(resource, read_metadata(item)).title
            for resource in served
            if resource.kind not in ("Event", "EndpointSlice", "Endpoints")
            for item in self.client.list(resource).items
        }


def add_objects_of_controllers(place: Place) -> None:
    """Create what controllers create, with the labels that they set."""
    client = place.client
    build = make_object(resources.MACHINEOSBUILDS, "worker-1", {
        "machineConfig": {"name": "rendered-worker-1"}, "machineOSConfig": {"name": "worker"},
        "renderedImagePushSpec": "registry.example.com/os:1",
    }, labels=PART_OF_LABELS)  # fmt: skip
    created = client.create(resources.MACHINEOSBUILDS, build)
    meta: Any = created["metadata"]
    owner = {"apiVersion": created["apiVersion"], "kind": created["kind"], "name": "worker-1",
             "uid": meta["uid"]}  # fmt: skip
    labels = {**PART_OF_LABELS, key.EPHEMERAL_BUILD_OBJECT: ""}
    for resource in (resources.CONFIGMAPS, resources.SECRETS):
        body = make_object(resource, "worker-1-input", labels=labels, ownerReferences=[owner],
                           namespace="treenail")  # fmt: skip
        client.create(resource, body, namespace="treenail")
    lease = make_object(resources.LEASES, "treenail-controller", {}, labels=PART_OF_LABELS,
                        namespace="treenail")  # fmt: skip
    client.create(resources.LEASES, lease, namespace="treenail")


@pytest.fixture
def place(server: LabServer) -> Iterator[Place]:
    with open_client(server.admin_kubeconfig) as client:
        found = Place(server.admin_kubeconfig, client)
        found.install()
        yield found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], server: LabServer) -> Run:
    """Run the command as the administrator, or as another user; return code, output, errors."""

    def run_command(*arguments: str, kubeconfig: Path | None = None) -> tuple[int, str, str]:
        path = kubeconfig or server.admin_kubeconfig
        code = main(["uninstall", "--timeout=2s", f"--kubeconfig={path}", *arguments])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run_command


def read_titles(output: str, word: str = "deleted") -> list[str]:
    return [line[len(word) + 1 :] for line in output.splitlines() if line.startswith(f"{word} ")]


@pytest.mark.controllers
def test_difference_is_what_the_command_names(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    with open_client(kubeconfig) as client:
        place = Place(kubeconfig, client)
        before = place.list_all()
        place.install()
        installed = place.list_all()
        try:
            arguments = ["uninstall", f"--kubeconfig={kubeconfig}"]
            assert main([*arguments, "--dry-run"]) == 0
            planned = read_titles(capsys.readouterr().out, "would delete")
            assert place.list_all() == installed
            assert main(arguments) == 0
            deleted = read_titles(capsys.readouterr().out)
            after = place.list_all()
        finally:
            if "real" in request.node.name:
                for document in installation_of_agents():
                    place.put(document)
    assert deleted == planned
    assert len(deleted) > 50
    assert not {*deleted} & after
    # What controllers of Kubernetes make of Deployments, DaemonSets and Services goes with these.
    generated = ("ControllerRevision", "Endpoint", "Event", "IPAddress", "Pod ", "ReplicaSet")
    gone = {title for title in installed - after - {*deleted} if not title.startswith(generated)}
    # What Kubernetes generates in each namespace goes with it.
    assert {title.partition(" ")[2].partition("/")[0] for title in gone} <= {
        "treenail", "treenail-hosted-ignition", "treenail-ignition",
    }  # fmt: skip
    assert {title.partition("/")[2] for title in gone} <= {"default", "kube-root-ca.crt"}
    left = after - before
    of_kinds = ("APIService ", "CustomResourceDefinition ")
    assert all(title.startswith(of_kinds) for title in left), left


def installation_of_agents() -> list[Any]:
    """The manifests that other tests on the real cluster need."""
    return [each for each in removal.build_all_manifests()
            if each["metadata"]["name"] == "treenail-node"]  # type: ignore[index]  # fmt: skip


def test_tokens_go_first_and_workloads_before_the_rest(place: Place, run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    titles = read_titles(out)
    assert titles[0] == TOKENS
    assert titles[1].startswith(BOOTSTRAP)
    assert titles[2:5] == [
        "DaemonSet treenail-ignition/treenail-ignition",
        "Deployment treenail-hosted-ignition/treenail-hosted-ignition",
        "Deployment treenail/treenail-controller",
    ]


def test_cluster_without_treenail_has_nothing_to_remove(server: LabServer, run: Run) -> None:
    for arguments in ((), ("--dry-run",), ("--delete-crds",)):
        code, out, _ = run(*arguments)
        assert code == 0
        assert out == (
            "nothing to remove: no object of the cluster has the label "
            "app.kubernetes.io/part-of=treenail\n"
        )


def test_second_run_names_what_stays(place: Place, run: Run) -> None:
    place.client.create(resources.MACHINECONFIGS, make_config("00-worker"))
    run()
    code, out, err = run()
    assert (code, err, read_titles(out)) == (0, "", [])
    assert (
        "stays: CustomResourceDefinition machineconfigs.machineconfiguration.openshift.io and its "
        "objects: --delete-crds deletes them\n"
    ) in out
    assert place.client.get(resources.MACHINECONFIGS, "00-worker")


def test_definitions_go_on_request_with_a_warning(place: Place, run: Run) -> None:
    add_pool(place.client, "worker", "x")
    code, out, err = run("--delete-crds")
    assert code == 0
    assert "warning: the custom resource definitions go with all MachineConfigs" in err
    last = read_titles(out)[-8:]
    assert all(title.startswith("CustomResourceDefinition ") for title in last)
    assert not [title for title in place.list_all() if "machineconfig" in title.lower()]
    # Those of Prometheus have no label.
    assert "CustomResourceDefinition podmonitors.monitoring.coreos.com" in place.list_all()
    assert run("--delete-crds")[1].startswith("nothing to remove")


def test_definitions_of_the_machine_config_operator_stay(place: Place, run: Run) -> None:
    namespace = "openshift-machine-config-operator"
    place.client.create(resources.NAMESPACES, {"metadata": {"name": namespace}})
    operator = make_object(
        resources.DEPLOYMENTS, "machine-config-operator",
        {"selector": {}, "template": {}}, namespace=namespace,
    )  # fmt: skip
    place.client.create(resources.DEPLOYMENTS, operator, namespace=namespace)
    code, out, _ = run("--delete-crds")
    assert code == 0
    assert "CustomResourceDefinition" not in str(read_titles(out))
    assert out.count("the Machine Config Operator may use them") == 18


def test_foreign_objects_stay_and_keep_their_namespace(place: Place, run: Run) -> None:
    def add(resource: resources.Resource, name: str, namespace: str, **meta: Any) -> str:
        body = make_object(resource, name, namespace=namespace, **meta)
        if resource == resources.DEPLOYMENTS:
            body["spec"] = {"selector": {}, "template": {}}
        place.client.create(resource, body, namespace=namespace)
        return f"{resource.kind} {namespace}/{name}"

    certificate = add(resources.SECRETS, "treenail-ignition-tls", "treenail-ignition")
    same_name = add(resources.DEPLOYMENTS, "treenail-controller", "default")
    same_label = add(resources.CONFIGMAPS, "mine", "default", labels=PART_OF_LABELS)
    token = add(resources.SECRETS, "bootstrap-token-abcdef", "kube-system")
    code, out, _ = run()
    assert code == 0
    assert {certificate, same_name, same_label, token} <= place.list_all()
    stays = read_titles(out, "stays:")
    assert [line for line in stays if same_label in line]
    (line,) = [line for line in stays if line.startswith("Namespace treenail-ignition: ")]
    assert certificate in line
    left = {title for title in place.list_all() if " treenail-ignition/" in title}
    assert left == {certificate, "ServiceAccount treenail-ignition/default"}


def test_object_that_took_the_name_meanwhile_stays(server: LabServer, place: Place) -> None:
    """Another program replaces a ConfigMap between the list and the delete request."""
    name, namespace = "treenail-dashboard", "treenail"

    def replace(request: ApiRequest) -> ApiResponse | None:
        if request.method == "DELETE" and request.path.endswith(f"/{name}"):
            wire.before = lambda _: None
            place.client.delete(resources.CONFIGMAPS, name, namespace=namespace)
            body = make_object(resources.CONFIGMAPS, name, namespace=namespace)
            place.client.create(resources.CONFIGMAPS, body, namespace=namespace)
        return None

    with closing(Wire(server, place.kubeconfig)) as wire:
        wire.before = replace
        remover = uninstall._Remover(Client(wire), 2.0, deletes_crds=False)
        kept = remover.remove(remover.plan()[0])
    assert place.client.get(resources.CONFIGMAPS, name, namespace=namespace)
    assert f"treenail did not create ConfigMap {namespace}/{name}" in str(kept)


def test_token_that_a_server_creates_meanwhile_goes_too(server: LabServer, place: Place) -> None:
    def create(request: ApiRequest) -> None:
        if request.method == "DELETE" and "/daemonsets/" in request.path:
            place.add_tokens()

    with closing(Wire(server, place.kubeconfig)) as wire:
        wire.after = create
        remover = uninstall._Remover(Client(wire), 5.0, deletes_crds=False)
        remover.remove(remover.plan()[0])
    assert remover.problems == {}
    assert not [title for title in place.list_all() if title.startswith((TOKENS, BOOTSTRAP))]


def test_refused_deletion_is_named_and_the_rest_goes(
    server: LabServer, place: Place, run: Run
) -> None:
    user = server.write_kubeconfig("careful")
    rules = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]},
        *({"apiGroups": [group], "resources": ["*"], "verbs": ["delete"]}
          for group in ("", "apps", "batch", "policy")),
    ]  # fmt: skip
    metadata = {"name": "careful"}
    api = "rbac.authorization.k8s.io"
    place.put({"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": metadata,
               "rules": rules})  # fmt: skip
    place.put({"apiVersion": f"{api}/v1", "kind": "ClusterRoleBinding", "metadata": metadata,
               "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "careful"},
               "subjects": [{"apiGroup": api, "kind": "User", "name": "careful"}]})  # fmt: skip
    code, out, err = run(kubeconfig=user)
    assert code == 1
    assert TOKENS in read_titles(out)
    assert "Deployment treenail/treenail-controller" in read_titles(out)
    assert "cannot delete ClusterRole treenail-node: DELETE clusterroles treenail-node: " in err
    assert "use a cluster administrator (--kubeconfig FILE)" in err
    # A refusal is final.
    assert server.count_requests(user="careful", verb="delete", resource="clusterroles") == 3
    assert "ClusterRole treenail-node" in place.list_all()
    code, out, _ = run()
    assert code == 0
    assert "ClusterRole treenail-node" in read_titles(out)
    assert "ClusterRole careful" in place.list_all()


def test_kind_that_may_not_be_listed_is_named(server: LabServer, place: Place, run: Run) -> None:
    user = server.write_kubeconfig("blind")
    api = "rbac.authorization.k8s.io"
    groups = [resource.group for resource in discover_resources(place.client)[0]]
    rules = [{"apiGroups": [group for group in {*groups} if group != "apps"], "resources": ["*"],
              "verbs": ["*"]}]  # fmt: skip
    place.put({"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": "blind"},
               "rules": rules})  # fmt: skip
    place.put({"apiVersion": f"{api}/v1", "kind": "ClusterRoleBinding",
               "metadata": {"name": "blind"},
               "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "blind"},
               "subjects": [{"apiGroup": api, "kind": "User", "name": "blind"}]})  # fmt: skip
    code, out, err = run(kubeconfig=user)
    assert code == 1
    assert TOKENS in read_titles(out)
    assert "cannot list deployments: " in err
    assert "use a cluster administrator" in err
    assert "Namespace treenail: its content is unknown" in out
    assert "Namespace treenail" in place.list_all()
    assert run()[0] == 0
    assert "Namespace treenail" not in place.list_all()


def test_object_with_a_finalizer_is_named_until_it_goes(place: Place, run: Run) -> None:
    patch: Any = {"metadata": {"finalizers": ["example.com/keep"]}}
    place.client.patch(resources.SECRETS, "treenail-ignition-tokens", patch,
                       namespace="treenail-ignition")  # fmt: skip
    code, out, err = run()
    assert code == 1
    assert read_titles(out).count(TOKENS) == 1
    assert (
        f"cannot delete {TOKENS}: it still exists; its finalizers are ['example.com/keep'] start "
        "what must finish the deletion, or remove the finalizer; see: kubectl get secrets -n "
        "treenail-ignition treenail-ignition-tokens -o yaml"
    ) in err
    assert "Namespace treenail" not in place.list_all()
    patch = {"metadata": {"finalizers": None}}
    place.client.patch(resources.SECRETS, "treenail-ignition-tokens", patch,
                       namespace="treenail-ignition")  # fmt: skip
    assert run()[0] == 0


@pytest.mark.long("503")
@pytest.mark.parametrize("code", [500, 503])
def test_failing_request_is_repeated_and_then_named(
    server: LabServer, place: Place, run: Run, code: int
) -> None:
    match = FaultMatch(verb="delete", resource="clusterroles", name="treenail-node")
    server.inject_fault(RejectFault(code, retry_after_s=0), match, times=2)
    assert run()[0] == 0
    place.install()
    server.inject_fault(RejectFault(code, retry_after_s=0), match)
    ended, out, err = run()
    assert ended == 1
    assert "cannot delete ClusterRole treenail-node: DELETE clusterroles treenail-node: " in err
    assert "Deployment treenail/treenail-controller" in read_titles(out)
    server.lift_fault()
    assert run()[0] == 0


def add_pod(place: Place, **meta: Any) -> None:
    """Create a pod of the controllers, which its Node keeps from being collected."""
    place.client.create(resources.NODES, make_node("a"))
    labels = {**PART_OF_LABELS, "app.kubernetes.io/name": "treenail-controller"}
    uid = place.client.get(resources.NODES, "a")["metadata"]["uid"]  # type: ignore[index]  # a dict
    owner = {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": uid}
    meta = {"ownerReferences": [owner], **meta}
    spec = {"containers": [{"name": "main", "image": "i"}]}
    pod = make_object(resources.PODS, "pod", spec, labels=labels, **meta)
    place.client.create(resources.PODS, pod, namespace="default")


def test_pod_that_does_not_end_is_named(place: Place, run: Run) -> None:
    add_pod(place)
    code, out, err = run()
    assert code == 1
    assert "cannot stop Pod default/pod: it still runs, and may create objects again" in err
    assert "ClusterRole treenail-controller" in read_titles(out)
    place.client.delete(resources.PODS, "pod", namespace="default")
    assert run()[0] == 0


def test_pod_without_an_owner_is_of_a_user(place: Place, run: Run) -> None:
    add_pod(place, ownerReferences=[])
    code, out, _ = run()
    assert code == 0
    assert "Pod default/pod" in place.list_all()
    assert "Pod default/pod" not in out


def test_rest_goes_after_the_end_of_the_pods(server: LabServer, place: Place) -> None:
    add_pod(place)
    has_pods: list[bool] = []
    lists = 0

    def end_pod(request: ApiRequest) -> None:
        nonlocal lists
        lists += request.method == "GET" and request.path == "/api/v1/pods"
        if lists == 2:
            with suppress(NotFoundError):
                place.client.delete(resources.PODS, "pod", namespace="default")
        if request.method == "DELETE":
            has_pods.append("Pod default/pod" in place.list_all())

    with closing(Wire(server, place.kubeconfig)) as wire:
        wire.after = end_pod
        remover = uninstall._Remover(Client(wire), 20.0, deletes_crds=False)
        remover.remove(remover.plan()[0])
    assert remover.problems == {}
    # Both tokens, the DaemonSet and the Deployments.
    assert has_pods[:5] == [True] * 5
    assert not any(has_pods[5:])


def test_kind_whose_definition_goes_meanwhile_is_no_problem(
    server: LabServer, place: Place
) -> None:
    def lose(request: ApiRequest) -> ApiResponse | None:
        is_list = request.path == "/apis/monitoring.coreos.com/v1/podmonitors"
        return ApiResponse(404) if is_list else None

    with closing(Wire(server, place.kubeconfig)) as wire:
        wire.before = lose
        remover = uninstall._Remover(Client(wire), 2.0, deletes_crds=False)
        deleted, _ = remover.plan()
    assert remover.problems == {}
    assert "PodMonitor" not in str([item.title for item in deleted])


def test_dry_run_of_an_unreachable_cluster_fails(place: Place, run: Run, server: LabServer) -> None:
    server.inject_fault(RejectFault(503))
    code, out, err = run("--dry-run")
    assert (code, out) == (1, "")
    assert "cannot read the cluster" in err


class KilledError(TreenailError):
    """The process ends."""


@pytest.mark.long("each")
@pytest.mark.parametrize("step", [1, 7], ids=["each", "seventh"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_killed_run_is_finished_by_the_next(
    server: LabServer, place: Place, run: Run, step: int, is_after: bool
) -> None:
    """Kill each run at its next delete request, before or after the API server got it."""
    runs = 0
    while True:
        runs += 1
        with closing(Wire(server, place.kubeconfig)) as wire:
            kill_at(wire, step, is_after=is_after)
            remover = uninstall._Remover(Client(wire), 5.0, deletes_crds=True)
            with suppress(KilledError):
                remover.remove(remover.plan()[0])
                break
    assert runs > 50 / step
    assert remover.problems == {}
    assert not [title for title in place.list_all() if "treenail" in title]
    assert "nothing to remove" in run("--delete-crds")[1]


def kill_at(wire: Wire, count: int, *, is_after: bool) -> None:
    seen = 0

    def kill(request: ApiRequest) -> None:
        nonlocal seen
        seen += request.method == "DELETE"
        if request.method == "DELETE" and seen == count + (not is_after):
            raise KilledError("killed")

    if is_after:
        wire.after = kill
    else:
        wire.before = kill


def test_discovery_of_a_failing_group_keeps_namespaces(server: LabServer, place: Place) -> None:
    def fail(request: ApiRequest) -> ApiResponse | None:
        return ApiResponse(503) if request.path == "/apis/certificates.k8s.io/v1" else None

    with closing(Wire(server, place.kubeconfig)) as wire:
        wire.before = fail
        remover = uninstall._Remover(Client(wire), 2.0, deletes_crds=False)
        remover.remove(remover.plan()[0])
        assert list(remover.problems) == ["read the resources of certificates.k8s.io/v1"]
    assert "Namespace treenail" in place.list_all()
    assert "Deployment treenail/treenail-controller" not in place.list_all()


def test_objects_that_processes_create_have_the_label(place: Place, server: LabServer) -> None:
    """The Secret of tokens and the log of requests, in a namespace without manifests."""
    client = place.client
    client.create(resources.NAMESPACES, {"metadata": {"name": "other"}})
    store = TokenStore(client, "other", CLOCK)
    _, record = make_token("worker", expires=2e9, uses=1)
    store.change(lambda table: (table.put(record), None))
    RequestStore(client, "other", "treenail-ignition-requests").change_rows(lambda rows: rows)
    for resource, name in (
        (resources.SECRETS, "treenail-ignition-tokens"),
        (resources.CONFIGMAPS, "treenail-ignition-requests"),
    ):
        found: Any = client.get(resource, name, namespace="other")
        assert found["metadata"]["labels"] == PART_OF_LABELS
