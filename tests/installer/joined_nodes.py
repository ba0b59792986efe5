"""Nodes of a new control plane, as their kubelets and agents write them."""

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES

ROLE = "node-role.kubernetes.io/master"


def make_node(name: str, *, registry: str = "", has_reported: bool = True) -> Json:
    """Return a Node whose agent uses the bootstrap registry, or none any longer."""
    notes: Json = {key.STATE: "Done"} if has_reported else {}
    if registry:
        notes[key.BOOTSTRAP_REGISTRY] = registry
    metadata: Json = {"name": name, "labels": {ROLE: ""}, "annotations": notes}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def join_node(client: Client, name: str = "master-0", *, registry: str = "") -> None:
    """Create the Node."""
    client.create(NODES, make_node(name, registry=registry))


def drop_registry(client: Client, name: str) -> None:
    """Report that the node uses no bootstrap registry, as its agent does after the removal."""
    notes: Json = {key.BOOTSTRAP_REGISTRY: None}
    client.patch(NODES, name, {"metadata": {"annotations": notes}})
