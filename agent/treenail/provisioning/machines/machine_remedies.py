"""Remedies for machines that did not join. Pure."""

import shlex
from http import HTTPStatus

from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.machines.joined_machines import JoinedMachine, NodeArrival
from treenail.provisioning.machines.logged_requests import LoggedRequest
from treenail.provisioning.server.access import RequestOutcome

_RETRY = "wait: Ignition tries again"


def find_remedy(logged: LoggedRequest, machine: JoinedMachine) -> str:
    """Return the remedy for a request of a machine without a Node, in the imperative.

    Empty when the reason of the request says it.
    """
    row = logged.row
    if row.reason:
        return _find_request_remedy(logged)
    if machine.arrival is NodeArrival.UNKNOWN:
        return (
            "compare the addresses: kubectl get nodes -o wide; to know the next time, use: "
            "treenail-controller token create --machine NODE"
        )
    if machine.certificate is not None:
        return _find_certificate_remedy(machine.certificate)
    return (
        "read its console; on the machine run: journalctl -u treenail-firstboot -u kubelet"
        if machine.served is not None
        else _find_request_remedy(machine.last)
    )


def _find_certificate_remedy(request: KubeletRequest) -> str:
    name = shlex.quote(request.name)
    if request.failure:
        return f"delete the request, and restart the kubelet: kubectl delete csr {name}"
    if request.has_certificate:
        return "on the machine run: journalctl -u kubelet"
    if request.is_approved:
        return "check that kube-controller-manager signs: it needs --cluster-signing-key-file"
    return (
        f"run the controller approve, or see why: kubectl describe csr {name}; to approve it, run: "
        f"kubectl certificate approve {name}"
    )


def _find_request_remedy(logged: LoggedRequest) -> str:
    row = logged.row
    if "treenail-controller " in row.reason or "kubectl " in row.reason:
        return ""
    match row.outcome:
        case RequestOutcome.REFUSED if row.status != HTTPStatus.SERVICE_UNAVAILABLE:
            return (
                "create another token, and install the machine with it: treenail-controller token "
                f"create --pool {shlex.quote(row.pool)}"
            )
        case RequestOutcome.REFUSED:
            return f"{_RETRY}; if it lasts, read the log of the server"
        case RequestOutcome.BUSY:
            return _RETRY
        case RequestOutcome.DISCONNECTED:
            return f"{_RETRY}; if it lasts, check the network between the machine and the server"
        case RequestOutcome.INVALID if row.status == HTTPStatus.NOT_FOUND:
            return "name a pool that exists in the user data: kubectl get machineconfigpools"
        case RequestOutcome.INVALID:
            return "change the MachineConfig, or install the machine with a newer Ignition"
        case RequestOutcome.FAILED:
            return f"see the pool: treenail-controller status {shlex.quote(row.pool)}"
        case RequestOutcome.SERVED | RequestOutcome.CHECKED:
            return ""
