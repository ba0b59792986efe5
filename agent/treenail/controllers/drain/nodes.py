"""Reads and conditional writes of Nodes.

Every write carries the resourceVersion that the decision was based on. The response of the API
server counts from then on, even before the watch shows it, so that no step is decided twice.
"""

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.controllers.drain.decide import DrainNode, DrainRecord, format_outage
from treenail.controllers.runtime.informers import InformerView
from treenail.errors import NotFoundError
from treenail.kube.client import Client
from treenail.kube.resources import NODES
from treenail.kube.responses import RecentResponses, RequestToken


class DrainNodeClient:
    """Reads and writes Nodes.

    Raises `ClusterError`, in particular `ConflictError` when the Node changed meanwhile.
    """

    def __init__(self, client: Client, view: InformerView[DrainNode]) -> None:
        self._client = client
        self._view = view
        self._responses = RecentResponses[DrainNode]()

    def get_latest(self, name: str) -> DrainNode | None:
        """Return the node from the watch or from the last response, whichever is newer."""
        return self._responses.select_latest(name, self._view.find(name))

    def handle_list(self) -> tuple[str, ...]:
        """Prefer the list that was just received to all earlier responses; return their nodes."""
        return self._responses.handle_list()

    def read_node(self, name: str) -> DrainNode | None:
        """Read the node from the API server; None when it does not exist."""
        token = self._responses.begin_request(self._view.find(name))
        try:
            return self._store_response(self._client.get(NODES, name), token)
        except NotFoundError:
            self._responses.forget_response(name)
            return None

    def cordon_node(self, node: DrainNode, record: DrainRecord) -> DrainNode:
        """Cordon the node and write the record."""
        annotations: Json = {key.DRAIN: record.to_text()}
        return self._patch_node(node, annotations, {"unschedulable": True})

    def disown_cordon(self, node: DrainNode, record: DrainRecord) -> DrainNode:
        """Write the record, which gives the cordon to a user."""
        return self._patch_node(node, {key.DRAIN: record.to_text()})

    def write_blockers(self, node: DrainNode, annotation: str) -> DrainNode:
        """Write the annotation with the blockers; an empty text removes it."""
        return self._patch_node(node, {key.DRAIN_BLOCKED: annotation or None})

    def acknowledge_drain(self, node: DrainNode) -> DrainNode:
        """Acknowledge the drain; raises `ConflictError` after an uncordon meanwhile."""
        annotations: Json = {key.LAST_APPLIED_DRAIN: node.desired_drain}
        if node.drain_blocked:
            annotations[key.DRAIN_BLOCKED] = None
        return self._patch_node(node, annotations)

    def acknowledge_uncordon(
        self, node: DrainNode, *, should_uncordon: bool, now: float
    ) -> DrainNode:
        """Acknowledge the uncordon, lift the cordon and remove the record, in one write."""
        annotations: Json = {
            key.LAST_APPLIED_DRAIN: node.desired_drain,
            key.DRAIN: None,
            key.DRAIN_BLOCKED: None,
        }
        if node.record is not None and should_uncordon:
            annotations[key.LAST_OUTAGE] = format_outage(node.record.began_at, now)
        spec: Json | None = {"unschedulable": None} if should_uncordon else None
        return self._patch_node(node, annotations, spec)

    def _patch_node(
        self, node: DrainNode, annotations: Json, spec: Json | None = None
    ) -> DrainNode:
        body: Json = {
            "metadata": {"resourceVersion": node.resource_version, "annotations": annotations},
            **({} if spec is None else {"spec": spec}),
        }
        token = self._responses.begin_request(self._view.find(node.name))
        return self._store_response(self._client.patch(NODES, node.name, body), token)

    def _store_response(self, document: Json, token: RequestToken) -> DrainNode:
        node = DrainNode.from_json(document)
        self._responses.store_response(node.name, node, token)
        return node
