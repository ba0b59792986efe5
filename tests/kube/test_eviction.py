"""A drain evicts the right pods and reports those that block it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import ClusterError, ForbiddenError, TooManyRequestsError, UnreachableError
from treenail.kube.api_client import Client, Json
from treenail.kube.eviction import (
    Blocker,
    BlockerReason,
    DisruptionBudget,
    DrainProgress,
    NodeDrain,
    ReturnedPods,
    classify_refusal,
    find_long_wait,
    find_stuck_reason,
    should_evict,
)
from treenail.kube.pods import Pod, parse_pod
from treenail.kube.request import ApiRequest, ApiResponse, parse_retry_after_s
from treenail.kube.resources import DAEMONSETS, NAMESPACES, NODES, PODDISRUPTIONBUDGETS, PODS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
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


def test_pod_with_every_field_is_read() -> None:
    assert parse_pod(POD) == Pod(
        namespace="shop",
        name="web",
        uid="u",
        labels={"app": "web"},
        owner="DaemonSet agents",
        is_mirror=True,
        is_finished=False,
        is_running=True,
        terminates_at=NOW,
        grace_s=30,
        finalizers=("example.com/hold",),
        claims=("disk",),
    )


@pytest.mark.parametrize("found", [{}, {"metadata": 1, "spec": [], "status": {"phase": {}}}])
def test_malformed_pod_is_read_as_empty(found: Json) -> None:
    assert parse_pod(found) == Pod("", "", "")


@pytest.mark.parametrize(
    ("status", "running"),
    [
        ({"phase": "Running"}, True),
        ({"phase": "Running", "containerStatuses": [{"state": {"terminated": {}}}]}, False),
        ({"phase": "Pending"}, False),
        ({"phase": "Failed"}, False),
    ],
)
def test_pod_is_running_until_all_containers_terminated(status: Json, running: bool) -> None:
    assert parse_pod({"status": status}).is_running is running


@pytest.mark.parametrize(
    ("found", "goes"),
    [
        (pod(), True),
        (pod(is_mirror=True), False),
        (pod(is_mirror=True, is_finished=True), False),
        (pod(owner="DaemonSet agents"), False),
        (pod(owner="DaemonSet agents", is_finished=True), True),
        (pod(owner="DaemonSet gone"), True),
        (pod(is_finished=True), True),
    ],
)
def test_mirror_and_daemonset_pods_are_not_evicted(found: Pod, goes: bool) -> None:
    assert should_evict(found, {"shop/agents", "other/gone"}) is goes


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (pod(), None),
        (pod(terminates_at=NOW - 14, is_running=True), None),
        (
            pod(terminates_at=NOW - 15, is_running=True, grace_s=30, finalizers=("f",)),
            (BlockerReason.TERMINATION, "still runs after its grace period of 30 s"),
        ),
        (
            pod(terminates_at=NOW - 15, finalizers=("a/b", "c"), claims=("disk",)),
            (BlockerReason.FINALIZER, "waits for a/b, c"),
        ),
        (
            pod(terminates_at=NOW - 15, claims=("disk",)),
            (BlockerReason.VOLUME, "its containers ended; it may wait for disk"),
        ),
        (
            pod(terminates_at=NOW - 15),
            (BlockerReason.TERMINATION, "its containers ended, but the kubelet does not remove it"),
        ),
    ],
)
def test_pod_past_its_grace_period_has_a_reason(
    found: Pod, why: tuple[BlockerReason, str] | None
) -> None:
    assert find_stuck_reason(found, NOW) == why


@pytest.mark.parametrize(
    ("blocker", "sentence"),
    [
        (
            Blocker(
                "shop/web",
                BlockerReason.BUDGET,
                "no",
                (DisruptionBudget("b", 0), DisruptionBudget("c", 1)),
                NOW,
            ),
            "shop/web: no (b allows 0, c allows 1)",
        ),
        (Blocker("shop/web", BlockerReason.WEBHOOK, "no", (), NOW), "shop/web: no"),
    ],
)
def test_blocker_summary_is_one_line(blocker: Blocker, sentence: str) -> None:
    assert blocker.summary == sentence


@pytest.mark.parametrize(
    ("error", "budgets", "reason"),
    [
        (TooManyRequestsError("POST: it would violate the pod's disruption budget."), (), "pdb"),
        (TooManyRequestsError("POST: no"), (DisruptionBudget("b", 0),), "pdb"),
        (TooManyRequestsError("POST: please try again later."), (), "overload"),
        (
            ClusterError("POST: more than one"),
            (DisruptionBudget("b", 1), DisruptionBudget("c", 1)),
            "pdb",
        ),
        (
            ForbiddenError('POST: admission webhook "w.example.com" denied the request'),
            (),
            "webhook",
        ),
        (ClusterError('POST: failed calling webhook "w.example.com": EOF'), (), "webhook"),
        (ForbiddenError("POST: pods is forbidden"), (DisruptionBudget("b", 1),), "refused"),
    ],
)
def test_rejected_eviction_is_classified_by_its_cause(
    error: ClusterError, budgets: tuple[DisruptionBudget, ...], reason: str
) -> None:
    found = classify_refusal(pod(), error, budgets, NOW)

    assert found.reason.value == reason
    assert found.message.endswith(str(error).removeprefix("POST: "))


class Wire(HttpTransport):
    """A transport that a test can interrupt."""

    is_interrupted = False
    slow_pods: frozenset[str] = frozenset()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.answered = threading.Event()

    def send(self, request: ApiRequest) -> ApiResponse:
        if request.path.endswith("/eviction") and request.path.split("/")[-2] in self.slow_pods:
            self.answered.wait(10)
        if self.is_interrupted:
            raise UnreachableError("the wire is cut")
        return super().send(request)


class Node:
    """A node on the lab's API server with pods of the test."""

    def __init__(self, server: LabServer) -> None:
        self.server = server
        self.rang = threading.Event()
        kubeconfig = read_kubeconfig(str(server.admin_kubeconfig))
        self.transport = Wire(kubeconfig, SystemClock())
        self.client = Client(self.transport)
        self.client.create(NAMESPACES, {"metadata": {"name": "shop"}})
        self.client.create(NODES, {"metadata": {"name": "a"}})

    def add(self, name: str, *, node: str = "a", stop_s: int = 0, **more: object) -> str:
        """Create a running pod; return its UID."""
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
        """Create a budget that blocks the pods of an app; wait until it is counted."""
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}}
        body: Json = {"metadata": {"name": budget}, "spec": spec}
        self.client.create(PODDISRUPTIONBUDGETS, body, namespace="shop")
        wait_until(lambda: self._known(budget))

    def pods(self) -> list[str]:
        items = self.client.list(PODS, namespace="shop").items
        return sorted(str(found["metadata"]["name"]) for found in items)  # type: ignore[index]  # a dict

    def drain(self, clock: FakeClock | SystemClock | None = None) -> NodeDrain:
        return NodeDrain(self.client, "a", clock or SystemClock(), notify=self.rang.set)

    def emptied(self, drain: NodeDrain) -> DrainProgress:
        """Evict pods in rounds, each after a pod change, until the node is empty."""
        while not (progress := drain.evict_pods()).is_drained:
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


def test_drain_evicts_every_evictable_pod(node: Node) -> None:
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

    assert (progress.blockers, progress.blocked_count) == ((), 0)
    assert node.pods() == ["agent", "static"]


@pytest.mark.parametrize(("grace_s", "is_named"), [(0, False), (30, False), (31, True)])
def test_pod_with_long_grace_period_blocks_from_its_eviction_on(
    grace_s: int, *, is_named: bool
) -> None:
    blocker = find_long_wait(pod(terminates_at=NOW + grace_s, grace_s=grace_s))
    assert (blocker is not None) is is_named
    if blocker is not None:
        assert (blocker.since, blocker.reason) == (NOW, BlockerReason.TERMINATION)
        assert blocker.message.endswith("Z: its grace period is 31 s")
    assert find_long_wait(pod(grace_s=6000)) is None


def test_pods_of_an_owner_that_return_are_left_after_three() -> None:
    def owned(number: int, owner: str) -> Pod:
        return Pod("shop", f"{owner}-{number}", f"{owner}-{number}", owner=owner)

    returned = ReturnedPods()
    # A hundred pods of one owner at the beginning, or late, are no return.
    first = [owned(number, "ReplicaSet a") for number in range(100)]
    assert returned.drop_ignored(first) == first
    for gone in first:
        returned.note_evicted(gone)
    bare = Pod("shop", "x", "x")
    for number in range(100, 103):
        later = [owned(number, "ReplicaSet a"), owned(0, "ReplicaSet b"), bare]
        assert returned.drop_ignored(later) == later
        # The same pod, seen again, has not returned again.
        assert returned.drop_ignored(later) == later
    assert returned.ignored_groups == ()
    for number in range(103, 200):
        later = [owned(number, "ReplicaSet a"), owned(0, "ReplicaSet b"), bare]
        assert returned.drop_ignored(later) == later[1:]
    assert returned.ignored_groups == ("shop/ReplicaSet a",)


def test_pods_of_another_node_are_not_evicted(node: Node) -> None:
    node.client.create(NODES, {"metadata": {"name": "b"}})
    node.add("there", node="b")
    with node.drain() as drain:
        assert drain.evict_pods().is_drained

    assert node.pods() == ["there"]


def test_terminating_pod_is_evicted_once_and_blocks_nothing(node: Node) -> None:
    node.add("slow", stop_s=30)
    with node.drain() as drain:
        drain.evict_pods()
        wait_until(lambda: node.deleting("slow"))
        since = node.client.get(PODS, "slow", namespace="shop")["metadata"]
        progress = drain.evict_pods()

    assert (progress.remaining, progress.blocked_count) == (("shop/slow",), 0)
    assert node.client.get(PODS, "slow", namespace="shop")["metadata"] == since


def test_blocking_budget_is_reported_until_it_allows_eviction(node: Node) -> None:
    node.add("web")
    node.add("free")
    node.protect("keep-web", "web")
    clock = FakeClock(NOW)
    with node.drain(clock) as drain:
        drain.evict_pods()
        wait_until(lambda: drain.evict_pods().remaining == ("shop/web",))
        clock.move(60)
        progress = drain.evict_pods()

        assert progress == DrainProgress(
            remaining=("shop/web",),
            blockers=(
                Blocker(
                    "shop/web",
                    BlockerReason.BUDGET,
                    "Cannot evict pod as it would violate the pod's disruption budget. "
                    "The disruption budget keep-web needs 1 healthy pods and has 1 currently",
                    (DisruptionBudget("keep-web", 0),),
                    NOW,
                ),
            ),
            blocked_count=1,
            retry_s=5.0,
        )
        node.client.delete(PODDISRUPTIONBUDGETS, "keep-web", namespace="shop")
        clock.move(5)
        node.emptied(drain)

    assert node.pods() == []


def test_pod_with_two_budgets_reports_both(node: Node) -> None:
    node.add("web")
    node.protect("one", "web")
    node.protect("two", "web")
    with node.drain() as drain:
        (blocker,) = drain.evict_pods().blockers

    assert (blocker.reason, [budget.name for budget in blocker.budgets]) == (
        BlockerReason.BUDGET,
        ["one", "two"],
    )


def test_budget_with_a_large_selector_counts_as_a_blocker(node: Node) -> None:
    node.add("web")
    node.protect("one", "web")
    values = [f"{number:063}" for number in range(1000)]
    selector = {"matchExpressions": [{"key": "app", "operator": "In", "values": values}]}
    body: Json = {"metadata": {"name": "large"}, "spec": {"minAvailable": 0, "selector": selector}}
    node.client.create(PODDISRUPTIONBUDGETS, body, namespace="shop")
    with node.drain() as drain:
        (blocker,) = drain.evict_pods().blockers

    assert {budget.name for budget in blocker.budgets} == {"one", "large"}


def test_recreated_pod_with_same_name_is_evicted_separately(node: Node) -> None:
    node.add("web")
    with node.drain() as drain:
        node.emptied(drain)
        node.add("web")
        wait_until(lambda: not drain.evict_pods().is_drained)
        node.emptied(drain)

    assert node.pods() == []


def test_finalizer_that_blocks_a_pod_is_reported(node: Node) -> None:
    node.add("held", finalizers=["example.com/hold"])
    clock = FakeClock(SystemClock().now())
    with node.drain(clock) as drain:
        drain.evict_pods()
        clock.move(60)
        wait_until(lambda: drain.evict_pods().blocked_count)
        (blocker,) = drain.evict_pods().blockers
        node.client.patch(PODS, "held", {"metadata": {"finalizers": None}}, namespace="shop")
        node.emptied(drain)

    assert (blocker.pod, blocker.reason) == ("shop/held", BlockerReason.FINALIZER)
    assert node.pods() == []


def test_unreachable_server_raises_and_keeps_attempts(node: Node) -> None:
    node.add("web")
    node.add("kept")
    node.protect("keep-it", "kept")
    clock = FakeClock(NOW)
    with node.drain(clock) as drain:
        drain.evict_pods()
        clock.move(60)
        node.transport.is_interrupted = True
        with pytest.raises(UnreachableError):
            drain.evict_pods()
        node.transport.is_interrupted = False
        wait_until(lambda: drain.evict_pods().remaining == ("shop/kept",))
        (blocker,) = drain.evict_pods().blockers

    assert blocker.since == NOW


def test_unanswered_evictions_block_no_other_pod_and_are_reported(node: Node) -> None:
    slow = [f"slow-{number}" for number in range(3)]
    for name in [*slow, "web", "api"]:
        node.add(name)
    node.transport.slow_pods = frozenset(slow)
    clock = FakeClock(SystemClock().now())
    with (
        ThreadPoolExecutor(8) as executor,
        NodeDrain(node.client, "a", clock, notify=node.rang.set, executor=executor) as drain,
    ):
        drain.evict_pods()
        wait_until(lambda: node.pods() == slow)
        assert drain.evict_pods().blockers == ()
        clock.move(10)
        blocked = drain.evict_pods().blockers
        assert [each.pod for each in blocked] == [f"shop/{name}" for name in slow]
        assert {each.reason for each in blocked} == {BlockerReason.UNANSWERED}
        assert "look for a slow admission webhook" in blocked[0].message

        node.rang.clear()
        node.transport.answered.set()
        assert node.rang.wait(10)
        node.emptied(drain)
    assert node.pods() == []


def test_eviction_without_answer_is_reported_when_the_server_answers_others(node: Node) -> None:
    node.add("web")
    send = node.transport.send

    def lose_evictions(request: ApiRequest) -> ApiResponse:
        if request.path.endswith("/eviction"):
            raise UnreachableError("no response within 15 s")
        return send(request)

    node.transport.send = lose_evictions  # type: ignore[method-assign]  # the client calls it
    with node.drain() as drain:
        (blocker,) = drain.evict_pods().blockers
    assert blocker.reason == BlockerReason.UNANSWERED


def test_eviction_that_fails_unexpectedly_is_reported_and_sent_again(node: Node) -> None:
    node.add("web")
    send = node.transport.send

    def fail_evictions(request: ApiRequest) -> ApiResponse:
        if request.path.endswith("/eviction"):
            raise MemoryError
        return send(request)

    clock = FakeClock(NOW)
    with (
        ThreadPoolExecutor(1) as executor,
        NodeDrain(node.client, "a", clock, notify=node.rang.set, executor=executor) as drain,
    ):
        node.transport.send = fail_evictions  # type: ignore[method-assign]  # the client calls it
        (blocker,) = drain.evict_pods().blockers
        assert blocker.reason == BlockerReason.REFUSED
        assert blocker.message == "the eviction was not sent: MemoryError"

        node.transport.send = send  # type: ignore[method-assign]  # the client calls it
        clock.move(5)
        node.emptied(drain)


class ThreadlessExecutor(ThreadPoolExecutor):
    """Cannot start a thread while ``is_exhausted``, as under the limit of a cgroup's tasks."""

    is_exhausted = True

    def submit(self, *arguments: Any, **named: Any) -> Any:
        if self.is_exhausted:
            raise RuntimeError("can't start new thread")
        return super().submit(*arguments, **named)


def test_eviction_without_a_thread_is_sent_in_a_later_round(node: Node) -> None:
    node.add("web")
    with (
        ThreadlessExecutor(1) as executor,
        NodeDrain(
            node.client, "a", FakeClock(NOW), notify=node.rang.set, executor=executor
        ) as drain,
    ):
        with pytest.raises(ClusterError, match="cannot evict pod shop/web: can't start new"):
            drain.evict_pods()
        executor.is_exhausted = False
        node.emptied(drain)


def test_eviction_that_an_overloaded_server_rejects_is_reported_and_retried(node: Node) -> None:
    node.add("web")
    send = node.transport.send

    def reject_evictions(request: ApiRequest) -> ApiResponse:
        if request.path.endswith("/eviction"):
            return ApiResponse(429, b"", parse_retry_after_s("3600"))
        return send(request)

    clock = FakeClock(NOW)
    with node.drain(clock) as drain:
        node.transport.send = reject_evictions  # type: ignore[method-assign]  # the client calls it
        (blocker,) = drain.evict_pods().blockers
        assert blocker.message == "the API server rejects the eviction for now: HTTP 429"

        node.transport.send = send  # type: ignore[method-assign]  # the client calls it
        clock.move(60)
        node.emptied(drain)
