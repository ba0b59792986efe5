"""Least privilege: each identity may do what the manifests grant it, and nothing more.

The kinds and verbs are those that the API server's discovery lists.
"""

import http.client
import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.client import Cluster, Json
from tests.contract.test_access import RBAC
from tests.controllers.access_matrix import (
    Cell,
    ServedResource,
    describe_cells,
    discover_resources,
    find_allowed_cells,
    find_granted_cells,
    find_named_cells,
    list_cells,
)
from tests.controllers.clusters import LIMIT_S, has_access
from tests.controllers.test_roles import MCO, Agents, run_alone
from tests.fixtures.clusters import KUBECONFIG
from tests.fixtures.objects import collection_of
from tests.records import write_record
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.controllers.pools import node_selection
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.health import HealthServer
from treenail.controllers.status.statuspage.server import EncodedDocument, StatusPageServer
from treenail.manifests import ignition_server, installation
from treenail.manifests.installation import NAME, InstallOptions
from treenail.manifests.objects import build_namespace
from treenail.manifests.permissions import CONTROLLER_VERBS, GROUP
from treenail.provisioning.tokens import bootstrap_tokens

pytestmark = [pytest.mark.integration]

COMMAND = "make test-long ARGS=tests/controllers/test_privileges.py"
CLUSTER_COMMAND = "make test-cluster: see docs/security.md"
NODES_GROUP = "system:nodes"
AUTHENTICATED = "system:authenticated"
NAMESPACES = ("default", "kube-system")
OURS = ("openshift.io", "treenail.io")
SECRETS = ("secrets", "configmaps")
EDITOR = "pool-editor"
POOLS, POLICIES = "machineconfigpools", "rolloutpolicies"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Attempts of identities on one API server."""

    admin: Cluster
    resources: list[ServedResource]
    own_namespace: str
    """That of the identity; empty without one."""
    server: str

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.own_namespace, *NAMESPACES)))

    def find_allowed(self, client: Cluster) -> set[Cell]:
        return find_allowed_cells(client, self.resources, self.namespaces)

    def find_granted(self, documents: list[Json], kind: str, name: str) -> set[Cell]:
        return find_granted_cells(documents, (kind, name), self.resources, self.namespaces)

    def check_account(
        self, client: Cluster, documents: list[Json], kind: str, name: str
    ) -> set[Cell]:
        """Require that the identity may do what the documents grant it; return the cells."""
        granted = self.find_granted(documents, kind, name)
        allowed = self.find_allowed(client)
        if (excess := allowed - granted) and kind == "ServiceAccount":
            # Kubernetes grants every account clustertrustbundles from 1.33 on.
            kinds = {cell.resource for cell in excess}
            resources = [each for each in self.resources if each.full_name in kinds]
            another = as_account(self.admin, "another", "default")
            allowed -= excess & find_allowed_cells(another, resources, self.namespaces)
        assert sort_cells(allowed - granted) == []
        assert sort_cells(granted - allowed) == []
        named, allowed_named = find_named_cells(
            client, documents, (kind, name), self.resources, self.namespaces
        )
        assert sort_cells(named - allowed_named) == []
        return allowed | allowed_named

    def record(self, identity: str, allowed: set[Cell]) -> None:
        cells = sum(1 for each in self.resources for _ in list_cells(each, self.namespaces))
        unnamed = sum(1 for each in allowed if not each.name)
        write_record(
            "privilege",
            what=f"every verb on every kind as {identity}, on {self.server}",
            count=cells,
            result=f"{unnamed} are allowed, as granted" if allowed else "none is allowed",
            command=CLUSTER_COMMAND if "real" in self.server else COMMAND,
            details={
                "identity": identity,
                "allowed": describe_cells(allowed, self.namespaces, self.own_namespace),
            },
        )


def make_matrix(kubeconfig: Path, own_namespace: str = "") -> Matrix:
    admin = Cluster.of_kubeconfig(kubeconfig)
    is_real = bool(KUBECONFIG) and kubeconfig == Path(KUBECONFIG)
    server = "a real kube-apiserver" if is_real else "the lab's API server"
    return Matrix(admin, discover_resources(admin), own_namespace, server)


def as_account(admin: Cluster, name: str, namespace: str, **_: object) -> Cluster:
    """Return a client of a service account."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED)
    return admin.as_user(f"system:serviceaccount:{namespace}:{name}", *groups)


def sort_cells(cells: set[Cell]) -> list[str]:
    return sorted(map(str, cells))


CONTROLLERS = [
    each if each == "drain" else pytest.param(each, marks=pytest.mark.long)
    for each in CONTROLLER_VERBS
]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_controller_has_the_verbs_of_its_manifests_and_no_other(
    kubeconfig: Path, tmp_path: Path, controller: str
) -> None:
    place = run_alone(kubeconfig, tmp_path, controller)
    try:
        matrix = make_matrix(kubeconfig, place.prefix)
        account = Cluster.of_kubeconfig(place.account_kubeconfig())
        wait_until(lambda: has_access(account), limit_s=LIMIT_S)
        documents = installation.build_documents(place.options)
        allowed = matrix.check_account(account, documents, "ServiceAccount", NAME)
        matrix.record(f"the controller {controller}", allowed)
        for other in documents:
            if other["kind"] == "ServiceAccount" and other["metadata"]["name"] != NAME:
                job = as_account(matrix.admin, **other["metadata"])
                assert matrix.check_account(job, documents, "ServiceAccount", "none") == set()
                matrix.record("a Job that builds an image", set())
    finally:
        place.remove()


@pytest.mark.long
def test_node_has_the_verbs_of_its_manifests_beyond_kubernetes(shared_kubeconfig: Path) -> None:
    matrix = make_matrix(shared_kubeconfig)
    granted = matrix.find_granted(installation.build_node_access(), "Group", NODES_GROUP)
    # Without the name of a node the Node authorizer of Kubernetes grants nothing.
    group_alone = matrix.admin.as_user("member-of-the-group", NODES_GROUP, AUTHENTICATED)
    documents = installation.build_node_access()
    allowed = matrix.check_account(group_alone, documents, "Group", NODES_GROUP)
    node = matrix.admin.as_user("system:node:absent-node", NODES_GROUP, AUTHENTICATED)
    cells = matrix.find_allowed(node) - granted
    others = {each for each in cells if each.resource.endswith(OURS) or each.resource in SECRETS}
    assert sort_cells(others) == []
    matrix.record("a node, beyond what Kubernetes gives each kubelet", allowed)


@pytest.mark.long
def test_user_without_a_role_and_anonymous_have_no_verb(shared_kubeconfig: Path) -> None:
    matrix = make_matrix(shared_kubeconfig)
    plain = matrix.admin.as_user("plain-user", AUTHENTICATED)
    for identity, client in (
        ("a user without a role", plain),
        ("a client without a credential", matrix.admin.as_bearer("")),
        ("a client with a wrong token", matrix.admin.as_bearer("wrong")),
    ):
        assert sort_cells(matrix.find_allowed(client)) == []
        matrix.record(identity, set())


@pytest.mark.long
def test_config_server_and_new_machine_have_the_verbs_of_their_manifests(
    shared_kubeconfig: Path,
) -> None:
    namespace = f"treenail-test-{secrets.token_hex(3)}"
    matrix = make_matrix(shared_kubeconfig, namespace)
    # The admission policy, which restricts names further, has tests of its own.
    kinds = ("Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole")
    documents = [
        each
        for each in ignition_server.build_server_documents(InstallOptions(), namespace)
        if each["kind"] in (*kinds, "ClusterRoleBinding")
    ]
    made = [f"{collection_of(each)}/{each['metadata']['name']}" for each in documents]
    bootstrapper = f"/apis/{RBAC}/clusterroles/system:node-bootstrapper"
    try:
        for path, document in zip(made, documents, strict=True):
            matrix.admin.apply(path, document, "tests").ok()
        server = as_account(matrix.admin, ignition_server.NAME, namespace)
        wait_until(lambda: server.get("/api/v1/nodes").code == 200, limit_s=LIMIT_S)
        role = {"kind": "ClusterRole", **matrix.admin.get(bootstrapper).ok()}
        granted = [*documents, role]
        allowed = matrix.check_account(server, granted, "ServiceAccount", ignition_server.NAME)
        matrix.record("the server of configs", allowed)
        machine = matrix.admin.as_user(
            "system:bootstrap:abcdef", "system:bootstrappers", bootstrap_tokens.GROUP, AUTHENTICATED
        )
        allowed = matrix.check_account(machine, granted, "Group", bootstrap_tokens.GROUP)
        matrix.record("a new machine with a bootstrap token", allowed)
    finally:
        for path in reversed(made):
            matrix.admin.delete(path)


@pytest.mark.long
def test_server_of_hosted_clusters_has_the_verbs_of_its_manifests(shared_kubeconfig: Path) -> None:
    place, plane = (f"treenail-test-{secrets.token_hex(3)}" for _ in range(2))
    matrix = make_matrix(shared_kubeconfig, plane)
    options = InstallOptions(serve_namespace=place, control_planes={plane: ""})
    kinds = ("Namespace", "ServiceAccount", "Role", "RoleBinding", "ConfigMap")
    documents = [build_namespace(plane, "restricted", {})] + [
        each for each in ignition_server.build_hosted_documents(options) if each["kind"] in kinds
    ]
    made = [f"{collection_of(each)}/{each['metadata']['name']}" for each in documents]
    try:
        for path, document in zip(made, documents, strict=True):
            matrix.admin.apply(path, document, "tests").ok()
        name = ignition_server.HOSTED_NAME
        server = as_account(matrix.admin, name, place)
        path = f"/api/v1/namespaces/{plane}/secrets"
        wait_until(lambda: server.get(path).code == 200, limit_s=LIMIT_S)
        allowed = matrix.check_account(server, documents, "ServiceAccount", name)
        matrix.record("the server of hosted clusters, in a control plane", allowed)
    finally:
        for path in reversed(made):
            matrix.admin.delete(path)


@pytest.mark.process
def test_reader_of_metrics_and_page_can_change_nothing() -> None:
    page = StatusPageServer("127.0.0.1", 0, lambda: EncodedDocument(b"{}", b""))
    health = HealthServer("127.0.0.1", 0, ControllerMetrics(), healthy=str, ready=str)
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    paths = ("/", "/status.json", "/metrics", "/healthz", "/readyz", "/config/worker", "/other")
    allowed: dict[str, list[str]] = {}
    count = 0
    with page, health:
        for port in (page.port, health.port):
            for method, path in itertools.product(methods, paths):
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
                client.request(method, path)
                if client.getresponse().status == 200:
                    allowed.setdefault(path, []).append(method)
                client.close()
                count += 1
    assert {*itertools.chain(*allowed.values())} == {"GET", "HEAD"}
    write_record(
        "privilege",
        what="every method on every path of the page and of the metrics, over HTTP",
        count=count,
        result="GET and HEAD of the documented paths are allowed",
        command="make test ARGS=tests/controllers/test_privileges.py",
        details={
            "identity": "a reader of the page or of metrics",
            "allowed": {path: " ".join(verbs) for path, verbs in sorted(allowed.items())},
        },
    )


@pytest.mark.long
def test_editor_of_pools_has_no_verb_on_nodes_and_configs(shared_kubeconfig: Path) -> None:
    matrix = make_matrix(shared_kubeconfig)
    rules: list[Json] = [
        {"apiGroups": [group], "resources": [plural], "verbs": ["get", "list", "patch", "watch"]}
        for group, plural in ((GROUP, POOLS), ("treenail.io", POLICIES))
    ]
    name = f"treenail-test-{EDITOR}"
    role: Json = {"kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}
    binding: Json = {
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC.partition("/")[0], "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": RBAC.partition("/")[0], "kind": "User", "name": EDITOR}],
    }
    made = [(f"/apis/{RBAC}/clusterroles", role), (f"/apis/{RBAC}/clusterrolebindings", binding)]
    try:
        for collection, body in made:
            matrix.admin.post(collection, body).ok()
        editor = matrix.admin.as_user(EDITOR, AUTHENTICATED)
        pools = f"{MCO}/{POOLS}"
        wait_until(lambda: editor.get(pools).code == 200, limit_s=LIMIT_S)
        allowed = matrix.find_allowed(editor)
        assert allowed == matrix.find_granted([role, binding], "User", EDITOR)
        matrix.record("an editor of pools", allowed)
    finally:
        for collection, _ in made:
            matrix.admin.delete(f"{collection}/{name}")


def test_node_cannot_take_the_label_of_another_role(agents: Agents) -> None:
    # A pool or a wave whose selector has an open label is open to each node.
    labels = (
        *("node-role.kubernetes.io/control-plane", "node-restriction.kubernetes.io/x"),
        *("a.node-restriction.kubernetes.io/x", "example.k8s.io/x", "kubernetes.io/canary"),
        *("example.com/pool", "canary", "topology.kubernetes.io/zone", "kubernetes.io/hostname"),
        *("a.kubelet.kubernetes.io/x", "node.kubernetes.io/instance-type", "beta.kubernetes.io/os"),
    )
    mine = f"/api/v1/nodes/{agents.mine}"
    codes = {
        label: agents.client.patch(mine, {"metadata": {"labels": {label: "x"}}}).code
        for label in labels
    }
    assert codes == {
        label: 200 if node_selection.can_node_set_label(label) else 403 for label in labels
    }
    assert list(codes.values()).count(403) == 5


def test_node_changes_annotations_of_its_own_node_only(agents: Agents) -> None:
    lies = {"metadata": {"annotations": {key.STATE: "Done", key.DESIRED_CONFIG: agents.config}}}
    assert agents.client.patch(f"/api/v1/nodes/{agents.mine}", lies).code == 200
    assert agents.client.patch(f"/api/v1/nodes/{agents.other}", lies).code == 403


@pytest.fixture
def agents(shared_kubeconfig: Path) -> Iterator[Agents]:
    found = Agents(shared_kubeconfig)
    try:
        found.arrange()
        yield found
    finally:
        found.remove()
