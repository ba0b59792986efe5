"""OCI images made of layers, put into a registry."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vmlab.image.layers import Layer
from vmlab.tools import run


class Login(Protocol):
    """How skopeo gets into a registry."""

    def options(self, prefix: str = "") -> tuple[str, ...]: ...


_MEDIA = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class Pushed:
    """An image that a registry has, with the texts that its digest covers."""

    digest: str
    manifest: str
    configuration: str


def push(layers: Sequence[Layer], version: str, aim: str, store: Login) -> Pushed:
    """Put an image into a registry at ``aim``, REGISTRY/REPOSITORY:TAG."""
    described = [_described(layer) for layer in layers]
    return _copy(layers, _configuration(layers, version), described, aim, store)


def extend(base: str, layer: Layer, aim: str, store: Login) -> str:
    """Put the image ``base`` of a registry with a layer on top at ``aim``; returns its digest."""
    options = store.options()
    manifest = json.loads(run("skopeo", "inspect", "--raw", *options, f"docker://{base}"))
    raw = run("skopeo", "inspect", "--raw", "--config", *options, f"docker://{base}")
    configuration = json.loads(raw)
    configuration["rootfs"]["diff_ids"].append(layer.content_digest)
    # Says of each layer how it came about, and would now be one short.
    configuration.pop("history", None)
    described = [*manifest["layers"], _described(layer)]
    return _copy([layer], configuration, described, aim, store).digest


def digest(name: str, store: Login) -> str:
    """The digest of an image that a registry has."""
    raw = run("skopeo", "inspect", "--raw", *store.options(), f"docker://{name}")
    return f"sha256:{hashlib.sha256(raw.encode()).hexdigest()}"


def _copy(
    layers: Sequence[Layer],
    configuration: dict[str, object],
    described: Sequence[dict[str, object]],
    aim: str,
    store: Login,
) -> Pushed:
    """Push a manifest and the layers that the registry does not have."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        blobs = place / "blobs/sha256"
        blobs.mkdir(parents=True)
        for layer in layers:
            (blobs / layer.digest.removeprefix("sha256:")).symlink_to(layer.path)
        document = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": {
                "mediaType": f"{_MEDIA}.config.v1+json",
                **_put(blobs, configuration),
            },
            "layers": list(described),
        }
        manifest = _put(blobs, document)
        index = {
            "schemaVersion": 2,
            "manifests": [{"mediaType": f"{_MEDIA}.manifest.v1+json", **manifest}],
        }
        (place / "index.json").write_text(json.dumps(index))
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        kept = ("--preserve-digests", "--quiet", "--insecure-policy")
        options = store.options("dest-")
        run("skopeo", "copy", *kept, *options, f"oci:{place}", f"docker://{aim}")
    return Pushed(str(manifest["digest"]), _text(document), _text(configuration))


def _described(layer: Layer) -> dict[str, object]:
    return {
        "mediaType": f"{_MEDIA}.layer.v1.tar+gzip",
        "digest": layer.digest,
        "size": layer.path.stat().st_size,
    }


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
    content = _text(document).encode()
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def _text(document: dict[str, object]) -> str:
    return json.dumps(document, sort_keys=True)
