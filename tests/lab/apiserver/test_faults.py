"""Faults, injected from Python and over HTTP."""

import http.client
import time
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.fakes.clock import FakeClock
from treenail_lab.apiserver.serving.faults import (
    DelayFault,
    DelayWatchesFault,
    FaultMatch,
    LoseAnswerFault,
    RefuseFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.server import LabServer

NODES = "/api/v1/nodes"
DROPPED = (http.client.HTTPException, OSError)


@pytest.fixture
def node(admin: Cluster) -> str:
    admin.post(NODES, {"metadata": {"name": "a"}}).ok()
    return f"{NODES}/a"


def mark(cluster: Cluster, at: str, value: str) -> int:
    return cluster.patch(at, {"metadata": {"labels": {"mark": value}}}).code


def test_refused_requests_get_no_answer(lab: LabServer, admin: Cluster, node: str) -> None:
    number = lab.inject_fault(RefuseFault())
    for _ in range(2):
        with pytest.raises(DROPPED):
            admin.get(node)
    lab.lift_fault(number)
    assert admin.get(node).code == 200


def test_refusal_ends_with_its_time(tmp_path: Path) -> None:
    clock = FakeClock(time.time())
    with LabServer(tmp_path / "lab", clock=clock) as lab:
        admin = Cluster.of_kubeconfig(lab.admin_kubeconfig)
        lab.inject_fault(RefuseFault(), for_s=30.0)
        clock.move(29.9)
        with pytest.raises(DROPPED):
            admin.get(NODES)
        clock.move(0.2)
        assert admin.get(NODES).code == 200


def test_refusal_ends_watches_too(lab: LabServer, admin: Cluster) -> None:
    with admin.watch(NODES) as events:
        lab.inject_fault(RefuseFault())
        assert list(events) == []


def test_refusal_of_one_user_spares_others(lab: LabServer, admin: Cluster, node: str) -> None:
    agent = Cluster.of_kubeconfig(lab.write_node_kubeconfig("a"))
    lab.inject_fault(RefuseFault(), FaultMatch(user="system:node:a"))
    with pytest.raises(DROPPED):
        agent.get(node)
    assert admin.get(node).code == 200


@pytest.mark.parametrize(
    ("code", "reason"),
    [(429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable")],
)
def test_next_requests_are_rejected(
    lab: LabServer, admin: Cluster, node: str, code: int, reason: str
) -> None:
    lab.inject_fault(
        RejectFault(code, retry_after_s=3), FaultMatch(verb="patch", resource="nodes"), times=2
    )
    for _ in range(2):
        answer = admin.patch(node, {"metadata": {"labels": {"mark": "x"}}})
        assert answer.verdict == (code, reason)
        assert answer.headers["Retry-After"] == "3"
        assert answer.body["details"] == {"retryAfterSeconds": 3}
    assert admin.get(node).metadata.get("labels") is None
    assert mark(admin, node, "y") == 200


def test_lost_answer_follows_write_that_took_effect(
    lab: LabServer, admin: Cluster, node: str
) -> None:
    lab.inject_fault(LoseAnswerFault(), times=1)
    assert admin.get(node).code == 200
    with pytest.raises(DROPPED):
        mark(admin, node, "x")
    assert admin.get(node).metadata["labels"] == {"mark": "x"}
    assert mark(admin, node, "y") == 200


def test_write_that_fails_loses_no_answer(lab: LabServer, admin: Cluster) -> None:
    lab.inject_fault(LoseAnswerFault(), times=1)
    assert mark(admin, f"{NODES}/absent", "x") == 404


def test_delayed_request_is_answered_after_others(
    lab: LabServer, admin: Cluster, node: str
) -> None:
    lab.inject_fault(DelayFault(0.3), FaultMatch(verb="patch"), times=1)
    assert mark(admin, node, "late") == 200
    assert lab.call_api(lambda api: api.faults.list_active()) == ()


def test_cut_watch_ends_without_event(lab: LabServer, admin: Cluster) -> None:
    with admin.watch(NODES) as nodes, admin.watch("/api/v1/pods", timeoutSeconds=1) as pods:
        assert lab.cut_watches("nodes") == 1
        assert list(nodes) == []
        assert list(pods) == []


def test_expired_version_answers_410(lab: LabServer, admin: Cluster, node: str) -> None:
    old = admin.get(NODES).metadata["resourceVersion"]
    page = admin.get("/api/v1/namespaces", limit=1).metadata
    mark(admin, node, "x")
    lab.expire_versions()
    with admin.watch(NODES, resourceVersion=old) as events:
        error = next(events)
    assert (error["type"], error["object"]["code"], error["object"]["reason"]) == (
        "ERROR", 410, "Expired",
    )  # fmt: skip
    rest = admin.get("/api/v1/namespaces", limit=1, **{"continue": page["continue"]})
    assert rest.verdict == (410, "Expired")
    fresh = admin.get(NODES).metadata["resourceVersion"]
    with admin.watch(NODES, resourceVersion=fresh, timeoutSeconds=1) as events:
        assert list(events) == []


def test_watch_that_is_up_to_date_survives_an_expiry(
    lab: LabServer, admin: Cluster, node: str
) -> None:
    version = admin.get(NODES).metadata["resourceVersion"]
    with admin.watch(NODES, resourceVersion=version) as events:
        lab.expire_versions()
        mark(admin, node, "x")
        assert next(events)["type"] == "MODIFIED"


def test_faults_can_be_injected_and_lifted_over_http(admin: Cluster, node: str) -> None:
    fault = {"fault": "reject", "code": 503, "match": {"verb": "get", "resource": "nodes"}}
    number = admin.post("/lab/faults", fault).ok()["id"]
    assert admin.get(node).code == 503
    assert admin.get("/lab/faults").ok()["faults"] == [
        {"id": number, "fault": "reject", "times": None,
         "match": {"verb": "get", "resource": "nodes"}}
    ]  # fmt: skip
    admin.delete(f"/lab/faults/{number}").ok()
    assert admin.get(node).code == 200


def test_control_endpoint_answers_while_requests_are_refused(admin: Cluster, node: str) -> None:
    admin.post("/lab/faults", {"fault": "refuse"}).ok()
    with pytest.raises(DROPPED):
        admin.get(node)
    admin.delete("/lab/faults").ok()
    assert admin.get(node).code == 200


def test_watches_are_cut_and_versions_expired_over_http(admin: Cluster) -> None:
    version = admin.get(NODES).metadata["resourceVersion"]
    with admin.watch(NODES) as events:
        assert admin.get("/lab/watches").body == {"nodes": 1}
        assert admin.post("/lab/faults", {"fault": "cut-watches"}).body == {"cut": 1}
        assert list(events) == []
    admin.post(NODES, {"metadata": {"name": "later"}}).ok()
    admin.post("/lab/faults", {"fault": "expire-versions"}).ok()
    with admin.watch(NODES, resourceVersion=version) as events:
        assert next(events)["type"] == "ERROR"


@pytest.mark.parametrize(
    "fault",
    [
        {},
        {"fault": "explode"},
        {"fault": "reject", "code": 200},
        {"fault": "refuse", "match": {"colour": "red"}},
        {"fault": "refuse", "match": {"verb": 1}},
        {"fault": "refuse", "match": []},
        {"fault": "refuse", "times": "many"},
        {"fault": "delay", "seconds": "long"},
    ],
)
def test_invalid_fault_is_bad_request(admin: Cluster, fault: dict[str, object]) -> None:
    assert admin.post("/lab/faults", fault).verdict == (400, "BadRequest")
    assert admin.get("/lab/faults").body == {"faults": []}


def test_only_masters_control_the_lab(lab: LabServer) -> None:
    agent = Cluster.of_kubeconfig(lab.write_node_kubeconfig("a"))
    assert agent.post("/lab/faults", {"fault": "refuse"}).verdict == (403, "Forbidden")
    assert agent.get("/lab/snapshot").verdict == (403, "Forbidden")


def test_unknown_controls_are_not_found(admin: Cluster) -> None:
    assert admin.get("/lab/nothing").code == 404
    assert admin.post("/lab/requests", {}).code == 405


def test_held_watch_of_one_user_delivers_nothing_until_lifted(lab: LabServer) -> None:
    admin = Cluster.of_kubeconfig(lab.admin_kubeconfig)
    held = Cluster.of_kubeconfig(lab.write_kubeconfig("held", ["system:masters"]))
    version = admin.get(NODES).metadata["resourceVersion"]
    fault = {"fault": "hold-watches", "match": {"user": "held", "resource": "nodes"}}
    number = admin.post("/lab/faults", fault).ok()["id"]
    with held.watch(NODES, resourceVersion=version) as late, admin.watch(NODES) as events:
        admin.post(NODES, {"metadata": {"name": "a"}}).ok()
        assert next(events)["object"]["metadata"]["name"] == "a"
        with held.watch(NODES, resourceVersion=version, timeoutSeconds=1) as silent:
            assert list(silent) == []
        assert held.get(f"{NODES}/a").code == 200
        admin.delete(f"/lab/faults/{number}").ok()
        assert next(late)["object"]["metadata"]["name"] == "a"


def test_delayed_watches_keep_their_own_order_and_overtake_each_other(
    lab: LabServer, admin: Cluster
) -> None:
    version = admin.get(NODES).metadata["resourceVersion"]
    names = [f"n{number:02}" for number in range(15)]
    lab.inject_fault(DelayWatchesFault(0.3, is_random=True))
    with (
        admin.watch(NODES, resourceVersion=version) as nodes,
        admin.watch("/api/v1/configmaps", resourceVersion=version) as maps,
    ):
        for name in names:
            admin.post(NODES, {"metadata": {"name": name}}).ok()
        lab.lift_fault()
        admin.post("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "last"}}).ok()
        # Written last, and delivered while the events of the Nodes are still late.
        assert next(maps)["object"]["metadata"]["name"] == "last"
        assert [next(nodes)["object"]["metadata"]["name"] for _ in names] == names
