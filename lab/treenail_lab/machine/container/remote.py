"""Images of real registries: what a machine reads of them over HTTPS with its own credentials.

Certificates come from the directories of containers-certs.d(5), ``/etc/containers/certs.d`` and
``/etc/docker/certs.d``. The texts of errors are those of the containers/image library, which the
agent reads.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treenail.clock import SystemClock, parse_rfc3339
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
from treenail.registry.logins import Login
from treenail.registry.names import Descriptor
from treenail.registry.transport import TlsSettings
from treenail_lab.images import ARCHITECTURE, CatalogueLayer, Credential, Image
from treenail_lab.machine.ostree.steps import OperationError

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


class RemoteImages:
    """The images that a machine reads with one credential."""

    def __init__(self, root: Path, pull_spec: str, credential: Credential | None) -> None:
        self._root = root
        name, _, self._reference = pull_spec.partition("@")
        self.host, _, self._repository = name.partition("/")
        self._pull_spec = pull_spec
        self._login = Login(credential.username, credential.password) if credential else None

    def resolve(self) -> Image:
        """Return the image of this host's architecture; raise `OperationError`."""
        with self._open_client() as client:
            found = resolve_image(client, self._repository, self._reference, ARCHITECTURE)
        return _convert_image(self.host, found)

    def read_manifest(self) -> bytes:
        """Return the manifest, or the list of manifests, as the registry has it."""
        with self._open_client() as client:
            return client.get_manifest(self._repository, self._reference).content

    def download_layer(self, layer: CatalogueLayer, target: Path) -> None:
        """Write a layer into a file, which appears when its digest is verified."""
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(".part")
        with self._open_client() as client, scratch.open("wb") as file:
            descriptor = Descriptor("application/octet-stream", layer.digest, layer.size_bytes)
            client.read_blob(self._repository, descriptor, file.write)
        scratch.rename(target)

    @contextmanager
    def _open_client(self) -> Iterator[RegistryClient]:
        client = RegistryClient(
            self.host,
            SystemClock(),
            login=self._login,
            tls=TlsSettings(ca_pem=self._read_certificates()),
        )
        try:
            yield client
        except RegistryError as error:
            raise OperationError(self._translate(error)) from error
        finally:
            client.close()

    def _read_certificates(self) -> str:
        files = [
            file
            for place in _CERTIFICATES
            for file in sorted((self._root / place / self.host).glob("*.crt"))
        ]
        return "\n".join(file.read_text("ascii") for file in files)

    def _translate(self, error: RegistryError) -> str:
        for kind, text in _TEXTS:
            if isinstance(error, kind):
                return text
        return str(error)


def _convert_image(host: str, found: ResolvedImage) -> Image:
    configuration = json.loads(found.config)
    labels = (configuration.get("config") or {}).get("Labels") or {}
    return Image(
        registry=host,
        repository=found.repository,
        digest=found.digest,
        version=str(labels.get(_VERSION_LABEL, "")),
        layers=tuple(
            CatalogueLayer(each.digest, each.size, is_chunk=False) for each in found.layers
        ),
        architecture=found.architecture,
        timestamp=int(parse_rfc3339(configuration.get("created")) or 0),
        labels={str(name): str(value) for name, value in labels.items()},
        list_digest=found.index_digest,
        manifest=found.manifest.content.decode("utf-8"),
        configuration=found.config.decode("utf-8"),
        content=hashlib.sha256(found.digest.encode()).hexdigest()[:16],
    )
