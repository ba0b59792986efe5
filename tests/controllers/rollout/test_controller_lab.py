"""The controller with real watches on the lab's API server, up to 500 nodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.controllers.rollout.agents import Agents, add_nodes
from tests.fixtures.controllers import CLOCK, open_client, run_controllers
from tests.fixtures.objects import add_config, add_policy, add_pool
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.controllers.pools.node_facts import LOCKED_BY
from treenail.controllers.pools.rollout_policy import LockServer, PrometheusAlerts
from treenail.controllers.rollout.controller import RolloutController
from treenail.controllers.rollout.external_gates import GateClient, Gates, LockHolder
from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
from treenail.controllers.rollout.reconcile import RolloutSettings
from treenail.controllers.runtime.web import WebClient
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import (
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    NODES,
    ROLLOUTPOLICIES,
)
from treenail_lab.apiserver.serving.faults import (
    DelayWatchesFault,
    FaultMatch,
    HoldWatchesFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.server import LabServer

USER = "rollout"
IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"


class FreeLocks:
    """Gates that are open; remembers who released a lock."""

    def __init__(self) -> None:
        self.released: list[LockHolder] = []

    def check_alerts(self, alerts: PrometheusAlerts | None) -> None:
        return None

    def acquire_lock(self, server: LockServer, holder: LockHolder) -> None:
        return None

    def release_lock(self, server: LockServer, holder: LockHolder) -> None:
        self.released.append(holder)


@contextmanager
def running(server: LabServer, gates: Gates | None = None) -> Iterator[None]:
    """Run the rollout controller in its runtime, as its own user."""
    with open_client(server.write_kubeconfig(USER, ["system:masters"])) as client:
        events = EventRecorder(client, "treenail-rollout", "here", CLOCK)
        gates = gates or GateClient(WebClient())
        rollout = RolloutController(client, CLOCK, gates, events, RolloutSettings())
        nodes = MachineConfigNodeController(client, CLOCK)
        with run_controllers(client, rollout, nodes):
            yield


def status(client: Client, pool: str = "worker") -> dict[str, Any]:
    found: Any = client.get(MACHINECONFIGPOOLS, pool)
    return found.get("status", {})


def condition(client: Client, kind: str, pool: str = "worker") -> dict[str, Any]:
    found = status(client, pool).get("conditions", ())
    return next((each for each in found if each["type"] == kind), {})


def notes(client: Client, node: str) -> dict[str, str]:
    found: Any = client.get(NODES, node)
    return found["metadata"]["annotations"]


def test_pool_is_updated_to_config_and_image(server: LabServer, client: Client) -> None:
    for config in ("old", "new"):
        add_config(client, config)
    add_nodes(client, [f"n{number}" for number in range(5)], "old")
    add_pool(client, "worker", "old", maxUnavailable=2)
    with Agents(client), running(server):
        wait_until(lambda: condition(client, "Updated").get("status") == "True")
        wait_until(lambda: writes(server, "machineconfignodes") == 5)
        assert not writes(server, "nodes")
        change = {
            "spec": {"osImage": IMAGE, "configuration": {"name": "new"}},
        }
        client.patch(MACHINECONFIGPOOLS, "worker", change)
        wait_until(lambda: status(client).get("configuration") == {"name": "new"}, limit_s=30)
        wait_until(lambda: writes(server, "machineconfignodes") == 10)
    found = notes(client, "n3")
    assert found[key.CURRENT_CONFIG] == "new"
    assert found[key.CURRENT_OS_IMAGE] == IMAGE
    assert {name: status(client)[name] for name in status(client) if name.endswith("Count")} == {
        "machineCount": 5,
        "updatedMachineCount": 5,
        "readyMachineCount": 5,
        "unavailableMachineCount": 0,
        "degradedMachineCount": 0,
    }
    machine_config_node: Any = client.get(MACHINECONFIGNODES, "n3")
    assert machine_config_node["spec"] == {
        "node": {"name": "n3"},
        "pool": {"name": "worker"},
        "configVersion": {"desired": "new"},
        "configImage": {"desiredImage": IMAGE},
    }
    # One write for the Node, one that creates its MachineConfigNode, and one with the new target.
    assert writes(server, "nodes") == 5
    assert writes(server, "machineconfignodes") == 10


def test_disconnected_node_watch_stops_assignments_and_is_named(
    server: LabServer, client: Client
) -> None:
    for config in ("old", "new"):
        add_config(client, config)
    add_nodes(client, ["n0", "n1"], "old")
    add_pool(client, "worker", "old")
    with running(server):
        wait_until(lambda: condition(client, "Updated").get("status") == "True")
        for verb in ("list", "watch"):
            server.inject_fault(
                RejectFault(503, retry_after_s=0), FaultMatch(verb, "nodes", user=USER)
            )
        watches = server.count_requests(user=USER, verb="watch", resource="nodes")
        server.cut_watches("nodes", USER)
        # The second try follows the first failure.
        wait_until(
            lambda: (
                server.count_requests(user=USER, verb="list", resource="nodes") > 1
                or server.count_requests(user=USER, verb="watch", resource="nodes") > watches + 1
            )
        )
        client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"configuration": {"name": "new"}}})
        wait_until(
            lambda: (
                "waiting: the watch of nodes is disconnected: "
                in condition(client, "Updating").get("message", "")
            )
        )
        assert writes(server, "nodes") == 0
        server.lift_fault()
        wait_until(lambda: writes(server, "nodes") == 1, limit_s=40)
    assert notes(client, "n0")[key.DESIRED_CONFIG] == "new"


def test_late_watches_exceed_no_limit(server: LabServer, client: Client) -> None:
    for config in ("old", "new"):
        add_config(client, config)
    add_nodes(client, [f"n{number}" for number in range(6)], "old")
    add_pool(client, "worker", "old", maxUnavailable=2)
    updating: dict[str, bool] = {}
    most = 0

    def count_updating(storage: object, event: Any) -> None:
        nonlocal most
        if storage == ("", "nodes"):
            found = event.object["metadata"]["annotations"]
            updating[event.object["metadata"]["name"]] = (
                found[key.DESIRED_CONFIG] != found[key.CURRENT_CONFIG]
            )
            most = max(most, sum(updating.values()))

    server.call_api(lambda api: api.store.add_listener(count_updating))
    with Agents(client), running(server):
        wait_until(lambda: condition(client, "Updated").get("status") == "True")
        server.inject_fault(DelayWatchesFault(0.3, is_random=True), FaultMatch(user=USER))
        node_watches = FaultMatch(resource="nodes", user=USER)
        server.inject_fault(HoldWatchesFault(), node_watches, for_s=1.0)
        client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"configuration": {"name": "new"}}})
        wait_until(lambda: status(client).get("configuration") == {"name": "new"}, limit_s=40)
    assert most == 2


def test_bad_image_reaches_only_the_canary_of_500_nodes(server: LabServer, client: Client) -> None:
    add_config(client, "old")
    names = [f"n{number:03}" for number in range(500)]
    add_nodes(client, names, "old")
    add_policy(client, "careful", {"canary": {"nodes": 2}, "soak": "1h"})
    add_pool(client, "worker", "old", maxUnavailable="10%", rolloutPolicy="careful")
    agents = Agents(client, is_bad=lambda node: node.image == IMAGE)
    with agents, running(server):
        wait_until(lambda: condition(client, "Updated").get("status") == "True", limit_s=60)
        change = {"spec": {"osImage": IMAGE}}
        client.patch(MACHINECONFIGPOOLS, "worker", change)
        # A degraded node has a minute before its state counts against the new target.
        halted = wait_until(
            lambda: found if (found := condition(client, "Degraded")).get("status") == "True"
            else None, limit_s=120,
        )  # fmt: skip
    assert len(agents.touched) == 2
    first = min(agents.touched)
    assert halted["reason"] in ("Halted", "NodeDegraded")
    assert first in halted["message"]
    assert "the image does not boot" in halted["message"]
    assert writes(server, "nodes") == 2


def writes(server: LabServer, resource: str) -> int:
    return sum(
        server.count_requests(user=USER, verb=verb, resource=resource)
        for verb in ("create", "update", "patch", "delete")
    )


URL = "http://locks.example.com"


def test_lock_is_released_after_its_pool_is_deleted(server: LabServer, client: Client) -> None:
    add_config(client, "old")
    add_nodes(client, ["n0"], "old")
    add_pool(client, "worker", "old", paused=True)
    add_policy(client, "locked", {"fleetLock": {"url": URL, "group": "workers"}})
    locks = FreeLocks()
    with running(server, locks):
        wait_until(lambda: condition(client, "Updated").get("status") == "True")
        client.delete(MACHINECONFIGPOOLS, "worker")
        held = {LOCKED_BY: f"workers {URL}"}
        found: Any = client.patch(NODES, "n0", {"metadata": {"annotations": held}})
        wait_until(lambda: LOCKED_BY not in notes(client, "n0"))
    assert locks.released == [LockHolder("n0", found["metadata"]["uid"])]


def test_rollout_starts_when_its_policy_appears(server: LabServer, client: Client) -> None:
    for config in ("old", "new"):
        add_config(client, config)
    add_nodes(client, ["n0"], "old")
    add_pool(client, "worker", "new", rolloutPolicy="careful")
    with Agents(client), running(server):
        wait_until(lambda: condition(client, "Stalled").get("reason") == "MissingRolloutPolicy")
        add_policy(client, "careful", {"canary": {}})
        wait_until(lambda: condition(client, "Updated").get("status") == "True", limit_s=30)
        wait_until(lambda: read_states(client) == ["Updated"])
    assert notes(client, "n0")[key.CURRENT_CONFIG] == "new"


def read_states(client: Client) -> list[str]:
    found: Any = client.get(ROLLOUTPOLICIES, "careful")
    return [each["state"] for each in found.get("status", {}).get("pools", ())]
