"""Phase ``fetch``: write the images of the Containerfile into a layout.

The registry client of treenail pulls, not buildah: it tells the causes of failures apart, resumes
broken transfers and respects Retry-After. Only this phase has the pull Secret, so that neither the
user's text nor buildah can read it.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import Event
from typing import BinaryIO

from treenail import clocks, errors
from treenail.api import decode
from treenail.builder import build_layout, build_spec, registries
from treenail.image import build_result
from treenail.registry import names
from treenail.registry.client import RegistryClient
from treenail.registry.images import ResolvedImage, resolve_image

log = logging.getLogger(__name__)

CACHE_LIMIT = 64
"""Maximum number of images of single instructions in the cache."""


def fetch_images(
    directories: build_spec.BuildDirectories,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> build_result.BuildResult:
    """Fetch the images and the cache into the layout; raise `TreenailError` for an image."""
    begin = clock.monotonic()
    spec = directories.read_spec()
    references = build_spec.find_images(directories.read_containerfile())
    layout = build_layout.ImageLayout(directories.layout)
    layout.create()
    images = [
        fetch_image(layout, reference, f"image-{number}", spec, settings, clock)
        for number, reference in enumerate(references)
    ]
    seconds = {"pull": clock.monotonic() - begin}
    if spec.cache_repository:
        images += _fetch_cache(layout, references, spec, settings, clock)
        seconds["cache"] = clock.monotonic() - begin - seconds["pull"]
    directories.write_fetched(build_spec.FetchOutput(tuple(images)))
    return build_result.BuildResult(build_result.BuildPhase.FETCH, seconds=seconds)


def fetch_image(
    layout: build_layout.ImageLayout,
    reference: str,
    name: str,
    spec: build_spec.BuildSpec,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> build_spec.FetchedImage:
    """Write one image of the architecture into the layout; blobs that it has are not pulled."""
    image = registries.parse_image_name(reference)

    def resolve(place: registries.ImageName) -> tuple[registries.ImageName, ResolvedImage]:
        with settings.open_client(place.registry, place.repository, clock) as client:
            return place, resolve_image(
                client, place.repository, place.reference, spec.architecture
            )

    place, resolved = registries.pull_from_places(image, spec.mirrors, resolve)

    def open_client() -> AbstractContextManager[RegistryClient]:
        return settings.open_client(place.registry, place.repository, clock)

    origin = "" if place == image else f" from {place.full_repository}"
    log.info("fetching %s, manifest %s%s", reference, resolved.digest, origin)
    _write_image(layout, open_client, resolved, name)
    return build_spec.FetchedImage(reference, name, image.full_repository, resolved.digest)


def compute_cache_tag(references: Iterable[str], architecture: str) -> str:
    """Return the tag of the cache for builds on these images: a change of the text keeps it."""
    text = "\n".join([architecture, *sorted(references)])
    return f"treenail-cache-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _fetch_cache(
    layout: build_layout.ImageLayout,
    references: Iterable[str],
    spec: build_spec.BuildSpec,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> list[build_spec.FetchedImage]:
    """Fetch the layers of earlier builds; a build without them is slower, and no failure."""
    caches: list[build_spec.FetchedImage] = []
    try:
        tag = compute_cache_tag(references, spec.architecture)
        cache = registries.parse_image_name(f"{spec.cache_repository}:{tag}")

        def open_client() -> AbstractContextManager[RegistryClient]:
            return settings.open_client(cache.registry, cache.repository, clock)

        with open_client() as client:
            if client.head_manifest(cache.repository, tag) is None:
                return caches
            index = client.get_manifest(cache.repository, tag)
            where = client.format_image(cache.repository, tag)
            for number, entry in enumerate(_read_index(index.content, where)[:CACHE_LIMIT]):
                image = resolve_image(client, cache.repository, entry.digest, spec.architecture)
                name = f"{build_spec.CACHE_PREFIX}{number}"
                _write_image(layout, open_client, image, name)
                caches.append(
                    build_spec.FetchedImage("", name, cache.full_repository, image.digest)
                )
    except errors.TreenailError as error:
        log.warning("building with an incomplete cache: %s", error)
    return caches


def _write_image(
    layout: build_layout.ImageLayout,
    open_client: registries.OpenClient,
    image: ResolvedImage,
    name: str,
) -> None:
    layout.write_blob(image.config)
    layers = {layer.digest: layer for layer in image.layers}.values()
    # A blob gets its name only when it is complete (`ImageLayout.open_blob`), so a file that exists
    # needs no second look.
    absent = [layer for layer in layers if layout.find_blob(layer.digest) is None]
    if absent:
        _write_layers(layout, open_client, image.repository, absent)
    manifest = image.manifest
    layout.write_blob(manifest.content)
    layout.set_name(name, manifest.digest, manifest.media_type, len(manifest.content))


def _write_layers(
    layout: build_layout.ImageLayout,
    open_client: registries.OpenClient,
    repository: str,
    layers: list[names.Descriptor],
) -> None:
    def write_layer(client: RegistryClient, layer: names.Descriptor, has_failed: Event) -> None:
        with layout.open_blob(layer.digest) as file:
            client.read_blob(repository, layer, _make_sink(file, has_failed))

    registries.transfer_blobs(layers, open_client, write_layer)


def _make_sink(file: BinaryIO, has_failed: Event) -> Callable[[bytes], object]:
    def write_piece(piece: bytes) -> None:
        if has_failed.is_set():
            raise errors.HostError("cannot pull a layer: the phase was ended")
        file.write(piece)

    return write_piece


def _read_index(content: bytes, where: str) -> list[names.Descriptor]:
    entries = decode.Fields.from_json(decode.load_json(content, where=where), where).get_list(
        "manifests"
    )
    return [names.parse_descriptor(entry, where=where) for entry in entries]
