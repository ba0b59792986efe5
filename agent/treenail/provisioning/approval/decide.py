"""Decides whether a kubelet with an access token gets its client certificate."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from treenail.provisioning.approval.request import KubeletRequest


class IssuedCertificate(NamedTuple):
    """A certificate that was approved: who has it holds the identity of the Node."""

    token: str
    """Name of the access token."""
    node: str


def find_refusal(
    request: KubeletRequest, nodes: Mapping[str, bool], approved: Collection[IssuedCertificate]
) -> str:
    """Return why a request must not be approved; empty when it may be.

    ``nodes`` maps names of Nodes to whether they are Ready, and has the requested one if it exists.
    ``approved`` are the certificates of all tokens as far as they are known.
    """
    if request.problem:
        return request.problem
    token, node = request.token, request.node
    if request.machine and node != request.machine:
        return f"token {token} is for machine {request.machine}, not {node}"
    if request.machine and nodes.get(node):
        # The machine that runs now would share its identity with the new one.
        return f"Node {node} is Ready: shut its machine down, or delete the Node"
    if not request.machine and node in nodes:
        return (
            f"Node {node} exists, and token {token} is not for it: delete the Node, or create a "
            f"token with --machine {node}"
        )
    own = {each.node for each in approved if each.token == token}
    # A kubelet that restarted before it stored its certificate requests another one.
    if node not in own and len(own) >= request.uses:
        names = ", ".join(sorted(own))
        return f"token {token} is for {request.uses} machines, and has certificates for {names}"
    others = [each.token for each in approved if each.node == node and each.token != token]
    if others and not request.machine:
        return (
            f"another machine has a certificate for {node} by token {others[0]}: create a token "
            f"with --machine {node} to replace that machine"
        )
    return ""
