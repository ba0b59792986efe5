"""Images of real registries: what a machine reads of them over HTTPS with its own credentials.

Certificates come from the directories of containers-certs.d(5), ``/etc/containers/certs.d`` and
``/etc/docker/certs.d``. Mirrors come from ``/etc/containers/registries.conf.d``. Only what an
installation writes there is read: a prefix of whole path components, and mirrors that may be
limited to digests (containers-registries.conf.d(5)). The proxy is that of ``/etc/mco/proxy.env``,
which programs receive from the agent, and rpm-ostreed from a drop-in of the package. The texts of
errors are those of the containers/image library, which the agent reads.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from treenail.clocks import SystemClock, parse_rfc3339
from treenail.host.system.proxies import PROXY_FILE, parse_proxies
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.errors import (
    Busy,
    CertificateUnknown,
    Denied,
    DigestMismatch,
    LoginRefused,
    NotFound,
    RegistryError,
    ServerFailure,
)
from treenail.registry.images import ResolvedImage, resolve_image
from treenail.registry.names import Descriptor
from treenail.registry.proxies import ProxySettings, read_proxy_settings
from treenail.registry.transport import TlsSettings
from treenail_lab.images import ARCHITECTURE, CatalogueLayer, Credential, Image
from treenail_lab.machine.ostree.steps import OperationError

_DIRECTORY = "etc/containers/registries.conf.d"


@dataclass(frozen=True, slots=True)
class MirrorSource:
    """A place to pull an image from: a name without tag and digest, such as ``HOST/PATH``."""

    name: str

    @property
    def host(self) -> str:
        return self.name.partition("/")[0]

    @property
    def repository(self) -> str:
        return self.name.partition("/")[2]


def list_sources(root: Path, pull_spec: str) -> tuple[MirrorSource, ...]:
    """Return the places of an image in the order in which they are tried, its own name last."""
    name, at, _ = pull_spec.partition("@")
    if not at:
        head, slash, tail = name.rpartition("/")
        name = head + slash + tail.partition(":")[0]
    entry = _find_entry(root, name)
    places = [
        MirrorSource(mirror["location"] + name[len(entry["prefix"]) :])
        for mirror in entry.get("mirror", [])
        if at or mirror.get("pull-from-mirror", "all") != "digest-only"
    ]
    return (*places, MirrorSource(name))


def _find_entry(root: Path, name: str) -> dict[str, Any]:
    """Return the entry with the longest prefix of a name; empty without one."""
    longest: dict[str, Any] = {}
    for path in sorted((root / _DIRECTORY).glob("*.conf")):
        for registry in tomllib.loads(path.read_text("utf-8")).get("registry", []):
            prefix = registry.get("prefix") or registry["location"]
            is_covered = name == prefix or name.startswith(f"{prefix}/")
            if is_covered and len(prefix) >= len(longest.get("prefix", "")):
                longest = {**registry, "prefix": prefix}
    return longest


_T = TypeVar("_T")
_CERTIFICATES = ("etc/containers/certs.d", "etc/docker/certs.d")
_VERSION_LABEL = "org.opencontainers.image.version"
_TEXTS: tuple[tuple[type[RegistryError], str], ...] = (
    (LoginRefused, "unauthorized: authentication required"),
    (Denied, "denied: requested access to the resource is denied"),
    (NotFound, "manifest unknown"),
    (Busy, "toomanyrequests: too many requests"),
    (
        CertificateUnknown,
        "tls: failed to verify certificate: x509: certificate signed by unknown authority",
    ),
    (ServerFailure, "received unexpected HTTP status: 503 Service Unavailable"),
    (DigestMismatch, "Digest did not match"),
)


class _ImpatientClient(RegistryClient):
    """Tries each request once: the next source may have the image (docker_image_src.go)."""

    def retry(self, call: Callable[[], _T]) -> _T:
        return call()


FindCredential = Callable[[str], Credential | None]
"""Returns the machine's credential for a name without tag and digest."""


class RemoteImages:
    """One image as a machine reads it, from a mirror of its registry or from the registry."""

    def __init__(self, root: Path, pull_spec: str, find_credential: FindCredential) -> None:
        self._root = root
        name, _, self._reference = pull_spec.partition("@")
        self._host, _, self._repository = name.partition("/")
        self._sources = list_sources(root, pull_spec)
        self._find_credential = find_credential

    def resolve(self) -> Image:
        """Return the image of this host's architecture; raise `OperationError`."""

        def read(client: RegistryClient, repository: str) -> ResolvedImage:
            return resolve_image(client, repository, self._reference, ARCHITECTURE)

        return _convert_image(self._host, self._repository, self._try_sources(read))

    def read_manifest(self) -> bytes:
        """Return the manifest, or the list of manifests, as the registry has it."""

        def read(client: RegistryClient, repository: str) -> bytes:
            return client.get_manifest(repository, self._reference).content

        return self._try_sources(read)

    def download_layer(self, layer: CatalogueLayer, target: Path) -> None:
        """Write a layer into a file, which appears when its digest is verified."""
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(".part")

        def read(client: RegistryClient, repository: str) -> None:
            with scratch.open("wb") as file:
                descriptor = Descriptor("application/octet-stream", layer.digest, layer.size_bytes)
                client.read_blob(repository, descriptor, file.write)

        self._try_sources(read)
        scratch.rename(target)

    def _try_sources(self, read: Callable[[RegistryClient, str], _T]) -> _T:
        """Read from the first source that answers.

        Raises `OperationError` with the text of containers/image (docker_image_src.go).
        """
        failures: list[tuple[MirrorSource, OperationError]] = []
        for source in self._sources:
            try:
                with self._open_client(source) as client:
                    return read(client, source.repository)
            except OperationError as error:
                failures.append((source, error))
        *mirrors, (_, last) = failures
        if not mirrors:
            raise last
        text = "] [".join(f"{source.name}@{self._reference}: {error}" for source, error in mirrors)
        raise OperationError(f"(Mirrors also failed: [{text}]): {last}")

    @contextmanager
    def _open_client(self, source: MirrorSource) -> Iterator[RegistryClient]:
        credential = self._find_credential(source.name)
        login = Login(credential.username, credential.password) if credential else None
        kind = RegistryClient if len(self._sources) == 1 else _ImpatientClient
        client = kind(
            source.host,
            SystemClock(),
            login=login,
            tls=TlsSettings(ca_pem=self._read_certificates(source.host)),
            proxies=self._read_proxies(),
        )
        try:
            yield client
        except RegistryError as error:
            raise OperationError(self._translate(error)) from error
        finally:
            client.close()

    def _read_certificates(self, host: str) -> str:
        files = [
            file
            for place in _CERTIFICATES
            for file in sorted((self._root / place / host).glob("*.crt"))
        ]
        return "\n".join(file.read_text("ascii") for file in files)

    def _read_proxies(self) -> ProxySettings:
        file = self._root / PROXY_FILE[1:]
        return read_proxy_settings(parse_proxies(file.read_text()) if file.exists() else {})

    def _translate(self, error: RegistryError) -> str:
        for kind, text in _TEXTS:
            if isinstance(error, kind):
                return text
        return str(error)


def _convert_image(host: str, repository: str, resolved: ResolvedImage) -> Image:
    configuration = json.loads(resolved.config)
    labels = (configuration.get("config") or {}).get("Labels") or {}
    return Image(
        registry=host,
        repository=repository,
        digest=resolved.digest,
        version=str(labels.get(_VERSION_LABEL, "")),
        layers=tuple(
            CatalogueLayer(layer.digest, layer.size, is_chunk=False) for layer in resolved.layers
        ),
        architecture=resolved.architecture,
        timestamp=int(parse_rfc3339(configuration.get("created")) or 0),
        labels={str(name): str(value) for name, value in labels.items()},
        list_digest=resolved.index_digest,
        manifest=resolved.manifest.content.decode("utf-8"),
        configuration=resolved.config.decode("utf-8"),
        content=hashlib.sha256(resolved.digest.encode()).hexdigest()[:16],
    )
