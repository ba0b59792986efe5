"""The controllers on the lab's API server and, unchanged, on the cluster one has.

With the manifests applied, a token of their account, and Nodes without machines. Agents are
simulated; pods, budgets and evictions are the cluster's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.clusters import LIMIT_S, Place
from tests.controllers.rollout.agents import Agents
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import (
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    PODDISRUPTIONBUDGETS,
)

pytestmark = [pytest.mark.integration]


@pytest.fixture
def place(kubeconfig: Path, tmp_path: Path) -> Iterator[Place]:
    found = Place(kubeconfig, tmp_path)
    try:
        found.install()
        yield found
    finally:
        found.remove()


def agents(place: Place, **more: Any) -> Agents:
    return Agents(place.client, drains=True, selector=place.prefix, **more)


@pytest.mark.controllers
def test_pool_change_reaches_every_node_and_moves_its_pods(place: Place) -> None:
    nodes = {place.node(name) for name in ("n1", "n2", "n3")}
    place.config("00", kernelArguments=["a=1"])
    place.pool("{canary: {}, soak: 0s}")
    with agents(place), place.controllers():
        wait_until(lambda: place.at(place.rendered()) == nodes, limit_s=LIMIT_S)
        wait_until(lambda: place.condition("Updated").get("status") == "True", limit_s=LIMIT_S)
        before = place.rendered()
        for node in sorted(nodes):
            place.pod(node, f"web-{node[-2:]}", "web")
        place.budget("keep", "web", 0)

        place.config("00", kernelArguments=["a=2"])
        wait_until(lambda: place.rendered() != before, limit_s=LIMIT_S)
        after = place.rendered()
        wait_until(lambda: place.at(after) == nodes, limit_s=LIMIT_S)
        wait_until(lambda: place.condition("Updated").get("status") == "True", limit_s=LIMIT_S)
        assert place.pods() == set()
        for node in nodes:
            said: Any = place.client.get(MACHINECONFIGNODES, node)
            assert said["spec"]["configVersion"] == {"desired": after}
            assert said["spec"]["pool"] == {"name": place.prefix}
        pool: Any = place.client.get(MACHINECONFIGPOOLS, place.prefix)
        status = pool["status"]
        assert status["configuration"]["name"] == after
        assert status["observedGeneration"] == pool["metadata"]["generation"]
        assert (status["machineCount"], status["updatedMachineCount"]) == (3, 3)
        config: Any = place.client.get(MACHINECONFIGS, after)
        assert config["spec"]["kernelArguments"] == ["a=2"]
        assert config["metadata"]["ownerReferences"][0]["name"] == place.prefix


def test_bad_config_stops_at_the_canary(place: Place) -> None:
    nodes = {place.node(name) for name in ("n1", "n2", "n3")}
    place.config("00", kernelArguments=["a=1"])
    place.pool("{canary: {}, soak: 0s, maxFailures: 0}", maxUnavailable=2)
    bad: set[str] = set()
    with agents(place, is_bad=lambda asked: asked.config in bad) as found, place.controllers():
        wait_until(lambda: place.at(place.rendered()) == nodes, limit_s=LIMIT_S)
        wait_until(lambda: place.condition("Updated").get("status") == "True", limit_s=LIMIT_S)
        before = place.rendered()
        found.touched.clear()
        found.is_bad = lambda asked: asked.config != before
        place.config("00", kernelArguments=["a=2"])
        wait_until(lambda: place.condition("Degraded").get("reason") == "Halted", limit_s=LIMIT_S)
        (canary,) = found.touched
        assert (
            f"node {canary} failed first: the image does not boot"
            in (place.condition("Degraded")["message"])
        )
        assert place.at(before) == nodes - {canary}


@pytest.mark.controllers
def test_blocking_budget_is_reported_until_the_drain_continues(place: Place) -> None:
    node = place.node("n1")
    place.config("00", kernelArguments=["a=1"])
    place.pool()
    with agents(place), place.controllers():
        wait_until(lambda: place.at(place.rendered()) == {node}, limit_s=LIMIT_S)
        before = place.rendered()
        place.pod(node, "web", "web")
        place.budget("keep", "web", 1)
        place.config("00", kernelArguments=["a=2"])
        named = wait_until(lambda: place.notes(node).get(key.DRAIN_BLOCKED), limit_s=LIMIT_S)
        assert f'"pod": "{place.prefix}/web"' in named
        assert '"name": "keep"' in named
        assert place.cordoned(node)
        assert place.pods() == {"web"}
        place.client.delete(PODDISRUPTIONBUDGETS, "keep", namespace=place.prefix)
        wait_until(lambda: place.rendered() != before, limit_s=LIMIT_S)
        wait_until(lambda: place.at(place.rendered()) == {node}, limit_s=LIMIT_S)
        assert place.pods() == set()
        assert key.DRAIN_BLOCKED not in place.notes(node)


def test_invalid_config_changes_no_node(place: Place) -> None:
    node = place.node("n1")
    place.config("00", kernelArguments=["a=1"])
    place.pool()
    with agents(place) as found, place.controllers():
        wait_until(lambda: place.at(place.rendered()) == {node}, limit_s=LIMIT_S)
        before = place.rendered()
        found.touched.clear()
        wrong = place.config("10", config={"ignition": {"version": "4.0.0"}})
        wait_until(lambda: place.condition("RenderDegraded").get("status") == "True",
                   limit_s=LIMIT_S)  # fmt: skip
        assert wrong in place.condition("RenderDegraded")["message"]
        wait_until(lambda: place.condition("Degraded").get("status") == "True", limit_s=LIMIT_S)
        assert place.rendered() == before
        assert not found.touched
