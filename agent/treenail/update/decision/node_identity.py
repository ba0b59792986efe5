"""Decide which Node this machine is.

The host name is the last source: the network sets it after the agent started, and the kubelet may
register another name (--hostname-override, or the name of a cloud provider).
"""

from dataclasses import dataclass

from treenail.api import node, object_meta


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The name of the Node, or the reason for which the agent waits."""

    name: str
    """Empty while it is uncertain."""
    note: str = ""
    """Why this name is used; empty if no source names another one."""
    problem: str = ""
    """Why it is uncertain."""
    remedy: str = ""

    @property
    def wait(self) -> str:
        """The sentence of the wait for a name."""
        return f"waiting for the name of this Node: {self.problem}"


def choose_identity(certificate: str, setting: str, host_name: str) -> NodeIdentity:
    """Return the Node of the first source that is certain; ``certificate`` and setting may be "".

    The API server lets a kubelet's client certificate change its own Node only. So the certificate
    cannot be wrong, and what names another Node is.
    """
    host = host_name.lower()
    is_placeholder = node.is_placeholder_name(host)
    names = {
        "the client certificate": certificate if object_meta.is_object_name(certificate) else "",
        "the setting node_name": setting,
        "the host name": "" if is_placeholder or not object_meta.is_object_name(host) else host,
    }
    named = [(source, name) for source, name in names.items() if name]
    if not named:
        kind = "a placeholder" if is_placeholder else "no name of a Node"
        return NodeIdentity(
            "",
            problem=f"the host name {host_name!r:.100} is {kind}, and the kubeconfig has no client "
            "certificate of a kubelet",
            remedy="give the machine its host name, or set node_name in /etc/treenail/agent.toml",
        )
    source, name = named[0]
    others = " or ".join(f"{other} {value}" for other, value in named if value != name)
    return NodeIdentity(name, f"by {source}, not {others}" if others else "")
