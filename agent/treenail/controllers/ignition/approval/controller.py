"""Approval controller: approves the client certificates of kubelets that have an access token."""

import logging

from treenail.api.decode import Fields, Json
from treenail.api.meta import ObjectMeta
from treenail.clock import Clock, format_rfc3339
from treenail.controllers.ignition.approval.decide import find_refusal
from treenail.controllers.ignition.approval.request import KUBELET_SIGNER, KubeletRequest
from treenail.controllers.runtime.informers import Informers, InformerView
from treenail.controllers.runtime.workers import Enqueue
from treenail.errors import NotFoundError
from treenail.kube.client import Client
from treenail.kube.events import EventRecorder, ObjectReference
from treenail.kube.resources import CERTIFICATESIGNINGREQUESTS, NODES, get_object
from treenail.kube.watch import WatchScope

log = logging.getLogger(__name__)

_REASON = "TreenailAccessToken"


class ApprovalController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are names of requests.

    It approves and never denies: a user may approve what it leaves. It needs one worker, so that
    two requests of a token are never decided at the same time.
    """

    name = "approve"

    def __init__(self, client: Client, clock: Clock, recorder: EventRecorder) -> None:
        self._client = client
        self._clock = clock
        self._recorder = recorder
        self._refusals: dict[str, str] = {}
        self._approved: dict[str, tuple[str, str]] = {}
        """Token and node of each request that this process approved: the watch shows it later."""

    def register_watches(self, informers: Informers, enqueue: Enqueue) -> None:
        """Watch requests of kubelets, and the names of Nodes."""
        scope = WatchScope(
            CERTIFICATESIGNINGREQUESTS, field_selector=f"spec.signerName={KUBELET_SIGNER}"
        )
        requests: InformerView[KubeletRequest] = informers.add_view(scope, KubeletRequest.from_json)
        nodes: InformerView[str] = informers.add_view(WatchScope(NODES), _read_name)
        self._requests, self._nodes = requests, nodes
        requests.add_handler(lambda name, _before, _after: enqueue(name))

        def on_node(_: str, before: str | None, after: str | None) -> None:
            if (before is None) != (after is None):
                for name in requests.get_all():
                    enqueue(name)

        nodes.add_handler(on_node)

    def sync_key(self, key: str) -> float | None:
        """Approve the request if its token permits it; raise `ClusterError`."""
        request = self._requests.find(key)
        if request is None or request.is_decided:
            self._refusals.pop(key, None)
            if request is None:
                self._approved.pop(key, None)
            return None
        if key in self._approved:
            return None
        refusal = find_refusal(request, self._nodes.get_all(), self._list_approved(request.token))
        if refusal:
            self._report_refusal(request, refusal)
            return None
        self._approve(request)
        return None

    def close(self) -> None:
        """Do nothing."""

    def _list_approved(self, token: str) -> set[str]:
        found = {node for owner, node in self._approved.values() if owner == token}
        return found | {
            each.node
            for each in self._requests.get_all().values()
            if each.token == token and each.is_approved and each.node
        }

    def _approve(self, request: KubeletRequest) -> None:
        try:
            document = self._client.get(CERTIFICATESIGNINGREQUESTS, request.name)
        except NotFoundError:
            return
        found = KubeletRequest.from_json(document)
        if found != request:
            # Another object of the same name, or decided meanwhile; the watch reports it.
            return
        message = f"access token {request.token} permits node {request.node}"
        condition: Json = {
            "type": "Approved",
            "status": "True",
            "reason": _REASON,
            "message": message,
            "lastUpdateTime": format_rfc3339(self._clock.now()),
        }
        # A request without a decision can still have other conditions, such as Failed.
        status = get_object(document, "status")
        before = status.get("conditions")
        conditions = [*before, condition] if isinstance(before, list) else [condition]
        body = {**document, "status": {**status, "conditions": conditions}}
        self._client.update(CERTIFICATESIGNINGREQUESTS, request.name, body, subresource="approval")
        self._approved[request.name] = request.token, request.node
        log.info("approved the certificate of node %s: %s", request.node, message)

    def _report_refusal(self, request: KubeletRequest, refusal: str) -> None:
        if self._refusals.get(request.name) == refusal:
            return
        self._refusals[request.name] = refusal
        log.warning("did not approve certificate request %s: %s", request.name, refusal)
        resource = CERTIFICATESIGNINGREQUESTS
        reference = ObjectReference(
            resource.kind, request.name, request.uid, api_version=resource.api_version
        )
        self._recorder.record_warning(reference, "NotApproved", f"not approved: {refusal}")


def _read_name(document: Json) -> str:
    return ObjectMeta.from_fields(Fields.from_json(document, "Node").get_object("metadata")).name
