"""Approval controller, which lets kubelets with an access token join the cluster.

It approves or denies their client certificates, and labels their Nodes as members of the token's
pool. A name belongs to one machine while a certificate for it can be valid.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from treenail import clocks
from treenail.api import decode, machineconfigpool
from treenail.controllers.runtime import informer_set, workers
from treenail.kube import api_client, event_recorder, resources, watch
from treenail.provisioning.approval import pool_labels
from treenail.provisioning.approval.request import (
    KUBELET_SIGNER,
    CSRRefusal,
    KubeletRequest,
    find_name_refusal,
    find_request_refusal,
)
from treenail.provisioning.tokens import certificates, token_store, tokens

log = logging.getLogger(__name__)

_REASON = "TreenailAccessToken"
_AUTO_APPROVED = (
    "kube-controller-manager approved it, and approves any name of a Node for a machine with a "
    "bootstrap token: in each ClusterRoleBinding of ClusterRole system:certificates.k8s.io:"
    "certificatesigningrequests:nodeclient, replace group system:bootstrappers by one that no "
    "token of treenail has"
)
_RESTORED_S = 60.0
"""Time after the first sign of a restored etcd in which each list may be the first of its kind."""
_NODES_KEY = "/"
"""Key of the names of all Nodes; no request has this name."""
_MAX_REPORTS = 10
"""Requests of one token whose refusal is reported: its machine can create any number of them."""


class ApprovalController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are names of requests.

    A decision about a name is a compare-and-set of the Secret: another process may decide at the
    same time. What is refused is denied, since what is pending could be approved later.
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
        self._issued: dict[certificates.CertificateID, certificates.IssuedCertificate] = {}
        """Certificates of approved requests. A machine may have the one that it has again."""
        self._listed_at = 0.0
        """Time from which on the watch shows each deletion of a Node."""
        self._deleted: dict[str, float] = {}
        """Times of deletions of Nodes, oldest first."""
        self._unrecorded: set[str] = set()
        """Names of deleted Nodes that are not in the table yet."""
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

        def on_request(name: str, _: KubeletRequest | None, after: KubeletRequest | None) -> None:
            if after is not None and after.is_approved and after.certificate.id not in self._issued:
                self._remember_issued(replace(after.certificate, expires=0.0))
            enqueue(name)

        def on_node(
            node: str,
            before: pool_labels.RegisteredNode | None,
            after: pool_labels.RegisteredNode | None,
        ) -> None:
            if before is None and after is not None:
                self._labeler.note_node(after)
            if after is None:
                pool_labels.remember_value(self._deleted, node, self._clock.now())
                self._unrecorded.add(node)
            if before is None or after is None:
                enqueue(_NODES_KEY)
            for name, request in requests.get_all().items():
                if not request.is_decided or (before is None and request.node == node):
                    enqueue(name)

        requests.add_handler(on_request)
        requests.add_list_handler(lambda: self._handle_list(informers, enqueue))
        nodes.add_handler(on_node)
        nodes.add_list_handler(self._labeler.note_list)
        nodes.add_list_handler(lambda: self._handle_list(informers, enqueue))

    def sync_key(self, key: str) -> float | None:
        """Decide about the request, or label its Node; raise `ClusterError` and `ConfigError`."""
        if key == _NODES_KEY:
            self._record_nodes()
            return None
        request = self._requests.find(key)
        if request is None:
            self._refusals.pop(key, None)
            return None
        # Not a copy of all Nodes for each of 10,000 requests.
        node = self._nodes.find(request.node)
        if request.is_decided:
            if request.is_auto_approved:
                self._report_refusal(request, _AUTO_APPROVED)
            if request.is_approved and request.node:
                self._record_expiry(request)
                pools = [*self._pools.get_all().values()]
                self._labeler.label_node(request, node, pools, partial(self._list_others, request))
            return None
        is_ready, refusal = None if node is None else node.is_ready, None
        if request.certificate.id not in self._issued:
            # The Secret is not read for each of 10,000 requests that are refused anyway.
            refusal = find_request_refusal(request, is_ready=is_ready)
        refusal = refusal or self._store.change(partial(self._record_name, request))
        if refusal is None:
            message = f"access token {request.token} permits node {request.node}"
            if self._write_decision(request, "Approved", message):
                expires = self._clock.now() + certificates.LIFETIME_S
                self._remember_issued(replace(request.certificate, expires=expires))
                log.info("approved the certificate of node %s: %s", request.node, message)
        elif not refusal.is_final or self._write_decision(request, "Denied", refusal.reason):
            self._report_refusal(request, refusal.reason)
        return None

    def close(self) -> None:
        """Do nothing."""

    def _handle_list(self, informers: informer_set.InformerSet, enqueue: workers.Enqueue) -> None:
        """Decide again about what a restore of etcd took away: approvals and labels."""
        if self._nodes.listed_at is not None:
            self._listed_at = self._listed_at or self._clock.now()
            enqueue(_NODES_KEY)
        if informers.restored_s >= _RESTORED_S:
            return
        self._labeler.forget_decisions()
        for name in self._requests.get_all():
            enqueue(name)

    def _remember_issued(self, certificate: certificates.IssuedCertificate) -> None:
        pool_labels.remember_value(self._issued, certificate.id, certificate)

    @property
    def _store(self) -> token_store.TokenStore:
        # A new one each time: a revoked token must not be found in memory.
        return token_store.TokenStore(self._client, self._token_namespace, self._clock)

    def _change_certificates(
        self, apply: Callable[[certificates.CertificateTable], certificates.CertificateTable]
    ) -> None:
        def change(table: tokens.TokenTable) -> tuple[tokens.TokenTable, None]:
            if table == tokens.TokenTable():
                return table, None
            found = apply(self._read_certificates(table))
            return certificates.store_certificates(table, found), None

        self._store.change(change)

    def _record_nodes(self) -> None:
        """Record the names of Nodes, also of those that were deleted."""
        deleted, nodes = frozenset(self._unrecorded), self._nodes.get_all().keys()
        now = self._clock.now()
        self._change_certificates(lambda found: found.note_nodes(nodes, now, deleted))
        self._unrecorded -= deleted

    def _record_expiry(self, request: KubeletRequest) -> None:
        """Record when the certificate ends, once it is signed."""
        certificate = request.certificate
        if certificate.expires and self._issued.get(certificate.id) != certificate:
            self._change_certificates(lambda found: found.put(certificate))
            self._remember_issued(certificate)

    def _record_name(
        self, request: KubeletRequest, table: tokens.TokenTable
    ) -> tuple[tokens.TokenTable, CSRRefusal | None]:
        """Record that the name belongs to the machine; return why it does not.

        kube-controller-manager deletes requests an hour after their decision (csrcleaner), and a
        token ends before the certificates of its machines.
        """
        record = table.tokens.get(request.token)
        if record is None:
            what = f"token {request.token} does not exist, or was revoked"
            return table, CSRRefusal(f"{what}: create another token for the machine")
        found = self._read_certificates(table)
        if request.certificate.id not in self._issued:
            newer_than = self._find_oldest(request, found)
            if refused := find_name_refusal(request, record, found.rows, newer_than=newer_than):
                return table, refused
        expires = self._clock.now() + certificates.LIFETIME_S
        found = found.put(replace(request.certificate, expires=expires))
        changed = table.put(tokens.add_node(record, request.node))
        return certificates.store_certificates(changed, found), None

    def _find_oldest(self, request: KubeletRequest, table: certificates.CertificateTable) -> float:
        """Return the time before which the Node of a request may have been deleted."""
        gone_at = self._deleted.get(request.node, 0.0)
        if not gone_at and self._nodes.find(request.node) is None:
            # It may have been deleted while no controller ran. The table has the names of Nodes.
            own = request.certificate.id
            is_known = any(row.node == request.node and row.id != own for row in table.rows)
            gone_at = self._listed_at if is_known else 0.0
        return max(gone_at + pool_labels.SKEW_S, table.since)

    def _read_certificates(self, table: tokens.TokenTable) -> certificates.CertificateTable:
        now = self._clock.now()
        found = certificates.read_certificates(table, now)
        # A restore of etcd takes rows away, but no certificate from a machine.
        known = {row.id: row for row in (*self._issued.values(), *found.rows)}
        found = replace(found, rows=tuple(row for row in known.values() if row.expires > now))
        if found.since:
            return found
        return found.note_nodes(self._nodes.get_all().keys(), float(int(self._listed_at or now)))

    def _list_others(self, request: KubeletRequest) -> list[certificates.IssuedCertificate]:
        rows = self._store.change(lambda table: (table, self._read_certificates(table).rows))
        return [row for row in rows if row.node == request.node and row.identity != request.holder]

    def _write_decision(self, request: KubeletRequest, decision: str, message: str) -> bool:
        """Add the condition; return False if it is another request, or decided meanwhile."""
        document = self._client.find(resources.CERTIFICATESIGNINGREQUESTS, request.name)
        if document is None or KubeletRequest.from_json(document) != request:
            return False
        condition: decode.Json = {
            "type": decision,
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
        return True

    def _report_refusal(self, request: KubeletRequest, reason: str) -> None:
        token = request.token
        if self._refusals.get(request.name) == (token, reason):
            return
        self._refusals[request.name] = token, reason
        excess = sum(other == token for other, _ in self._refusals.values()) - _MAX_REPORTS
        if excess == 1:
            log.warning(
                "did not approve more than %d certificate requests of token %s: not reporting "
                "further ones; to end them, run: treenail-controller token revoke %s",
                *(_MAX_REPORTS, token, token),
            )
        if excess > 0:
            return
        log.warning("did not approve certificate request %s: %s", request.name, reason)
        resource = resources.CERTIFICATESIGNINGREQUESTS
        reference = event_recorder.ObjectReference(
            resource.kind, request.name, request.uid, api_version=resource.api_version
        )
        self._recorder.record_warning(reference, "NotApproved", f"not approved: {reason}")
