"""The scheduler binds pods to Nodes of the role builder, and says why it cannot."""

from typing import Any

import pytest

from tests.contract.client import Cluster, Json
from tests.waiting import wait_until

PODS = "/api/v1/namespaces/default/pods"
LABELS = {"node-role.kubernetes.io/builder": "", "kubernetes.io/arch": "amd64"}


def add_node(admin: Cluster, name: str, *, why: str = "", **spec: Any) -> None:
    body = {"metadata": {"name": name, "labels": LABELS}, "spec": spec}
    admin.post("/api/v1/nodes", body).ok()
    ready = {"type": "Ready", "status": "False" if why else "True", "message": why}
    admin.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}}).ok()


def add_pod(admin: Cluster, **spec: Any) -> None:
    containers = [{"name": "c", "image": "i"}]
    body = {"metadata": {"name": "p"}, "spec": {"containers": containers} | spec}
    admin.post(PODS, body).ok()


def read_pod(admin: Cluster) -> Json:
    return admin.get(f"{PODS}/p").ok()


def read_refusal(admin: Cluster) -> str:
    for condition in read_pod(admin)["status"].get("conditions", []):
        if (condition["type"], condition["status"]) == ("PodScheduled", "False"):
            return str(condition["message"])
    return ""


def test_pod_is_bound_to_the_node_with_the_fewest_pods(admin: Cluster) -> None:
    for name in ("one", "two"):
        add_node(admin, name)
    other = {"containers": [{"name": "c", "image": "i"}], "nodeName": "one"}
    admin.post(PODS, {"metadata": {"name": "other"}, "spec": other}).ok()
    add_pod(admin, nodeSelector={"kubernetes.io/arch": "amd64"})
    wait_until(lambda: read_pod(admin)["spec"].get("nodeName") == "two")


def test_message_of_a_node_that_cannot_build_reaches_the_pod(admin: Cluster) -> None:
    why = "buildah is not installed: install the package buildah"
    add_node(admin, "n", why=why)
    add_pod(admin)
    wait_until(lambda: why in read_refusal(admin))
    ready = {"type": "Ready", "status": "True"}
    admin.patch("/api/v1/nodes/n/status", {"status": {"conditions": [ready]}}).ok()
    wait_until(lambda: read_pod(admin)["spec"].get("nodeName") == "n")


@pytest.mark.parametrize(
    ("node", "pod", "cause"),
    [
        ({}, {"nodeSelector": {"kubernetes.io/arch": "arm64"}}, "didn't match"),
        ({"unschedulable": True}, {}, "were unschedulable"),
        ({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}, {}, "untolerated taint"),
    ],
)
def test_pod_that_no_node_takes_names_the_cause(
    admin: Cluster, node: Json, pod: Json, cause: str
) -> None:
    add_node(admin, "n", **node)
    add_pod(admin, **pod)
    wait_until(lambda: cause in read_refusal(admin))


def test_tolerated_taint_and_matching_affinity_allow_a_pod(admin: Cluster) -> None:
    add_node(admin, "n", taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}])
    expression = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    add_pod(
        admin,
        tolerations=[{"key": "k", "operator": "Exists"}],
        affinity={"nodeAffinity": rule},
    )
    wait_until(lambda: read_pod(admin)["spec"].get("nodeName") == "n")
