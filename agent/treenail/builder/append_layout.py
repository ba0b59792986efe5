"""The config layer on top of an image in a layout, and copies of images between layouts."""

import os
import shutil
from collections.abc import Mapping

from treenail.builder.assemble import read_manifest
from treenail.builder.layout import ImageLayout, LayoutImage
from treenail.errors import FileError
from treenail.image.config_layer import ConfigLayer
from treenail.image.oci.documents import append_layer


def append_config_layer(
    layout: ImageLayout, source: str, target: str, layer: ConfigLayer, labels: Mapping[str, str]
) -> LayoutImage:
    """Name the image ``source`` with the config layer ``target``; raise `ConfigError`.

    Equal to `treenail.builder.append_config.append_config` in a registry: equal inputs give an
    equal digest.
    """
    image = layout.read_named(source)
    if image is None:
        raise FileError(f"cannot add the config: {layout.path} has no image {source}")
    config = layout.read_blob(read_manifest(image).get_object("config").get_text("digest"))
    documents = append_layer(image.media_type, image.content, config, layer, labels)
    layout.write_blob(layer.tar_gz)
    layout.write_blob(documents.config)
    digest = layout.write_blob(documents.manifest)
    layout.set_name(target, digest, documents.media_type, len(documents.manifest))
    return LayoutImage(digest, documents.media_type, documents.manifest)


def copy_to_layout(source: ImageLayout, image: LayoutImage, target: ImageLayout, name: str) -> None:
    """Copy an image with all blobs, verify their digests, and name it."""
    target.create()
    manifest = read_manifest(image)
    digests = [
        each.get_text("digest")
        for each in (manifest.get_object("config"), *manifest.iter_objects("layers"))
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
