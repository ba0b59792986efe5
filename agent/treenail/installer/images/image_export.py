"""Writes images of the bootstrap registry as OCI directories: ``oci:DIR:NAME`` of skopeo.

The blobs come from the registry's storage directory, so that no registry needs to run. Its layout
is that of the file system driver of docker-registry 2 and 3.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from treenail.api.decode import Fields, load_json
from treenail.builder.layout import ImageLayout
from treenail.errors import FileError
from treenail.installer.images.built_image import BuiltPoolImage
from treenail.registry.names import INDEX_TYPES, OCI_MANIFEST, check_digest
from treenail.registry.referrers import make_referrers_tag

_ROOT = "docker/registry/v2"
_MANIFEST_LIMIT = 4 * 1024 * 1024
_ENTRIES_LIMIT = 700


def export_pool_image(image: BuiltPoolImage, storage: Path, target: Path) -> str:
    """Write the image with its attachments to an OCI directory; return its name there.

    ``storage`` is that of the bootstrap registry. Can be repeated. Raises `FileError`.
    """
    blobs = StoredBlobs(storage)
    layout = ImageLayout(target)
    layout.create()
    repository = image.repository.partition("/")[2]
    name = image.build_name
    media_type, size = _copy_manifest(blobs, layout, image.digest)
    for each in (image.digest, *_list_instances(blobs, image.digest)):
        tag = make_referrers_tag(each)
        if attached := blobs.find_tag(repository, tag):
            attached_type, attached_size = _copy_manifest(blobs, layout, attached)
            layout.set_name(tag, attached, attached_type, attached_size)
    # Last: a directory without this name is incomplete.
    layout.set_name(name, image.digest, media_type, size)
    return name


class StoredBlobs:
    """Blobs, manifests and tags in the storage directory of a docker-registry."""

    def __init__(self, storage: Path) -> None:
        self._root = storage / _ROOT

    def get_path(self, digest: str) -> Path:
        """Return the file of a blob or manifest, which may not exist."""
        value = check_digest(digest).partition(":")[2]
        return self._root / "blobs/sha256" / value[:2] / value / "data"

    def read_manifest(self, digest: str) -> bytes:
        """Return a manifest; raise `FileError`."""
        path = self.get_path(digest)
        try:
            with path.open("rb") as file:
                return file.read(_MANIFEST_LIMIT)
        except OSError as error:
            raise _make_error(digest, error) from error

    def find_tag(self, repository: str, tag: str) -> str:
        """Return the digest of a tag; empty without one."""
        path = self._root / "repositories" / repository / "_manifests/tags" / tag / "current/link"
        try:
            return check_digest(path.read_text().strip())
        except OSError:
            return ""


def _copy_manifest(blobs: StoredBlobs, layout: ImageLayout, digest: str) -> tuple[str, int]:
    """Copy a manifest and all that it names; return its media type and size."""
    content = blobs.read_manifest(digest)
    fields = _parse(content, digest)
    media_type = fields.get_text("mediaType") or OCI_MANIFEST
    for entry in fields.iter_objects("manifests"):
        _copy_manifest(blobs, layout, entry.get_text("digest"))
    if media_type not in INDEX_TYPES:
        for entry in (fields.get_object("config"), *fields.iter_objects("layers")):
            _copy_blob(blobs, layout, entry)
    if layout.write_blob(content) != digest:
        raise FileError(f"cannot export {digest}: the registry's storage has other content")
    return media_type, len(content)


def _copy_blob(blobs: StoredBlobs, layout: ImageLayout, entry: Fields) -> None:
    digest = entry.get_text("digest")
    source, size = blobs.get_path(digest), entry.get_optional_integer("size")
    try:
        if source.stat().st_size != size:
            raise FileError(f"cannot export {digest}: the registry's storage has a part of it")
        if layout.find_blob(digest) is not None:
            return
        try:
            # The registry never changes a blob.
            os.link(source, layout.get_blob_path(digest))
        except OSError:
            with source.open("rb") as file, layout.open_blob(digest) as copy:
                shutil.copyfileobj(file, copy)
    except OSError as error:
        raise _make_error(digest, error) from error


def _list_instances(blobs: StoredBlobs, digest: str) -> Iterator[str]:
    """Yield the images of a list of manifests."""
    fields = _parse(blobs.read_manifest(digest), digest)
    for entry in fields.iter_objects("manifests"):
        yield entry.get_text("digest")


def _parse(content: bytes, digest: str) -> Fields:
    fields = Fields.from_json(load_json(content, where=digest), digest)
    for name in ("manifests", "layers"):
        if len(fields.get_list(name)) > _ENTRIES_LIMIT:
            raise FileError(f"cannot export {digest}: more than {_ENTRIES_LIMIT} {name}")
    return fields


def _make_error(digest: str, error: OSError) -> FileError:
    return FileError(
        f"cannot export {digest}: {error.filename}: {error.strerror}",
        remedy="build the image: treenail-controller install bootstrap --dir DIR",
    )
