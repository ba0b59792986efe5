"""The config server on the bootstrap host, and its certificate."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.api.decode import Json
from treenail.clock import Clock
from treenail.controllers.runtime.http_server import parse_address
from treenail.errors import FileError
from treenail.installer.bootstrap.bootstrap_source import BootstrapSource
from treenail.installer.certificates.server_certificates import CaFiles, prepare_server_certificate
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles
from treenail.provisioning.server.access import ConfigRequestLog, OpenAccess
from treenail.provisioning.server.certificate import ServerCertificate
from treenail.provisioning.server.server import PORT, IgnitionServer
from treenail.provisioning.server.service import ConfigService

log = logging.getLogger(__name__)

DEFAULT_LISTEN = f":{PORT}"
_KUBECONFIG_LIMIT = 1024 * 1024
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
    directory: InstallDirectory,
    settings: ConfigServerSettings,
    source: BootstrapSource,
    describe_status: Callable[[], Json],
    files: InstallFiles,
    clock: Clock,
    requests: ConfigRequestLog,
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


def read_node_kubeconfig(files: InstallFiles, path: Path) -> bytes:
    """Read the kubeconfig of machines; raise `FileError`, also when it does not exist."""
    content = files.read(path, limit=_KUBECONFIG_LIMIT)
    if content is None:
        raise FileError(
            f"cannot read the kubeconfig of machines: {path} does not exist",
            remedy="name the kubeconfig with which kubelets join: --node-kubeconfig FILE",
        )
    return content


def _prepare_certificate(
    directory: InstallDirectory, settings: ConfigServerSettings, files: InstallFiles, now: float
) -> tuple[Path, Path]:
    """Return certificate and key of the server, and make them unless an earlier process did."""
    authority = CaFiles(directory.ca_certificate, directory.ca_key)
    if settings.ca_certificate is not None and settings.ca_key is not None:
        authority = CaFiles(settings.ca_certificate, settings.ca_key, is_own=False)
    certificate = directory.private / "config-server.crt"
    key = directory.private / "config-server.key"
    names: Sequence[str] = (*settings.hosts, "localhost", "127.0.0.1")
    issued = prepare_server_certificate(files, authority, certificate, key, names, now)
    if issued.certificate:
        log.info("made a certificate of the config server for %s", ", ".join(names))
    return certificate, key
