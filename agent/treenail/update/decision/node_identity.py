"""Decide which Node this machine is.

The host name is the last source: the network sets it after the agent started, and the kubelet may
register another name (--hostname-override, or the name of a cloud provider).
"""

from dataclasses import dataclass

from treenail.api import node, object_meta

_SETTING_REMEDY = "set node_name in /etc/treenail/agent.toml"


@dataclass(frozen=True, slots=True)
class IdentitySources:
    """The sources of the Node's name at one moment."""

    certificate: str = ""
    """Node in the client certificate of the kubeconfig; empty for a kubeconfig without one."""
    setting: str = ""
    host_name: str = ""
    problem: str = ""
    """Why kubeconfig or certificate cannot be read."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The name of the Node, or the reason for which the agent waits."""

    name: str
    """Empty while it is uncertain."""
    source: str = ""
    differences: tuple[str, ...] = ()
    """The sources that name another Node."""
    problem: str = ""
    """Why it is uncertain."""
    remedy: str = ""

    @property
    def note(self) -> str:
        """Why this name is used; empty if no source names another one."""
        return f"by {self.source}, not {' or '.join(self.differences)}" if self.differences else ""


def choose_identity(sources: IdentitySources) -> NodeIdentity:
    """Return the Node of the first source that is certain.

    The API server lets a kubelet's client certificate change its own Node only. So the certificate
    cannot be wrong, and what names another Node is.
    """
    if sources.problem:
        return NodeIdentity("", problem=sources.problem, remedy=sources.remedy)
    host_name = sources.host_name.lower()
    is_certain = object_meta.is_object_name(host_name) and not node.is_placeholder_name(host_name)
    names = {
        "the client certificate": sources.certificate,
        "the setting node_name": sources.setting,
        "the host name": host_name if is_certain else "",
    }
    chosen = [(source, name) for source, name in names.items() if name]
    if not chosen:
        kind = "a placeholder" if node.is_placeholder_name(host_name) else "no name of a Node"
        return NodeIdentity(
            "",
            problem=f"the host name {sources.host_name!r:.100} is {kind}, and the kubeconfig has "
            "no client certificate of a kubelet",
            remedy=f"give the machine its host name, or {_SETTING_REMEDY}",
        )
    source, name = chosen[0]
    return NodeIdentity(
        name, source, tuple(f"{other} {value}" for other, value in chosen[1:] if value != name)
    )
