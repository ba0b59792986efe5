"""A small OS image for builds in the lab: a shell and some programs of this host, with libraries.

Its layer has no times and no owners of this host, so the same host gives the same digest.
"""

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treenail.errors import HostError
from treenail.registry.client import RegistryClient
from treenail.registry.names import OCI_MANIFEST, Descriptor
from treenail.registry.uploads import upload_blob
from treenail_lab.images import ARCHITECTURE

_PROGRAMS = (
    "sh", "cat", "cp", "mkdir", "rm", "ln", "ls", "mv", "touch", "chmod", "echo", "true", "false",
    "sleep", "head", "env", "uname", "test", "dd", "id",
)  # fmt: skip
_LINKS = {
    "bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64",
    "home": "var/home", "root": "var/roothome", "opt": "var/opt",
}  # fmt: skip
_LIBRARY = re.compile(r"(/\S+) \(0x")
_DIRECTORIES = ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "var", "tmp", "dev", "proc",
                "sys", "run")  # fmt: skip


@dataclass(frozen=True, slots=True)
class BaseImage:
    """The blobs of an image: one layer, its config and its manifest."""

    layer: bytes
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        return _compute_digest(self.manifest)


def build_base_image(version: str) -> BaseImage:
    """Build the image from programs of this host."""
    tree = dict(_collect_files())
    release = f'NAME="Lab OS"\nID=lab\nVERSION="{version}"\nOSTREE_VERSION="{version}"\n'
    texts = {
        "usr/lib/os-release": release,
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
        "etc/group": "root:x:0:\n",
    }
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in _DIRECTORIES:
            _add(archive, name, kind=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name, target in _LINKS.items():
            _add(archive, name, kind=tarfile.SYMTYPE, target=target)
        for name, text in texts.items():
            _add(archive, name, text.encode())
        for name in sorted(tree):
            _add(archive, name, tree[name].read_bytes(), mode=0o755)
    layer = gzip.compress(unpacked.getvalue(), 6, mtime=0)
    labels = {"org.opencontainers.image.version": version, "containers.bootc": "1"}
    config = _dump(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "config": {"Labels": labels, "Env": ["PATH=/usr/sbin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_compute_digest(unpacked.getvalue())]},
            "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "treenail-lab"}],
        }
    )
    oci = "application/vnd.oci.image"
    manifest = _dump(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _describe(f"{oci}.config.v1+json", config),
            "layers": [_describe(f"{oci}.layer.v1.tar+gzip", layer)],
        }
    )
    return BaseImage(layer, config, manifest)


def push_base_image(client: RegistryClient, repository: str, tag: str, image: BaseImage) -> None:
    """Push the image with its tag."""
    for content in (image.layer, image.config):
        blob = Descriptor("application/octet-stream", _compute_digest(content), len(content))
        upload_blob(client, repository, blob, lambda content=content: io.BytesIO(content))  # type: ignore[misc]
    client.put_manifest(repository, tag, OCI_MANIFEST, image.manifest)


def _collect_files() -> Iterator[tuple[str, Path]]:
    """Yield the path in the image and the file of each program and its libraries."""
    for name in _PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is None:
            if name == "sh":
                raise HostError("cannot make an OS image: this host has no /bin/sh")
            continue
        yield f"usr/bin/{name}", Path(found).resolve()
        done = subprocess.run(
            ["ldd", found], capture_output=True, check=False, text=True, timeout=10.0
        )
        for library in _LIBRARY.findall(done.stdout):
            path = Path(library)
            place = path.relative_to("/")
            yield str(place if place.parts[0] == "usr" else Path("usr") / place), path.resolve()


def _add(
    archive: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    target: str = "",
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname, member.size = kind, mode, target, len(content)
    archive.addfile(member, io.BytesIO(content))


def _describe(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _compute_digest(content), "size": len(content)}


def _dump(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _compute_digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
