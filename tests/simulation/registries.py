"""Image registries of a simulation: the lab's small registry, without sockets."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import treenail.registry.client as client_module
from tests.registry.real_registry import RegistryService
from tests.simulation.cluster import SimCluster
from treenail.errors import UnreachableError
from treenail.registry.transport import RegistryTransport, Url, _Connection
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.registry.small_registry import SmallRegistry

_LATENCY_S = 0.02
_Backup = dict[str, Any]


class SimRegistry(RegistryService):
    """A registry at a name that no resolver knows."""

    def __init__(self, cluster: SimCluster, directory: Path, host: str) -> None:
        super().__init__(is_real=False, has_tls=False)
        self._cluster = cluster
        self._host = host
        self.directory = directory
        self.ca_file.parent.mkdir(parents=True)
        self.ca_file.write_bytes(CertificateAuthority(directory).pem)
        self.images = SmallRegistry(directory, self.passwords)
        self.images.blobs.mkdir()
        self.images.uploads.mkdir()
        self.is_down = False

    @property
    def host(self) -> str:
        return self._host

    def save(self) -> _Backup:
        return copy.deepcopy(self.images.repositories)

    def load(self, backup: _Backup) -> None:
        """Replace all images by those of a backup."""
        self.images.repositories = copy.deepcopy(backup)

    def has_image(self, image: str) -> bool:
        """Return whether a pull spec by digest can be pulled."""
        name, _, digest = image.partition("@")
        found = self.images.repositories.get(name.partition("/")[2])
        return found is not None and digest in found.manifests

    def answer(self, content: bytes) -> bytes:
        """Answer an HTTP request; other threads of the simulation run before it."""
        simulation = self._cluster.simulation
        if simulation.current is not None:
            simulation.park(_LATENCY_S)
        if self.is_down:
            raise ConnectionRefusedError("the registry is down")
        return _Answering(self.images, content).wfile.getvalue()


class _Answering:
    """One request of the small registry."""

    def __init__(self, images: SmallRegistry, content: bytes) -> None:
        self.wfile = io.BytesIO()
        handler = images._handler.__new__(images._handler)
        handler.rfile, handler.wfile = io.BytesIO(content), self.wfile
        handler.client_address, handler.close_connection = ("simulation", 0), True
        handler.handle_one_request()


class _Socket:
    """The part of a socket that ``http.client`` uses."""

    def __init__(self, registry: SimRegistry) -> None:
        self._registry = registry
        self._sent = b""
        self.deadline = 0.0

    def sendall(self, content: bytes) -> None:
        self._sent += content

    def makefile(self, _mode: str) -> io.BytesIO:
        sent, self._sent = self._sent, b""
        return io.BytesIO(self._registry.answer(sent))

    def close(self) -> None:
        """There is no connection."""


@contextmanager
def hold_registries(*registries: SimRegistry) -> Iterator[None]:
    """Let all clients of registries reach these and no others."""
    by_host = {each.host: each for each in registries}

    class Transport(RegistryTransport):
        def clone(self) -> RegistryTransport:
            return Transport(self._tls, self._proxies, self._limits, self._clock)

        def _connect(self, url: Url, _deadline: float, _action: str) -> _Connection:
            if url.address not in by_host:
                raise UnreachableError(f"no registry is at {url.address}")
            return _Connection(_Socket(by_host[url.address]), url.origin)  # type: ignore[arg-type]  # a part

    before = client_module.RegistryTransport
    client_module.RegistryTransport = Transport  # type: ignore[misc]
    try:
        yield
    finally:
        client_module.RegistryTransport = before  # type: ignore[misc]
