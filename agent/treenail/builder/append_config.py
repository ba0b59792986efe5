"""Add the config layer to an image in a registry by its API alone, or in a layout.

The registry's layers are not pulled: blobs are mounted where both images are in one registry, and
streamed elsewhere. Every step can be repeated; equal inputs give an equal digest.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treenail import oci_content
from treenail.builder import build_layout
from treenail.errors import FileError
from treenail.image.config_layer import ConfigLayer
from treenail.image.oci.documents import ImageInstance, append_layer, make_index
from treenail.registry import images, names, uploads
from treenail.registry.client import RegistryClient
from treenail.registry.errors import DigestMismatch


@dataclass(frozen=True, slots=True)
class ImageDestination:
    """Where an image is pushed to."""

    client: RegistryClient
    repository: str
    tag: str


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image, and a client of the registry that has it."""

    client: RegistryClient
    image: images.ResolvedImage


@dataclass(frozen=True, slots=True)
class AppendedImage:
    """A pushed image, verified by its digest."""

    digest: str
    layer_digest: str
    moved_bytes: int
    """Bytes of the base that no mount could provide."""
    instances: tuple[str, ...] = ()
    """Digests of the images of a list of manifests, in the order of their sources."""


def append_config(
    source: ImageSource,
    layer: ConfigLayer,
    labels: Mapping[str, str],
    destination: ImageDestination,
) -> AppendedImage:
    """Push the image with the config layer under the tag; raises `RegistryError`, `ConfigError`."""
    instance, moved = _push_instance(source, layer, labels, destination, tag=destination.tag)
    _verify(destination, instance.digest)
    return AppendedImage(instance.digest, layer.digest, moved)


def append_config_to_list(
    sources: Sequence[ImageSource],
    layer: ConfigLayer,
    labels: Mapping[str, str],
    destination: ImageDestination,
) -> AppendedImage:
    """Push one image per architecture, and their list of manifests under the tag.

    Raises `RegistryError`, `ConfigError`.
    """
    instances: list[ImageInstance] = []
    moved = 0
    for source in sources:
        instance, more = _push_instance(source, layer, labels, destination)
        instances.append(instance)
        moved += more
    media_type, content = make_index(instances)
    # The list comes last: registries refuse one whose images they do not have (docker-registry:
    # MANIFEST_BLOB_UNKNOWN).
    digest = _push_manifest(destination, media_type, content, destination.tag)
    _verify(destination, digest)
    return AppendedImage(digest, layer.digest, moved, tuple(member.digest for member in instances))


def _push_instance(
    source: ImageSource,
    layer: ConfigLayer,
    labels: Mapping[str, str],
    destination: ImageDestination,
    *,
    tag: str = "",
) -> tuple[ImageInstance, int]:
    client, repository = destination.client, destination.repository
    image, base = source.image, source.image.manifest
    documents = append_layer(base.media_type, base.content, image.config, layer, labels)
    moved = images.copy_blobs(image.layers, source.client, image.repository, client, repository)
    uploads.upload_bytes(client, repository, documents.layer_type, layer.tar_gz)
    uploads.upload_bytes(client, repository, image.config_blob.media_type, documents.config)
    digest = _push_manifest(destination, documents.media_type, documents.manifest, tag)
    size = len(documents.manifest)
    return ImageInstance(documents.media_type, digest, size, image.architecture), moved


def _push_manifest(destination: ImageDestination, media_type: str, content: bytes, tag: str) -> str:
    """Push a manifest under the tag of its digest, then under the other one; return its digest."""
    # Garbage collections delete what has no tag, also if a list names it (docker-registry 2.8).
    digest = oci_content.compute_digest(content)
    for reference in filter(None, (oci_content.make_digest_tag(digest), tag)):
        destination.client.put_manifest(destination.repository, reference, media_type, content)
    return digest


def _verify(destination: ImageDestination, digest: str) -> None:
    """Query the registry for the tag: nothing is reported before the registry has it."""
    client = destination.client
    pushed = client.head_manifest(destination.repository, destination.tag)
    if pushed is None or pushed.digest != digest:
        spec = client.format_image(destination.repository, destination.tag)
        actual = pushed.digest if pushed else "nothing"
        raise DigestMismatch(
            f"cannot verify {spec}: expected {digest}, found {actual}",
            remedy="push again; another client may push to this tag",
        )


def append_config_layer(
    layout: build_layout.ImageLayout,
    source: str,
    target: str,
    layer: ConfigLayer,
    labels: Mapping[str, str],
) -> names.Manifest:
    """Name the image ``source`` with the config layer ``target``; raise `ConfigError`.

    Equal to `treenail.builder.append_config.append_config` in a registry: equal inputs give an
    equal digest.
    """
    image = layout.read_named(source)
    if image is None:
        raise FileError(f"cannot add the config: {layout.path} has no image {source}")
    config = layout.read_blob(
        build_layout.read_manifest(image).get_object("config").get_text("digest")
    )
    documents = append_layer(image.media_type, image.content, config, layer, labels)
    layout.write_blob(layer.tar_gz)
    layout.write_blob(documents.config)
    digest = layout.write_blob(documents.manifest)
    layout.set_name(target, digest, documents.media_type, len(documents.manifest))
    return names.Manifest(documents.media_type, digest, documents.manifest)


def copy_to_layout(
    source: build_layout.ImageLayout,
    image: names.Manifest,
    target: build_layout.ImageLayout,
    name: str,
) -> None:
    """Copy an image with all blobs, verify their digests, and name it."""
    target.create()
    manifest = build_layout.read_manifest(image)
    digests = [
        blob.get_text("digest")
        for blob in (manifest.get_object("config"), *manifest.iter_objects("layers"))
    ]
    for digest in dict.fromkeys(digests):
        path = source.find_blob(digest)
        if path is None:
            raise FileError(f"cannot copy {image.digest}: {source.path} has no blob {digest}")
        if target.find_blob(digest) is None:
            with path.open("rb") as file, target.open_blob(digest) as copy:
                shutil.copyfileobj(file, copy)
                copy.flush()
                os.fsync(copy.fileno())
    target.write_blob(image.content)
    target.set_name(name, image.digest, image.media_type, len(image.content))
