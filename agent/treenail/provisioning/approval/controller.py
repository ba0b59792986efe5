"""Approval controller, which lets kubelets with an access token join the cluster.

It approves their client certificates, and labels their Nodes as members of the token's pool.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from treenail import clocks, errors
from treenail.api import decode, machineconfigpool
from treenail.controllers.runtime import informer_set, workers
from treenail.kube import api_client, event_recorder, resources, watch
from treenail.provisioning.approval import pool_labels
from treenail.provisioning.approval.request import (
    KUBELET_SIGNER,
    IssuedCertificate,
    KubeletRequest,
    find_refusal,
)
from treenail.provisioning.tokens import token_store, tokens

log = logging.getLogger(__name__)

_REASON = "TreenailAccessToken"
_RESTORED_S = 60.0
"""Time after the first sign of a restored etcd in which each list may be the first of its kind."""
_MAX_REPORTS = 10
"""Requests of one token whose refusal is reported: its machine can create any number of them."""


class ApprovalController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are names of requests.

    It approves and never denies: a user may approve what it leaves. It needs one worker, so that
    two requests of a token are never decided at the same time.
    """

    name = "approve"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        recorder: event_recorder.EventRecorder,
        token_namespace: str,
    ) -> None:
        """``token_namespace`` has the Secret with the access tokens."""
        self._client = client
        self._token_namespace = token_namespace
        self._clock = clock
        self._recorder = recorder
        self._refusals: dict[str, tuple[str, str]] = {}
        """Token and reason of each refused request."""
        self._refused_counts: Counter[str] = Counter()
        """Number of refused requests of each token."""
        self._approved: dict[str, IssuedCertificate] = {}
        """The approved requests by name. Those of this process are here before the watch shows
        them. A client can fill the list of requests, but not this one."""
        self._labeler = pool_labels.PoolLabeler(client, clock, recorder)

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: workers.Enqueue
    ) -> None:
        """Watch requests of kubelets, Nodes and pools."""
        scope = watch.WatchScope(
            resources.CERTIFICATESIGNINGREQUESTS, field_selector=f"spec.signerName={KUBELET_SIGNER}"
        )
        requests: informer_set.InformerView[KubeletRequest] = informers.add_view(
            scope, KubeletRequest.from_json
        )
        nodes: informer_set.InformerView[pool_labels.RegisteredNode] = informers.add_view(
            watch.WatchScope(resources.NODES), pool_labels.RegisteredNode.from_json
        )
        self._requests, self._nodes = requests, nodes
        self._pools: informer_set.InformerView[machineconfigpool.MachineConfigPool] = (
            informers.add_view(
                watch.WatchScope(resources.MACHINECONFIGPOOLS),
                machineconfigpool.MachineConfigPool.from_json,
                optional=True,
            )
        )

        def on_request(
            name: str, before: KubeletRequest | None, after: KubeletRequest | None
        ) -> None:
            if after is None or (before is not None and before.uid != after.uid):
                self._approved.pop(name, None)
            if after is not None and after.is_approved and after.node:
                self._approved[name] = IssuedCertificate(after.token, after.node)
            enqueue(name)

        def on_node(
            node: str,
            before: pool_labels.RegisteredNode | None,
            after: pool_labels.RegisteredNode | None,
        ) -> None:
            if before is None and after is not None:
                self._labeler.note_node(after)
            for name, request in requests.get_all().items():
                if not request.is_decided or (before is None and request.node == node):
                    enqueue(name)

        requests.add_handler(on_request)
        requests.add_list_handler(lambda: self._handle_list(informers, enqueue))
        nodes.add_handler(on_node)
        nodes.add_list_handler(self._labeler.note_list)
        nodes.add_list_handler(lambda: self._handle_list(informers, enqueue))

    def sync_key(self, key: str) -> float | None:
        """Approve the request if its token permits it, or label its Node; raise `ClusterError`."""
        request = self._requests.find(key)
        if request is None or request.is_decided:
            self._forget_refusal(key)
            if request is not None and request.is_approved and request.node:
                node = self._nodes.find(request.node)
                self._labeler.label_node(request, node, [*self._pools.get_all().values()])
            return None
        if key in self._approved:
            return None
        # Not a copy of all Nodes for each of 10,000 requests.
        node = self._nodes.find(request.node)
        nodes = {} if node is None else {request.node: node.is_ready}
        # The Secret is not read for each of 10,000 requests that are refused anyway.
        refusal = self._find_refusal(request, nodes) or self._record_node(request, nodes)
        if refusal:
            self._report_refusal(request, refusal)
            return None
        self._approve_request(request)
        return None

    def close(self) -> None:
        """Do nothing."""

    def _handle_list(self, informers: informer_set.InformerSet, enqueue: workers.Enqueue) -> None:
        """Decide again about what a restore of etcd took away: approvals and labels."""
        if informers.restored_s >= _RESTORED_S:
            return
        self._labeler.forget_decisions()
        for name, request in self._requests.get_all().items():
            if not request.is_decided and self._approved.pop(name, None) is not None:
                log.info("certificate request %s lost its approval: etcd was restored", name)
            enqueue(name)

    def _find_refusal(
        self, request: KubeletRequest, nodes: Mapping[str, bool], recorded: Iterable[str] = ()
    ) -> str:
        own = (IssuedCertificate(request.token, node) for node in recorded)
        return find_refusal(request, nodes, [*self._approved.values(), *own])

    def _record_node(self, request: KubeletRequest, nodes: Mapping[str, bool]) -> str:
        """Record the name of the Node in the token; return why it must not be approved.

        kube-controller-manager deletes requests an hour after their approval (csrcleaner), while a
        token may be valid for days and a refused request waits for a day.
        """
        # A new one each time: a revoked token must not be found in memory.
        store = token_store.TokenStore(self._client, self._token_namespace, self._clock)
        if request.token not in store.load().tokens:
            return f"token {request.token} does not exist, or was revoked"
        return store.change(partial(self._record_in_table, request, nodes))

    def _record_in_table(
        self, request: KubeletRequest, nodes: Mapping[str, bool], table: tokens.TokenTable
    ) -> tuple[tokens.TokenTable, str]:
        record = table.tokens.get(request.token)
        if record is None:
            return table, f"token {request.token} was revoked"
        refusal = self._find_refusal(request, nodes, record.nodes)
        return (
            (table, refusal) if refusal else (table.put(tokens.add_node(record, request.node)), "")
        )

    def _approve_request(self, request: KubeletRequest) -> None:
        try:
            document = self._client.get(resources.CERTIFICATESIGNINGREQUESTS, request.name)
        except errors.NotFoundError:
            return
        current = KubeletRequest.from_json(document)
        if current != request:
            # Another object of the same name, or decided meanwhile; the watch reports it.
            return
        message = f"access token {request.token} permits node {request.node}"
        condition: decode.Json = {
            "type": "Approved",
            "status": "True",
            "reason": _REASON,
            "message": message,
            "lastUpdateTime": clocks.format_rfc3339(self._clock.now()),
        }
        # A request without a decision can still have other conditions, such as Failed.
        status = resources.get_object(document, "status")
        before = status.get("conditions")
        conditions = [*before, condition] if isinstance(before, list) else [condition]
        body = {**document, "status": {**status, "conditions": conditions}}
        self._client.update(
            resources.CERTIFICATESIGNINGREQUESTS, request.name, body, subresource="approval"
        )
        self._approved[request.name] = IssuedCertificate(request.token, request.node)
        log.info("approved the certificate of node %s: %s", request.node, message)

    def _forget_refusal(self, name: str) -> None:
        token, _ = self._refusals.pop(name, ("", ""))
        self._refused_counts[token] -= 1
        if self._refused_counts[token] <= 0:
            del self._refused_counts[token]

    def _report_refusal(self, request: KubeletRequest, refusal: str) -> None:
        token = request.token
        if self._refusals.get(request.name) == (token, refusal):
            return
        self._forget_refusal(request.name)
        self._refusals[request.name] = token, refusal
        self._refused_counts[token] += 1
        excess = self._refused_counts[token] - _MAX_REPORTS
        if excess > 0:
            if excess == 1:
                log.warning(
                    "did not approve more than %d certificate requests of token %s: not reporting "
                    "further ones; to end them, run: treenail-controller token revoke %s",
                    *(_MAX_REPORTS, token, token),
                )
            return
        log.warning("did not approve certificate request %s: %s", request.name, refusal)
        resource = resources.CERTIFICATESIGNINGREQUESTS
        reference = event_recorder.ObjectReference(
            resource.kind, request.name, request.uid, api_version=resource.api_version
        )
        self._recorder.record_warning(reference, "NotApproved", f"not approved: {refusal}")
