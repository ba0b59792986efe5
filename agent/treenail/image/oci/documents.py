"""Manifests, configs, lists of manifests and labels of images, of OCI and of Docker (schema 2).

Pure. The labels are those of the Machine Config Operator, and treenail's own.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treenail import errors, oci_content
from treenail.api.decode import Json
from treenail.image.config_layer import ConfigLayer

MACHINE_CONFIG = "machineconfig"
POOL = "machineconfigpool"
BASE_IMAGE = "baseOSContainerImage"
RELEASE = "releaseversion"
CONTENT_KEY = "io.treenail.content-key"
BUILD = "io.treenail.machine-os-build"
IMAGE_CONFIG = "io.treenail.machine-os-config"
SYSTEM_LAYER = "io.treenail.system-layer"
"""The diff ID of the last layer of a system part: images on it inherit the label, not the layer."""
CONFIG_LAYER = "io.treenail.config-layer"
"""The diff ID of the config layer: a later config replaces this layer."""


@dataclass(frozen=True, slots=True)
class ImageLabels:
    """The values of the labels; empty ones are left out."""

    machine_config: str
    pool: str
    base_image: str
    release: str = ""
    content_key: str = ""
    image_config: str = ""
    build: str = ""

    def to_map(self) -> dict[str, str]:
        """Return the labels by name."""
        labels = {
            MACHINE_CONFIG: self.machine_config,
            POOL: self.pool,
            BASE_IMAGE: self.base_image,
            RELEASE: self.release,
            CONTENT_KEY: self.content_key,
            IMAGE_CONFIG: self.image_config,
            BUILD: self.build,
        }
        return {name: text for name, text in labels.items() if text}


_LAYER_TYPES = {
    oci_content.OCI_MANIFEST: "application/vnd.oci.image.layer.v1.tar+gzip",
    oci_content.DOCKER_MANIFEST: "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
_LIST_TYPES = {
    oci_content.OCI_MANIFEST: oci_content.OCI_INDEX,
    oci_content.DOCKER_MANIFEST: oci_content.DOCKER_LIST,
}
_CREATED_BY = "treenail: files and units of the config"


@dataclass(frozen=True, slots=True)
class ImageDocuments:
    """The manifest of an image, its config, and their digests."""

    media_type: str
    manifest: bytes = field(repr=False)
    config: bytes = field(repr=False)
    layer_type: str

    @property
    def digest(self) -> str:
        """The digest of the manifest."""
        return oci_content.compute_digest(self.manifest)

    @property
    def config_digest(self) -> str:
        """The digest of the config."""
        return oci_content.compute_digest(self.config)


@dataclass(frozen=True, slots=True)
class ImageInstance:
    """One image of a list of manifests."""

    media_type: str
    digest: str
    size: int
    architecture: str
    variant: str = ""


def append_layer(
    media_type: str, manifest: bytes, config: bytes, layer: ConfigLayer, labels: Mapping[str, str]
) -> ImageDocuments:
    """Return the image with the layer on top and the labels; raises `ConfigError`.

    A config layer that the image already ends with is replaced. Equal input gives equal bytes.
    """
    document, described = _load(manifest, "manifest"), _load(config, "config")
    if media_type not in _LAYER_TYPES:
        raise errors.ConfigError(
            f"cannot append a layer to an image of the media type {media_type!r:.100}",
            remedy=f"use a base with a manifest of the type {' or '.join(_LAYER_TYPES)}",
        )
    layers, diff_ids = _find_layers(document, described)
    runtime = described.get("config")
    runtime = dict(runtime) if isinstance(runtime, dict) else {}
    recorded = runtime.get("Labels")
    base_labels = recorded if isinstance(recorded, dict) else {}
    history = described.get("history")
    steps = list(history) if isinstance(history, list) else []
    if diff_ids and base_labels.get(CONFIG_LAYER) == diff_ids[-1]:
        layers, diff_ids = layers[:-1], diff_ids[:-1]
        if steps and isinstance(steps[-1], dict) and steps[-1].get("created_by") == _CREATED_BY:
            steps.pop()
    runtime["Labels"] = dict(sorted({**base_labels, **labels, CONFIG_LAYER: layer.diff_id}.items()))
    # A time of today would give equal inputs another digest.
    created = described.get("created")
    step: Json = {"created_by": _CREATED_BY}
    steps.append({"created": created, **step} if isinstance(created, str) else step)
    new_config = encode(
        {
            **described,
            "config": runtime,
            "rootfs": {"type": "layers", "diff_ids": [*diff_ids, layer.diff_id]},
            "history": steps,
        }
    )
    layer_type = _LAYER_TYPES[media_type]
    config_entry = document.get("config")
    if not isinstance(config_entry, dict):
        raise errors.ConfigError("cannot append a layer: the manifest names no config")
    new_manifest = encode(
        {
            **document,
            "mediaType": media_type,
            "config": {
                "mediaType": config_entry.get("mediaType"),
                "digest": oci_content.compute_digest(new_config),
                "size": len(new_config),
            },
            "layers": [
                *layers,
                {"mediaType": layer_type, "digest": layer.digest, "size": layer.size},
            ],
        }
    )
    return ImageDocuments(media_type, new_manifest, new_config, layer_type)


def make_index(instances: Iterable[ImageInstance]) -> tuple[str, bytes]:
    """Return the media type and the content of a list of manifests, ordered by architecture."""
    ordered = sorted(instances, key=lambda instance: (instance.architecture, instance.variant))
    architectures = [(instance.architecture, instance.variant) for instance in ordered]
    if not ordered or len(set(architectures)) != len(architectures):
        raise errors.ConfigError(
            "cannot make a list of manifests: expected one image per architecture"
        )
    kinds = {instance.media_type for instance in ordered}
    media_type = (
        _LIST_TYPES[oci_content.DOCKER_MANIFEST]
        if kinds == {oci_content.DOCKER_MANIFEST}
        else oci_content.OCI_INDEX
    )
    manifests = []
    for instance in ordered:
        platform = {"architecture": instance.architecture, "os": "linux"}
        if instance.variant:
            platform["variant"] = instance.variant
        manifests.append(
            {
                "mediaType": instance.media_type,
                "digest": instance.digest,
                "size": instance.size,
                "platform": platform,
            }
        )
    return media_type, encode({"schemaVersion": 2, "mediaType": media_type, "manifests": manifests})


def read_labels(config: bytes) -> dict[str, str]:
    """Return the labels of an image's config; empty for an invalid one."""
    try:
        document = json.loads(config)
    except (ValueError, RecursionError):
        return {}
    runtime = document.get("config") if isinstance(document, dict) else None
    labels = runtime.get("Labels") if isinstance(runtime, dict) else None
    if not isinstance(labels, dict):
        return {}
    return {name: text for name, text in labels.items() if isinstance(text, str)}


def read_origin(config: bytes) -> tuple[str, str]:
    """Return the MachineOSConfig that built an image, and the tag that its build gave it.

    Both are empty for other images, also for one that a user built on such an image.
    """
    labels = read_labels(config)
    rootfs = json.loads(config).get("rootfs") if labels else None
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    last = diff_ids[-1] if isinstance(diff_ids, list) and diff_ids else object()
    owner = labels.get(IMAGE_CONFIG, "")
    if labels.get(CONFIG_LAYER) == last:
        return owner, labels.get(BUILD, "")
    if labels.get(SYSTEM_LAYER) == last:
        return owner, make_system_tag(labels.get(CONTENT_KEY, ""))
    return "", ""


def make_system_tag(content_key: str) -> str:
    """Return the tag of the system part of builds with this key."""
    return f"system-{content_key}"


def encode(document: Mapping[str, object]) -> bytes:
    """Encode a document; equal documents give equal bytes.

    Raises `ConfigError` for a document that is nested too deeply.
    """
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    except RecursionError as error:
        raise errors.ConfigError(
            "cannot write the manifest or the config of an image: it is nested too deeply",
            remedy="use a base image whose documents are nested less",
        ) from error


def _load(content: bytes, what: str) -> Json:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise errors.ConfigError(f"cannot append a layer: the {what} of the base is no JSON object")
    return document


def _find_layers(document: Json, described: Json) -> tuple[list[object], list[object]]:
    layers, rootfs = document.get("layers"), described.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(layers, list) or not isinstance(diff_ids, list):
        raise errors.ConfigError("cannot append a layer: the base has no list of layers")
    if len(layers) != len(diff_ids):
        raise errors.ConfigError(
            f"cannot append a layer: the base has {len(layers)} layers and {len(diff_ids)} diff IDs"
        )
    return layers, diff_ids
