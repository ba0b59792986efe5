"""The requests of the last day with their Nodes, worst first, for users and scripts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treenail.clock import format_rfc3339
from treenail.provisioning.machines.joined_machines import JoinedMachine, NodeArrival
from treenail.provisioning.machines.logged_requests import LoggedRequest
from treenail.provisioning.machines.machine_remedies import find_remedy
from treenail.provisioning.server.access import RequestOutcome

_SUCCESSES = (RequestOutcome.SERVED, RequestOutcome.CHECKED)
_RANKS = {
    NodeArrival.UNKNOWN: 2,
    NodeArrival.WAITING: 3,
    NodeArrival.UNEXPECTED: 4,
    NodeArrival.APPEARED: 6,
}


@dataclass(frozen=True, slots=True)
class ReportedRequest:
    """A request and the machine that sent it."""

    logged: LoggedRequest
    machine: JoinedMachine

    @property
    def problem(self) -> str:
        """Why the request failed, or what is known of the machine without a Node."""
        if self.logged.row.reason:
            return self.logged.row.reason
        if self.machine.arrival is NodeArrival.UNKNOWN:
            return self.machine.reason
        if self.machine.arrival is NodeArrival.MISSING:
            return f"no Node appeared; {self.machine.describe_last_step()}"
        if self.machine.arrival is NodeArrival.WAITING and self.machine.certificate is not None:
            return self.machine.describe_last_step()
        return ""

    @property
    def remedy(self) -> str:
        """Remedy for the problem; empty when the problem names it, or without a problem."""
        if not self.problem or self.machine.arrival is NodeArrival.APPEARED:
            return ""
        return find_remedy(self.logged, self.machine)


def build_report(machines: Iterable[JoinedMachine]) -> list[ReportedRequest]:
    """Return the requests of all machines.

    Machines that need a user come first, those with a Node last. The requests of a machine stay
    together, newest first.
    """
    ordered = sorted(machines, key=lambda each: (_rank(each), -each.last.row.at, each.last.id))
    return [
        ReportedRequest(request, machine)
        for machine in ordered
        for request in reversed(machine.requests)
    ]


def build_report_document(rows: Sequence[ReportedRequest], *, expect_s: float) -> dict[str, object]:
    """Build the content of the document, with the requests in the order of the report."""
    return {"expectSeconds": expect_s, "requests": [_format_request(each) for each in rows]}


def _rank(machine: JoinedMachine) -> int:
    if machine.needs_user:
        return 0 if machine.arrival is NodeArrival.MISSING else 1
    rank = _RANKS[machine.arrival]
    has_failed = machine.last.row.outcome not in _SUCCESSES
    return rank + (machine.arrival is NodeArrival.UNEXPECTED and not has_failed)


def _format_request(reported: ReportedRequest) -> dict[str, object]:
    logged, machine = reported.logged, reported.machine
    row = logged.row
    return {
        "time": format_rfc3339(row.at),
        "firstTime": format_rfc3339(logged.first_at),
        "count": logged.count,
        "address": row.address,
        "pool": row.pool,
        "token": row.token,
        "machine": row.machine,
        "version": row.version,
        "outcome": row.outcome.value,
        "status": row.status,
        "reason": row.reason,
        "problem": reported.problem,
        "remedy": reported.remedy,
        "bytes": row.bytes,
        "seconds": row.seconds,
        "config": row.rendered,
        "image": row.image,
        "needsUser": machine.needs_user,
        "certificateRequest": machine.certificate.name if machine.certificate else "",
        "node": {
            "arrival": machine.arrival.value,
            "name": machine.node,
            "reason": machine.reason,
        },
    }
