"""Image that an installation built, as the MachineOSBuild that the cluster adopts.

It is exported as an OCI directory, ``oci:DIR:NAME`` of skopeo. The blobs come from the registry's
storage directory, so that no registry needs to run. Its layout is that of the file system driver of
docker-registry 2 and 3.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from treenail import clocks, errors, memory, oci_content
from treenail.api import annotations as key
from treenail.api import decode, machineosbuild, machineosconfig
from treenail.builder.build_layout import ImageLayout
from treenail.controllers.image_build import build_facts, build_objects
from treenail.controllers.pools import image_tags
from treenail.image import build_result
from treenail.registry import names, referrers

_MESSAGE = "The image was built on the bootstrap host"


@dataclass(frozen=True, slots=True)
class BuiltPoolImage:
    """A pushed image, by the names that it has in the cluster."""

    pool: str
    digest: str
    """Of the manifest that nodes pull."""
    push_spec: str
    """Final ``REGISTRY/REPOSITORY:TAG``, also while only the bootstrap registry has it."""
    key: str
    """Content key."""
    build_name: str
    """Name of the MachineOSBuild."""
    architectures: tuple[str, ...]
    system_images: tuple[str, ...] = ()
    """Pull specs of the system parts, which later builds use again; without the base image."""

    @property
    def repository(self) -> str:
        """``REGISTRY/REPOSITORY``, final."""
        return self.push_spec.rpartition(":")[0]

    @property
    def pull_spec(self) -> str:
        """Final name by digest."""
        return f"{self.repository}@{self.digest}"


@dataclass(frozen=True, slots=True)
class BuildTimes:
    """Begin and end in seconds since the epoch."""

    began: float
    ended: float


def make_built_object(
    wanted: build_facts.WantedBuild,
    config: machineosconfig.MachineOSConfig,
    systems: dict[str, build_facts.SystemFacts],
    image: str,
    report: build_facts.BuildReport,
    times: BuildTimes,
    base: image_tags.TagRecord | None = None,
) -> decode.Json:
    """Return the MachineOSBuild with its status, as the build controller leaves it. Pure.

    ``image`` is the final pull spec. ``base`` says how the tag of the base image was resolved; the
    cluster records it in the MachineOSConfig, and does not resolve the tag again. The object has
    no owner: the UID of the MachineOSConfig is known in the cluster only.
    """
    document = build_objects.make_build_object(wanted, config)
    metadata = document["metadata"]
    if not isinstance(metadata, dict) or not isinstance(metadata["annotations"], dict):
        raise TypeError("a MachineOSBuild has no annotations")
    metadata["annotations"] |= {
        **build_objects.encode_systems(systems),
        key.BUILD_REPORT: build_objects.encode_report(report),
        **({key.RESOLVED_BASE: image_tags.encode_base_record(base)} if base is not None else {}),
    }
    began = clocks.format_rfc3339(times.began)
    conditions = build_result.compute_build_conditions(
        machineosbuild.BuildState.SUCCEEDED, build_result.BUILT_AT_INSTALL, _MESSAGE
    )
    # The CRD of the Machine Config Operator requires an end after the start.
    ended = clocks.format_rfc3339(max(times.ended, times.began + 1.0))
    return {
        **document,
        "status": {
            "conditions": [
                replace(condition, last_transition_time=ended).to_json() for condition in conditions
            ],
            "buildStart": began,
            "buildEnd": ended,
            "digestedImagePushSpec": image,
        },
    }


def encode_built_object(document: decode.Json) -> bytes:
    """Encode the object as a file of `InstallDirectory.cluster_objects`."""
    return json.dumps(document, indent=1).encode() + b"\n"


def decode_built_image(content: bytes, *, where: str) -> BuiltPoolImage:
    """Return the image of a file of `InstallDirectory.cluster_objects`; raise `ConfigError`."""
    build = machineosbuild.MachineOSBuild.from_json(decode.load_json(content, where=where))
    repository, _, digest = build.pull_spec.partition("@")
    if build.state is not machineosbuild.BuildState.SUCCEEDED or not digest:
        raise errors.ConfigError(f"{where}: expected a build that succeeded")
    if repository != build.push_spec.rpartition(":")[0]:
        raise errors.ConfigError(f"{where}: its image is not in the repository of its push spec")
    return BuiltPoolImage(
        pool=build.metadata.labels.get(key.TARGET_POOL, ""),
        digest=digest,
        push_spec=build.push_spec,
        key=build.content_key,
        build_name=build.name,
        architectures=build_objects.read_architectures(build),
        system_images=tuple(
            system.image for system in build_objects.read_systems(build).values() if system.image
        ),
    )


_ROOT = "docker/registry/v2"
_MANIFEST_LIMIT = 4 * memory.MIB
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
    for digest in (image.digest, *_list_instances(blobs, image.digest)):
        tag = referrers.make_referrers_tag(digest)
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
        value = names.check_digest(digest).partition(":")[2]
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
            return names.check_digest(path.read_text().strip())
        except OSError:
            return ""


def _copy_manifest(blobs: StoredBlobs, layout: ImageLayout, digest: str) -> tuple[str, int]:
    """Copy a manifest and all that it names; return its media type and size."""
    content = blobs.read_manifest(digest)
    fields = _parse_manifest(content, digest)
    media_type = fields.get_text("mediaType") or oci_content.OCI_MANIFEST
    for entry in fields.iter_objects("manifests"):
        _copy_manifest(blobs, layout, entry.get_text("digest"))
    if media_type not in oci_content.INDEX_TYPES:
        for entry in (fields.get_object("config"), *fields.iter_objects("layers")):
            _copy_blob(blobs, layout, entry)
    if layout.write_blob(content) != digest:
        raise errors.FileError(f"cannot export {digest}: the registry's storage has other content")
    return media_type, len(content)


def _copy_blob(blobs: StoredBlobs, layout: ImageLayout, entry: decode.Fields) -> None:
    digest = entry.get_text("digest")
    source, size = blobs.get_path(digest), entry.get_optional_integer("size")
    try:
        if source.stat().st_size != size:
            raise errors.FileError(
                f"cannot export {digest}: the registry's storage has a part of it"
            )
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
    fields = _parse_manifest(blobs.read_manifest(digest), digest)
    for entry in fields.iter_objects("manifests"):
        yield entry.get_text("digest")


def _parse_manifest(content: bytes, digest: str) -> decode.Fields:
    fields = decode.Fields.from_json(decode.load_json(content, where=digest), digest)
    for name in ("manifests", "layers"):
        if len(fields.get_list(name)) > _ENTRIES_LIMIT:
            raise errors.FileError(f"cannot export {digest}: more than {_ENTRIES_LIMIT} {name}")
    return fields


def _make_error(digest: str, error: OSError) -> errors.FileError:
    return errors.FileError(
        f"cannot export {digest}: {error.filename}: {error.strerror}",
        remedy="build the image: treenail-controller install bootstrap --dir DIR",
    )
