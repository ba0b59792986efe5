"""OCI images made of layers, put into a registry."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vmlab.image.layers import Layer
from vmlab.tools import run


class Login(Protocol):
    """How skopeo gets into a registry."""

    def options(self, prefix: str = "") -> tuple[str, ...]: ...


_MEDIA = "application/vnd.oci.image"
_INDEX = f"{_MEDIA}.index.v1+json"


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


def extend(
    base: str, layer: Layer, aim: str, store: Login, *, has_whole_history: bool = True
) -> str:
    """Put the image ``base`` of a registry with a layer on top at ``aim``; returns its digest."""
    layers = json.loads(manifest(base, store))["layers"]
    raw = run("skopeo", "inspect", "--raw", "--config", *store.options(), f"docker://{base}")
    configuration = json.loads(raw)
    configuration["rootfs"]["diff_ids"].append(layer.content_digest)
    if has_whole_history:
        _fill_history(configuration)
    described = [*layers, _described(layer)]
    return _copy([layer], configuration, described, aim, store).digest


def push_list(manifest: str, aim: str, store: Login) -> str:
    """Put a manifest list with this manifest, as amd64's, at ``aim``; returns its digest.

    The registry must have the image with the manifest.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        blobs = place / "blobs/sha256"
        blobs.mkdir(parents=True)
        (blobs / hashlib.sha256(manifest.encode()).hexdigest()).write_text(manifest)
        image = {
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "digest": f"sha256:{hashlib.sha256(manifest.encode()).hexdigest()}",
            "size": len(manifest.encode()),
            "platform": {"architecture": "amd64", "os": "linux"},
        }
        listed = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [image]}
        found = {"mediaType": _INDEX, **_put(blobs, listed)}
        _write_layout(place, found)
        options = store.options("dest-")
        run(
            "skopeo", "copy", "--multi-arch=index-only", "--preserve-digests", "--quiet",
            "--insecure-policy", *options, f"oci:{place}", f"docker://{aim}",
        )  # fmt: skip
    return str(found["digest"])


def manifest(name: str, store: Login) -> str:
    """Return the manifest of an image that a registry has, as the digest covers it."""
    return run("skopeo", "inspect", "--raw", *store.options(), f"docker://{name}")


def digest(name: str, store: Login) -> str:
    """The digest of an image that a registry has."""
    return f"sha256:{hashlib.sha256(manifest(name, store).encode()).hexdigest()}"


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
        put = _put(blobs, document)
        _write_layout(place, {"mediaType": f"{_MEDIA}.manifest.v1+json", **put})
        kept = ("--preserve-digests", "--quiet", "--insecure-policy")
        options = store.options("dest-")
        run("skopeo", "copy", *kept, *options, f"oci:{place}", f"docker://{aim}")
    return Pushed(str(put["digest"]), _text(document), _text(configuration))


def _write_layout(place: Path, described: dict[str, object]) -> None:
    """Make a directory with blobs an OCI layout of one image or list."""
    index = {"schemaVersion": 2, "manifests": [described]}
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def _described(layer: Layer) -> dict[str, object]:
    return {
        "mediaType": f"{_MEDIA}.layer.v1.tar+gzip",
        "digest": layer.digest,
        "size": layer.path.stat().st_size,
    }


def _configuration(layers: Sequence[Layer], version: str) -> dict[str, object]:
    labels = {"containers.bootc": "1", "org.opencontainers.image.version": version}
    configuration: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer.content_digest for layer in layers]},
    }
    _fill_history(configuration)
    return configuration


def _fill_history(configuration: dict[str, Any]) -> None:
    """Add an entry for each layer that lacks one: bootc refuses an image with a shorter history."""
    history = configuration.setdefault("history", [])
    known = sum(not each.get("empty_layer") for each in history)
    missing = len(configuration["rootfs"]["diff_ids"]) - known
    history += [{"created_by": "vm-tests"}] * missing


def _put(blobs: Path, document: dict[str, object]) -> dict[str, object]:
    content = _text(document).encode()
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def _text(document: dict[str, object]) -> str:
    return json.dumps(document, sort_keys=True)
