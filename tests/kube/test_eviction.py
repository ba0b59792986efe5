"""Emptying a node: what goes, what stays, who is named as being in the way."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.waiting import wait_until
from treenail.clock import SystemClock
from treenail.errors import ClusterError, Forbidden, TooManyRequests, Unreachable
from treenail.kube.client import Client, Json
from treenail.kube.eviction import (
    Blocker,
    Budget,
    Drain,
    Progress,
    Reason,
    cordon,
    has_to_go,
    refusal,
    stuck,
)
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.pod import Pod, pod_from_json
from treenail.kube.request import Reply, Request
from treenail.kube.resources import DAEMONSETS, NAMESPACES, NODES, PODDISRUPTIONBUDGETS, PODS
from treenail.kube.selector import selects
from treenail.kube.transport import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer

NOW = 1_700_000_000.0
POD: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": "u",
        "labels": {"app": "web"},
        "annotations": {"kubernetes.io/config.mirror": "hash"},
        "ownerReferences": [
            {"kind": "Job", "name": "other"},
            {"kind": "DaemonSet", "name": "agents", "controller": True},
        ],
        "deletionTimestamp": "2023-11-14T22:13:20Z",
        "deletionGracePeriodSeconds": 30,
        "finalizers": ["example.com/hold"],
    },
    "spec": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "disk"}}]},
    "status": {
        "phase": "Running",
        "containerStatuses": [{"state": {"terminated": {}}}, {"state": {"running": {}}}],
    },
}


def pod(**more: object) -> Pod:
    return Pod("shop", "web", "u", **more)  # type: ignore[arg-type]  # what a test wants to say


def test_pod_is_read_as_the_server_has_it() -> None:
    assert pod_from_json(POD) == Pod(
        namespace="shop",
        name="web",
        uid="u",
        labels={"app": "web"},
        daemonset="agents",
        mirror=True,
        finished=False,
        running=True,
        terminates_at=NOW,
        grace_s=30,
        finalizers=("example.com/hold",),
        claims=("disk",),
    )


@pytest.mark.parametrize("found", [{}, {"metadata": 1, "spec": [], "status": {"phase": {}}}])
def test_pod_of_another_shape_is_read_as_empty(found: Json) -> None:
    assert pod_from_json(found) == Pod("", "", "")


@pytest.mark.parametrize(
    ("status", "running"),
    [
        ({"phase": "Running"}, True),
        ({"phase": "Running", "containerStatuses": [{"state": {"terminated": {}}}]}, False),
        ({"phase": "Pending"}, False),
        ({"phase": "Failed"}, False),
    ],
)
def test_pod_runs_until_its_containers_are_known_to_have_ended(status: Json, running: bool) -> None:
    assert pod_from_json({"status": status}).running is running


@pytest.mark.parametrize(
    ("found", "goes"),
    [
        (pod(), True),
        (pod(mirror=True), False),
        (pod(mirror=True, finished=True), False),
        (pod(daemonset="agents"), False),
        (pod(daemonset="agents", finished=True), True),
        (pod(daemonset="gone"), True),
        (pod(finished=True), True),
    ],
)
def test_what_would_come_back_at_once_stays(found: Pod, goes: bool) -> None:
    assert has_to_go(found, {"shop/agents", "other/gone"}) is goes


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (pod(), None),
        (pod(terminates_at=NOW - 14, running=True), None),
        (
            pod(terminates_at=NOW - 15, running=True, grace_s=30, finalizers=("f",)),
            (Reason.TERMINATION, "still runs after its grace period of 30 s"),
        ),
        (
            pod(terminates_at=NOW - 15, finalizers=("a/b", "c"), claims=("disk",)),
            (Reason.FINALIZER, "waits for a/b, c"),
        ),
        (
            pod(terminates_at=NOW - 15, claims=("disk",)),
            (Reason.VOLUME, "its containers ended; it may wait for disk"),
        ),
        (
            pod(terminates_at=NOW - 15),
            (Reason.TERMINATION, "its containers ended, but the kubelet does not remove it"),
        ),
    ],
)
def test_pod_beyond_its_time_is_said_to_wait_for_something(
    found: Pod, why: tuple[Reason, str] | None
) -> None:
    assert stuck(found, NOW) == why


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "web", "tier": "a"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Near"}]}, False),
        ({"matchExpressions": [{"operator": "Exists"}]}, False),
        ({"matchExpressions": ["app"]}, False),
        ({"matchLabels": ["app"]}, False),
    ],
)
def test_selector_matches_as_the_api_says(selector: object, matches: bool) -> None:
    assert selects(selector, {"app": "web"}) is matches


@pytest.mark.parametrize(
    ("blocker", "sentence"),
    [
        (
            Blocker("shop/web", Reason.BUDGET, "no", (Budget("b", 0), Budget("c", 1)), NOW),
            "shop/web: no (b allows 0, c allows 1)",
        ),
        (Blocker("shop/web", Reason.WEBHOOK, "no", (), NOW), "shop/web: no"),
    ],
)
def test_blocker_is_one_sentence_for_a_person(blocker: Blocker, sentence: str) -> None:
    assert blocker.sentence == sentence


@pytest.mark.parametrize(
    ("error", "budgets", "reason"),
    [
        (TooManyRequests("POST: it would violate the pod's disruption budget."), (), "pdb"),
        (TooManyRequests("POST: no"), (Budget("b", 0),), "pdb"),
        (TooManyRequests("POST: Too many requests, please try again later."), (), None),
        (ClusterError("POST: more than one"), (Budget("b", 1), Budget("c", 1)), "pdb"),
        (Forbidden('POST: admission webhook "w.example.com" denied the request'), (), "webhook"),
        (ClusterError('POST: failed calling webhook "w.example.com": EOF'), (), "webhook"),
        (Forbidden("POST: pods is forbidden"), (Budget("b", 1),), "refused"),
    ],
)
def test_refused_eviction_names_who_refuses(
    error: ClusterError, budgets: tuple[Budget, ...], reason: str | None
) -> None:
    found = refusal(pod(), error, budgets, NOW)

    assert (found and found.reason.value) == reason
    assert found is None or found.said == str(error).removeprefix("POST: ")


class Wire(HttpTransport):
    """A transport that a test can cut."""

    away = False

    def send(self, request: Request) -> Reply:
        if self.away:
            raise Unreachable("the wire is cut")
        return super().send(request)


class Node:
    """A node on the lab's API server, with pods that a test puts there."""

    def __init__(self, server: LabServer) -> None:
        self.server = server
        self.rang = threading.Event()
        kubeconfig = read_kubeconfig(str(server.admin_kubeconfig))
        self.transport = Wire(kubeconfig, SystemClock())
        self.client = Client(self.transport)
        self.client.create(NAMESPACES, {"metadata": {"name": "shop"}})
        self.client.create(NODES, {"metadata": {"name": "a"}})

    def add(self, name: str, *, node: str = "a", stop_s: int = 0, **more: object) -> str:
        """A running pod; its UID."""
        metadata: Json = {
            "name": name,
            "labels": {"app": name},
            "annotations": {"lab.treenail/stop-seconds": str(stop_s)},
            **more,
        }
        spec = {"nodeName": node, "containers": [{"name": "main", "image": "i"}]}
        made = self.client.create(PODS, {"metadata": metadata, "spec": spec}, namespace="shop")
        wait_until(lambda: self.phase(name) == "Running")
        return str(made["metadata"]["uid"])  # type: ignore[index]  # a dict

    def phase(self, name: str) -> object:
        found = self.client.get(PODS, name, namespace="shop")
        return found["status"].get("phase")  # type: ignore[attr-defined]  # a dict

    def deleting(self, name: str) -> bool:
        found = self.client.get(PODS, name, namespace="shop")
        return "deletionTimestamp" in found["metadata"]  # type: ignore[operator]  # a dict

    def protect(self, budget: str, app: str) -> None:
        """A budget that keeps the pod of an app, as the server knows by then."""
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}}
        body: Json = {"metadata": {"name": budget}, "spec": spec}
        self.client.create(PODDISRUPTIONBUDGETS, body, namespace="shop")
        wait_until(lambda: self._known(budget))

    def pods(self) -> list[str]:
        items = self.client.list(PODS, namespace="shop").items
        return sorted(str(found["metadata"]["name"]) for found in items)  # type: ignore[index]  # a dict

    def drain(self, clock: FakeClock | SystemClock | None = None) -> Drain:
        return Drain(self.client, "a", clock or SystemClock(), ring=self.rang.set)

    def emptied(self, drain: Drain) -> Progress:
        """Turn after turn, each when a pod changed, until the node is empty."""
        while not (progress := drain.turn()).empty:
            assert self.rang.wait(10), progress
            self.rang.clear()
        return progress

    def _known(self, budget: str) -> bool:
        found = self.client.get(PODDISRUPTIONBUDGETS, budget, namespace="shop")
        status = found.get("status") or {}
        return status.get("currentHealthy") == 1  # type: ignore[attr-defined]  # a dict


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with LabServer(tmp_path) as server:
        found = Node(server)
        yield found
        found.transport.close()


def test_node_is_emptied_of_what_has_to_go(node: Node) -> None:
    spec = {"selector": {}, "template": {}}
    made = node.client.create(
        DAEMONSETS, {"metadata": {"name": "agents"}, "spec": spec}, namespace="shop"
    )
    owner = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "name": "agents",
        "uid": made["metadata"]["uid"],  # type: ignore[index]  # a dict
        "controller": True,
    }
    node.add("web")
    node.add("bare")
    node.add("agent", ownerReferences=[owner])
    node.add("static", annotations={"kubernetes.io/config.mirror": "hash"})

    with node.drain() as drain:
        progress = node.emptied(drain)

    assert (progress.blockers, progress.blocked) == ((), 0)
    assert node.pods() == ["agent", "static"]


def test_pods_of_another_node_stay(node: Node) -> None:
    node.client.create(NODES, {"metadata": {"name": "b"}})
    node.add("there", node="b")
    with node.drain() as drain:
        assert drain.turn().empty

    assert node.pods() == ["there"]


def test_pod_that_takes_its_time_is_asked_once_and_blocks_nothing(node: Node) -> None:
    node.add("slow", stop_s=30)
    with node.drain() as drain:
        drain.turn()
        wait_until(lambda: node.deleting("slow"))
        since = node.client.get(PODS, "slow", namespace="shop")["metadata"]
        progress = drain.turn()

    assert (progress.remaining, progress.blocked) == (("shop/slow",), 0)
    assert node.client.get(PODS, "slow", namespace="shop")["metadata"] == since


def test_budget_in_the_way_is_named_until_it_yields(node: Node) -> None:
    node.add("web")
    node.add("free")
    node.protect("keep-web", "web")
    clock = FakeClock(NOW)
    with node.drain(clock) as drain:
        drain.turn()
        wait_until(lambda: drain.turn().remaining == ("shop/web",))
        clock.move(60)
        progress = drain.turn()

        assert progress == Progress(
            remaining=("shop/web",),
            blockers=(
                Blocker(
                    "shop/web",
                    Reason.BUDGET,
                    "Cannot evict pod as it would violate the pod's disruption budget. "
                    "The disruption budget keep-web needs 1 healthy pods and has 1 currently",
                    (Budget("keep-web", 0),),
                    NOW,
                ),
            ),
            blocked=1,
            again_s=5.0,
        )
        node.client.delete(PODDISRUPTIONBUDGETS, "keep-web", namespace="shop")
        clock.move(5)
        node.emptied(drain)

    assert node.pods() == []


def test_two_budgets_for_one_pod_are_both_named(node: Node) -> None:
    node.add("web")
    node.protect("one", "web")
    node.protect("two", "web")
    with node.drain() as drain:
        (blocker,) = drain.turn().blockers

    assert (blocker.reason, [budget.name for budget in blocker.budgets]) == (
        Reason.BUDGET,
        ["one", "two"],
    )


def test_pod_of_the_same_name_that_came_meanwhile_is_another_one(node: Node) -> None:
    node.add("web")
    with node.drain() as drain:
        node.emptied(drain)
        node.add("web")
        wait_until(lambda: not drain.turn().empty)
        node.emptied(drain)

    assert node.pods() == []


def test_finalizer_that_holds_a_pod_is_named(node: Node) -> None:
    node.add("held", finalizers=["example.com/hold"])
    clock = FakeClock(SystemClock().now())
    with node.drain(clock) as drain:
        drain.turn()
        clock.move(60)
        wait_until(lambda: drain.turn().blocked)
        (blocker,) = drain.turn().blockers
        node.client.patch(PODS, "held", {"metadata": {"finalizers": None}}, namespace="shop")
        node.emptied(drain)

    assert (blocker.pod, blocker.reason) == ("shop/held", Reason.FINALIZER)
    assert node.pods() == []


def test_server_that_is_away_is_said_and_nothing_is_forgotten(node: Node) -> None:
    node.add("web")
    node.add("kept")
    node.protect("keep-it", "kept")
    clock = FakeClock(NOW)
    with node.drain(clock) as drain:
        drain.turn()
        clock.move(60)
        node.transport.away = True
        with pytest.raises(Unreachable):
            drain.turn()
        node.transport.away = False
        wait_until(lambda: drain.turn().remaining == ("shop/kept",))
        (blocker,) = drain.turn().blockers

    assert blocker.since == NOW


def test_cordon_is_set_and_cleared(node: Node) -> None:
    cordoned = cordon(node.client, "a", cordoned=True)
    again = cordon(node.client, "a", cordoned=False)

    assert cordoned["spec"] == {"unschedulable": True}
    assert not again.get("spec")
