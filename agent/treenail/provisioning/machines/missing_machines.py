"""Events about machines whose Node did not appear, one for each.

Each server looks at the requests of all servers, so that an Event does not depend on the server
that answered. The log keeps the result of a check: the server that wrote it records the Event.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from treenail import clocks, sanitize
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.kube import api_client, event_recorder, resources
from treenail.provisioning.approval.request import list_kubelet_requests
from treenail.provisioning.machines import joined_machines, logged_requests, request_log

log = logging.getLogger(__name__)

REASON = "NodeNotAppeared"
"""Reason of the Event."""
CHECK_PERIOD_S = 30.0
_MAX_EVENTS = 3
"""Machines of a pool that get an Event each in one check; more share one."""


class MissingMachineReporter:
    """Looks for the Nodes of machines, once for each after the expected time.

    It lists Nodes only when a machine is due. Only one thread may use it.
    """

    def __init__(
        self,
        client: api_client.Client,
        store: request_log.RequestStore,
        get_pools: Callable[[], Iterable[MachineConfigPool]],
        recorder: event_recorder.EventRecorder,
        clock: clocks.Clock,
        *,
        expect_s: float,
    ) -> None:
        self._client = client
        self._store = store
        self._get_pools = get_pools
        self._recorder = recorder
        self._clock = clock
        self._expect_s = expect_s
        self._next_at = 0.0

    def check_periodically(self) -> None:
        """Check if the last check is `CHECK_PERIOD_S` ago; raise `ClusterError`."""
        now = self._clock.monotonic()
        if now >= self._next_at:
            self._next_at = now + min(CHECK_PERIOD_S, self._expect_s / 4)
            self.check_machines()

    def check_machines(self) -> None:
        """Record an Event for machines that are due and without a Node; raise `ClusterError`."""
        self._recorder.flush_pending()
        rows = self._store.read_rows()
        now = self._clock.now()
        if not find_due_machines(rows, now, self._expect_s):
            return
        pools = {pool.name: pool for pool in self._get_pools()}
        if not pools:
            # Not listed yet: an Event needs the UID of its pool.
            return
        nodes = self._list_nodes()
        certificates = list_kubelet_requests(self._client)
        due_machines = [
            machine
            for machine in joined_machines.join_machines(
                rows,
                nodes,
                pools.values(),
                now,
                expect_s=self._expect_s,
                certificates=certificates,
            )
            if _is_due(machine, now, self._expect_s)
        ]
        checked = self._write_checks(due_machines)
        missing: dict[str, list[joined_machines.JoinedMachine]] = {}
        for machine in due_machines:
            is_own = any(request.id in checked for request in machine.requests)
            if is_own and machine.arrival is joined_machines.NodeArrival.MISSING:
                missing.setdefault(machine.pool, []).append(machine)
        for pool, machines in missing.items():
            self._report_machines(pools.get(pool), machines)

    def _list_nodes(self) -> Sequence[joined_machines.ArrivedNode]:
        # Whole Nodes are large: keep those of one page only.
        return self._client.list_parsed(
            resources.NODES, lambda page: joined_machines.parse_nodes(page.items)
        )

    def _write_checks(self, machines: Iterable[joined_machines.JoinedMachine]) -> frozenset[str]:
        """Write the results; return the IDs of the rows that no other server checked before."""
        nodes = {request.id: machine.node for machine in machines for request in machine.requests}
        own: frozenset[str] = frozenset()

        def mark(
            stored: Sequence[logged_requests.LoggedRequest],
        ) -> tuple[logged_requests.LoggedRequest, ...]:
            nonlocal own
            own = frozenset(
                request.id for request in stored if request.id in nodes and not request.is_checked
            )
            return tuple(
                replace(request, is_checked=True, node=nodes[request.id])
                if request.id in own
                else request
                for request in stored
            )

        self._store.change_rows(mark)
        return own

    def _report_machines(
        self, pool: MachineConfigPool | None, machines: Sequence[joined_machines.JoinedMachine]
    ) -> None:
        name = machines[0].pool
        for message in format_messages(machines, self._expect_s):
            log.warning("pool %s: %s", name, message)
            if pool is not None:
                reference = event_recorder.ObjectReference(
                    resources.MACHINECONFIGPOOLS.kind,
                    pool.name,
                    pool.metadata.uid,
                    api_version=resources.MACHINECONFIGPOOLS.api_version,
                )
                self._recorder.record_warning(reference, REASON, message)


def find_due_machines(
    rows: Iterable[logged_requests.LoggedRequest], now: float, expect_s: float
) -> list[joined_machines.JoinedMachine]:
    """Return the machines whose Node is overdue and that no server has checked."""
    return [
        machine
        for machine in joined_machines.group_requests(rows)
        if _is_due(machine, now, expect_s)
    ]


def format_messages(
    machines: Sequence[joined_machines.JoinedMachine], expect_s: float
) -> list[str]:
    """Return the messages of the Events for machines of one pool."""
    minutes = f"{expect_s / 60:g} min"
    if len(machines) <= _MAX_EVENTS:
        return [
            f"no Node appeared within {minutes} for {_describe_machine(machine)}; last known step: "
            f"{_describe_step(machine)}; run: treenail-controller machines"
            for machine in machines
        ]
    named = ", ".join(map(_describe_machine, machines[:_MAX_EVENTS]))
    more = f"{len(machines) - _MAX_EVENTS} more"
    step = _describe_step(machines[0])
    message = (
        f"no Node appeared within {minutes} for {len(machines)} machines: {named} and {more}; "
        f"last known step of the first: {step}; run: treenail-controller machines"
    )
    return [message]


def _is_due(machine: joined_machines.JoinedMachine, now: float, expect_s: float) -> bool:
    since = machine.expected_since
    if since is None or now - since < expect_s:
        return False
    if machine.served is not None:
        return not machine.served.is_checked
    # A machine that repeats its request for hours is reported once.
    return not any(request.is_checked for request in machine.requests)


def _describe_machine(machine: joined_machines.JoinedMachine) -> str:
    row = machine.last.row
    names: Mapping[str, str] = {"token": row.token, "machine": row.machine}
    listed = ", ".join(f"{name} {value}" for name, value in names.items() if value)
    return sanitize.escape_line(f"{row.address} ({listed or 'without a token'})")


def _describe_step(machine: joined_machines.JoinedMachine) -> str:
    at = machine.last.row.at if machine.served is None else machine.served.row.at
    if machine.certificate is not None:
        at = machine.certificate.created_at
    return sanitize.escape_line(f"{machine.describe_last_step()}, at {clocks.format_rfc3339(at)}")
