"""The MachineConfigNodes that are kept for Nodes, on the lab's API server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.controllers.rollout.agents import add_nodes
from tests.fixtures.controllers import CLOCK, open_client, run_controllers
from tests.fixtures.objects import add_pool
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.component_names import PART_OF_LABELS
from treenail.controllers.rollout.machineconfignodes import MachineConfigNodeController
from treenail.controllers.runtime.runtime import ControllerRuntime
from treenail.errors import NotFoundError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import (
    CUSTOMRESOURCEDEFINITIONS,
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    NODES,
)
from treenail_lab.apiserver.serving.faults import FaultMatch, LoseAnswerFault, RejectFault
from treenail_lab.apiserver.serving.server import LabServer

IMAGE = f"registry.example.com/os@sha256:{'1' * 64}"
USER = "keeper"


@contextmanager
def running(server: LabServer) -> Iterator[ControllerRuntime]:
    """Run the controller as a user of its own."""
    with open_client(server.write_kubeconfig(USER, ["system:masters"])) as own:
        controller = MachineConfigNodeController(own, CLOCK)
        with run_controllers(own, controller) as runtime:
            yield runtime


@pytest.fixture
def kept(server: LabServer, client: Client) -> Iterator[None]:
    """Run the controller in a cluster with a pool and its node."""
    add_nodes(client, ["a"], "old")
    add_pool(client, "worker", "old")
    with running(server):
        wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "old"))
        yield


def read_spec(client: Client, node: str) -> Json:
    """The spec of the MachineConfigNode; empty while there is none."""
    try:
        found: Any = client.get(MACHINECONFIGNODES, node)
    except NotFoundError:
        return {}
    return dict(found["spec"])


def spec(node: str, pool: str, config: str, image: str = "") -> Json:
    named = {"configImage": {"desiredImage": image}} if image else {}
    return {
        "node": {"name": node},
        "pool": {"name": pool},
        "configVersion": {"desired": config},
        **named,
    }


def ask(client: Client, node: str, **notes: str | None) -> None:
    named = {key.PREFIX + name: value for name, value in notes.items()}
    client.patch(NODES, node, {"metadata": {"annotations": named}})


@pytest.mark.usefixtures("kept")
def test_each_node_of_a_pool_gets_a_machineconfignode_that_follows_it(
    server: LabServer, client: Client
) -> None:
    client.create(NODES, {"metadata": {"name": "unpooled"}})
    node: Any = client.get(NODES, "a")
    made: Any = client.get(MACHINECONFIGNODES, "a")
    assert made["metadata"]["labels"] == PART_OF_LABELS
    owner = {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": node["metadata"]["uid"]}
    assert made["metadata"]["ownerReferences"] == [owner]

    ask(client, "a", desiredConfig="new", desiredOSImage=IMAGE)
    wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "new", IMAGE))
    # An image by tag is omitted.
    ask(client, "a", desiredOSImage="registry.example.com/os:latest")
    wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "new"))

    assert read_spec(client, "unpooled") == {}
    # The node's own writes and those of its pool cost nothing.
    writes = server.count_requests(user=USER, verb="patch", resource="machineconfignodes")
    ask(client, "a", state="Working", currentConfig="new")
    client.patch(MACHINECONFIGPOOLS, "worker", {"spec": {"paused": True}})
    ask(client, "a", desiredConfig="newer", desiredOSImage=None)
    wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "newer"))
    after = server.count_requests(user=USER, verb="patch", resource="machineconfignodes")
    assert after == writes + 1


@pytest.mark.usefixtures("kept")
def test_node_moved_to_another_pool_updates_its_machineconfignode(client: Client) -> None:
    labels = {"node-role.kubernetes.io/infra": ""}
    client.patch(NODES, "a", {"metadata": {"labels": labels}})
    add_pool(client, "infra", "old")
    wait_until(lambda: read_spec(client, "a") == spec("a", "infra", "old"))


@pytest.mark.usefixtures("kept")
def test_machineconfignode_changed_by_a_user_is_restored(client: Client) -> None:
    # An object of the Machine Config Operator has no label, and gets none.
    unlabelled: Any = {"metadata": {"labels": None}, "spec": {"pool": {"name": "other"}}}
    client.patch(MACHINECONFIGNODES, "a", unlabelled)
    wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "old"))
    assert "labels" not in client.get(MACHINECONFIGNODES, "a")["metadata"]  # type: ignore[operator]  # a dict
    client.delete(MACHINECONFIGNODES, "a")
    wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "old"))


@pytest.mark.usefixtures("kept")
def test_recreated_node_becomes_the_owner(client: Client) -> None:
    client.delete(NODES, "a")
    add_nodes(client, ["a"], "older")
    node: Any = client.get(NODES, "a")

    def owner() -> object:
        try:
            found: Any = client.get(MACHINECONFIGNODES, "a")
        except NotFoundError:
            return ""
        return found["metadata"]["ownerReferences"][0]["uid"]

    wait_until(lambda: owner() == node["metadata"]["uid"])
    wait_until(lambda: read_spec(client, "a") == spec("a", "worker", "older"))


@pytest.mark.usefixtures("kept")
def test_lost_responses_and_errors_are_retried(server: LabServer, client: Client) -> None:
    match = FaultMatch(user=USER, resource="machineconfignodes", verb="create")
    server.inject_fault(RejectFault(500), match, times=2)
    add_nodes(client, ["b"], "old")
    wait_until(lambda: read_spec(client, "b") == spec("b", "worker", "old"))
    match = FaultMatch(user=USER, resource="machineconfignodes", verb="patch")
    server.inject_fault(LoseAnswerFault(), match, times=1)
    ask(client, "b", desiredConfig="new")
    wait_until(lambda: read_spec(client, "b") == spec("b", "worker", "new"))


def test_cluster_without_machineconfignodes_gets_none(server: LabServer, client: Client) -> None:
    client.delete(CUSTOMRESOURCEDEFINITIONS, "machineconfignodes.machineconfiguration.openshift.io")
    add_nodes(client, ["a", "b"], "old")
    add_pool(client, "worker", "old")
    with running(server) as runtime:
        wait_until(lambda: server.count_requests(user=USER, verb="create"))
        assert runtime.unready_reason == ""
