"""Phases ``fetch`` and ``push``: images of the Containerfile into a layout, and the built one out.

The registry client of treenail pulls and pushes, not buildah: it tells the causes of failures
apart, resumes broken transfers and respects Retry-After. Only `fetch_images` has the pull Secret,
and only `push_image` the push Secret, so that neither the user's text nor buildah can read them.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from threading import Event
from typing import BinaryIO

from treenail import __version__, clocks, errors, oci_content
from treenail.api import decode, pullspec
from treenail.builder import build_layout, build_spec, registries
from treenail.builder.images.attachments import attach_packages
from treenail.builder.images.packages import read_package_file
from treenail.image import build_result
from treenail.image.oci.attachments import make_spdx_document
from treenail.registry import names, uploads
from treenail.registry.client import RegistryClient
from treenail.registry.errors import (
    Denied,
    DigestMismatch,
    LoginRefused,
    NotFound,
    Unsupported,
)
from treenail.registry.images import ResolvedImage, resolve_image, transfer_blobs

log = logging.getLogger(__name__)

CACHE_LIMIT = 64
"""Maximum number of images of single instructions in the cache."""
_CONNECTIONS = 3
_OpenClient = Callable[[], AbstractContextManager[RegistryClient]]


def fetch_images(
    directories: build_spec.BuildDirectories,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> build_result.BuildResult:
    """Fetch the images and the cache into the layout; raise `TreenailError` for an image."""
    begin = clock.monotonic()
    inputs = directories.read_inputs()
    spec = inputs.spec
    references = build_spec.find_images(inputs.containerfile, spec.architecture)
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
    open_client: _OpenClient,
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
    open_client: _OpenClient,
    repository: str,
    layers: list[names.Descriptor],
) -> None:
    def write_layer(client: RegistryClient, layer: names.Descriptor, has_failed: Event) -> None:
        with layout.open_blob(layer.digest) as file:
            client.read_blob(repository, layer, _make_sink(file, has_failed))

    transfer_blobs(layers, open_client, write_layer, connections=_CONNECTIONS)


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


def push_image(
    directories: build_spec.BuildDirectories,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> build_result.BuildResult:
    """Push the image of `build` under the tag; return its digest.

    Raises `RegistryError`; `HostError` when `build` left no image.
    """
    begin = clock.monotonic()
    inputs, fetched = directories.read_inputs(), directories.read_fetched()
    spec = inputs.spec
    layout = build_layout.ImageLayout(directories.layout)
    built = layout.read_named(build_spec.BUILT_IMAGE)
    if built is None:
        raise errors.HostError("cannot push: the work directory holds no built image")
    target = pullspec.parse_push_spec(spec.push_spec, where="the push spec")
    host = spec.push_registry or target.registry
    with settings.open_client(host, target.repository, clock) as client:
        upload_image(client, target.repository, layout, built, fetched)
        client.put_manifest(target.repository, target.tag, built.media_type, built.content)
        verify_push(client, target, built.digest)
        warning = _attach_packages(client, target, built.digest, directories, clock)
    log.info("pushed %s as %s", built.digest, target)
    seconds = {"push": clock.monotonic() - begin}
    if spec.cache_repository and _has_new_cache(layout, fetched):
        references = build_spec.find_images(inputs.containerfile, spec.architecture)
        _push_cache(layout, references, spec, fetched, settings, clock)
        seconds["cache"] = clock.monotonic() - begin - seconds["push"]
    return build_result.BuildResult(
        build_result.BuildPhase.PUSH, digest=built.digest, message=warning, seconds=seconds
    )


def _attach_packages(
    client: RegistryClient,
    target: pullspec.PushSpec,
    digest: str,
    directories: build_spec.BuildDirectories,
    clock: clocks.Clock,
) -> str:
    """Attach the packages that `build` found; return why that failed. The image is complete."""
    try:
        packages = read_package_file(directories.work)
        if packages is not None:
            document = make_spdx_document(
                packages,
                image=f"{target.registry}/{target.repository}",
                digest=digest,
                version=__version__,
                created=clocks.format_rfc3339(clock.now()),
            )
            attach_packages(client, target.repository, digest, document)
    except errors.TreenailError as error:
        warning = f"cannot attach the packages of the image: {error}"
        log.warning("%s", warning)
        return warning
    return ""


def upload_image(
    client: RegistryClient,
    repository: str,
    layout: build_layout.ImageLayout,
    image: names.Manifest,
    fetched: build_spec.FetchOutput,
) -> None:
    """Upload the blobs of an image; layers of the same registry are mounted."""
    manifest = build_layout.read_manifest(image)
    # A mount costs one request, an upload the whole layer: a base has most of the bytes.
    sources = _find_sources(layout, fetched, client.host)

    def upload(own: RegistryClient, blob: names.Descriptor, _has_failed: Event) -> None:
        source = sources.get(blob.digest)
        if source is not None and source != repository and _mount(own, repository, blob, source):
            return
        path = layout.find_blob(blob.digest)
        if path is None:
            raise errors.HostError(
                f"cannot push {image.digest}: the layout has no blob {blob.digest}"
            )
        uploads.upload_blob(own, repository, blob, partial(_open_file, path))

    transfer_blobs(
        _list_blobs(manifest, image.digest),
        lambda: closing(client.clone()),
        upload,
        connections=_CONNECTIONS,
    )


def verify_push(client: RegistryClient, target: pullspec.PushSpec, digest: str) -> None:
    """Verify that the registry has this manifest under the tag; raise `RegistryError`."""
    pushed = client.head_manifest(target.repository, target.tag)
    if pushed is None or pushed.digest != digest:
        actual = pushed.digest if pushed else "nothing"
        raise DigestMismatch(f"cannot push {target}: expected {digest}, found {actual}")


def _has_new_cache(layout: build_layout.ImageLayout, fetched: build_spec.FetchOutput) -> bool:
    """Whether the build made images of instructions that the cache did not have."""
    known = {image.name for image in fetched.images}
    return any(
        name.startswith(build_spec.CACHE_PREFIX) and name not in known
        for name in layout.list_names()
    )


def _push_cache(
    layout: build_layout.ImageLayout,
    references: Iterable[str],
    spec: build_spec.BuildSpec,
    fetched: build_spec.FetchOutput,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> None:
    """Push the images of single instructions; a failure makes the next build slower only."""
    try:
        tag = compute_cache_tag(references, spec.architecture)
        cache = registries.parse_image_name(f"{spec.cache_repository}:{tag}")
        entries: dict[str, names.Descriptor] = {}
        with settings.open_client(cache.registry, cache.repository, clock) as client:
            for name in layout.list_names():
                image = (
                    layout.read_named(name) if name.startswith(build_spec.CACHE_PREFIX) else None
                )
                if image is None or image.digest in entries or len(entries) == CACHE_LIMIT:
                    continue
                upload_image(client, cache.repository, layout, image, fetched)
                client.put_manifest(cache.repository, image.digest, image.media_type, image.content)
                entries[image.digest] = names.Descriptor(
                    image.media_type, image.digest, len(image.content)
                )
            content = _make_index(entries.values())
            client.put_manifest(cache.repository, tag, oci_content.OCI_INDEX, content)
    except errors.TreenailError as error:
        log.warning("cannot write the build cache: %s", error)


def _find_sources(
    layout: build_layout.ImageLayout, fetched: build_spec.FetchOutput, host: str
) -> dict[str, str]:
    """Map the layers of images from this registry to their repositories there."""
    sources: dict[str, str] = {}
    for fetched_image in fetched.images:
        registry, _, repository = fetched_image.repository.partition("/")
        image = layout.read_named(fetched_image.name) if registry == host else None
        if image is not None:
            for blob in _list_blobs(build_layout.read_manifest(image), image.digest):
                sources.setdefault(blob.digest, repository)
    return sources


def _list_blobs(manifest: decode.Fields, where: str) -> list[names.Descriptor]:
    """List the config and the layers of a manifest, each once."""
    documents = [manifest.values.get("config"), *manifest.get_list("layers")]
    blobs = [names.parse_descriptor(document, where=where) for document in documents]
    return list({blob.digest: blob for blob in blobs}.values())


def _mount(client: RegistryClient, repository: str, blob: names.Descriptor, source: str) -> bool:
    """Mount a blob unless it is there; False where the registry or the login cannot."""
    if client.has_blob(repository, blob.digest):
        return True
    try:
        return uploads.mount_blob(client, repository, blob.digest, source)
    except (Denied, LoginRefused, NotFound, Unsupported):
        # The login for pushes may not read the source.
        return False


def _open_file(path: Path) -> BinaryIO:
    return path.open("rb")


def _make_index(entries: Iterable[names.Descriptor]) -> bytes:
    manifests: list[decode.Json] = [
        {"mediaType": entry.media_type, "digest": entry.digest, "size": entry.size}
        for entry in entries
    ]
    document = {"schemaVersion": 2, "mediaType": oci_content.OCI_INDEX, "manifests": manifests}
    return json.dumps(document, separators=(",", ":")).encode()
