"""The requests of the last day with their Nodes and remedies, worst first. Pure."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from treenail.clocks import format_rfc3339
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.machines import joined_machines, logged_requests

_SUCCESSES = (logged_requests.RequestOutcome.SERVED, logged_requests.RequestOutcome.CHECKED)
_RANKS = {
    joined_machines.NodeArrival.UNKNOWN: 2,
    joined_machines.NodeArrival.WAITING: 3,
    joined_machines.NodeArrival.UNEXPECTED: 4,
    joined_machines.NodeArrival.APPEARED: 6,
}


@dataclass(frozen=True, slots=True)
class ReportedRequest:
    """A request and the machine that sent it."""

    logged: logged_requests.LoggedRequest
    machine: joined_machines.JoinedMachine

    @property
    def problem(self) -> str:
        """Why the request failed, or what is known of the machine without a Node."""
        if self.logged.row.reason:
            return self.logged.row.reason
        if self.machine.arrival is joined_machines.NodeArrival.UNKNOWN:
            return self.machine.reason
        if self.machine.arrival is joined_machines.NodeArrival.MISSING:
            return f"no Node appeared; {self.machine.describe_last_step()}"
        if (
            self.machine.arrival is joined_machines.NodeArrival.WAITING
            and self.machine.certificate is not None
        ):
            return self.machine.describe_last_step()
        return ""

    @property
    def remedy(self) -> str:
        """Remedy for the problem; empty when the problem names it, or without a problem."""
        if not self.problem or self.machine.arrival is joined_machines.NodeArrival.APPEARED:
            return ""
        return find_remedy(self.logged, self.machine)


def build_report(machines: Iterable[joined_machines.JoinedMachine]) -> list[ReportedRequest]:
    """Return the requests of all machines.

    Machines that need a user come first, those with a Node last. The requests of a machine stay
    together, newest first.
    """
    ordered = sorted(
        machines,
        key=lambda machine: (_rank_machine(machine), -machine.last.row.at, machine.last.id),
    )
    return [
        ReportedRequest(request, machine)
        for machine in ordered
        for request in reversed(machine.requests)
    ]


def build_report_document(rows: Sequence[ReportedRequest], *, expect_s: float) -> dict[str, object]:
    """Build the content of the document, with the requests in the order of the report."""
    return {"expectSeconds": expect_s, "requests": [_format_request(request) for request in rows]}


def _rank_machine(machine: joined_machines.JoinedMachine) -> int:
    if machine.needs_user:
        return 0 if machine.arrival is joined_machines.NodeArrival.MISSING else 1
    rank = _RANKS[machine.arrival]
    has_failed = machine.last.row.outcome not in _SUCCESSES
    return rank + (machine.arrival is joined_machines.NodeArrival.UNEXPECTED and not has_failed)


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


_RETRY = "wait: Ignition tries again"


def find_remedy(
    logged: logged_requests.LoggedRequest, machine: joined_machines.JoinedMachine
) -> str:
    """Return the remedy for a request of a machine without a Node, in the imperative.

    Empty when the reason of the request says it.
    """
    row = logged.row
    if row.reason:
        return _find_request_remedy(logged)
    if machine.arrival is joined_machines.NodeArrival.UNKNOWN:
        return (
            "compare the addresses: kubectl get nodes -o wide; to know the next time, use: "
            "treenail-controller token create --machine NODE"
        )
    if machine.certificate is not None:
        return find_certificate_remedy(machine.certificate)
    return (
        "read its console; on the machine run: journalctl -u treenail-firstboot -u kubelet"
        if machine.served is not None
        else _find_request_remedy(machine.last)
    )


def find_certificate_remedy(request: KubeletRequest) -> str:
    """Return the next step for a kubelet without a Node; never to approve its request by hand."""
    name = shlex.quote(request.name)
    if request.failure:
        return (
            f"do what the refusal says, then let the kubelet try again: kubectl delete csr {name}"
        )
    if request.has_certificate:
        return "on the machine run: journalctl -u kubelet"
    if request.is_approved:
        return "check that kube-controller-manager signs: it needs --cluster-signing-key-file"
    return f"check that the controller approve runs, or see why: kubectl describe csr {name}"


def _find_request_remedy(logged: logged_requests.LoggedRequest) -> str:
    row = logged.row
    if "treenail-controller " in row.reason or "kubectl " in row.reason:
        return ""
    match row.outcome:
        case logged_requests.RequestOutcome.REFUSED if row.status != HTTPStatus.SERVICE_UNAVAILABLE:
            return (
                "create another token, and install the machine with it: treenail-controller token "
                f"create --pool {shlex.quote(row.pool)}"
            )
        case logged_requests.RequestOutcome.REFUSED:
            return f"{_RETRY}; if it lasts, read the log of the server"
        case logged_requests.RequestOutcome.BUSY:
            return _RETRY
        case logged_requests.RequestOutcome.DISCONNECTED:
            return f"{_RETRY}; if it lasts, check the network between the machine and the server"
        case logged_requests.RequestOutcome.INVALID if row.status == HTTPStatus.NOT_FOUND:
            return "name a pool that exists in the user data: kubectl get machineconfigpools"
        case logged_requests.RequestOutcome.INVALID:
            return "change the MachineConfig, or install the machine with a newer Ignition"
        case logged_requests.RequestOutcome.FAILED:
            return f"see the pool: treenail-controller status {shlex.quote(row.pool)}"
        case logged_requests.RequestOutcome.SERVED | logged_requests.RequestOutcome.CHECKED:
            return ""
