"""The log of requests."""

from tests.contract.client import Cluster
from treenail_lab.apiserver.serving.server import LabServer

NODES = "/api/v1/nodes"


def test_requests_are_counted_by_user_verb_and_resource(lab: LabServer, admin: Cluster) -> None:
    agent = Cluster.of_kubeconfig(lab.write_node_kubeconfig("a"))
    admin.post(NODES, {"metadata": {"name": "a"}}).ok()
    for _ in range(3):
        agent.get(f"{NODES}/a").ok()
    agent.patch(f"{NODES}/a/status", {"status": {"phase": "x"}}).ok()
    agent.get(f"{NODES}/b")
    with agent.watch(NODES, fieldSelector="metadata.name=a", timeoutSeconds=1) as events:
        next(events)
        assert lab.count_requests(verb="watch") == 1
    assert lab.call_api(lambda api: api.requests.count_by_user()) == {
        ("kubernetes-admin", "create", "nodes"): 1,
        ("system:node:a", "get", "nodes"): 4,
        ("system:node:a", "patch", "nodes/status"): 1,
        ("system:node:a", "watch", "nodes"): 1,
    }
    assert lab.count_requests(user="system:node:a") == 6
    assert lab.count_requests(user="system:node:a", verb="get") == 4


def test_latest_requests_have_status_codes(lab: LabServer, admin: Cluster) -> None:
    admin.post("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "a"}}).ok()
    admin.get("/api/v1/namespaces/default/configmaps/b")
    entries = lab.call_api(lambda api: api.requests.list_latest())
    assert [(one.verb, one.namespace, one.name, one.code) for one in entries] == [
        ("create", "default", "", 201),
        ("get", "default", "b", 404),
    ]


def test_log_is_read_and_reset_over_http(admin: Cluster) -> None:
    admin.get(NODES).ok()
    found = admin.get("/lab/requests").ok()
    assert found["counts"] == [
        {"user": "kubernetes-admin", "verb": "list", "resource": "nodes", "count": 1}
    ]
    assert found["latest"][0]["code"] == 200
    admin.delete("/lab/requests").ok()
    assert admin.get("/lab/requests").body == {"counts": [], "latest": []}
