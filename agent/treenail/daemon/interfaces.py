"""The OS back end and the API server as the daemon uses them; adapters implement both."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from treenail.api import disruptionpolicy, machineconfig, node
from treenail.deployment_change import DeploymentChange
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree import deployments
from treenail.update import status


class OSBackend(Protocol):
    """The deployments of this machine, managed by rpm-ostree or bootc.

    Every method has its own time limit and is idempotent.
    """

    @property
    def name(self) -> str:
        """``rpm-ostree`` or ``bootc``."""

    def read_deployments(self) -> deployments.DeploymentStatus:
        """Read the deployments from the back end, without a cache."""

    def stage_deployment(
        self, change: DeploymentChange, *, watch: deployments.TransactionWatch
    ) -> None:
        """Stage the change as a locked deployment; do nothing when it is already staged.

        Calls ``watch`` at least once a second; its result says whether to continue. Raises
        `CancelledError` if it does not, also when the transaction continues without the caller.
        """

    def open_staged_tree(
        self, staged_id: str, paths: Sequence[str]
    ) -> AbstractContextManager[Root]:
        """Open the tree of the staged deployment of this ID; it has at least these paths.

        A path that ends with a slash is a directory with its content. Its /etc is the one of the
        image. Raises `HostError` when it is not staged.
        """

    def wait_for_other_transaction(self, *, watch: deployments.TransactionWatch) -> bool:
        """Wait until another program's transaction ends; return False when there is none."""

    def read_finalization_error(self) -> str:
        """Return why ostree did not finalize a deployment at the last shutdown; empty if it did."""

    def drop_staged(self, staged_id: str) -> None:
        """Drop the staged deployment of this ID and cancel our transaction that would create one.

        Keeps deployments that other programs staged.
        """

    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:
        """Unlock the staged deployment of this ID, so that the next boot starts it.

        rpm-ostree's FinalizeDeployment also reboots at once unless ``is_soft``. The caller requests
        the reboot in either case.
        """

    def roll_back(self) -> None:
        """Make the previous deployment the default of the boot loader, without a reboot."""

    def release_daemon(self) -> None:
        """Unregister from the OS daemon, so that it can exit when idle."""


class ClusterAccess(Protocol):
    """The API server, as far as this node reads and writes it."""

    def get_cached_node(self) -> node.Node | None:
        """Return our Node as last observed; None before the first observation."""

    def refresh_node(self) -> None:
        """Read our Node from the API server. Raises `ClusterError`."""

    def fetch_machine_config(self, name: str) -> machineconfig.MachineConfig:
        """Read a MachineConfig. Raises `ClusterError` and `ConfigError`."""

    def fetch_disruption_policy(self) -> disruptionpolicy.ClusterDisruptionPolicy:
        """Read the node disruption policy; the defaults without one. Raises `ClusterError`."""

    def write_report(self, report: status.StatusReport) -> None:
        """Write what differs from the last report. Raises `ClusterError`."""

    def write_progress(self, percent: int) -> None:
        """Write how far the running transaction is. Raises `ClusterError`."""

    def record_event(self, event: status.NodeEvent) -> None:
        """Record an Event about our Node, and deliver it as soon as the API server answers."""
