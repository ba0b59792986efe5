"""Settlement of the uses of access tokens: the Node is Ready, or never became so."""

import logging
from collections.abc import Sequence
from functools import partial

from treenail import clocks
from treenail.kube import api_client, resources
from treenail.provisioning.approval import request
from treenail.provisioning.machines.joined_machines import ArrivedNode, parse_nodes
from treenail.provisioning.tokens import bootstrap_tokens, token_store, tokens

log = logging.getLogger(__name__)

LIST_S = 30.0
"""Interval between lists of the Nodes, while a machine is expected."""
_SKEW_S = 60.0
"""Tolerated difference between the clocks of this server and of the API server."""


class TokenUseSettler:
    """Revokes the kubelet's credential when the Node is Ready or the credential has ended."""

    def __init__(
        self,
        store: token_store.TokenStore,
        client: api_client.Client,
        clock: clocks.Clock,
        credentials: bootstrap_tokens.MachineCredentials,
        *,
        retry_window_s: float,
    ) -> None:
        self._store = store
        self._client = client
        self._clock = clock
        self._credentials = credentials
        self._lifetime_s = bootstrap_tokens.LIFETIME_S + retry_window_s
        self._listed_at = float("-inf")

    def settle_uses(self) -> None:
        """Settle what can be settled; raise `TreenailError`. Lists Nodes at most every 30 s."""
        observed = self._store.observed
        table = observed.table if observed else None
        waiting = [
            record
            for record in (table.tokens.values() if table else ())
            if any(use.state is tokens.UseState.SENT for use in record.used)
        ]
        if not waiting or self._clock.monotonic() < self._listed_at + LIST_S:
            return
        self._listed_at = self._clock.monotonic()
        now = self._clock.now()
        nodes = self._client.list_parsed(resources.NODES, lambda page: parse_nodes(page.items))
        requests = request.list_kubelet_requests(self._client)
        settled = [
            (before, after)
            for before in waiting
            if (after := settle_record(before, nodes, requests, now, self._lifetime_s)) != before
        ]
        for _, after in settled:
            # Before the state: a server that is killed here repeats it.
            for identity in list_finished_identities(after, now, self._lifetime_s):
                self._credentials.revoke(identity)
        if settled:
            self._store.change(partial(_store_states, settled))
        for _, after in settled:
            uses = ", ".join(f"{use.address} {use.state}" for use in after.used)
            log.info("settled token %s: %s", after.name, uses)


def settle_record(
    record: tokens.TokenRecord,
    nodes: Sequence[ArrivedNode],
    requests: Sequence[request.KubeletRequest],
    now: float,
    lifetime_s: float,
) -> tokens.TokenRecord:
    """Return the record with the final state of uses that were sent.

    ``requests`` are those of kubelets for their certificates. Machines behind one address share a
    use and a bootstrap token, which the last of them needs after the first one is Ready.
    """
    for use in record.used:
        if use.state is not tokens.UseState.SENT:
            continue
        names = _list_node_names(record, use, requests)
        joined = sum(_is_node_of(use, node, names) for node in nodes)
        if joined >= use.responses or (joined and now >= use.at + lifetime_s):
            record = tokens.settle_use(record, use, tokens.UseState.JOINED)
        elif now >= use.at + lifetime_s:
            record = tokens.settle_use(record, use, tokens.UseState.ENDED)
    return record


def list_finished_identities(
    record: tokens.TokenRecord, now: float, lifetime_s: float
) -> list[str]:
    """Return the IDs of the bootstrap tokens that no machine needs any longer.

    Uses of one address share a bootstrap token. All uses of an access token for one machine do,
    which have several addresses when two servers accepted it.
    """
    needed = {
        bootstrap_tokens.compute_identity(record.name, record.uses, use.address)
        for use in record.used
        if use.state not in (tokens.UseState.JOINED, tokens.UseState.ENDED)
        and now < use.at + lifetime_s
    }
    return [
        identity for identity in bootstrap_tokens.list_identities(record) if identity not in needed
    ]


def _list_node_names(
    record: tokens.TokenRecord, use: tokens.TokenUse, requests: Sequence[request.KubeletRequest]
) -> frozenset[str]:
    """Return the names that the Node of a machine may have; empty when none is known."""
    if record.machine:
        return frozenset({record.machine})
    identity = bootstrap_tokens.compute_identity(record.name, record.uses, use.address)
    return frozenset(
        request.node for request in requests if request.identity == identity and request.is_approved
    )


def _is_node_of(use: tokens.TokenUse, node: ArrivedNode, names: frozenset[str]) -> bool:
    if node.ready_at is None or not node.has_arrived(use.at - _SKEW_S):
        return False
    # The names in their certificates distinguish machines behind one address.
    return node.name in names if names else use.address in node.addresses


def _store_states(
    settled: Sequence[tuple[tokens.TokenRecord, tokens.TokenRecord]], table: tokens.TokenTable
) -> tuple[tokens.TokenTable, None]:
    for before, after in settled:
        # A use that changed meanwhile is settled next time.
        if table.tokens.get(before.name) == before:
            table = table.put(after)
    return table, None
