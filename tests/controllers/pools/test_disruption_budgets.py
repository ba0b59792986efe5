"""Nodes with pods that cannot be evicted now are assigned last."""

from collections.abc import Iterator

import pytest

from tests.controllers.drain.site import Site
from tests.controllers.rollout.builders import NEW, decide_rollout, node, pool, proceed
from tests.fakes.clock import FakeClock
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.controllers.pools.disruption_budgets import CACHE_S, BudgetWatcher, ExhaustedBudget
from treenail.controllers.pools.rollout_policy import NodeOrder
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.resources import PODS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail_lab.apiserver.serving.faults import FaultMatch, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

USER = "rollout"


@pytest.fixture
def site(server: LabServer) -> Iterator[Site]:
    found = Site(server)
    for name in "abc":
        found.node(name)
    yield found
    found.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(SystemClock().now())


@pytest.fixture
def budgets(server: LabServer, site: Site, clock: FakeClock) -> Iterator[BudgetWatcher]:
    kubeconfig = read_kubeconfig(str(server.write_kubeconfig(USER, ["system:masters"])))
    transport = HttpTransport(kubeconfig, SystemClock())
    client = Client(transport)
    informers = InformerSet(client, SystemClock())
    found = BudgetWatcher(client, clock)
    found.watch_budgets(informers)
    informers.start()
    assert informers.wait_until_synced(10)
    yield found
    informers.stop()
    transport.close()


def looked_up(budgets: BudgetWatcher, clock: FakeClock) -> frozenset[str]:
    clock.move(CACHE_S)
    return budgets.find_blocked_nodes()


def test_nodes_with_pods_of_an_exhausted_budget_are_blocked(
    site: Site, budgets: BudgetWatcher, clock: FakeClock
) -> None:
    site.pod("a", "web-1", app="web")
    site.pod("b", "web-2", app="web")
    site.pod("c", "other")
    assert looked_up(budgets, clock) == frozenset()
    site.budget("keep", "web")
    wait_until(lambda: looked_up(budgets, clock) == {"a", "b"})
    site.budget("free", "other", keep=0)
    site.drop_budget("keep")
    wait_until(lambda: looked_up(budgets, clock) == frozenset())


def test_pods_of_exhausted_budgets_are_cached(
    server: LabServer, site: Site, budgets: BudgetWatcher, clock: FakeClock
) -> None:
    site.pod("a", "web-1", app="web")
    site.budget("keep", "web")
    wait_until(lambda: looked_up(budgets, clock))
    before = server.count_requests(user=USER, verb="list", resource="pods")
    for _ in range(5):
        assert budgets.find_blocked_nodes() == {"a"}
    assert server.count_requests(user=USER, verb="list", resource="pods") == before


def test_failed_pod_list_blocks_no_node(
    server: LabServer, site: Site, budgets: BudgetWatcher, clock: FakeClock
) -> None:
    site.pod("a", "web-1", app="web")
    site.budget("keep", "web")
    wait_until(lambda: looked_up(budgets, clock))
    server.inject_fault(RejectFault(503), FaultMatch(user=USER, resource=PODS.plural))
    assert looked_up(budgets, clock) == frozenset()


@pytest.mark.parametrize(("count", "is_watched"), [(10, True), (200, False)])
def test_budget_with_a_long_selector_is_not_stored(count: int, *, is_watched: bool) -> None:
    values = [f"{number:030}" for number in range(count)]
    selector = {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": values}]}
    document: dict[str, object] = {
        "metadata": {"name": "large", "namespace": "shop"},
        "spec": {"selector": selector},
        "status": {"disruptionsAllowed": 0, "expectedPods": 1},
    }
    assert bool(ExhaustedBudget.from_json(document)) == is_watched


@pytest.mark.parametrize("order", NodeOrder)
def test_blocked_nodes_are_assigned_last(order: NodeOrder) -> None:
    nodes = [node(name) for name in "abc"]
    careful = pool({"order": str(order)}, maxUnavailable=2)

    def given(*blocked: str) -> tuple[str, ...]:
        return decide_rollout(
            careful, nodes, proceed(NEW), None, now=0.0, blocked_nodes=blocked
        ).nodes_to_assign

    assert given() == ("a", "b")
    assert given("a") == ("b", "c")
    assert given("a", "b") == ("c", "a")
    assert given("a", "b", "c") == ("a", "b")
