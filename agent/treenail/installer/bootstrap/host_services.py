"""The bootstrap host as the stage ``bootstrap`` uses it, with its config server.

`MachineContacts` knows which machines got their config and their image from this host. A machine
that gets its config and no image never joins, and cannot say why. Only the bootstrap host sees what
it did last.
"""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from threading import Lock

from treenail import clocks, errors, memory, sd_notify
from treenail.api.decode import Json
from treenail.controllers.runtime.http_server import parse_address
from treenail.installer.bootstrap import (
    cluster_steps,
    image_steps,
    registry_process,
    server_certificates,
)
from treenail.installer.directory import install_files, install_manifests
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.provisioning.content.source import PoolSource
from treenail.provisioning.machines import logged_requests
from treenail.provisioning.server.certificate import ServerCertificate
from treenail.provisioning.server.server import PORT, IgnitionServer
from treenail.provisioning.server.service import ConfigService
from treenail.provisioning.tokens.tokens import OpenAccess

log = logging.getLogger(__name__)

DEFAULT_LISTEN = f":{PORT}"
_KUBECONFIG_LIMIT = memory.MIB
_CACHED = 8
"""Two pools, in the versions of Ignition that their machines request."""


@dataclass(frozen=True, slots=True)
class ConfigServerSettings:
    """Address, certificate, and the kubeconfig of machines."""

    hosts: tuple[str, ...]
    """Names and addresses of this host in a certificate that the installation makes."""
    listen: str = DEFAULT_LISTEN
    certificate: Path | None = None
    """Certificate chain, PEM; None makes one with the CA of the installation."""
    key: Path | None = None
    ca_certificate: Path | None = None
    """CA of the installation; None creates one."""
    ca_key: Path | None = None
    node_kubeconfig: Path | None = None
    """Kubeconfig with which kubelets join; None leaves that of the rendered config."""


def make_config_server(
    directory: install_files.InstallDirectory,
    settings: ConfigServerSettings,
    source: PoolSource,
    describe_status: Callable[[], Json],
    files: install_files.InstallFiles,
    clock: clocks.Clock,
    requests: logged_requests.ConfigRequestLog,
) -> IgnitionServer:
    """Return a server that listens, and serves while it is entered; raise `TreenailError`.

    It serves without tokens, as the Machine Config Operator's: no API server could check them.
    """
    path = settings.node_kubeconfig

    def load_kubeconfig() -> bytes | None:
        return None if path is None else read_node_kubeconfig(files, path)

    load_kubeconfig()
    certificate, key = settings.certificate, settings.key
    if certificate is None or key is None:
        certificate, key = _prepare_certificate(directory, settings, files, clock.now())
    service = ConfigService(source, OpenAccess(load_kubeconfig), cache_entries=_CACHED)
    return IgnitionServer(
        parse_address(settings.listen),
        ServerCertificate(certificate, key),
        service,
        requests,
        clock=clock,
        describe_status=describe_status,
    )


def read_node_kubeconfig(files: install_files.InstallFiles, path: Path) -> bytes:
    """Read the kubeconfig of machines; raise `FileError`, also when it does not exist."""
    content = files.read(path, limit=_KUBECONFIG_LIMIT)
    if content is None:
        raise errors.FileError(
            f"cannot read the kubeconfig of machines: {path} does not exist",
            remedy="name the kubeconfig with which kubelets join: --node-kubeconfig FILE",
        )
    return content


def _prepare_certificate(
    directory: install_files.InstallDirectory,
    settings: ConfigServerSettings,
    files: install_files.InstallFiles,
    now: float,
) -> tuple[Path, Path]:
    """Return certificate and key of the server, and make them unless an earlier process did."""
    authority = server_certificates.CaFiles(directory.ca_certificate, directory.ca_key)
    if settings.ca_certificate is not None and settings.ca_key is not None:
        authority = server_certificates.CaFiles(
            settings.ca_certificate, settings.ca_key, is_own=False
        )
    certificate = directory.private / "config-server.crt"
    key = directory.private / "config-server.key"
    names: Sequence[str] = (*settings.hosts, "localhost", "127.0.0.1")
    issued = server_certificates.prepare_server_certificate(
        files, authority, certificate, key, names, now
    )
    if issued.server is not None:
        log.info("made a certificate of the config server for %s", ", ".join(names))
    return certificate, key


_PULL = re.compile(
    rb'^(\S+) \S+ \S+ \[[^\]]*\] "GET /v2/\S+/manifests/sha256:[0-9a-f]{64} \S+" 200 ',
    re.MULTILINE,
)
"""A line of docker-registry's access log, in the format of Apache."""
_CHUNK = memory.MIB
_NAMES_LIMIT = 5


@dataclass(slots=True)
class RegistryPulls:
    """Reads the access log of docker-registry as it grows."""

    log: Path
    addresses: set[str] = field(default_factory=set)
    _offset: int = 0

    def update(self) -> None:
        """Read what is new; a log that cannot be read has nothing new."""
        with suppress(OSError), self.log.open("rb") as file:
            if self.log.stat().st_size < self._offset:
                self._offset = 0  # The log was rotated.
            while True:
                file.seek(self._offset)
                content = file.read(_CHUNK)
                complete = content[: content.rfind(b"\n") + 1]
                if not complete:
                    return
                self._offset += len(complete)
                addresses = (match.group(1) for match in _PULL.finditer(complete))
                self.addresses.update(address.decode("ascii", "replace") for address in addresses)


class MachineContacts:
    """A `treenail.provisioning.machines.logged_requests.ConfigRequestLog`. Thread-safe."""

    def __init__(self, registry_log: Path) -> None:
        self._pulls = RegistryPulls(registry_log)
        self._lock = Lock()
        self._served: set[str] = set()
        self._refused: dict[str, str] = {}
        """Reasons by address; empty for a config that was not ready."""

    def record(self, row: logged_requests.RequestRow) -> None:
        """Record a request for a config."""
        with self._lock:
            if row.outcome is logged_requests.RequestOutcome.SERVED:
                self._served.add(row.address)
                self._refused.pop(row.address, None)
            elif (
                row.outcome is not logged_requests.RequestOutcome.CHECKED
                and row.address not in self._served
            ):
                is_early = row.status == HTTPStatus.SERVICE_UNAVAILABLE
                self._refused[row.address] = "" if is_early else row.reason or str(row.outcome)

    def describe(self, registry: str) -> str:
        """Say what machines got last; ``registry`` is ``HOST:PORT``, empty without one."""
        with self._lock:
            self._pulls.update()
            pulled, served = sorted(self._pulls.addresses), sorted(self._served)
            refused = dict(self._refused)
        if registry and pulled:
            return f"{_join_addresses(pulled)} pulled the image from {registry}, and must boot it"
        if served and registry:
            return (
                f"{_join_addresses(served)} got the config, and no machine has pulled its image "
                f"from {registry}: check on the machine that it reaches this address, and read: "
                "journalctl -u treenail-firstboot"
            )
        if served:
            return f"{_join_addresses(served)} got the config"
        for address, why in sorted(refused.items()):
            if why:
                return f"{address} requested the config, and got none: {why}"
        if refused:
            return f"{_join_addresses(sorted(refused))} requested the config before it was ready"
        return "no machine has requested a config from this process"


def _join_addresses(addresses: Sequence[str]) -> str:
    more = len(addresses) - _NAMES_LIMIT
    return ", ".join(addresses[:_NAMES_LIMIT]) + (f" and {more} more" if more > 0 else "")


_IDLE_S = 3600.0


class StopRequested(BaseException):  # no error
    """A signal requests the end. No `Exception`: no step may take it for a failure."""


@dataclass(frozen=True, slots=True)
class HostAdapters:
    """Parts of the host that the command line provides."""

    notifier: sd_notify.SystemdNotifier
    connect: cluster_steps.ConnectCluster
    begin_log: Callable[[str], None]
    open_images: Callable[
        [install_manifests.InstallManifests], AbstractContextManager[image_steps.ImageStore]
    ]


class HostServices:
    """The host, the registry and the cluster, as the stage uses them."""

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        server: ConfigServerSettings,
        kubeconfig: str,
        adapters: HostAdapters,
        files: install_files.InstallFiles,
        clock: clocks.Clock,
    ) -> None:
        self._directory = directory
        self._server = server
        self._kubeconfig = kubeconfig
        self._adapters = adapters
        self._files = files
        self._clock = clock
        self._contacts = MachineContacts(directory.registry_access_log)

    def check_host(self) -> None:
        """Check free space, and the certificates against the clock; raise `TreenailError`."""
        registry_process.check_space(self._directory.root, registry_process.STATE_SPACE)
        server, private = self._server, self._directory
        paths = [server.certificate, server.ca_certificate, private.ca_certificate]
        server_certificates.check_host_clock(
            self._files,
            [path for path in paths if path is not None],
            self._read_kubeconfig_certificates(),
            self._clock.now(),
        )

    def open_server(
        self, source: PoolSource, describe_status: Callable[[], Json]
    ) -> AbstractContextManager[object]:
        """Return the config server; it serves while it is entered. Raises `UsageError`."""
        return make_config_server(
            self._directory,
            self._server,
            source,
            describe_status,
            self._files,
            self._clock,
            self._contacts,
        )

    def open_images(
        self, manifests: install_manifests.InstallManifests
    ) -> AbstractContextManager[image_steps.ImageStore]:
        """Return the images; entering starts the registry if a pool needs it."""
        return self._adapters.open_images(manifests)

    def describe_machines(self, registry: str) -> str:
        """Say which machines got config and image; ``registry`` is empty without one."""
        return self._contacts.describe(registry)

    def connect(self) -> cluster_steps.ConnectCluster:
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
        with suppress(errors.UsageError):
            kubeconfig = read_kubeconfig(self._kubeconfig)
            pairs = {"CA": kubeconfig.ca, "client certificate": kubeconfig.certificate}
            return {
                f"{name} of {self._kubeconfig}": certificate
                for name, certificate in pairs.items()
                if isinstance(certificate, bytes)
            }
        return {}
