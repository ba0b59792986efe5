"""The agent and each controller with their own role only, on the lab and on a real API server."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import STRATEGIC, Answer, Cluster, Json
from tests.contract.csr import REQUESTS
from tests.controllers.clusters import LIMIT_S, Place, has_access
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import MACHINECONFIGS, NODES
from treenail.manifests.installation import NODE_ROLE_NAME
from treenail.manifests.permissions import CONTROLLER_VERBS

pytestmark = [pytest.mark.integration]

GROUP = "machineconfiguration.openshift.io/v1"
MCO = f"/apis/{GROUP}"
EVENTS = "/api/v1/namespaces/default/events"
CAPI = "/apis/cluster.x-k8s.io/v1beta2/namespaces/default"
Attempt = tuple[str, str, object]


def run_alone(kubeconfig: Path, folder: Path, controller: str) -> Place:
    """Install one controller, with its permissions only."""
    place = Place(kubeconfig, folder, (controller,))
    try:
        place.install()
    except BaseException:
        place.remove()
        raise
    return place


def test_render_role_suffices_to_render(kubeconfig: Path, tmp_path: Path) -> None:
    place = run_alone(kubeconfig, tmp_path, "render")
    try:
        node = place.node("n1")
        place.config("00", kernelArguments=["a=1"])
        place.pool()
        with place.controllers():
            rendered = wait_until(place.rendered, limit_s=LIMIT_S)
            found: Any = place.client.get(MACHINECONFIGS, rendered)
        assert found["spec"]["kernelArguments"] == ["a=1"]
        assert key.DESIRED_CONFIG not in place.notes(node)
    finally:
        place.remove()


def test_rollout_role_suffices_to_assign_a_config(kubeconfig: Path, tmp_path: Path) -> None:
    place = run_alone(kubeconfig, tmp_path, "rollout")
    try:
        node = place.node("n1")
        target = place.config("rendered")
        notes = {key.CURRENT_CONFIG: target, key.DESIRED_CONFIG: target, key.STATE: "Done"}
        place.client.patch(NODES, node, {"metadata": {"annotations": notes}})
        place.pool(configuration={"name": place.config("rendered-2")})
        with place.controllers():
            wait_until(
                lambda: place.notes(node)[key.DESIRED_CONFIG] == f"rendered-2-{place.prefix}",
                limit_s=LIMIT_S,
            )
            wait_until(lambda: place.condition("Updating").get("status") == "True", limit_s=LIMIT_S)
        assert not place.cordoned(node)
    finally:
        place.remove()


def test_drain_role_suffices_to_drain_and_uncordon(kubeconfig: Path, tmp_path: Path) -> None:
    place = run_alone(kubeconfig, tmp_path, "drain")
    try:
        node = place.node("n1")
        place.pod(node, "web", "web")
        with place.controllers():
            for request, is_cordoned in (("drain-x", True), ("uncordon-x", False)):
                notes: Json = {key.DESIRED_DRAIN: request}
                place.client.patch(NODES, node, {"metadata": {"annotations": notes}})
                wait_until(
                    lambda request=request: (
                        place.notes(node).get(key.LAST_APPLIED_DRAIN)  # type: ignore[misc]
                        == request
                    ),
                    limit_s=LIMIT_S,
                )
                assert place.cordoned(node) is is_cordoned
                assert place.pods() == set()
    finally:
        place.remove()


NEVER: tuple[Attempt, ...] = (
    ("GET", "/api/v1/secrets", None),
    ("GET", "/api/v1/namespaces/default/configmaps", None),
    ("DELETE", "/api/v1/nodes/absent", None),
    ("DELETE", "/api/v1/namespaces/default/pods/absent", None),
    ("POST", "/api/v1/namespaces/default/pods/absent/exec", {}),
    ("PATCH", "/api/v1/nodes/absent/status", {}),
    ("DELETE", f"{MCO}/machineconfigpools/absent", None),
    ("PATCH", f"{MCO}/machineconfigs/absent", {}),
    ("PATCH", "/apis/treenail.io/v1alpha1/rolloutpolicies/absent", {}),
    ("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles", None),
    ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {"metadata": {}}),
)
OTHERS: dict[str, tuple[Attempt, ...]] = {
    "render": (
        ("PATCH", "/api/v1/nodes/absent", {}),
        ("GET", "/api/v1/pods", None),
        ("PATCH", f"{MCO}/machineconfignodes/absent", {}),
    ),
    "generate": (
        ("PATCH", "/api/v1/nodes/absent", {}),
        ("GET", "/api/v1/pods", None),
        ("PATCH", f"{MCO}/machineconfigpools/absent", {}),
        ("GET", "/apis/apps/v1/deployments", None),
    ),
    "rollout": (
        ("POST", f"{MCO}/machineconfigs", {"metadata": {"name": "a"}}),
        ("PATCH", f"{MCO}/machineconfigpools/absent", {}),
        ("POST", "/api/v1/namespaces/default/pods/absent/eviction", {}),
        ("PATCH", f"{MCO}/machineconfignodes/absent/status", {}),
    ),
    "drain": (
        ("GET", f"{MCO}/machineconfigs", None),
        ("PATCH", f"{MCO}/machineconfigpools/absent/status", {}),
        ("PATCH", f"{MCO}/machineconfignodes/absent", {}),
    ),
    "approve": (
        ("GET", "/api/v1/pods", None),
        ("PATCH", f"{MCO}/machineconfigpools/absent/status", {}),
        ("GET", f"{MCO}/machineconfigs", None),
        ("DELETE", f"{REQUESTS}/absent", None),
        ("PUT", f"{REQUESTS}/absent/status", {}),
        ("POST", REQUESTS, {"metadata": {"name": "a"}}),
    ),
    "build": (
        ("PATCH", "/api/v1/nodes/absent", {}),
        ("POST", f"{MCO}/machineconfigs", {"metadata": {"name": "a"}}),
        ("PATCH", f"{MCO}/machineconfigpools/absent", {}),
        ("DELETE", f"{MCO}/machineosconfigs/absent", None),
        ("POST", "/apis/batch/v1/namespaces/default/jobs", {"metadata": {"name": "a"}}),
    ),
    "install": (
        ("GET", "/api/v1/pods", None),
        ("POST", f"{MCO}/machineconfigs", {"metadata": {"name": "a"}}),
        ("PATCH", f"{MCO}/machineconfigpools/absent/status", {}),
        ("DELETE", f"{MCO}/machineosconfigs/absent", None),
        ("POST", "/apis/batch/v1/namespaces/default/jobs", {"metadata": {"name": "a"}}),
    ),
    # Without the Role of a control plane.
    "hosted": (
        ("PATCH", "/api/v1/nodes/absent", {}),
        ("PATCH", f"{MCO}/machineconfigpools/absent/status", {}),
        ("GET", "/api/v1/namespaces/default/configmaps/treenail-rollouts", None),
        ("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": "a"}}),
        ("GET", "/api/v1/namespaces/default/secrets/admin-kubeconfig", None),
        ("DELETE", "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machines/absent", None),
        ("GET", "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machines/absent", None),
        ("PATCH", "/apis/hypershift.openshift.io/v1beta1/namespaces/default/nodepools/absent", {}),
    ),
    # Without the Roles of a control plane and of a namespace of NodePools.
    "nodepools": (
        ("PATCH", "/api/v1/nodes/absent", {}),
        ("GET", "/api/v1/namespaces/default/configmaps/absent", None),
        ("GET", "/api/v1/namespaces/default/secrets/admin-kubeconfig", None),
        ("POST", "/api/v1/namespaces/default/secrets", {"metadata": {"name": "a"}}),
        ("DELETE", f"{CAPI}/machines/absent", None),
        ("DELETE", f"{CAPI}/machinedeployments/absent", None),
        ("PATCH", f"{CAPI}/machinesets/absent", {}),
        ("PATCH", "/apis/hypershift.openshift.io/v1beta1/namespaces/default/nodepools/absent", {}),
    ),
}


def find_allowed(client: Cluster, attempts: tuple[Attempt, ...]) -> list[tuple[str, str, int]]:
    """Return the attempts that the API server did not refuse as forbidden."""
    found = []
    for method, path, body in attempts:
        if method == "PATCH":
            answer = client.patch(path, body)
        else:
            answer = client.request(method, path, body)
        if answer.verdict != (403, "Forbidden"):
            found.append((method, path, answer.code))
    return found


@pytest.mark.parametrize("controller", CONTROLLER_VERBS)
def test_controller_is_refused_what_others_do(
    kubeconfig: Path, tmp_path: Path, controller: str
) -> None:
    place = run_alone(kubeconfig, tmp_path, controller)
    try:
        account = Cluster.of_kubeconfig(place.account_kubeconfig())
        wait_until(lambda: has_access(account), limit_s=LIMIT_S)
        assert find_allowed(account, NEVER + OTHERS[controller]) == []
        # In its own namespace it reads no Secret but those of gates, builds and installations.
        secret = f"/api/v1/namespaces/{place.prefix}/secrets/absent"
        readers = ("rollout", "build", "install", "hosted")
        assert account.get(secret).code == (404 if controller in readers else 403)
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{place.prefix}/leases"
        assert account.get(lease).code == 403
        assert account.get(f"{lease}/other").code == 403
    finally:
        place.remove()


class Agents:
    """Two nodes, their credentials, and the objects that their agents use."""

    def __init__(self, kubeconfig: Path) -> None:
        self.admin = Cluster.of_kubeconfig(kubeconfig)
        prefix = f"treenail-test-{secrets.token_hex(3)}"
        self.mine, self.other = f"{prefix}-a", f"{prefix}-b"
        self.config = f"rendered-{prefix}"
        self.client = self.admin.as_user(f"system:node:{self.mine}", "system:nodes")
        self._made: list[str] = []

    def make(self, collection: str, document: Json) -> None:
        self.admin.post(collection, document).ok()
        self._made.append(f"{collection}/{document['metadata']['name']}")

    def arrange(self) -> None:
        for name in (self.mine, self.other):
            self.make("/api/v1/nodes", {"metadata": {"name": name}})
            spec = {
                "node": {"name": name},
                "pool": {"name": "worker"},
                "configVersion": {"desired": self.config},
            }
            self.make(f"{MCO}/machineconfignodes", document("MachineConfigNode", name, spec))
        spec = {"config": {"ignition": {"version": "3.5.0"}}}
        self.make(f"{MCO}/machineconfigs", document("MachineConfig", self.config, spec))

    def report(self, name: str) -> Answer:
        """Apply the status of a MachineConfigNode, as the agent does."""
        body = document("MachineConfigNode", name, None)
        body["status"] = {"configVersion": {"desired": self.config}}
        return self.client.apply(f"{MCO}/machineconfignodes/{name}/status", body, "treenail")

    def remove(self) -> None:
        for place in reversed(self._made):
            self.admin.delete(place)


def document(kind: str, name: str, spec: Json | None) -> Json:
    found: Json = {"apiVersion": GROUP, "kind": kind, "metadata": {"name": name}}
    return found | ({} if spec is None else {"spec": spec})


@pytest.fixture
def agents(shared_kubeconfig: Path) -> Iterator[Agents]:
    found = Agents(shared_kubeconfig)
    try:
        found.arrange()
        yield found
    finally:
        found.remove()


def test_node_role_suffices_for_the_agent(agents: Agents) -> None:
    client, mine = agents.client, f"/api/v1/nodes/{agents.mine}"
    notes = {"metadata": {"annotations": {key.STATE: "Working"}}}
    assert client.get(mine).code == 200
    assert client.patch(mine, notes).code == 200
    conditions = {"status": {"conditions": [{"type": "treenail.io/Warm", "status": "True"}]}}
    assert client.patch(f"{mine}/status", conditions, STRATEGIC).code == 200
    assert client.get("/api/v1/nodes", fieldSelector=f"metadata.name={agents.mine}").code == 200
    assert client.get(f"{MCO}/machineconfigs/{agents.config}").code == 200
    assert client.get("/apis/operator.openshift.io/v1/machineconfigurations/cluster").code == 404
    controller_config = f"{MCO}/controllerconfigs"
    selector = "metadata.name=machine-config-controller"
    assert client.get(controller_config, fieldSelector=selector).code == 200
    with client.watch(controller_config, fieldSelector=selector, timeoutSeconds=1):
        pass
    assert agents.report(agents.mine).code == 200
    event = {
        "metadata": {"name": f"{agents.mine}.1"},
        "involvedObject": {"kind": "Node", "name": agents.mine},
        "reason": "Staging",
        "message": "",
    }
    assert client.post(EVENTS, event).code == 201
    assert client.patch(f"{EVENTS}/{agents.mine}.1", {"count": 2}).code == 200
    agents.admin.delete(f"{EVENTS}/{agents.mine}.1")


def test_agent_is_refused_what_is_not_its_own(agents: Agents) -> None:
    mine, other = (f"{MCO}/machineconfignodes/{name}" for name in (agents.mine, agents.other))
    config = f"{MCO}/machineconfigs/{agents.config}"
    attempts: tuple[Attempt, ...] = (
        # The Node authorizer lets a node write some objects; its admission refuses those of others.
        *(attempt for attempt in NEVER if "/absent" not in attempt[1] or MCO in attempt[1]),
        ("DELETE", f"/api/v1/nodes/{agents.other}", None),
        ("PATCH", f"/api/v1/nodes/{agents.other}/status", {"status": {"phase": "Running"}}),
        ("PATCH", f"/api/v1/nodes/{agents.other}", {"metadata": {"annotations": {"a": "1"}}}),
        ("GET", f"{MCO}/machineconfigs", None),
        ("PATCH", config, {"spec": {"kernelArguments": ["a"]}}),
        ("DELETE", config, None),
        ("GET", mine, None),
        ("GET", f"{mine}/status", None),
        ("PATCH", mine, {"spec": {"pool": {"name": "other"}}}),
        ("GET", other, None),
        ("GET", f"{MCO}/controllerconfigs", None),
        # The agent watches it.
        ("GET", f"{MCO}/controllerconfigs/machine-config-controller", None),
        ("GET", f"{MCO}/machineconfigpools", None),
        ("GET", "/apis/operator.openshift.io/v1/machineconfigurations", None),
        ("GET", EVENTS, None),
    )
    assert find_allowed(agents.client, attempts) == []
    reserved = {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}
    answer = agents.client.patch(f"/api/v1/nodes/{agents.mine}", reserved)
    assert "is not allowed to modify labels" in answer.body["message"]


def test_policy_keeps_an_agent_off_other_machineconfignodes(agents: Agents) -> None:
    # The API server begins to enforce a policy some time after its creation.
    refused = wait_until(lambda: is_forbidden(agents.report(agents.other)), limit_s=30)
    assert refused.body["message"] == (
        f'machineconfignodes.machineconfiguration.openshift.io "{agents.other}" is forbidden: '
        f"ValidatingAdmissionPolicy '{NODE_ROLE_NAME}' with binding '{NODE_ROLE_NAME}' denied "
        "request: a node may write only the MachineConfigNode of its own name"
    )
    assert agents.report(agents.mine).code == 200


def is_forbidden(answer: Answer) -> Answer | None:
    return answer if answer.verdict == (403, "Forbidden") else None
