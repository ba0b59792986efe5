"""Least privilege: each identity may do what the manifests grant it, and nothing more.

The kinds and verbs are those that the API server's discovery lists.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.client import Cluster, Json
from tests.contract.test_access import RBAC
from tests.controllers.access_matrix import (
    Cell,
    ServedResource,
    discover_resources,
    find_allowed_cells,
    find_granted_cells,
    list_cells,
)
from tests.controllers.clusters import LIMIT_S
from tests.controllers.test_roles import MCO, Agents, run_alone
from tests.fixtures.clusters import KUBECONFIG
from tests.records import write_record
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.controllers.pools import node_selection
from treenail.manifests import installation
from treenail.manifests.installation import NAME
from treenail.manifests.permissions import CONTROLLER_VERBS, GROUP

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
    namespaces: tuple[str, ...]
    server: str

    def find_allowed(self, client: Cluster) -> set[Cell]:
        return find_allowed_cells(client, self.resources, self.namespaces)

    def find_granted(self, documents: list[Json], kind: str, name: str) -> set[Cell]:
        return find_granted_cells(documents, (kind, name), self.resources, self.namespaces)

    def record(self, identity: str, allowed: int) -> None:
        cells = sum(1 for each in self.resources for _ in list_cells(each, self.namespaces))
        write_record(
            "privilege",
            what=f"every verb on every kind as {identity}, on {self.server}",
            count=cells,
            result=f"{allowed} are allowed, as granted" if allowed else "none is allowed",
            command=CLUSTER_COMMAND if "real" in self.server else COMMAND,
        )


def make_matrix(kubeconfig: Path, *namespaces: str) -> Matrix:
    admin = Cluster.of_kubeconfig(kubeconfig)
    is_real = bool(KUBECONFIG) and kubeconfig == Path(KUBECONFIG)
    server = "a real kube-apiserver" if is_real else "the lab's API server"
    return Matrix(admin, discover_resources(admin), (*namespaces, *NAMESPACES), server)


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
        wait_until(lambda: account.get("/api/v1/nodes").code == 200, limit_s=LIMIT_S)
        documents = installation.build_documents(place.options)
        granted = matrix.find_granted(documents, "ServiceAccount", NAME)
        allowed = matrix.find_allowed(account)
        assert sort_cells(allowed - granted) == []
        assert sort_cells(granted - allowed) == []
        matrix.record(f"the controller {controller}", len(allowed))
    finally:
        place.remove()


@pytest.mark.long
def test_node_has_the_verbs_of_its_manifests_beyond_kubernetes(shared_kubeconfig: Path) -> None:
    matrix = make_matrix(shared_kubeconfig)
    granted = matrix.find_granted(installation.build_node_access(), "Group", NODES_GROUP)
    # Without the name of a node the Node authorizer of Kubernetes grants nothing.
    group_alone = matrix.admin.as_user("member-of-the-group", NODES_GROUP, AUTHENTICATED)
    allowed = matrix.find_allowed(group_alone)
    assert sort_cells(allowed - granted) == []
    assert sort_cells(granted - allowed) == []
    node = matrix.admin.as_user("system:node:absent-node", NODES_GROUP, AUTHENTICATED)
    cells = matrix.find_allowed(node) - granted
    others = {each for each in cells if each.resource.endswith(OURS) or each.resource in SECRETS}
    assert sort_cells(others) == []
    matrix.record("a node", len(allowed))


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
        matrix.record(identity, 0)


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
        matrix.record("an editor of pools", len(allowed))
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
