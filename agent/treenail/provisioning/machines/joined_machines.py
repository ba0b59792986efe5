"""Machines that requested a config, with their Nodes.

A Node is that of a machine by the name in the certificate that its kubelet requested, by the name
in the machine's token, by its InternalIP, or as the only new Node of the pool. The result is
unknown where more than one machine or Node is possible.
"""

import ipaddress
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool, object_meta
from treenail.controllers.pools.pool_membership import find_membership
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.machines import logged_requests
from treenail.provisioning.tokens.bootstrap_tokens import compute_identity

EXPECT_S = 1200.0
"""Default time in which a Node must appear after the config was sent."""

_SPLIT_S = 3600.0
"""Requests of one address with a longer gap are of two installations."""
_SKEW_S = 5.0
"""Tolerated difference between the clocks of a server and of the API server.

A machine reboots before its Node appears, so that a small value is enough.
"""


class NodeArrival(StrEnum):
    """Whether the Node of a machine appeared."""

    MISSING = "missing"
    """No Node appeared in the expected time."""
    WAITING = "waiting"
    """No Node has appeared yet."""
    UNKNOWN = "unknown"
    """A Node appeared that may be that of another machine."""
    UNEXPECTED = "unexpected"
    """The requests were not those of a machine with a token, and received no config."""
    APPEARED = "appeared"


@dataclass(frozen=True, slots=True)
class ArrivedNode:
    """The parts of a Node that identify its machine."""

    name: str
    addresses: frozenset[str] = frozenset()
    """Its InternalIPs."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    ready_at: float | None = None
    """Since when it is Ready; None for a Node that is not."""
    labels: tuple[tuple[str, str], ...] = ()
    configs: frozenset[str] = frozenset()
    """Rendered configs that its annotations name."""

    @classmethod
    def from_json(cls, document: decode.Json) -> "ArrivedNode":
        """Read a Node; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "Node")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        status = fields.get_object("status")
        conditions = status.read_list("conditions", object_meta.Condition)
        ready = next((condition for condition in conditions if condition.type == "Ready"), None)
        is_ready = ready is not None and ready.status == "True"
        addresses = status.map_objects(
            "addresses", lambda address: (address.get_text("type"), address.get_text("address"))
        )
        configs = (meta.annotations.get(name) for name in (key.CURRENT_CONFIG, key.DESIRED_CONFIG))
        return cls(
            name=meta.name,
            addresses=frozenset(
                _normalize_address(address) for kind, address in addresses if kind == "InternalIP"
            ),
            created_at=clocks.parse_rfc3339(meta.created) or 0.0,
            ready_at=clocks.parse_rfc3339(ready.last_transition_time)
            if is_ready and ready
            else None,
            labels=tuple(meta.labels.items()),
            configs=frozenset(filter(None, configs)),
        )

    def has_arrived(self, since: float) -> bool:
        """Return whether it registered, or became Ready again, after ``since``."""
        return self.created_at >= since or (self.ready_at is not None and self.ready_at >= since)


@dataclass(frozen=True, slots=True)
class JoinedMachine:
    """The requests of one machine, and its Node."""

    requests: tuple[logged_requests.LoggedRequest, ...]
    """Oldest first; at least one."""
    arrival: NodeArrival = NodeArrival.UNEXPECTED
    node: str = ""
    """Name of the Node that appeared."""
    reason: str = ""
    """How the Node was found, or why the result is unknown."""
    certificate: KubeletRequest | None = None
    """The last request of its kubelet for a certificate."""

    @property
    def last(self) -> logged_requests.LoggedRequest:
        return self.requests[-1]

    @property
    def pool(self) -> str:
        return self.last.row.pool

    @property
    def token(self) -> str:
        return self.last.row.token

    @property
    def machine(self) -> str:
        return self.last.row.machine

    @property
    def address(self) -> str:
        return self.last.row.address

    @property
    def began_at(self) -> float:
        return self.requests[0].first_at

    @property
    def served(self) -> logged_requests.LoggedRequest | None:
        """The last request that received the config."""
        served = logged_requests.RequestOutcome.SERVED
        requests = (row for row in reversed(self.requests) if row.row.outcome is served)
        return next(requests, None)

    @property
    def expected_since(self) -> float | None:
        """Begin of the time in which the Node is expected; None when none is.

        It begins with the last config that was sent, or with the first attempt.
        """
        if self.served is not None:
            return self.served.row.at
        return self.began_at if any(map(_needs_node, self.requests)) else None

    @property
    def needs_user(self) -> bool:
        """No Node appears before a user acts."""
        if self.arrival is NodeArrival.MISSING:
            return True
        has_failed = self.last.row.outcome in _FAILURES
        return self.arrival is NodeArrival.WAITING and self.served is None and has_failed

    def describe_last_step(self) -> str:
        """Return the last known step of the machine, in one sentence without its name."""
        row = self.last.row
        if self.certificate is not None:
            return describe_certificate(self.certificate)
        if self.served is not None:
            served = self.served.row
            config = f"{served.rendered} in Ignition {served.version}".strip()
            return f"it received {config} ({served.bytes} bytes)"
        match row.outcome:
            case logged_requests.RequestOutcome.DISCONNECTED:
                return f"it disconnected after {row.bytes} bytes of the config: {row.reason}"
            case logged_requests.RequestOutcome.BUSY:
                return f"the server was busy: {row.reason}"
            case _:
                return f"it received no config (status {row.status}): {row.reason}"


def describe_certificate(request: KubeletRequest) -> str:
    """Return how far the request of a kubelet for its certificate is."""
    what = f"the certificate request {request.name} of its kubelet"
    if request.node:
        what += f", for node {request.node},"
    if request.failure:
        return f"{what} was refused: {request.failure}"
    if request.has_certificate:
        return f"{what} was signed"
    if request.is_approved:
        return f"{what} was approved and is not signed"
    return f"{what} is not approved" + (f": {request.problem}" if request.problem else "")


_FAILURES = (
    logged_requests.RequestOutcome.FAILED,
    logged_requests.RequestOutcome.REFUSED,
    logged_requests.RequestOutcome.INVALID,
)


def parse_nodes(documents: Iterable[decode.Json]) -> Iterator[ArrivedNode]:
    """Yield the Nodes that can be read."""
    for document in documents:
        try:
            yield ArrivedNode.from_json(document)
        except errors.ConfigError:
            continue


def join_machines(
    rows: Iterable[logged_requests.LoggedRequest],
    nodes: Sequence[ArrivedNode],
    pools: Iterable[machineconfigpool.MachineConfigPool],
    now: float,
    *,
    expect_s: float = EXPECT_S,
    certificates: Iterable[KubeletRequest] = (),
) -> list[JoinedMachine]:
    """Return the machines that sent the requests, in the order of their first ones.

    ``certificates`` are the requests of kubelets for their certificates.
    """
    machines = _add_certificates(group_requests(rows), certificates)
    by_name = {node.name: node for node in nodes}
    by_address: dict[str, list[ArrivedNode]] = {}
    for node in nodes:
        for address in node.addresses:
            by_address.setdefault(address, []).append(node)
    by_identity = [_join_by_identity(machine, by_name, by_address) for machine in machines]
    joined = {machine.node for machine in by_identity if machine is not None}
    # The name in a token excludes Nodes of other names.
    nameless = [
        machine
        for machine, identified in zip(machines, by_identity, strict=True)
        if identified is None and _may_be_any_node(machine)
    ]
    begin = min((machine.began_at for machine in nameless), default=now) - _SKEW_S
    new = [node for node in nodes if node.created_at >= begin and node.name not in joined]
    candidates = _CandidateNodes(new, tuple(pools), nameless)
    used = [
        (machine.token, machine.address, machine.served.row.at)
        for machine in machines
        if machine.token and machine.served is not None
    ]
    return [
        identified
        or (_join_by_pool(machine, candidates) if _may_be_any_node(machine) else None)
        or _judge_absence(machine, used, now, expect_s)
        for machine, identified in zip(machines, by_identity, strict=True)
    ]


def group_requests(rows: Iterable[logged_requests.LoggedRequest]) -> list[JoinedMachine]:
    """Return the requests of each machine, without its Node.

    A machine is what a token names, or an address with one token. An hour without a request
    separates two installations.
    """
    groups: dict[tuple[str, ...], list[logged_requests.LoggedRequest]] = {}
    installations: list[list[logged_requests.LoggedRequest]] = []
    for request in sorted(rows, key=lambda request: (request.first_at, request.id)):
        row = request.row
        name = (row.pool, row.token, row.machine or row.address)
        group = groups.get(name)
        if group is None or request.first_at - group[-1].row.at > _SPLIT_S:
            group = groups[name] = []
            installations.append(group)
        group.append(request)
    return [
        JoinedMachine(tuple(sorted(group, key=lambda request: (request.row.at, request.id))))
        for group in installations
    ]


def _add_certificates(
    machines: Sequence[JoinedMachine], certificates: Iterable[KubeletRequest]
) -> list[JoinedMachine]:
    """Return the machines with the last request of their kubelet.

    The ID of the bootstrap token tells machines behind one address apart.
    """
    by_identity: dict[str, list[KubeletRequest]] = {}
    for certificate in sorted(
        certificates, key=lambda certificate: (certificate.created_at, certificate.name)
    ):
        by_identity.setdefault(certificate.identity, []).append(certificate)
    with_certificates = []
    for machine in machines:
        # A token for one machine, or for several.
        identities = {compute_identity(machine.token, uses, machine.address) for uses in (1, 2)}
        since = machine.began_at - _SKEW_S
        own = [
            certificate
            for identity in (identities if machine.token else ())
            for certificate in by_identity.get(identity, ())
            if certificate.created_at >= since
        ]
        with_certificates.append(replace(machine, certificate=own[-1]) if own else machine)
    return with_certificates


def _may_be_any_node(machine: JoinedMachine) -> bool:
    """Return whether neither token nor certificate say which Node a machine has."""
    return machine.expected_since is not None and not machine.machine and not machine.certificate


def _join_by_identity(
    machine: JoinedMachine,
    by_name: Mapping[str, ArrivedNode],
    by_address: Mapping[str, Sequence[ArrivedNode]],
) -> JoinedMachine | None:
    """Join by what a server found before, by the name of the machine, or by its address."""
    for request in machine.requests:
        if request.node:
            reason = "a server found it in the expected time"
            return replace(machine, arrival=NodeArrival.APPEARED, node=request.node, reason=reason)
    since = machine.began_at - _SKEW_S
    if machine.certificate is not None:
        node = by_name.get(machine.certificate.node)
        if node is None or not machine.certificate.is_approved or not node.has_arrived(since):
            return None
        return _mark_appeared(machine, node, "it has the name in the machine's certificate")
    named = [by_name[machine.machine]] if machine.machine in by_name else []
    addressed = by_address.get(_normalize_address(machine.address), ())
    arrived = [candidate for candidate in addressed if candidate.has_arrived(since)]
    if named and named[0].has_arrived(since):
        return _mark_appeared(machine, named[0], "it has the name of the token's machine")
    if len(arrived) == 1:
        return _mark_appeared(machine, arrived[0], "it has the address of the machine")
    if len(arrived) > 1:
        names = ", ".join(sorted(candidate.name for candidate in arrived)[:3])
        return _mark_unknown(machine, f"{len(arrived)} Nodes have the address: {names}")
    # With a token for any machine the Node is a new one, and never an old one of that address.
    for candidate in (*named, *(() if machine.token else addressed)):
        if candidate.ready_at is not None:
            return _mark_unknown(machine, f"Node {candidate.name} was Ready before the request")
    return None


class _CandidateNodes:
    """New Nodes that no machine has by its name or address."""

    def __init__(
        self,
        nodes: Iterable[ArrivedNode],
        pools: Sequence[machineconfigpool.MachineConfigPool],
        machines: Iterable[JoinedMachine],
    ) -> None:
        self._by_pool: dict[str, list[ArrivedNode]] = {pool.name: [] for pool in pools}
        self._pools: dict[str, frozenset[str]] = {}
        for node in sorted(nodes, key=lambda node: node.created_at):
            names = _find_pools(node, pools)
            self._pools[node.name] = names
            # Without a label and an annotation a Node may be of any pool.
            for name in names or self._by_pool:
                self._by_pool.setdefault(name, []).append(node)
        self._began_at: dict[str, list[float]] = {}
        for machine in machines:
            self._began_at.setdefault(machine.pool, []).append(machine.began_at)

    def find(self, machine: JoinedMachine) -> list[ArrivedNode]:
        """Return the Nodes of the pool that appeared after the request."""
        nodes = self._by_pool.get(machine.pool, [])
        since = machine.began_at - _SKEW_S
        return nodes[bisect_left(nodes, since, key=lambda node: node.created_at) :]

    def has_one_machine(self, node: ArrivedNode) -> bool:
        """Return whether the pool of the Node is known, and one machine of it may be the Node."""
        began = [at for pool in self._pools[node.name] for at in self._began_at.get(pool, ())]
        return sum(at - _SKEW_S <= node.created_at for at in began) == 1


def _find_pools(
    node: ArrivedNode, pools: Sequence[machineconfigpool.MachineConfigPool]
) -> frozenset[str]:
    """Return the pools whose machine the Node may be."""
    # A Node may get the label of its pool later than its config, rendered-POOL-HASH.
    names = {config.rpartition("-")[0].removeprefix("rendered-") for config in node.configs}
    names &= {pool.name for pool in pools}
    try:
        membership = find_membership(node.name, dict(node.labels), pools)
    except errors.ConfigError:
        return frozenset(names)
    return frozenset(names | set(membership.pools if membership else ()))


def _join_by_pool(machine: JoinedMachine, nodes: _CandidateNodes) -> JoinedMachine | None:
    """Join with the only new Node of the pool, if no other machine may be that Node."""
    candidates = nodes.find(machine) if machine.expected_since is not None else []
    if not candidates:
        return None
    if len(candidates) == 1 and nodes.has_one_machine(candidates[0]):
        reason = "it is the only new Node of the pool, with another address"
        return _mark_appeared(machine, candidates[0], reason)
    names = ", ".join(sorted(candidate.name for candidate in candidates)[:3])
    return _mark_unknown(machine, f"it may be one of {len(candidates)} new Nodes: {names}")


def _judge_absence(
    machine: JoinedMachine, used: Iterable[tuple[str, str, float]], now: float, expect_s: float
) -> JoinedMachine:
    since = machine.expected_since
    if since is None:
        return machine
    if machine.served is None:
        for token, address, at in used:
            if token == machine.token and address != machine.address and at >= machine.began_at:
                return _mark_unknown(machine, f"{address} received the config with its token")
    is_late = now - since >= expect_s
    return replace(machine, arrival=NodeArrival.MISSING if is_late else NodeArrival.WAITING)


def _mark_appeared(machine: JoinedMachine, node: ArrivedNode, reason: str) -> JoinedMachine:
    return replace(machine, arrival=NodeArrival.APPEARED, node=node.name, reason=reason)


def _mark_unknown(machine: JoinedMachine, reason: str) -> JoinedMachine:
    return replace(machine, arrival=NodeArrival.UNKNOWN, reason=reason)


def _needs_node(request: logged_requests.LoggedRequest) -> bool:
    """Return whether the client is a machine that should join."""
    row = request.row
    if row.outcome is logged_requests.RequestOutcome.CHECKED:
        return False
    # Without a token a client that received nothing may be anyone.
    return bool(row.token or row.rendered) or row.outcome is logged_requests.RequestOutcome.FAILED


def _normalize_address(text: str) -> str:
    """Return the usual spelling of an IP address."""
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return text
