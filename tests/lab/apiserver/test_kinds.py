"""Kinds from definitions: several versions, real documents, and what nodes may do with them."""

from importlib import resources
from pathlib import Path

import pytest
import yaml

from tests.contract.client import APPLY, Cluster, Json
from tests.contract.conftest import GADGET, WIDGET, definition
from tests.oracle import ROOT, needs_oracle
from treenail_lab.apiserver.serving.server import LabServer

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MCO = "/apis/machineconfiguration.openshift.io/v1"
GROUP = "lab.example"


def at(version: str, name: str = "") -> str:
    return f"/apis/{GROUP}/{version}/namespaces/default/gadgets/{name}".rstrip("/")


def gadget(version: str, name: str) -> Json:
    return {"apiVersion": f"{GROUP}/{version}", "kind": "Gadget", "metadata": {"name": name}}


@pytest.fixture
def two_versions(admin: Cluster) -> None:
    document = definition(GROUP, "Gadget", "gadgets", GADGET, None)
    old = document["spec"]["versions"][0] | {"name": "v1beta1", "storage": False}
    document["spec"]["versions"].append(old)
    admin.post(CRDS, document).ok()


@pytest.mark.usefixtures("two_versions")
def test_object_is_served_in_every_version(admin: Cluster) -> None:
    admin.post(at("v1"), gadget("v1", "a") | {"x": 1}).ok()
    admin.post(at("v1beta1"), gadget("v1beta1", "b")).ok()
    for version in ("v1", "v1beta1"):
        listed = admin.get(at(version)).ok()
        assert {one["apiVersion"] for one in listed["items"]} == {f"{GROUP}/{version}"}
        assert len(listed["items"]) == 2
        with admin.watch(at(version)) as events:
            assert next(events)["object"]["apiVersion"] == f"{GROUP}/{version}"
    changed = admin.patch(at("v1beta1", "a"), {"x": 2}).ok()
    assert changed["apiVersion"] == f"{GROUP}/v1beta1"
    assert admin.get(at("v1", "a")).body["x"] == 2


@pytest.mark.usefixtures("two_versions")
def test_body_of_another_version_is_a_bad_request(admin: Cluster) -> None:
    assert admin.post(at("v1"), gadget("v1beta1", "a")).verdict == (400, "BadRequest")


@pytest.mark.usefixtures("two_versions")
def test_version_no_longer_served_is_not_found(admin: Cluster) -> None:
    versions = admin.get(f"{CRDS}/gadgets.{GROUP}").ok()["spec"]["versions"]
    versions[1]["served"] = False
    admin.patch(f"{CRDS}/gadgets.{GROUP}", {"spec": {"versions": versions}}).ok()
    assert admin.get(at("v1beta1")).code == 404
    assert admin.get(at("v1")).code == 200


def test_list_that_an_apply_empties_is_refused(admin: Cluster) -> None:
    """Like kube-apiserver: the list becomes null, which the schema does not allow."""
    admin.post(CRDS, definition(GROUP, "Widget", "widgets", WIDGET, {"status": {}})).ok()
    path = f"/apis/{GROUP}/v1/namespaces/default/widgets/w"
    body = {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": "w"}}
    admin.apply(path, body | {"spec": {"size": 1, "tags": ["a"]}}, "me").ok()
    answer = admin.apply(path, body | {"spec": {"size": 1}}, "me")
    assert answer.verdict == (422, "Invalid")
    assert {field for _, field in answer.causes} == {"spec.tags"}


def machine_config_kinds(cluster: Cluster) -> None:
    folder = resources.files("treenail.manifests").joinpath("crds")
    for entry in folder.iterdir():
        if entry.name.endswith(".yaml"):
            document = yaml.safe_load(entry.read_text("utf-8"))
            if document["spec"]["group"] in MCO:
                cluster.post(CRDS, document).ok()


@needs_oracle
@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "bootstrap" / "output" / "machine-configs").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_rendered_configs_of_a_real_cluster_are_kept_without_loss(
    admin: Cluster, path: Path
) -> None:
    machine_config_kinds(admin)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document.pop("status", None)
    document["metadata"].pop("creationTimestamp", None)
    document["metadata"].pop("ownerReferences", None)
    name = document["metadata"]["name"]
    admin.request("POST", f"{MCO}/machineconfigs", document).ok()
    found = admin.get(f"{MCO}/machineconfigs/{name}").ok()
    assert found["spec"] == document["spec"]
    assert found["metadata"].items() >= document["metadata"].items()


@pytest.fixture
def agent(lab: LabServer, admin: Cluster) -> Cluster:
    """Node a, in a cluster that has the MachineConfig kinds."""
    machine_config_kinds(admin)
    for name in "ab":
        body = {
            "apiVersion": "machineconfiguration.openshift.io/v1",
            "kind": "MachineConfigNode",
            "metadata": {"name": name},
            "spec": {"node": {"name": name}, "pool": {"name": "worker"},
                     "configVersion": {"desired": "not-yet-set"}},
        }  # fmt: skip
        admin.post(f"{MCO}/machineconfignodes", body).ok()
    return Cluster.of_kubeconfig(lab.write_node_kubeconfig("a"))


def status(name: str) -> Json:
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfigNode",
        "metadata": {"name": name},
        "status": {"configVersion": {"desired": "rendered-worker-1"}},
    }


def test_rbac_does_not_let_a_node_report_on_another_one(admin: Cluster, agent: Cluster) -> None:
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["*"], "resources": ["machineconfignodes/status"], "verbs": ["*"]}
    role = {"metadata": {"name": "nodes"}, "rules": [rule]}
    admin.post(f"/apis/{rbac}/v1/clusterroles", role).ok()
    binding = {
        "metadata": {"name": "nodes"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "nodes"},
        "subjects": [{"apiGroup": rbac, "kind": "Group", "name": "system:nodes"}],
    }
    admin.post(f"/apis/{rbac}/v1/clusterrolebindings", binding).ok()
    at_other = f"{MCO}/machineconfignodes/b/status"
    for answer in (
        agent.patch(at_other, status("b")),
        agent.patch(at_other, status("b"), APPLY, fieldManager="agent"),
    ):
        assert answer.verdict == (403, "Forbidden")
        assert "of its own name" in answer.body["message"]
