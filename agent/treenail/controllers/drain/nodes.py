"""The Nodes as the drain controller knows them, and its writes to them.

Every write is conditional on the version that was judged. What the API server answered is known
from then on, whether the watch has told it yet or not, so that nothing is decided twice.
"""

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.controllers.drain.decide import NodeSeen, Record
from treenail.controllers.runtime.informers import View
from treenail.errors import NotFound
from treenail.kube.client import Client
from treenail.kube.resources import NODES


class Nodes:
    """Reads and writes Nodes; raises ClusterError, and Conflict when a Node changed meanwhile."""

    def __init__(self, client: Client, view: View[NodeSeen]) -> None:
        self._client = client
        self._view = view
        self._answered: dict[str, NodeSeen] = {}

    def newest(self, name: str) -> NodeSeen | None:
        """The node by the watch or by our last write to it, whichever is newer."""
        seen, answered = self._view.find(name), self._answered.get(name)
        if seen is None or answered is None or not _older(seen, answered):
            self._answered.pop(name, None)
            return seen
        return answered

    def read(self, name: str) -> NodeSeen | None:
        """The node as the API server has it now."""
        try:
            return self._note(self._client.get(NODES, name))
        except NotFound:
            self._answered.pop(name, None)
            return None

    def cordon(self, node: NodeSeen, record: Record) -> NodeSeen:
        """Make it unschedulable, and keep the record on it."""
        notes: Json = {key.DRAIN: record.to_text()}
        return self._write(node, notes, {"unschedulable": True})

    def disown(self, node: NodeSeen, record: Record) -> NodeSeen:
        """Keep this record on it."""
        return self._write(node, {key.DRAIN: record.to_text()})

    def name_blockers(self, node: NodeSeen, text: str) -> NodeSeen:
        """Name on it what is in the way; an empty text takes that back."""
        return self._write(node, {key.DRAIN_BLOCKED: text or None})

    def drained(self, node: NodeSeen) -> NodeSeen:
        """Acknowledge the drain; Conflict if it was uncordoned meanwhile."""
        notes: Json = {key.LAST_APPLIED_DRAIN: node.asked}
        if node.blocked:
            notes[key.DRAIN_BLOCKED] = None
        return self._write(node, notes)

    def uncordoned(self, node: NodeSeen, *, lift: bool) -> NodeSeen:
        """Acknowledge the uncordon, and in the same write lift the cordon and end the record."""
        notes: Json = {key.LAST_APPLIED_DRAIN: node.asked, key.DRAIN: None, key.DRAIN_BLOCKED: None}
        return self._write(node, notes, {"unschedulable": None} if lift else None)

    def _write(self, node: NodeSeen, notes: Json, spec: Json | None = None) -> NodeSeen:
        body: Json = {
            "metadata": {"resourceVersion": node.resource_version, "annotations": notes},
            **({} if spec is None else {"spec": spec}),
        }
        return self._note(self._client.patch(NODES, node.name, body))

    def _note(self, document: Json) -> NodeSeen:
        node = NodeSeen.from_json(document)
        self._answered[node.name] = node
        return node


def _older(node: NodeSeen, than: NodeSeen) -> bool:
    new, old = node.resource_version, than.resource_version
    return new.isdigit() and old.isdigit() and int(new) < int(old)
