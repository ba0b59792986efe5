"""The last step: nodes have joined, and none pulls from the bootstrap host."""

import logging
from collections.abc import Iterable

from treenail.api.decode import Json
from treenail.controllers.handover.handover_objects import RESULT_CONFIGMAP, read_result_configmap
from treenail.controllers.handover.handover_state import RegistryNode, describe_missing_nodes
from treenail.errors import ClusterError, ConfigError, UsageError
from treenail.installer.inputs.image_mode import NAMESPACE
from treenail.installer.steps.cluster_steps import ConnectCluster, wait_until_complete
from treenail.installer.steps.steps import (
    StepContext,
    StepInputs,
    StepLimit,
    StepOverdueError,
    StepResult,
)
from treenail.kube.client import Client
from treenail.kube.resources import CONFIGMAPS, NODES

log = logging.getLogger(__name__)


class NodesStep:
    """Waits until the bootstrap host is not needed by any machine of the control plane."""

    name = "nodes"
    title = "release the control plane from the bootstrap host"

    def __init__(
        self, connect: ConnectCluster, registry: str, machines: int | None, limit: StepLimit
    ) -> None:
        """``registry`` is ``HOST:PORT``, empty without one; ``machines`` None if unknown."""
        self._connect = connect
        self._registry = registry
        self._machines = machines
        self.limit = limit

    def compute_inputs(self) -> StepInputs:
        """Return what machines may still need."""
        count = "unknown" if self._machines is None else str(self._machines)
        return {"bootstrap registry": self._registry, "machines of the control plane": count}

    def resume(self, result: StepResult) -> bool:  # noqa: ARG002  # of the interface
        """Return True: a machine that joins later does not make the installation incomplete."""
        return True

    def run(self, context: StepContext) -> StepResult:
        """Wait for the nodes."""
        if self._machines is None:
            log.warning(
                "the number of control-plane machines is unknown: boot all of them before this "
                "host stops, or name it with --control-plane-machines"
            )
        try:
            wait_until_complete(context, self._find_missing)
        except StepOverdueError as error:
            raise StepOverdueError(
                str(error),
                remedy="see why with: journalctl -u treenail on the node, or with: "
                f"treenail-controller machines; {error.remedy}",
            ) from error
        return {}

    def _find_missing(self) -> str:
        try:
            return find_missing_nodes(self._connect(), self._registry, self._machines)
        except (ClusterError, UsageError) as error:
            return f"cannot list the nodes: {error}"


def find_missing_nodes(client: Client, registry: str, machines: int | None) -> str:
    """Return which nodes still need the bootstrap host; empty when none does.

    Raises `ClusterError`.
    """
    return describe_missing_nodes(_read_nodes(client.list(NODES).items), registry, machines)


def read_registry(client: Client) -> str:
    """Return the bootstrap registry of a complete hand-over; empty without one.

    Raises `ClusterError`.
    """
    document = client.get(CONFIGMAPS, RESULT_CONFIGMAP, namespace=NAMESPACE)
    try:
        return read_result_configmap(document).registry
    except ConfigError as error:
        raise ClusterError(str(error)) from error


def _read_nodes(documents: Iterable[Json]) -> list[RegistryNode]:
    nodes = []
    for each in documents:
        try:
            nodes.append(RegistryNode.from_json(each))
        except ConfigError as error:
            # An API server accepts any annotation and any label, but no such Node.
            log.warning("ignored a Node: %s", error)
    return nodes
