"""The bootstrap host as the stage ``bootstrap`` uses it."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.clock import Clock
from treenail.errors import UsageError
from treenail.installer.bootstrap.bootstrap import ImageStore
from treenail.installer.bootstrap.bootstrap_source import BootstrapSource
from treenail.installer.bootstrap.config_server import ConfigServerSettings, make_config_server
from treenail.installer.bootstrap.machine_contacts import MachineContacts
from treenail.installer.certificates.server_certificates import check_host_clock
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles
from treenail.installer.inputs.install_manifests import InstallManifests
from treenail.installer.registry.registry_storage import STATE_SPACE, check_space
from treenail.installer.steps.cluster_steps import ConnectCluster
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.sd_notify import SystemdNotifier

log = logging.getLogger(__name__)

_IDLE_S = 3600.0


class StopRequested(BaseException):  # no error
    """A signal requests the end. No `Exception`: no step may take it for a failure."""


@dataclass(frozen=True, slots=True)
class HostAdapters:
    """Parts of the host that the command line provides."""

    notifier: SystemdNotifier
    connect: ConnectCluster
    begin_log: Callable[[str], None]
    open_images: Callable[[InstallManifests], AbstractContextManager[ImageStore]]


class HostServices:
    """The `BootstrapServices` of this host."""

    def __init__(
        self,
        directory: InstallDirectory,
        server: ConfigServerSettings,
        kubeconfig: str,
        adapters: HostAdapters,
        files: InstallFiles,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._server = server
        self._kubeconfig = kubeconfig
        self._adapters = adapters
        self._files = files
        self._clock = clock
        self._contacts = MachineContacts(directory.registry_access_log)

    def check_host(self, manifests: InstallManifests) -> None:  # noqa: ARG002  # of the interface
        """Check free space, and the certificates against the clock; raise `TreenailError`."""
        check_space(self._directory.root, STATE_SPACE)
        server, private = self._server, self._directory
        paths = [server.certificate, server.ca_certificate, private.ca_certificate]
        check_host_clock(
            self._files,
            [each for each in paths if each is not None],
            self._read_kubeconfig_certificates(),
            self._clock.now(),
        )

    def open_server(
        self, source: BootstrapSource, describe_status: Callable[[], Json]
    ) -> AbstractContextManager[object]:
        """Listen; raise `TreenailError`."""
        return make_config_server(
            self._directory,
            self._server,
            source,
            describe_status,
            self._files,
            self._clock,
            self._contacts,
        )

    def open_images(self, manifests: InstallManifests) -> AbstractContextManager[ImageStore]:
        """Return the images of the manifests."""
        return self._adapters.open_images(manifests)

    def describe_machines(self, registry: str) -> str:
        """Say which machines got config and image."""
        return self._contacts.describe(registry)

    def connect(self) -> ConnectCluster:
        """Return a function that reads the kubeconfig again until it connects."""
        return self._adapters.connect

    def notify_ready(self) -> None:
        """Report to systemd that machines may send requests."""
        self._adapters.notifier.notify_ready()

    def notify_status(self, text: str) -> None:
        """Set the line of ``systemctl status``."""
        self._adapters.notifier.notify_status(text)

    def begin_log(self, install_id: str) -> None:
        """Add the ID to each line of the log."""
        self._adapters.begin_log(install_id)

    def wait_for_stop(self) -> None:
        """Wait until the handler of a signal raises `StopRequested`."""
        while True:
            self._clock.sleep(_IDLE_S)

    def _read_kubeconfig_certificates(self) -> dict[str, bytes]:
        """Return the certificates in the kubeconfig; none while it cannot be read."""
        with suppress(UsageError):
            found = read_kubeconfig(self._kubeconfig)
            pairs = {"CA": found.ca, "client certificate": found.certificate}
            return {
                f"{name} of {self._kubeconfig}": each
                for name, each in pairs.items()
                if isinstance(each, bytes)
            }
        return {}
