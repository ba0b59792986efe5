"""The name of this machine's Node, read from its sources, and the connection as this Node."""

from dataclasses import dataclass
from typing import NoReturn

from treenail import errors
from treenail.daemon.agent_settings import AgentSettings
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.kernel import HostKernel
from treenail.kube.request import ApiRequest
from treenail.kube.transport import credentials, kubeconfig
from treenail.update.decision.node_identity import NodeIdentity, choose_identity


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """The Node of this machine, and the connection to its API server."""

    identity: NodeIdentity
    connection: kubeconfig.ApiServerConfig | None
    """None while the kubeconfig cannot be read."""


def read_access(settings: AgentSettings, root: Root) -> NodeAccess:
    """Read kubeconfig, client certificate and host name. They may be missing for a while."""
    connection = None
    try:
        connection = kubeconfig.read_kubeconfig(settings.kubeconfig, locate=root.resolve_path)
        certificate = credentials.read_node_name(connection)
    except errors.TreenailError as error:
        return NodeAccess(NodeIdentity("", problem=str(error), remedy=error.remedy), connection)
    host_name = HostKernel(root).read_host_name()
    return NodeAccess(choose_identity(certificate, settings.node_name, host_name), connection)


def make_unnamed_error(identity: NodeIdentity) -> errors.UnnamedNodeError:
    """Return why nothing can be requested for this machine's Node yet."""
    return errors.UnnamedNodeError(identity.wait, remedy=identity.remedy)


class UnnamedNodeTransport:
    """The transport while the Node is uncertain: it refuses all requests, and sends none."""

    def __init__(self, identity: NodeIdentity) -> None:
        self._identity = identity

    # The arguments have the names of `Transport`.
    def send(self, request: ApiRequest) -> NoReturn:  # noqa: ARG002
        raise make_unnamed_error(self._identity)

    # As above.
    def open_stream(self, request: ApiRequest, *, duration_s: float) -> NoReturn:  # noqa: ARG002
        raise make_unnamed_error(self._identity)

    def close(self) -> None:
        """There is no connection."""
