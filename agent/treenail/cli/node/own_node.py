"""The Node of this machine, for commands that also work without it."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from treenail.api.disruptionpolicy import DEFAULT_POLICY, ClusterDisruptionPolicy, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.cli.node.node_settings import load_node_settings
from treenail.errors import NotFoundError
from treenail.host.machine import Machine
from treenail.kube.resources import MACHINECONFIGS, MACHINECONFIGURATIONS, NODES

if TYPE_CHECKING:
    from treenail.kube.client import Client

Json = dict[str, object]
_CALL_TIMEOUT_S = 5.0


class OwnNode:
    """The Node of this machine; its methods raise `ClusterError`."""

    def __init__(self, client: "Client", name: str) -> None:
        self._client = client
        self.name = name

    def machine_config(self, name: str) -> MachineConfig:
        """Fetch a MachineConfig; raise also `ConfigError`."""
        return MachineConfig.from_json(self._client.get(MACHINECONFIGS, name))

    def fetch_policy(self) -> DisruptionPolicy:
        """Fetch the node disruption policy of the cluster, or return the default policy."""
        try:
            return ClusterDisruptionPolicy.from_json(
                self._client.get(MACHINECONFIGURATIONS, "cluster")
            ).policy
        except NotFoundError:
            return DEFAULT_POLICY

    def read_node(self) -> Json:
        """Fetch the Node."""
        return self._client.get(NODES, self.name)

    def annotate_node(self, changes: Mapping[str, str | None]) -> None:
        """Set these annotations; None removes one."""
        body: Json = {"metadata": {"annotations": dict(changes)}}
        self._client.patch(NODES, self.name, body)


@contextmanager
def connect_own_node(machine: Machine, config: str | None) -> Iterator[OwnNode]:
    """Connect to the API server with a short timeout; raise `UsageError` without a kubeconfig."""
    # Imported late: most commands do not need TLS.
    from treenail.kube.client import Client
    from treenail.kube.kubeconfig import read_kubeconfig
    from treenail.kube.transport import HttpTransport

    settings = load_node_settings(machine.root, config)
    connection = read_kubeconfig(settings.kubeconfig, locate=machine.root.resolve_path)
    with closing(HttpTransport(connection, machine.clock)) as transport:
        yield OwnNode(Client(transport, limit_s=_CALL_TIMEOUT_S), settings.node_name)
