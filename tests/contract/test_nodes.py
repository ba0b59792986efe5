"""Permissions of a node's credentials (Node authorizer, NodeRestriction)."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.client import STRATEGIC, Answer, Cluster, Json
from tests.contract.space import Space, pod
from tests.waiting import wait_until

NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# Since this minor version a node can read only its own objects.
READS_OWN = 32


@pytest.fixture
def names(space: Space) -> Iterator[tuple[str, str]]:
    """Create two Nodes without a kubelet."""
    found = (f"{space.name}-a", f"{space.name}-b")
    for name in found:
        node = {"metadata": {"name": name}, "spec": {"unschedulable": True}}
        space.cluster.post(NODES, node).ok()
    yield found
    for name in found:
        space.cluster.delete(f"{NODES}/{name}")


@pytest.fixture
def node(space: Space, names: tuple[str, str]) -> Cluster:
    """A client with the credentials of the first node."""
    return space.cluster.as_user(f"system:node:{names[0]}", "system:nodes")


def refused(answer: Answer, *words: str) -> bool:
    said = answer.body.get("message", "")
    return answer.verdict == (403, "Forbidden") and all(word in said for word in words)


def annotated(**annotations: str) -> Json:
    return {"metadata": {"annotations": {f"example.com/{k}": v for k, v in annotations.items()}}}


def labelled(name: str) -> Json:
    return {"metadata": {"labels": {name: "x"}}}


def test_node_changes_itself(node: Cluster, names: tuple[str, str]) -> None:
    at = f"{NODES}/{names[0]}"
    assert node.get(at).code == 200
    assert node.patch(at, annotated(a="1")).code == 200
    assert node.patch(at, {"spec": {"unschedulable": False}}).code == 200
    condition = {"type": "example.com/Warm", "status": "True"}
    status = {"status": {"conditions": [condition]}}
    assert node.patch(f"{at}/status", status, STRATEGIC).code == 200


def test_node_cannot_change_another_one(node: Cluster, names: tuple[str, str]) -> None:
    mine, other = names
    words = f'node "{mine}" is not allowed to modify node "{other}"'
    at = f"{NODES}/{other}"
    assert refused(node.patch(at, annotated(a="1")), words)
    assert refused(node.patch(f"{at}/status", {"status": {"phase": "x"}}), words)
    assert refused(node.delete(at))


def test_node_reads_no_other_one(node: Cluster, names: tuple[str, str], minor: int) -> None:
    if minor < READS_OWN:
        pytest.skip("nodes of this server may read each other")
    assert refused(node.get(f"{NODES}/{names[1]}"))
    assert refused(node.get(NODES))
    assert refused(node.get(NODES, fieldSelector=f"metadata.name={names[1]}"))


def test_node_lists_and_watches_itself(node: Cluster, names: tuple[str, str]) -> None:
    selector = f"metadata.name={names[0]}"
    listed = node.get(NODES, fieldSelector=selector).ok()
    assert [one["metadata"]["name"] for one in listed["items"]] == [names[0]]
    with node.watch(NODES, fieldSelector=selector, timeoutSeconds=10) as events:
        assert next(events)["object"]["metadata"]["name"] == names[0]


@pytest.mark.parametrize(
    "label",
    ["node-restriction.kubernetes.io/a", "node-role.kubernetes.io/master", "example.k8s.io/a"],
)
def test_node_cannot_give_itself_reserved_labels(
    node: Cluster, names: tuple[str, str], label: str
) -> None:
    answer = node.patch(f"{NODES}/{names[0]}", labelled(label))
    assert refused(answer, "is not allowed to modify labels", label)


@pytest.mark.parametrize(
    "label",
    [
        "example.com/a",
        "a",
        "kubernetes.io/arch",
        "node.kubernetes.io/a",
        "x.kubelet.kubernetes.io/a",
    ],
)
def test_node_can_give_itself_other_labels(
    node: Cluster, names: tuple[str, str], label: str
) -> None:
    assert node.patch(f"{NODES}/{names[0]}", labelled(label)).code == 200


def test_node_cannot_change_its_taints(node: Cluster, names: tuple[str, str]) -> None:
    taints = {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}
    answer = node.patch(f"{NODES}/{names[0]}", taints)
    assert refused(answer, "is not allowed to modify taints")


def test_node_reports_events_and_reads_none(node: Cluster, space: Space) -> None:
    at = space.at("events")
    about = {"kind": "ConfigMap", "namespace": space.name, "name": "a"}
    event = {"metadata": {"name": "e"}, "involvedObject": about, "reason": "Tried", "message": ""}
    assert node.post(at, event).code == 201
    assert node.patch(f"{at}/e", {"count": 2}).code == 200
    assert refused(node.get(at))


def test_node_renews_its_own_lease(node: Cluster, names: tuple[str, str]) -> None:
    mine, other = names
    made = node.post(LEASES, {"metadata": {"name": mine}, "spec": {"holderIdentity": mine}})
    assert made.code == 201
    assert node.patch(f"{LEASES}/{mine}", {"spec": {"leaseDurationSeconds": 40}}).code == 200
    assert refused(node.post(LEASES, {"metadata": {"name": other}}))
    assert refused(node.get(f"{LEASES}/{other}"))
    assert node.delete(f"{LEASES}/{mine}").code == 200


def bound(name: str, node_name: str, **spec: Any) -> Json:
    found = pod(name)
    found["spec"] |= {"nodeName": node_name} | spec
    return found


@pytest.fixture
def pods(space: Space, names: tuple[str, str]) -> Iterator[None]:
    """Create a pod on each node, and one on the first node that reads a Secret."""
    volume = {"name": "v", "secret": {"secretName": "used"}}
    for body in (
        bound("mine", names[0]),
        bound("other", names[1]),
        bound("reader", names[0], volumes=[volume]),
    ):
        space.cluster.post(space.at("pods"), body).ok()
    yield
    for name in ("mine", "other", "reader"):
        space.cluster.delete(space.at("pods", name), {"gracePeriodSeconds": 0})


@pytest.mark.usefixtures("pods")
def test_node_reports_on_its_own_pods(node: Cluster, space: Space) -> None:
    status = {"status": {"message": "fine"}}
    assert node.patch(space.at("pods", "mine", "status"), status).code == 200
    assert refused(
        node.patch(space.at("pods", "other", "status"), status), "spec.nodeName set to itself"
    )


@pytest.mark.usefixtures("pods")
def test_node_evicts_and_deletes_its_own_pods_only(
    node: Cluster, space: Space, policy: str
) -> None:
    other = space.at("pods", "other")
    assert refused(node.delete(other), "can only delete pods with spec.nodeName set to itself")
    eviction = {
        "apiVersion": policy,
        "kind": "Eviction",
        "metadata": {"name": "other", "namespace": space.name},
    }
    answer = node.post(f"{other}/eviction", eviction)
    assert refused(answer, "can only evict pods with spec.nodeName set to itself")
    assert node.delete(space.at("pods", "mine"), {"gracePeriodSeconds": 0}).code == 200


@pytest.mark.usefixtures("pods")
def test_node_reads_only_secrets_its_pods_use(node: Cluster, space: Space) -> None:
    for name in ("used", "unused"):
        space.cluster.post(space.at("secrets"), {"metadata": {"name": name}}).ok()
    wait_until(lambda: node.get(space.at("secrets", "used")).code == 200)
    assert refused(node.get(space.at("secrets", "unused")), "no relationship found")
    assert refused(node.get(space.at("secrets")))


def test_node_creates_only_mirror_pods(node: Cluster, space: Space, names: tuple[str, str]) -> None:
    answer = node.post(space.at("pods"), bound("mine", names[0]))
    assert refused(answer, "can only create mirror pods")


def test_node_is_no_administrator(node: Cluster, space: Space) -> None:
    assert refused(node.get(space.at("configmaps")))
    assert refused(node.post("/api/v1/namespaces", {"metadata": {"name": "n"}}))
    assert refused(node.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions"))
