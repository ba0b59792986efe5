"""PinnedImageSets that the rollout controller names on nodes."""

from typing import Any

from tests.controllers.rollout.agents import add_nodes
from tests.controllers.rollout.test_controller_lab import USER, running
from tests.fixtures.objects import add_config, add_pool
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES, PINNEDIMAGESETS
from treenail_lab.apiserver.serving.server import LabServer

IMAGES = tuple(f"registry.example.com/app@sha256:{digit * 64}" for digit in "123")
ROLE = "machineconfiguration.openshift.io/role"


def add_set(client: Client, name: str, role: str = "worker") -> None:
    body = {"apiVersion": PINNEDIMAGESETS.api_version, "kind": PINNEDIMAGESETS.kind}
    metadata = {"name": name, "labels": {ROLE: role}}
    spec = {"pinnedImages": [{"name": IMAGES[0]}]}
    client.create(PINNEDIMAGESETS, {**body, "metadata": metadata, "spec": spec})


def read_annotation(client: Client, node: str) -> str:
    found: Any = client.get(NODES, node)
    return str(found["metadata"]["annotations"].get(key.PINNED_IMAGE_SETS, ""))


def test_selected_sets_are_named_on_the_nodes_of_the_pool(
    server: LabServer, client: Client
) -> None:
    def wait_for(annotation: str) -> None:
        wait_until(lambda: {read_annotation(client, n) for n in ("a", "b")} == {annotation})

    add_config(client, "old")
    add_nodes(client, ["a", "b"], "old")
    selector = {"matchLabels": {ROLE: "worker"}}
    add_pool(client, "worker", "old", machineConfigSelector=selector, paused=True)
    for name in ("two", "one"):
        add_set(client, name)
    add_set(client, "other", role="infra")
    with running(server):
        wait_for("one@1,two@1")
        writes = server.count_requests(user=USER, verb="patch", resource="nodes")
        assert writes == 2
        spec = {"pinnedImages": [{"name": image} for image in IMAGES]}
        client.patch(PINNEDIMAGESETS, "one", {"spec": spec})
        wait_for("one@2,two@1")
        client.patch(PINNEDIMAGESETS, "two", {"metadata": {"labels": {ROLE: "infra"}}})
        wait_for("one@2")
        client.delete(PINNEDIMAGESETS, "one")
        wait_for("")
        assert server.count_requests(user=USER, verb="patch", resource="nodes") == 8
    # Another process finds nothing to do.
    with running(server):
        add_set(client, "three")
        wait_for("three@1")
        assert server.count_requests(user=USER, verb="patch", resource="nodes") == 10
        # A node that leaves its pool pins nothing.
        client.patch(NODES, "b", {"metadata": {"labels": {"node-role.kubernetes.io/worker": None}}})
        wait_until(lambda: read_annotation(client, "b") == "")
    assert read_annotation(client, "a") == "three@1"
