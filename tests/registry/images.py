"""Images and clients for tests of registries."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping

from tests.fakes.clock import FakeClock
from tests.registry.real_registry import PUSHER, RegistryService
from treenail.config.pullsecret import parse_pull_secret
from treenail.oci_content import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    compute_digest,
)
from treenail.registry.authorization import select_login
from treenail.registry.client import RegistryClient
from treenail.registry.names import Descriptor
from treenail.registry.referrers import encode_descriptor
from treenail.registry.transport import RegistryLimits, TlsSettings
from treenail.registry.uploads import upload_bytes

OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def make_client(
    service: RegistryService,
    user: str = PUSHER,
    *,
    limits: RegistryLimits | None = None,
    has_ca: bool = True,
) -> RegistryClient:
    login = None
    if user:
        secret = parse_pull_secret(service.make_auth_json(user), where="the test")
        login = select_login(secret.credentials, service.host, "os/node")
    ca = service.ca_file.read_text() if has_ca else ""
    return RegistryClient(
        service.host, FakeClock(), login=login, tls=TlsSettings(ca), limits=limits
    )


def make_layer(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for path, target in (links or {}).items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return gzip.compress(tree.getvalue(), 1, mtime=0)


def compute_diff_id(layer: bytes) -> str:
    """Return the digest of a compressed layer's content."""
    return f"sha256:{hashlib.sha256(gzip.decompress(layer)).hexdigest()}"


def push_image(
    client: RegistryClient,
    repository: str = "os/node",
    tag: str = "base",
    *,
    architecture: str = "amd64",
    layers: Iterable[bytes] = (),
    is_docker: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Descriptor:
    """Push an image; return its manifest."""
    contents = list(layers) or [make_layer({"usr/lib/os-release": b"ID=test\n"})]
    layer_type = DOCKER_LAYER if is_docker else OCI_LAYER
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": {"Labels": dict(labels or {}), "Cmd": ["/sbin/init"]},
        "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "base"} for _ in contents],
        "rootfs": {
            "type": "layers",
            "diff_ids": [
                f"sha256:{hashlib.sha256(gzip.decompress(each)).hexdigest()}" for each in contents
            ],
        },
    }
    media_type = DOCKER_MANIFEST if is_docker else OCI_MANIFEST
    config_type = DOCKER_CONFIG if is_docker else OCI_CONFIG
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": encode_descriptor(
            upload_bytes(client, repository, config_type, json.dumps(config).encode())
        ),
        "layers": [
            encode_descriptor(upload_bytes(client, repository, layer_type, each))
            for each in contents
        ],
    }
    content = json.dumps(document, indent=1).encode()
    digest = client.put_manifest(repository, tag, media_type, content)
    return Descriptor(media_type, digest, len(content))


def push_index(
    client: RegistryClient,
    instances: Mapping[str, Descriptor],
    repository: str = "os/node",
    tag: str = "base",
    *,
    is_docker: bool = False,
) -> str:
    """Push a list of manifests by architecture; return its digest."""
    media_type = DOCKER_LIST if is_docker else OCI_INDEX
    entries = [
        {**encode_descriptor(each), "platform": {"os": "linux", "architecture": architecture}}
        for architecture, each in instances.items()
    ]
    document = {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}
    return client.put_manifest(repository, tag, media_type, json.dumps(document).encode())


def describe_blob(content: bytes, media_type: str = OCI_LAYER) -> Descriptor:
    return Descriptor(media_type, compute_digest(content), len(content))
