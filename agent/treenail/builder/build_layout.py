"""OCI image layout on disk: blobs by digest, and an index of named manifests.

buildah compresses each layer again when it writes an image to a layout. For a base of 1 GB that
takes longer than most builds, and a registry or a node that has the base would not know its layers.
So the layers of fetched images are left out of the write, and named by their first digest.

buildah writes into a layout of its own: instructions of a user may have changed its storage.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from treenail import errors, memory, oci_content
from treenail.api import decode, pullspec
from treenail.image.oci.documents import SYSTEM_LAYER
from treenail.registry.names import Manifest

_REF_NAME = "org.opencontainers.image.ref.name"
_LIMIT = 4 * memory.MIB  # bytes of a manifest or config
_CHUNK = memory.MIB


class ImageLayout:
    """Reads and writes one OCI image layout, a directory that ``oci:DIR:NAME`` names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blobs = path / "blobs/sha256"

    def create(self) -> None:
        """Create the layout unless it exists."""
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            # Readers reject a directory without this file (image-spec, image-layout.md).
            (self.path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
            if not self._index.exists():
                self._write_index([])
        except OSError as error:
            raise _make_file_error("create", self.path, error) from error

    @property
    def _index(self) -> Path:
        return self.path / "index.json"

    def find_blob(self, digest: str) -> Path | None:
        """Return the file of this blob; None if it is absent."""
        path = self.get_blob_path(digest)
        return path if path.is_file() else None

    def read_blob(self, digest: str) -> bytes:
        """Read a manifest or config of this layout, and verify its digest."""
        path = self.get_blob_path(digest)
        try:
            with path.open("rb") as file:
                content = file.read(_LIMIT + 1)
        except OSError as error:
            raise _make_file_error("read", path, error) from error
        if len(content) > _LIMIT or oci_content.compute_digest(content) != digest:
            raise errors.FileError(f"cannot read {path}: its content does not have this digest")
        return content

    def write_blob(self, content: bytes) -> str:
        """Write a blob; return its digest."""
        digest = oci_content.compute_digest(content)
        with self.open_blob(digest) as file:
            file.write(content)
        return digest

    @contextmanager
    def open_blob(self, digest: str) -> Iterator[BinaryIO]:
        """Open a new blob; it gets its name when the block ends without an error."""
        path = self.get_blob_path(digest)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
        try:
            with partial.open("wb") as file:
                yield file
            partial.rename(path)
        except OSError as error:
            raise _make_file_error("write", path, error) from error
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def write_placeholder(self, digest: str) -> None:
        """Create an empty file in place of a blob that buildah must not write again."""
        try:
            # containers/image writes no blob whose file exists in the layout, whatever its size
            # (oci/layout/oci_dest.go, TryReusingBlob).
            self.get_blob_path(digest).touch()
        except OSError as error:
            raise _make_file_error("write", self.get_blob_path(digest), error) from error

    def move_blob(self, digest: str, other: "ImageLayout") -> None:
        """Move a blob from another layout on this file system."""
        source = other.get_blob_path(digest)
        if source.is_symlink():
            raise errors.FileError(f"cannot move {source}: it is a link")
        try:
            source.rename(self.get_blob_path(digest))
        except OSError as error:
            raise _make_file_error("move", source, error) from error

    def set_name(self, name: str, digest: str, media_type: str, size: int) -> None:
        """Name a manifest; the name moves from another manifest."""
        # containers/image takes the first entry with a name (oci/layout/oci_transport.go), so an
        # old one must go.
        entries = [entry for entry in self._read_index() if _get_name(entry) != name]
        entry: decode.Json = {
            "mediaType": media_type,
            "digest": digest,
            "size": size,
            "annotations": {_REF_NAME: name},
        }
        self._write_index([*entries, entry])

    def read_named(self, name: str) -> Manifest | None:
        """Read the manifest with this name; None without one."""
        for entry in self._read_index():
            if _get_name(entry) == name:
                digest = str(entry.get("digest", ""))
                media_type = str(entry.get("mediaType", oci_content.OCI_MANIFEST))
                return Manifest(media_type, digest, self.read_blob(digest))
        return None

    def list_names(self) -> list[str]:
        return [name for entry in self._read_index() if (name := _get_name(entry))]

    def _read_index(self) -> list[decode.Json]:
        try:
            with self._index.open("rb") as file:
                document = decode.load_json(file.read(_LIMIT), where=str(self._index))
        except OSError as error:
            raise _make_file_error("read", self._index, error) from error
        entries = document.get("manifests") if isinstance(document, dict) else None
        return [entry for entry in entries or () if isinstance(entry, dict)]

    def _write_index(self, entries: list[decode.Json]) -> None:
        content = json.dumps({"schemaVersion": 2, "manifests": entries})
        partial = self.path / ".index.json"
        try:
            partial.write_text(content)
            partial.rename(self._index)
        except OSError as error:
            raise _make_file_error("write", self._index, error) from error

    def get_blob_path(self, digest: str) -> Path:
        """Return the file of this blob, which may not exist."""
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or not value.isalnum():
            raise errors.FileError(f"cannot find blob {digest!r:.80}: expected a digest of SHA-256")
        return self._blobs / value


def _get_name(entry: decode.Json) -> str:
    annotations = entry.get("annotations")
    name = annotations.get(_REF_NAME) if isinstance(annotations, dict) else None
    return name if isinstance(name, str) else ""


def _make_file_error(verb: str, path: Path, error: OSError) -> errors.FileError:
    return errors.FileError(f"cannot {verb} {error.filename or path}: {error.strerror or error}")


_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
_BASE_ANNOTATIONS = {"org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"}
_LAYER_TYPES = {
    "application/vnd.docker.image.rootfs.diff.tar": _OCI_LAYER,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{_OCI_LAYER}+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": f"{_OCI_LAYER}+zstd",
}


def collect_layers(layout: ImageLayout, names: Iterable[str]) -> dict[str, decode.Json]:
    """Map the digest of each layer's content, uncompressed, to its descriptor in a manifest."""
    by_diff_id: dict[str, decode.Json] = {}
    for name in names:
        image = layout.read_named(name)
        if image is None:
            continue
        manifest = read_manifest(image)
        layers = [dict(layer.values) for layer in manifest.iter_objects("layers")]
        diff_ids = _read_config(layout, manifest).get_object("rootfs").get_text_list("diff_ids")
        for diff_id, layer in zip(diff_ids, layers, strict=False):
            media_type = str(layer.get("mediaType", ""))
            # buildah writes manifests of OCI, in which a layer of a Docker type would be invalid.
            # Only the type differs: the bytes of the layer are the same.
            layer["mediaType"] = _LAYER_TYPES.get(media_type, media_type)
            by_diff_id.setdefault(diff_id, layer)
    return by_diff_id


def adopt_image(
    layout: ImageLayout,
    saved: ImageLayout,
    name: str,
    layers: Mapping[str, decode.Json],
    labels: Mapping[str, str],
) -> Manifest:
    """Move an image from the layout that buildah wrote, and give it the labels.

    Its manifest gets the first descriptors of layers that the layout has.
    """
    image = saved.read_named(name)
    if image is None:
        raise errors.FileError(f"cannot read {saved.path}: buildah wrote no image {name}")
    document = dict(read_manifest(image).values)
    manifest = decode.Fields(document, name)
    descriptors = [layer.values for layer in manifest.iter_objects("layers")]
    digests = [str(descriptor.get("digest")) for descriptor in descriptors]
    for digest in dict.fromkeys(digests):
        if digest not in layers:
            layout.move_blob(digest, saved)
    document["layers"] = list(map(layers.get, digests, descriptors))
    content = saved.read_blob(manifest.get_object("config").get_text("digest"))
    if labels:
        content = _add_labels(content, labels)
    document["config"] = {
        **manifest.get_object("config").values,
        "digest": layout.write_blob(content),
        "size": len(content),
    }
    # buildah names its local copy of the base.
    annotations = {
        name: value
        for name, value in manifest.get_text_map("annotations").items()
        if name not in _BASE_ANNOTATIONS
    }
    document.pop("annotations", None)
    if annotations:
        document["annotations"] = annotations
    content = json.dumps(document, separators=(",", ":")).encode()
    digest = layout.write_blob(content)
    layout.set_name(name, digest, oci_content.OCI_MANIFEST, len(content))
    return Manifest(oci_content.OCI_MANIFEST, digest, content)


def _add_labels(content: bytes, labels: Mapping[str, str]) -> bytes:
    """Return the config of an image with these labels, and with that of its last layer."""
    config = decode.Fields.from_json(decode.load_json(content, where="config"), "config")
    runtime = config.get_object("config")
    last = "".join(config.get_object("rootfs").get_text_list("diff_ids")[-1:])
    merged = {**runtime.get_object("Labels").values, **labels, SYSTEM_LAYER: last}
    document = {**config.values, "config": {**runtime.values, "Labels": merged}}
    return json.dumps(document, separators=(",", ":")).encode()


def read_manifest(image: Manifest) -> decode.Fields:
    """Decode a manifest."""
    return decode.Fields.from_json(
        decode.load_json(image.content, where=image.digest), image.digest
    )


def is_bootable(layout: ImageLayout, name: str) -> bool:
    """Return whether the image ``name`` has a label of a bootable operating system."""
    image = layout.read_named(name)
    if image is None:
        return False
    labels = _read_config(layout, read_manifest(image)).get_object("config").get_object("Labels")
    return any(labels.values.get(label) for label in pullspec.BOOTABLE_LABELS)


def _read_config(layout: ImageLayout, manifest: decode.Fields) -> decode.Fields:
    digest = manifest.get_object("config").get_text("digest")
    return decode.Fields.from_json(decode.load_json(layout.read_blob(digest), where=digest), digest)
