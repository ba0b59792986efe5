"""Manifests of built images: the layers of fetched images stay as their registry has them.

buildah compresses each layer again when it writes an image to a layout. For a base of 1 GB that
takes longer than most builds, and a registry or a node that has the base would not know its layers.
So the layers of fetched images are left out of the write, and named by their first digest.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from treenail.api.decode import Fields, Json, load_json
from treenail.api.image_labels import BOOTABLE_LABELS
from treenail.builder.layout import OCI_MANIFEST, ImageLayout, LayoutImage

_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
_BASE_ANNOTATIONS = {"org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"}
_LAYER_TYPES = {
    "application/vnd.docker.image.rootfs.diff.tar": _OCI_LAYER,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{_OCI_LAYER}+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": f"{_OCI_LAYER}+zstd",
}


def collect_layers(layout: ImageLayout, names: Iterable[str]) -> dict[str, Json]:
    """Map the digest of each layer's content, uncompressed, to its descriptor in a manifest."""
    found: dict[str, Json] = {}
    for name in names:
        image = layout.read_named(name)
        if image is None:
            continue
        manifest = read_manifest(image)
        layers = [dict(layer.values) for layer in manifest.iter_objects("layers")]
        for diff_id, layer in zip(_read_diff_ids(layout, manifest), layers, strict=False):
            media_type = str(layer.get("mediaType", ""))
            layer["mediaType"] = _LAYER_TYPES.get(media_type, media_type)
            found.setdefault(diff_id, layer)
    return found


@contextmanager
def hide_layers(layout: ImageLayout, layers: Mapping[str, Json]) -> Iterator[None]:
    """Let buildah believe that the layout has these layers, uncompressed, while it writes."""
    created = [diff_id for diff_id in layers if layout.write_placeholder(diff_id)]
    try:
        yield
    finally:
        for diff_id in created:
            layout.remove_blob(diff_id)


def restore_layers(layout: ImageLayout, name: str, layers: Mapping[str, Json]) -> LayoutImage:
    """Replace the descriptors of hidden layers in the manifest ``name`` by the first ones."""
    image = layout.read_named(name)
    if image is None:
        raise KeyError(name)
    document = dict(read_manifest(image).values)
    manifest = Fields(document, name)
    document["layers"] = [
        layers.get(str(layer.values.get("digest")), layer.values)
        for layer in manifest.iter_objects("layers")
    ]
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
    layout.set_name(name, digest, OCI_MANIFEST, len(content))
    return LayoutImage(digest, OCI_MANIFEST, content)


def read_manifest(image: LayoutImage) -> Fields:
    """Decode a manifest."""
    return Fields.from_json(load_json(image.content, where=image.digest), image.digest)


def is_bootable(layout: ImageLayout, name: str) -> bool:
    """Return whether the image ``name`` has a label of a bootable operating system."""
    image = layout.read_named(name)
    if image is None:
        return False
    labels = _read_config(layout, read_manifest(image)).get_object("config").get_object("Labels")
    return any(labels.values.get(label) for label in BOOTABLE_LABELS)


def _read_diff_ids(layout: ImageLayout, manifest: Fields) -> list[str]:
    return list(_read_config(layout, manifest).get_object("rootfs").get_text_list("diff_ids"))


def _read_config(layout: ImageLayout, manifest: Fields) -> Fields:
    digest = manifest.get_object("config").get_text("digest")
    return Fields.from_json(load_json(layout.read_blob(digest), where=digest), digest)
