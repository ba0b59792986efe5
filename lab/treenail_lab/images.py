"""The lab's registry: the OS images, their sizes and the credentials that a pull needs.

The catalogue is one JSON file in the lab's directory. Every machine reads it at each pull,
so an image can be added while machines run.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

REGISTRY = "registry.lab.example"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
"""The architecture of this host by its OCI name: that of every lab machine."""
_VERSION_LABEL = "org.opencontainers.image.version"


@dataclass(frozen=True, slots=True)
class Credential:
    """The user name and password that a registry requires."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class CatalogueLayer:
    """One blob of an image: a chunk of the OSTree commit, or a layer of a derived image."""

    digest: str
    size_bytes: int
    is_chunk: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """An OS image in a registry.

    ``faults`` maps a phase (``inspect``, ``pull``, ``stage``, ``sanity``, ``finalize``, ``boot``)
    to the error with which it fails for this image. ``labels`` are added to the default ones; an
    empty value removes a label. ``packages`` are in the extensions directory of the image.
    """

    registry: str
    repository: str
    digest: str
    version: str
    layers: tuple[CatalogueLayer, ...]
    architecture: str = "amd64"
    timestamp: int = 1_767_225_600
    labels: Mapping[str, str] = field(default_factory=dict)
    kernel_arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    credential: Credential | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    kernel: str = "6.12.0-1.lab"
    """Version of kernel and initramfs; a soft reboot needs the same one."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of each file by its path, beside the files that every image has."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Target of each symbolic link by its path."""
    list_digest: str = ""
    """Digest of the manifest list that has the image; empty if no list has it."""
    manifest: str = ""
    """Text of the manifest of an image in a real registry; else it is rendered."""
    configuration: str = ""
    content: str = ""
    """Name of the directory with the unpacked files of an image of a real registry."""

    @property
    def pull_spec(self) -> str:
        """Return ``REGISTRY/REPOSITORY@sha256:…``."""
        return f"{self.registry}/{self.repository}@{self.digest}"

    @property
    def list_pull_spec(self) -> str:
        """Return ``REGISTRY/REPOSITORY@sha256:…`` of the manifest list."""
        return f"{self.registry}/{self.repository}@{self.list_digest}"

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)

    @property
    def commit(self) -> str:
        """Return the OSTree checksum of the imported image."""
        return hashlib.sha256(f"commit {self.digest}".encode()).hexdigest()

    def render_manifest(self) -> str:
        """Render the OCI manifest, whose SHA-256 is the digest."""
        if self.manifest:
            return self.manifest
        oci = "application/vnd.oci.image"
        configuration = self.render_configuration()
        return _dump_json(
            {
                "schemaVersion": 2,
                "mediaType": f"{oci}.manifest.v1+json",
                "config": {
                    "mediaType": f"{oci}.config.v1+json",
                    "digest": _compute_digest(configuration),
                    "size": len(configuration),
                },
                "layers": [
                    {
                        "mediaType": f"{oci}.layer.v1.tar+gzip",
                        "digest": layer.digest,
                        "size": layer.size_bytes,
                    }
                    for layer in self.layers
                ],
                "annotations": {_VERSION_LABEL: self.version},
            }
        )

    def render_configuration(self) -> str:
        """Render the OCI image configuration, which contains the labels."""
        if self.configuration:
            return self.configuration
        labels = {_VERSION_LABEL: self.version, "containers.bootc": "1", **self.labels}
        labels = {name: value for name, value in labels.items() if value}
        return _dump_json(
            {
                "architecture": self.architecture,
                "os": "linux",
                "created": self.timestamp,
                "config": {"Labels": labels},
            }
        )


def make_image(  # noqa: PLR0913  # each is a property of an image
    name: str,
    version: str,
    size_bytes: int,
    *,
    registry: str = REGISTRY,
    layers: int = 4,
    architecture: str = "amd64",
    labels: Mapping[str, str] | None = None,
    credential: Credential | None = None,
    faults: Mapping[str, str] | None = None,
) -> Image:
    """Make an image of the repository ``name`` with ``layers`` layers, the last a derived one.

    The same arguments give the same digest, other content gives another one. Fields that are not
    content, such as ``kernel_arguments``, are set with `dataclasses.replace`.
    """
    image = Image(
        registry=registry,
        repository=name,
        digest="",
        version=version,
        layers=_make_layers(f"{registry}/{name} {version}", size_bytes, layers),
        architecture=architecture,
        labels=dict(labels or {}),
        credential=credential,
        faults=dict(faults or {}),
    )
    return replace(image, digest=_compute_digest(image.render_manifest()))


def derive_image(
    image: Image, files: Mapping[str, str], links: Mapping[str, str] | None = None
) -> Image:
    """Return the image with a further layer of files, and of links by their targets."""
    content = _dump_json([files, links])
    layer = CatalogueLayer(_compute_digest(content), len(content), is_chunk=False)
    derived = replace(
        image, files=dict(files), links=dict(links or {}), layers=(*image.layers, layer)
    )
    return replace(derived, digest=_compute_digest(derived.render_manifest()))


def make_manifest_list(*images: Image) -> tuple[Image, ...]:
    """Return the images, which differ in their architecture, in one manifest list."""
    digest = _compute_digest(render_manifest_list(images))
    return tuple(replace(image, list_digest=digest) for image in images)


def render_manifest_list(images: Iterable[Image]) -> str:
    """Render the OCI image index of the images, whose SHA-256 is the digest of the list."""
    oci = "application/vnd.oci.image"
    return _dump_json(
        {
            "schemaVersion": 2,
            "mediaType": f"{oci}.index.v1+json",
            "manifests": [
                {
                    "mediaType": f"{oci}.manifest.v1+json",
                    "digest": image.digest,
                    "size": len(image.render_manifest()),
                    "platform": {"architecture": image.architecture, "os": "linux"},
                }
                for image in images
            ],
        }
    )


@dataclass(frozen=True, slots=True)
class ImageCatalogue:
    """All images of the registry, and the registries that are real ones."""

    images: tuple[Image, ...] = ()
    registries: tuple[str, ...] = ()
    """Hosts, with port, whose images are pulled over HTTPS instead of looked up here."""

    def find_image(self, pull_spec: str) -> Image | None:
        """Return the image with this pull spec; that of this host's platform in a list."""
        named = (image for image in self.images if image.pull_spec == pull_spec)
        listed = (
            image for image in self.find_listed(pull_spec) if image.architecture == ARCHITECTURE
        )
        return next(named, None) or next(listed, None)

    def find_listed(self, pull_spec: str) -> tuple[Image, ...]:
        """Return the images in the manifest list with this pull spec; empty without one."""
        return tuple(
            image
            for image in self.images
            if image.list_digest and image.list_pull_spec == pull_spec
        )

    def find_by_digest(self, digest: str) -> Image | None:
        """Return an image with this digest, in any repository."""
        return next((image for image in self.images if image.digest == digest), None)

    def find_credential(self, pull_spec: str) -> Credential | None:
        """Return the credential that the registry of ``pull_spec`` requires, also for no image."""
        image = self.find_image(pull_spec)
        if image is not None:
            return image.credential
        registry = pull_spec.partition("/")[0]
        credentials = (image.credential for image in self.images if image.registry == registry)
        return next((credential for credential in credentials if credential is not None), None)

    def with_image(self, image: Image) -> "ImageCatalogue":
        """Return a catalogue with ``image``, in place of one with the same pull spec."""
        others = (other for other in self.images if other.pull_spec != image.pull_spec)
        return replace(self, images=(*others, image))

    def is_in_registry(self, pull_spec: str) -> bool:
        """Return whether a real registry has the images of this name."""
        return pull_spec.partition("/")[0] in self.registries


def load_image(path: Path) -> Image | None:
    """Read an image of a real registry from its record; None without one."""
    if not path.exists():
        return None
    return _parse_image(json.loads(path.read_text(encoding="utf-8")))


def save_image(image: Image, path: Path) -> None:
    """Write the record of an image, for the programs of one machine."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(asdict(image)), encoding="utf-8")
    scratch.replace(path)


def find_layer_file(directory: Path, digest: str) -> Path:
    """Return the path of a layer of the image that machines are installed from."""
    return directory / "blobs" / digest.removeprefix("sha256:")


def load_catalogue(path: Path) -> ImageCatalogue:
    """Read the catalogue from ``path``; an empty one when there is no file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ImageCatalogue()
    images = tuple(_parse_image(entry) for entry in document["images"])
    return ImageCatalogue(images, tuple(document["registries"]))


def save_catalogue(catalogue: ImageCatalogue, path: Path) -> None:
    """Write the catalogue to ``path``, readable by its owner only."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(asdict(catalogue), indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _parse_image(entry: dict[str, Any]) -> Image:
    layers = tuple(CatalogueLayer(**layer) for layer in entry.pop("layers"))
    credential = entry.pop("credential")
    arguments = tuple(entry.pop("kernel_arguments"))
    packages = tuple(entry.pop("packages", ()))
    return Image(
        **entry,
        layers=layers,
        kernel_arguments=arguments,
        packages=packages,
        credential=Credential(**credential) if credential else None,
    )


def _make_layers(seed: str, size_bytes: int, count: int) -> tuple[CatalogueLayer, ...]:
    even = size_bytes // count
    sizes = [size_bytes - even * (count - 1), *[even] * (count - 1)]
    return tuple(
        CatalogueLayer(
            _compute_digest(f"{seed} {index} {size}"),
            size,
            is_chunk=index < count - 1 or count == 1,
        )
        for index, size in enumerate(sizes)
    )


def _dump_json(document: object) -> str:
    return json.dumps(document, sort_keys=True)


def _compute_digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
