"""A base image of busybox in an OCI layout, in several layers."""

import gzip
import hashlib
import io
import json
import platform
import random
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from treenail.builder.build_layout import ImageLayout
from treenail.oci_content import OCI_MANIFEST

BUSYBOX = shutil.which("busybox")
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())

_APPLETS = (
    "cat", "chmod", "dd", "echo", "env", "false", "gzip", "head", "id", "kill", "ls", "mkdir",
    "ps", "rm", "sh", "sleep", "test", "touch", "true", "wget",
)  # fmt: skip


def _is_static(path: str) -> bool:
    return b"/ld-linux" not in Path(path).read_bytes()


needs_busybox = pytest.mark.skipif(
    BUSYBOX is None or not _is_static(BUSYBOX),
    reason="busybox is not installed: install the package busybox-static",
)


def write_base_image(layout: ImageLayout, name: str, *, sizes: tuple[int, ...] = (1000,)) -> str:
    """Write a base image with a layer of busybox and one of each size; return its digest."""
    assert BUSYBOX is not None
    files = {
        "etc/passwd": b"root:x:0:0::/:/bin/sh\n",
        "etc/os-release": b"ID=test\n",
        "usr/lib/first": b"1",
        "bin/busybox": Path(BUSYBOX).read_bytes(),
    }
    layers = [
        _make_layer(files, links=dict.fromkeys((f"bin/{each}" for each in _APPLETS), "busybox"))
    ]
    generator = random.Random(4711)
    layers += [
        _make_layer({f"usr/lib/layer-{number}": _make_content(generator, size)}, links={})
        for number, size in enumerate(sizes)
    ]
    descriptors, diff_ids = [], []
    for layer in layers:
        packed = gzip.compress(layer, compresslevel=1, mtime=0)
        descriptors.append(
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": layout.write_blob(packed),
                "size": len(packed),
            }
        )
        diff_ids.append(f"sha256:{hashlib.sha256(layer).hexdigest()}")
    config = json.dumps(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Labels": {"version": "1", "containers.bootc": "1"}},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created_by": f"layer {number}"} for number in range(len(layers))],
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": layout.write_blob(config),
                "size": len(config),
            },
            "layers": descriptors,
        }
    ).encode()
    digest = layout.write_blob(manifest)
    layout.set_name(name, digest, OCI_MANIFEST, len(manifest))
    return digest


def _make_content(generator: random.Random, size: int) -> bytes:
    """Make content that compresses to about half, as programs do."""
    half = generator.randbytes(size // 2)
    return half + bytes(size - len(half))


def _make_layer(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        folders = {str(parent) for path in [*files, *links] for parent in Path(path).parents}
        for folder in sorted(folders - {"."}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755 if path.startswith("bin/") else 0o644
            archive.addfile(entry, io.BytesIO(content))
        for path, target in links.items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return packed.getvalue()


def read_layer_files(layout: ImageLayout, digest: str) -> dict[str, bytes]:
    """Read the regular files of one layer."""
    path = layout.find_blob(digest)
    assert path is not None
    with tarfile.open(path) as archive:
        return {
            entry.name: file.read()
            for entry in archive
            if entry.isfile() and (file := archive.extractfile(entry)) is not None
        }
