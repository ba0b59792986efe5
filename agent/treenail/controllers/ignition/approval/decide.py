"""Decides whether a kubelet with an access token gets its client certificate."""

from collections.abc import Collection

from treenail.controllers.ignition.approval.request import KubeletRequest


def find_refusal(request: KubeletRequest, nodes: Collection[str], approved: Collection[str]) -> str:
    """Return why a request must not be approved; empty when it may be.

    ``nodes`` are the names of all Nodes, ``approved`` the node names that were approved for the
    same token.
    """
    if request.problem:
        return request.problem
    if request.node in approved:
        # The kubelet restarted before it stored its certificate.
        return ""
    if request.machine and request.node != request.machine:
        return f"token {request.token} is for machine {request.machine}, not {request.node}"
    if len(approved) >= request.uses:
        return (
            f"token {request.token} is for {request.uses} machines, and has certificates for "
            f"{', '.join(sorted(approved))}"
        )
    if not request.machine and request.node in nodes:
        return f"Node {request.node} exists, and token {request.token} is not for it"
    return ""
