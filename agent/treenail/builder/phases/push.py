"""Phase ``push``: upload the built image, and verify it. Only this phase has the push Secret."""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import BinaryIO

from treenail import __version__, clocks, oci_content
from treenail.api import decode, pullspec
from treenail.builder import build_layout, build_spec, registries
from treenail.builder.images.packages import read_package_file
from treenail.builder.images.provenance import attach_packages
from treenail.builder.phases import fetch
from treenail.errors import HostError, TreenailError
from treenail.image import build_result
from treenail.image.oci.packages import make_spdx_document
from treenail.registry import names, uploads
from treenail.registry.client import RegistryClient
from treenail.registry.errors import (
    Denied,
    DigestMismatch,
    LoginRefused,
    NotFound,
    Unsupported,
)

log = logging.getLogger(__name__)


def push_image(
    directories: build_spec.BuildDirectories,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> build_result.BuildResult:
    """Push the image of `build` under the tag; return its digest.

    Raises `RegistryError`; `HostError` when `build` left no image.
    """
    begin = clock.monotonic()
    spec, fetched = directories.read_spec(), directories.read_fetched()
    layout = build_layout.ImageLayout(directories.layout)
    built = layout.read_named(build_spec.BUILT_IMAGE)
    if built is None:
        raise HostError("cannot push: the work directory holds no built image")
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
        _push_cache(directories, spec, fetched, settings, clock)
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
    except TreenailError as error:
        warning = f"cannot attach the packages of the image: {error}"
        log.warning("%s", warning)
        return warning
    return ""


def upload_image(
    client: RegistryClient,
    repository: str,
    layout: build_layout.ImageLayout,
    image: build_layout.LayoutImage,
    fetched: build_spec.FetchOutput,
) -> None:
    """Upload the blobs of an image; layers of the same registry are mounted."""

    @contextmanager
    def open_client() -> Iterator[RegistryClient]:
        own = client.clone()
        try:
            yield own
        finally:
            own.close()

    manifest = build_layout.read_manifest(image)
    # A mount costs one request, an upload the whole layer: a base has most of the bytes.
    sources = _find_sources(layout, fetched, client.host)

    def upload(own: RegistryClient, blob: names.Descriptor, _has_failed: Event) -> None:
        source = sources.get(blob.digest)
        if source is not None and source != repository and _mount(own, repository, blob, source):
            return
        path = layout.find_blob(blob.digest)
        if path is None:
            raise HostError(f"cannot push {image.digest}: the layout has no blob {blob.digest}")
        uploads.upload_blob(own, repository, blob, partial(_open_file, path))

    registries.transfer_blobs(_list_blobs(manifest, image.digest), open_client, upload)


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
    directories: build_spec.BuildDirectories,
    spec: build_spec.BuildSpec,
    fetched: build_spec.FetchOutput,
    settings: registries.RegistrySettings,
    clock: clocks.Clock,
) -> None:
    """Push the images of single instructions; a failure makes the next build slower only."""
    layout = build_layout.ImageLayout(directories.layout)
    try:
        tag = fetch.compute_cache_tag(
            build_spec.find_images(directories.read_containerfile()), spec.architecture
        )
        cache = registries.parse_image_name(f"{spec.cache_repository}:{tag}")
        entries: dict[str, names.Descriptor] = {}
        with settings.open_client(cache.registry, cache.repository, clock) as client:
            for name in layout.list_names():
                image = (
                    layout.read_named(name) if name.startswith(build_spec.CACHE_PREFIX) else None
                )
                if image is None or image.digest in entries or len(entries) == fetch.CACHE_LIMIT:
                    continue
                upload_image(client, cache.repository, layout, image, fetched)
                client.put_manifest(cache.repository, image.digest, image.media_type, image.content)
                entries[image.digest] = names.Descriptor(
                    image.media_type, image.digest, len(image.content)
                )
            content = _make_index(entries.values())
            client.put_manifest(cache.repository, tag, oci_content.OCI_INDEX, content)
    except TreenailError as error:
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
