"""Pinned images of a node: which sets cannot be completed, and which images to pin."""

from collections.abc import Iterable, Mapping, Set

from treenail import observations, sanitize
from treenail.api import pullspec
from treenail.api.machineconfigpool import PinnedImageSet
from treenail.errors import ConfigError
from treenail.memory import format_bytes

Inspection = observations.ImageInspection | observations.InspectionProblem | None
"""None for an image whose size is unknown."""

_UNPACKED_FACTOR = 2
"""Space of an image as a multiple of its compressed layers; the MCO assumes the same."""


def find_invalid(pinned: PinnedImageSet) -> str:
    """Return the problem of a set with a name that no runtime lists; empty without one.

    The CRDs accept more names than runtimes do.
    """
    for index, image in enumerate(pinned.images):
        field = f"spec.pinnedImages[{index}].name"
        try:
            spec = pullspec.parse_pull_spec(image, where=field)
        except ConfigError as error:
            return f"{error}; {error.remedy}"
        if spec.registry == "docker.io" and "/" not in spec.repository:
            full = f"docker.io/library/{spec.repository}@…"
            return f"{field}: expected {full}, found {image}; correct the name"
    return ""


def find_obstacle(
    pinned: PinnedImageSet, missing: Mapping[str, Inspection], usable_bytes: int
) -> str:
    """Return why none of the missing images of a set is pulled; empty if all can be.

    An image of unknown size counts nothing: only the check before its pull limits it.
    """
    layers: dict[str, int] = {}
    for image, found in missing.items():
        if isinstance(found, observations.InspectionProblem):
            return _describe_failure(pinned, image, f"{found.kind}: {found.text}")
        layers |= {layer.digest: layer.size_bytes for layer in found.layers} if found else {}
    if (needed := sum(layers.values()) * _UNPACKED_FACTOR) <= usable_bytes:
        return ""
    return (
        f"spec.pinnedImages: expected at most {format_bytes(max(usable_bytes, 0))} to pull, found "
        f"{format_bytes(needed)}; remove images, or enlarge the disk"
    )


def choose_pins(
    sets: Iterable[tuple[PinnedImageSet, str]],
    present: Set[str],
    before: Set[str],
    failures: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """Return the images to pin, and the problem of each incomplete set by its name.

    ``sets`` come with their obstacles. ``failures`` are the errors of pulls by image. An incomplete
    set keeps its pins.
    """
    pins, problems = set[str](), dict[str, str]()
    for pinned, problem in sets:
        lacking = next((image for image in pinned.images if image not in present), "")
        cause = failures.get(lacking) or "it was removed after its pull"
        if found := problem or (lacking and _describe_failure(pinned, lacking, cause)):
            problems[pinned.metadata.name] = found
        pins |= {*pinned.images} & before if found else {*pinned.images}
    return sorted(pins & present), problems


def _describe_failure(pinned: PinnedImageSet, image: str, cause: str) -> str:
    field = f"spec.pinnedImages[{pinned.images.index(image)}].name"
    shown = sanitize.sanitize_text(cause, limit=500)
    return (
        f"{field}: expected an image that can be pulled, found {image}: {shown}; correct or push it"
    )
