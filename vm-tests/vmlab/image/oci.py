"""OCI images made of layers, put into a registry."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vmlab.image.layers import Layer
from vmlab.tools import run

_MEDIA = "application/vnd.oci.image"


def push(layers: Sequence[Layer], version: str, aim: str, *options: str) -> str:
    """Put an image into a registry at ``aim``, REGISTRY/REPOSITORY:TAG; returns its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        blobs = place / "blobs/sha256"
        blobs.mkdir(parents=True)
        for layer in layers:
            (blobs / layer.digest.removeprefix("sha256:")).symlink_to(layer.path)
        configuration = _put(blobs, _configuration(layers, version))
        manifest = _put(
            blobs,
            {
                "schemaVersion": 2,
                "mediaType": f"{_MEDIA}.manifest.v1+json",
                "config": {"mediaType": f"{_MEDIA}.config.v1+json", **configuration},
                "layers": [
                    {
                        "mediaType": f"{_MEDIA}.layer.v1.tar+gzip",
                        "digest": layer.digest,
                        "size": layer.path.stat().st_size,
                    }
                    for layer in layers
                ],
            },
        )
        index = {
            "schemaVersion": 2,
            "manifests": [{"mediaType": f"{_MEDIA}.manifest.v1+json", **manifest}],
        }
        (place / "index.json").write_text(json.dumps(index))
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        kept = ("--preserve-digests", "--quiet", "--insecure-policy")
        run("skopeo", "copy", *kept, *options, f"oci:{place}", f"docker://{aim}")
        shutil.rmtree(blobs)
    return str(manifest["digest"])


def _configuration(layers: Sequence[Layer], version: str) -> dict[str, object]:
    labels = {"containers.bootc": "1", "org.opencontainers.image.version": version}
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer.content_digest for layer in layers]},
    }


def _put(blobs: Path, document: dict[str, object]) -> dict[str, object]:
    content = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}
