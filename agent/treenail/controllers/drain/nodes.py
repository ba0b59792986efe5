"""The Nodes as the drain controller knows them, and its writes to them.

Every write is conditional on the version that was judged. What the API server answered is known
from then on, whether the watch has told it yet or not, so that nothing is decided twice.
"""

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.controllers.drain.decide import DrainNode, DrainRecord
from treenail.controllers.runtime.informers import InformerView
from treenail.errors import NotFoundError
from treenail.kube.client import Client
from treenail.kube.resources import NODES


class DrainNodeClient:
    """Reads and writes Nodes; raises ClusterError, and Conflict when a Node changed meanwhile."""

    def __init__(self, client: Client, view: InformerView[DrainNode]) -> None:
        self._client = client
        self._view = view
        self._answered: dict[str, DrainNode] = {}

    def get_latest(self, name: str) -> DrainNode | None:
        """The node by the watch or by our last write to it, whichever is newer."""
        seen, answered = self._view.find(name), self._answered.get(name)
        if seen is None or answered is None or not _is_older(seen, answered):
            self._answered.pop(name, None)
            return seen
        return answered

    def read_node(self, name: str) -> DrainNode | None:
        """The node as the API server has it now."""
        try:
            return self._store_answer(self._client.get(NODES, name))
        except NotFoundError:
            self._answered.pop(name, None)
            return None

    def cordon_node(self, node: DrainNode, record: DrainRecord) -> DrainNode:
        """Make it unschedulable, and keep the record on it."""
        notes: Json = {key.DRAIN: record.to_text()}
        return self._patch_node(node, notes, {"unschedulable": True})

    def disown_cordon(self, node: DrainNode, record: DrainRecord) -> DrainNode:
        """Keep this record on it."""
        return self._patch_node(node, {key.DRAIN: record.to_text()})

    def write_blockers(self, node: DrainNode, annotation: str) -> DrainNode:
        """Name on it what is in the way; an empty text takes that back."""
        return self._patch_node(node, {key.DRAIN_BLOCKED: annotation or None})

    def acknowledge_drain(self, node: DrainNode) -> DrainNode:
        """Acknowledge the drain; Conflict if it was uncordoned meanwhile."""
        notes: Json = {key.LAST_APPLIED_DRAIN: node.desired_drain}
        if node.drain_blocked:
            notes[key.DRAIN_BLOCKED] = None
        return self._patch_node(node, notes)

    def acknowledge_uncordon(self, node: DrainNode, *, should_uncordon: bool) -> DrainNode:
        """Acknowledge the uncordon, and in the same write lift the cordon and end the record."""
        notes: Json = {
            key.LAST_APPLIED_DRAIN: node.desired_drain,
            key.DRAIN: None,
            key.DRAIN_BLOCKED: None,
        }
        return self._patch_node(node, notes, {"unschedulable": None} if should_uncordon else None)

    def _patch_node(
        self, node: DrainNode, annotations: Json, spec: Json | None = None
    ) -> DrainNode:
        body: Json = {
            "metadata": {"resourceVersion": node.resource_version, "annotations": annotations},
            **({} if spec is None else {"spec": spec}),
        }
        return self._store_answer(self._client.patch(NODES, node.name, body))

    def _store_answer(self, document: Json) -> DrainNode:
        node = DrainNode.from_json(document)
        self._answered[node.name] = node
        return node


def _is_older(node: DrainNode, other: DrainNode) -> bool:
    new, old = node.resource_version, other.resource_version
    return new.isdigit() and old.isdigit() and int(new) < int(old)
