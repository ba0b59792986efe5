"""Evictions and PodDisruptionBudgets."""

import pytest

from tests.contract.client import Answer, Json
from tests.contract.space import POLL_LIMIT_S, Space, pod
from tests.waiting import wait_until


def run(space: Space, name: str, **labels: str) -> None:
    """Create a running, ready pod as a kubelet would report it."""
    space.cluster.post(space.at("pods"), pod(name, **labels)).ok()
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    space.cluster.patch(space.at("pods", name, "status"), {"status": status}).ok()


def limit(space: Space, policy: str, name: str, **spec: object) -> None:
    """Create a budget for the pods of app ``a``."""
    selector = {"matchLabels": {"app": "a"}}
    body = {"metadata": {"name": name}, "spec": {"selector": selector} | spec}
    space.cluster.post(space.at("poddisruptionbudgets", group=policy), body).ok()


def budget(space: Space, policy: str, name: str) -> Json:
    found: Json = space.cluster.get(space.at("poddisruptionbudgets", name, group=policy)).ok()
    return found.get("status", {})


def wait_budget(space: Space, policy: str, name: str, allowed: int, healthy: int) -> None:
    def settled() -> bool:
        status = budget(space, policy, name)
        found = status.get("disruptionsAllowed"), status.get("currentHealthy")
        return found == (allowed, healthy) and status.get("observedGeneration") == 1

    wait_until(settled, limit_s=POLL_LIMIT_S)


def evict(space: Space, policy: str, name: str, **query: object) -> Answer:
    body = {
        "apiVersion": policy,
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": space.name},
    }
    return space.cluster.post(space.at("pods", name, "eviction"), body, **query)


def test_pod_without_a_budget_is_evicted(space: Space, policy: str) -> None:
    run(space, "p", app="a")
    answer = evict(space, policy, "p")
    assert (answer.code, answer.body["status"]) == (201, "Success")
    assert space.cluster.get(space.at("pods", "p")).code == 404


def test_pod_that_is_not_there_is_not_found(space: Space, policy: str) -> None:
    assert evict(space, policy, "p").verdict == (404, "NotFound")


@pytest.mark.controllers
def test_budget_counts_its_pods(space: Space, policy: str) -> None:
    for name in "pqr":
        run(space, name, app="a")
    run(space, "other", app="b")
    limit(space, policy, "b", minAvailable=2)
    wait_budget(space, policy, "b", 1, 3)
    status = budget(space, policy, "b")
    assert (status["desiredHealthy"], status["expectedPods"]) == (2, 3)


@pytest.mark.controllers
def test_eviction_that_breaks_a_budget_is_rejected(space: Space, policy: str) -> None:
    run(space, "p", app="a")
    limit(space, policy, "b", minAvailable=1)
    wait_budget(space, policy, "b", 0, 1)
    answer = evict(space, policy, "p")
    assert answer.verdict == (429, "TooManyRequests")
    assert answer.body["message"] == (
        "Cannot evict pod as it would violate the pod's disruption budget."
    )
    assert answer.body["details"]["causes"] == [
        {
            "reason": "DisruptionBudget",
            "message": "The disruption budget b needs 1 healthy pods and has 1 currently",
        }
    ]
    assert space.cluster.get(space.at("pods", "p")).code == 200


@pytest.mark.controllers
def test_budget_is_spent_by_evictions_and_restored_by_new_pods(space: Space, policy: str) -> None:
    run(space, "p", app="a")
    run(space, "q", app="a")
    limit(space, policy, "b", minAvailable=1)
    wait_budget(space, policy, "b", 1, 2)
    assert evict(space, policy, "p").code == 201
    wait_until(lambda: evict(space, policy, "q").code == 429)
    wait_budget(space, policy, "b", 0, 1)
    run(space, "r", app="a")
    wait_budget(space, policy, "b", 1, 2)
    assert evict(space, policy, "q").code == 201


@pytest.mark.controllers
def test_dry_run_of_an_eviction_spends_nothing(space: Space, policy: str) -> None:
    run(space, "p", app="a")
    run(space, "q", app="a")
    limit(space, policy, "b", minAvailable=1)
    wait_budget(space, policy, "b", 1, 2)
    for name in ("p", "q"):
        assert evict(space, policy, name, dryRun="All").code == 201
        assert space.cluster.get(space.at("pods", name)).code == 200


def test_pod_that_has_not_begun_or_has_ended_is_not_protected(space: Space, policy: str) -> None:
    space.cluster.post(space.at("pods"), pod("pending", app="a")).ok()
    run(space, "ended", app="a")
    done = {"status": {"phase": "Succeeded"}}
    space.cluster.patch(space.at("pods", "ended", "status"), done).ok()
    limit(space, policy, "b", minAvailable=5)
    for name in ("pending", "ended"):
        assert evict(space, policy, name).code == 201


@pytest.mark.controllers
def test_two_budgets_for_one_pod_are_an_error(space: Space, policy: str) -> None:
    run(space, "p", app="a")
    for name in ("b", "c"):
        limit(space, policy, name, minAvailable=0)
    wait_budget(space, policy, "c", 1, 1)
    answer = evict(space, policy, "p")
    assert (answer.code, answer.body["status"]) == (500, "Failure")


def test_budget_has_one_bound(space: Space, policy: str) -> None:
    body = {
        "metadata": {"name": "b"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}, "minAvailable": 1,
                 "maxUnavailable": 1},
    }  # fmt: skip
    answer = space.cluster.post(space.at("poddisruptionbudgets", group=policy), body)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "spec")}
