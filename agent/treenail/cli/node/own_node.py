"""This machine's settings, and its Node, for commands that may have to do without either."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treenail.api.disruptionpolicy import DEFAULTS, ClusterPolicy, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.daemon.settings.settings import FILE, Given, Settings, load
from treenail.errors import NotFound
from treenail.host.filesystem.root import Root
from treenail.kube.resources import MACHINECONFIGS, MACHINECONFIGURATIONS, NODES

if TYPE_CHECKING:
    from treenail.kube.client import Client

Json = dict[str, object]
_LIMIT_S = 5.0


def settings_of(root: Root, config: str | None) -> Settings:
    """The settings that the agent has; raises `UsageError`."""
    path = Path(config) if config else root.path(FILE)
    given = Given(root=str(root.prefix))
    return load(path, given, host_name=socket.gethostname(), required=config is not None)


class OwnNode:
    """Our Node. Raises `ClusterError`."""

    def __init__(self, client: "Client", name: str) -> None:
        self._client = client
        self.name = name

    def machine_config(self, name: str) -> MachineConfig:
        """The MachineConfig of this name; raises `ConfigError`, too."""
        return MachineConfig.from_json(self._client.get(MACHINECONFIGS, name))

    def policy(self) -> DisruptionPolicy:
        """The cluster's node disruption policy."""
        try:
            return ClusterPolicy.from_json(
                self._client.get(MACHINECONFIGURATIONS, "cluster")
            ).policy
        except NotFound:
            return DEFAULTS

    def read(self) -> Json:
        """The Node as it is."""
        return self._client.get(NODES, self.name)

    def annotate(self, changes: Mapping[str, str | None]) -> None:
        """Set these annotations; None takes one away."""
        body: Json = {"metadata": {"annotations": dict(changes)}}
        self._client.patch(NODES, self.name, body)


@contextmanager
def own_node(root: Root, config: str | None, clock: Clock) -> Iterator[OwnNode]:
    """The Node, with a few seconds for each call; raises `UsageError` without a kubeconfig."""
    # TLS is loaded only where the API server is asked.
    from treenail.kube.client import Client
    from treenail.kube.kubeconfig import read_kubeconfig
    from treenail.kube.transport import HttpTransport

    settings = settings_of(root, config)
    connection = read_kubeconfig(settings.kubeconfig, locate=root.path)
    with closing(HttpTransport(connection, clock)) as transport:
        yield OwnNode(Client(transport, limit_s=_LIMIT_S), settings.node_name)
