"""The servers that the contract is tried on: the lab's, and the cluster one has."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.client import Cluster, Json
from tests.contract.space import Space, pod
from tests.waiting import wait_until
from treenail_lab.apiserver.serving.server import LabServer

KUBECONFIG = os.environ.get("TREENAIL_TEST_KUBECONFIG", "")


@pytest.fixture(scope="session")
def lab_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with LabServer(tmp_path_factory.mktemp("lab")) as server:
        # The real one, which only the real cluster keeps, is 10 seconds.
        server.api.controllers.jobs.first_backoff_s = 0.2
        yield Cluster.of_kubeconfig(server.admin_kubeconfig)


@pytest.fixture(
    scope="session",
    params=[
        "lab",
        pytest.param(
            "real",
            marks=[
                pytest.mark.cluster,
                pytest.mark.skipif(not KUBECONFIG, reason="TREENAIL_TEST_KUBECONFIG is not set"),
            ],
        ),
    ],
)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The server, as one who may do everything."""
    if request.param == "lab":
        return request.getfixturevalue("lab_cluster")
    return Cluster.of_kubeconfig(Path(KUBECONFIG))


@pytest.fixture(autouse=True)
def controllers(request: pytest.FixtureRequest) -> None:
    """Skip tests that need the controllers of a real cluster that has none."""
    if request.node.get_closest_marker("controllers") and "real" in request.node.name:
        cluster: Cluster = request.getfixturevalue("cluster")
        if not cluster.has_controllers():
            pytest.skip("no kube-controller-manager serves the cluster")


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Space]:
    """A fresh namespace."""
    name = f"treenail-contract-{secrets.token_hex(4)}"
    cluster.post("/api/v1/namespaces", {"metadata": {"name": name}}).ok()
    found = Space(cluster, name)
    # Pods are admitted once the namespace's service account is complete.
    wait_until(lambda: cluster.post(found.at("pods"), pod("try"), dryRun="All").code == 201)
    yield found
    cluster.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def group(cluster: Cluster) -> Iterator[str]:
    """An API group of the test's own with the kinds Widget and Gadget; ``GROUP/v1``.

    Widgets have a schema and a status subresource, Gadgets keep what they are given.
    """
    name = f"contract-{secrets.token_hex(4)}.treenail.example"
    definitions = [
        definition(name, "Widget", "widgets", WIDGET, {"status": {}}),
        definition(name, "Gadget", "gadgets", GADGET, None),
    ]
    base = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for document in definitions:
        cluster.post(base, document).ok()
    for plural in ("widgets", "gadgets"):
        wait_until(lambda p=plural: cluster.get(f"/apis/{name}/v1/{p}").code == 200, limit_s=30)
    yield f"{name}/v1"
    for document in definitions:
        cluster.delete(f"{base}/{document['metadata']['name']}")


@pytest.fixture
def minor(cluster: Cluster) -> int:
    """The server's minor version, for what not all versions do; 0 when it does not say."""
    return int(cluster.get("/version").ok()["minor"].rstrip("+") or 0)


@pytest.fixture
def policy(cluster: Cluster) -> str:
    """The API version of budgets and evictions: servers before 1.22 know an older one only."""
    served = cluster.get("/apis/policy").ok()["versions"]
    versions = {entry["groupVersion"] for entry in served}
    return "policy/v1" if "policy/v1" in versions else "policy/v1beta1"


def definition(group: str, kind: str, plural: str, schema: Json, subresources: Json | None) -> Json:
    """A CustomResourceDefinition with one version."""
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    if subresources is not None:
        version["subresources"] = subresources
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind,
                      "listKind": f"{kind}List"},
            "versions": [version],
        },
    }  # fmt: skip


_PORT = {
    "type": "object",
    "required": ["name", "port"],
    "properties": {
        "name": {"type": "string"},
        "port": {"type": "integer", "format": "int32"},
        "note": {"type": "string"},
    },
}
WIDGET: Json = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["size"],
            "properties": {
                "size": {"type": "integer", "minimum": 1, "maximum": 10},
                "mode": {"type": "string", "enum": ["slow", "fast"], "default": "slow"},
                "code": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
                "ratio": {"type": "number"},
                "maybe": {"type": "string", "nullable": True},
                "sure": {"type": "string", "default": "yes"},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3,
                         "x-kubernetes-list-type": "set"},
                "words": {"type": "array", "items": {"type": "string"}},
                "ports": {"type": "array", "items": _PORT, "x-kubernetes-list-type": "map",
                          "x-kubernetes-list-map-keys": ["name"]},
                "weights": {"type": "object", "additionalProperties": {"type": "integer"}},
                "deep": {"type": "object", "default": {},
                         "properties": {"level": {"type": "integer", "default": 1}}},
            },
        },
        "status": {
            "type": "object",
            "properties": {
                "phase": {"type": "string"},
                "count": {"type": "integer", "minimum": 0},
                "conditions": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "status"],
                        "properties": {"type": {"type": "string"}, "status": {"type": "string"},
                                       "message": {"type": "string"}},
                    },
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["type"],
                },
            },
        },
    },
}  # fmt: skip
GADGET: Json = {
    "type": "object",
    "x-kubernetes-preserve-unknown-fields": True,
    "properties": {"limit": {"x-kubernetes-int-or-string": True}},
}
