"""Pinned images of a node: which to pull, which to pin, and which sets cannot be completed."""

from collections.abc import Mapping, Sequence, Set

from treenail import observations, sanitize
from treenail.api import pullspec
from treenail.api.machineconfigpool import PinnedImageSet
from treenail.errors import ConfigError
from treenail.memory import format_bytes

Inspection = observations.ImageInspection | observations.InspectionProblem | None
"""None for an image whose size is unknown."""

_UNPACKED_FACTOR = 2
"""Space of an image as a multiple of its compressed layers; the MCO assumes the same."""


def find_invalid(sets: Sequence[PinnedImageSet]) -> dict[str, str]:
    """Return the problem of each set with a name that no runtime lists, by the set's name.

    The CRDs accept more names than runtimes do.
    """
    problems: dict[str, str] = {}
    for pinned in sets:
        for index, image in enumerate(pinned.images):
            field = f"spec.pinnedImages[{index}].name"
            try:
                spec = pullspec.parse_pull_spec(image, where=field)
            except ConfigError as error:
                problems.setdefault(pinned.metadata.name, f"{error}; {error.remedy}")
                continue
            if spec.registry == "docker.io" and "/" not in spec.repository:
                problems.setdefault(
                    pinned.metadata.name,
                    f"{field}: expected docker.io/library/{spec.repository}@…, found {image}; "
                    "correct the name",
                )
    return problems


def plan_pulls(
    sets: Sequence[PinnedImageSet],
    present: Set[str],
    usable_bytes: int,
    inspected: Mapping[str, Inspection],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the images to pull, and the problem of each set that gets none, by its name.

    Layers that several images share count once. An image of unknown size counts nothing: only the
    check before its pull limits it.
    """
    pulls: dict[str, None] = {}
    layers: dict[str, int] = {}
    problems: dict[str, str] = {}
    for pinned in sets:
        missing = [image for image in pinned.images if image not in present]
        problem, with_missing = "", dict(layers)
        for image in missing:
            found = inspected.get(image)
            if isinstance(found, observations.InspectionProblem):
                cause = f"{found.kind}: {found.text}"
                problem = problem or _describe_failure(pinned, image, cause)
            elif found is not None:
                with_missing |= {layer.digest: layer.size_bytes for layer in found.layers}
        needed = sum(with_missing.values()) * _UNPACKED_FACTOR
        if missing and needed > usable_bytes:
            problem = problem or (
                f"spec.pinnedImages: expected at most {format_bytes(max(usable_bytes, 0))}, found "
                f"{format_bytes(needed)} with earlier sets; remove images, or enlarge the disk"
            )
        if problem:
            problems[pinned.metadata.name] = problem
        else:
            layers = with_missing
            pulls |= dict.fromkeys(missing)
    return tuple(pulls), problems


def choose_pins(
    sets: Sequence[PinnedImageSet],
    present: Set[str],
    pinned_before: Set[str],
    problems: Mapping[str, str],
    failures: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the images to pin, sorted, and the problems with those of incomplete sets.

    ``failures`` are the errors of pulls by image. A set with a problem pins nothing new.
    """
    pins, problems = set[str](), dict(problems)
    for pinned in sets:
        name, lacking = pinned.metadata.name, [i for i in pinned.images if i not in present]
        if lacking and name not in problems:
            cause = failures.get(lacking[0]) or "it was removed after its pull"
            problems[name] = _describe_failure(pinned, lacking[0], cause)
        pins |= {*pinned.images} & pinned_before if name in problems else {*pinned.images}
    return tuple(sorted(pins & present)), problems


def _describe_failure(pinned: PinnedImageSet, image: str, cause: str) -> str:
    field = f"spec.pinnedImages[{pinned.images.index(image)}].name"
    shown = sanitize.sanitize_text(cause, limit=500)
    return (
        f"{field}: expected an image that can be pulled, found {image}: {shown}; correct or push it"
    )
