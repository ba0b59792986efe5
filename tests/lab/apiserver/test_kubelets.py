"""Kubelets start and end pods; budgets count pods of controllers."""

from typing import Any

import pytest

from tests.contract.client import Cluster, Json
from tests.waiting import wait_until
from treenail_lab.apiserver.controllers.pods import STOP_SECONDS_ANNOTATION
from treenail_lab.apiserver.serving.server import LabServer

PODS = "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"


@pytest.fixture(autouse=True)
def node(admin: Cluster) -> None:
    admin.post("/api/v1/nodes", {"metadata": {"name": "n"}}).ok()


def run(cluster: Cluster, name: str, **metadata: Any) -> Json:
    """A pod on the node that stops as fast as its annotation says."""
    annotations = metadata.pop("annotations", {STOP_SECONDS_ANNOTATION: "0"})
    spec = {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}
    body = {"metadata": {"name": name, "annotations": annotations} | metadata, "spec": spec}
    return cluster.post(PODS, body).ok()


def wait_gone(cluster: Cluster, name: str) -> None:
    wait_until(lambda: cluster.get(f"{PODS}/{name}").code == 404)


def test_pod_on_a_node_runs_and_is_ready(admin: Cluster) -> None:
    run(admin, "p")
    status = admin.get(f"{PODS}/p").ok()["status"]
    assert status["phase"] == "Running"
    assert {"Ready", "PodScheduled"} <= {one["type"] for one in status["conditions"]}


def test_pod_of_a_node_that_does_not_exist_stays_pending(admin: Cluster) -> None:
    spec = {"nodeName": "absent", "containers": [{"name": "c", "image": "i"}]}
    admin.post(PODS, {"metadata": {"name": "p"}, "spec": spec}).ok()
    assert admin.get(f"{PODS}/p").body["status"]["phase"] == "Pending"
    admin.delete(f"{PODS}/p").ok()
    wait_gone(admin, "p")


def test_deleted_pod_terminates_and_then_is_gone(admin: Cluster) -> None:
    run(admin, "p", annotations={STOP_SECONDS_ANNOTATION: "0.2"})
    with admin.watch(PODS, fieldSelector="metadata.name=p") as events:
        assert next(events)["type"] == "ADDED"
        deleted = admin.delete(f"{PODS}/p").ok()
        assert deleted["metadata"]["deletionGracePeriodSeconds"] == 30
        assert next(events)["type"] == "MODIFIED"
        assert next(events)["type"] == "DELETED"


def test_grace_period_limits_how_long_a_pod_takes(admin: Cluster) -> None:
    run(admin, "p", annotations={STOP_SECONDS_ANNOTATION: "1000"})
    admin.delete(f"{PODS}/p", {"gracePeriodSeconds": 1}).ok()
    wait_gone(admin, "p")


def test_no_grace_ends_a_pod_at_once(admin: Cluster) -> None:
    run(admin, "p", annotations={})
    admin.delete(f"{PODS}/p").ok()
    assert admin.get(f"{PODS}/p").code == 200
    admin.delete(f"{PODS}/p", {"gracePeriodSeconds": 0}).ok()
    assert admin.get(f"{PODS}/p").code == 404


def test_finalizer_holds_a_pod_that_has_ended(admin: Cluster) -> None:
    run(admin, "p", finalizers=["example.com/hold"])
    admin.delete(f"{PODS}/p").ok()
    at = f"{PODS}/p"
    wait_until(lambda: admin.get(at).metadata["deletionGracePeriodSeconds"] == 0)
    admin.patch(at, {"metadata": {"finalizers": None}}).ok()
    wait_gone(admin, "p")


def test_pods_of_stopped_kubelet_stay_until_it_starts(lab: LabServer, admin: Cluster) -> None:
    run(admin, "p")
    lab.set_kubelet("n", is_stopped=True)
    admin.delete(f"{PODS}/p").ok()
    run(admin, "q")
    assert admin.get(f"{PODS}/q").body["status"]["phase"] == "Pending"
    assert "deletionTimestamp" in admin.get(f"{PODS}/p").metadata
    admin.put("/lab/kubelets/n", {"gone": False}).ok()
    wait_gone(admin, "p")
    wait_until(lambda: admin.get(f"{PODS}/q").body["status"]["phase"] == "Running")


def test_pod_deletion_completes_after_server_restart(lab: LabServer, admin: Cluster) -> None:
    run(admin, "p", annotations={STOP_SECONDS_ANNOTATION: "0.5"})
    admin.delete(f"{PODS}/p").ok()
    lab.stop()
    lab.start()
    wait_gone(admin, "p")


def budget(cluster: Cluster, **spec: Any) -> None:
    selector = {"selector": {"matchLabels": {"app": "a"}}}
    cluster.post(BUDGETS, {"metadata": {"name": "b"}, "spec": selector | spec}).ok()


def replicas(cluster: Cluster, count: int) -> list[Json]:
    """A ReplicaSet that wants so many pods; references to it as their controller."""
    at = "/apis/apps/v1/namespaces/default/replicasets"
    body = {"metadata": {"name": "rs"}, "spec": {"replicas": count}}
    made = cluster.post(at, body).ok()
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "controller": True}
    return [owner | {"uid": made["metadata"]["uid"]}]


@pytest.mark.parametrize(
    ("spec", "desired", "allowed"),
    [
        ({"maxUnavailable": 1}, 2, 1),
        ({"maxUnavailable": "34%"}, 1, 2),
        ({"maxUnavailable": 0}, 3, 0),
        ({"minAvailable": "50%"}, 2, 1),
        ({"minAvailable": 1}, 1, 2),
    ],
)
def test_shares_of_a_budget_are_of_what_the_controller_wants(
    admin: Cluster, spec: Json, desired: int, allowed: int
) -> None:
    owner = replicas(admin, 3)
    for name in "pqr":
        run(admin, name, labels={"app": "a"}, ownerReferences=owner)
    budget(admin, **spec)
    status = admin.get(f"{BUDGETS}/b").ok()["status"]
    assert (status["expectedPods"], status["desiredHealthy"], status["disruptionsAllowed"]) == (
        3, desired, allowed,
    )  # fmt: skip


def evict(cluster: Cluster, name: str) -> int:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    return cluster.post(f"{PODS}/{name}/eviction", eviction).code


def unready(cluster: Cluster, name: str) -> None:
    conditions = [{"type": "Ready", "status": "False"}]
    cluster.patch(f"{PODS}/{name}/status", {"status": {"conditions": conditions}}).ok()


def test_unready_pod_goes_while_its_budget_is_met(admin: Cluster) -> None:
    for name in "pq":
        run(admin, name, labels={"app": "a"})
    unready(admin, "q")
    budget(admin, minAvailable=1)
    assert evict(admin, "q") == 201
    assert evict(admin, "p") == 429


def test_unready_pod_of_a_broken_budget_goes_only_if_always_allowed(admin: Cluster) -> None:
    for name in "pq":
        run(admin, name, labels={"app": "a"})
        unready(admin, name)
    budget(admin, minAvailable=2)
    assert evict(admin, "p") == 429
    always = {"spec": {"unhealthyPodEvictionPolicy": "AlwaysAllow"}}
    admin.patch(f"{BUDGETS}/b", always).ok()
    assert evict(admin, "p") == 201


def test_owners_take_their_pods_with_them(admin: Cluster) -> None:
    run(admin, "p", ownerReferences=replicas(admin, 1))
    admin.delete("/apis/apps/v1/namespaces/default/replicasets/rs").ok()
    wait_gone(admin, "p")
