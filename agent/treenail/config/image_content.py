"""Comparison of a config with the content of an image: the rules of image mode.

In image mode the image provides the files and units of the config. The content is compared, and
no label is believed. What no image can carry, and the state of the machine, the agent writes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from treenail import errors, observations, sanitize
from treenail.config import drift_comparison, node_paths, wanted_state

T = TypeVar("T")

IMAGE_FILES = "ImageFiles"
"""The name of the comparison, where a target is quarantined by it."""
IMAGE_REMEDY = (
    "build the config into the image, or let the agent write what the image lacks: set "
    'image_files = "write" in agent.toml, or imageFiles: Write in the pool'
)
NAMED_LIMIT = 5
"""Maximum number of paths that a message names."""

# A deployment takes only /usr and /etc from its image (ostree(1)). The others are created at the
# installation, shared by all deployments, or in memory.
_OUTSIDE_IMAGES = (
    *(f"{directory}/" for directory in node_paths.SYSTEM_DIRECTORIES),
    *(f"/{name}/" for name in ("boot", "home", "root", "run", "tmp", "var")),
)


@dataclass(frozen=True, slots=True)
class ImageContent:
    """The content of a deployment's tree at the paths of a config, before any local change."""

    entries: Mapping[str, observations.PathEntry] = field(default_factory=dict)
    """The entry at each path of `list_image_paths`; /etc is the one of the image."""
    resolved_paths: Mapping[str, str] = field(default_factory=dict)
    """The resolved path of each path that leads through symbolic links of the image."""
    vendor_entries: Mapping[str, observations.PathEntry] = field(default_factory=dict)
    """The entry below /usr in place of each unit file or drop-in below /etc that the image lacks.
    """
    unit_states: Mapping[str, str] = field(default_factory=dict)
    """The units' states by ``systemctl is-enabled``; empty or missing without a file."""


@dataclass(frozen=True, slots=True)
class ImageSplit:
    """A config, divided into what an image provides and what the agent must write."""

    wanted: wanted_state.WantedState
    """The config. A unit file that the image has below /usr is not wanted below /etc."""
    provided: frozenset[str] = frozenset()
    """The paths and units that the image provides."""
    missing: tuple[drift_comparison.Drift, ...] = ()
    """How the image differs from what the config has and an image can carry."""


def list_image_paths(wanted: wanted_state.WantedState) -> tuple[str, ...]:
    """Return the paths that `compare_with_image` needs in the content."""
    hard_links = (link.path for link in wanted.links.values() if link.is_hard)
    return tuple(dict.fromkeys((*drift_comparison.list_expected_paths(wanted), *hard_links)))


def can_image_carry(path: str, resolved: str = "") -> bool:
    """Return whether an image can carry the path, which leads to ``resolved`` in its tree."""
    return not (resolved or path).startswith(_OUTSIDE_IMAGES)


def is_machine_state(path: str) -> bool:
    """Return whether the file is state of the machine, which the agent writes in both modes.

    Pull secrets and kubeconfigs belong to it: who can pull an image could read them.
    """
    return node_paths.holds_logins(path) or node_paths.should_outlive_config(path)


def has_named_owner(
    entry: wanted_state.WantedFile | wanted_state.WantedDirectory | wanted_state.WantedLink,
) -> bool:
    """Return whether the owner is a name that only the accounts of a tree translate."""
    return isinstance(entry.user, str) or isinstance(entry.group, str)


def assume_provided(wanted: wanted_state.WantedState) -> ImageSplit:
    """Return the split for an image that contains all that an image can carry."""
    files = (*wanted.files, *wanted.directories, *wanted.links)
    return ImageSplit(wanted, frozenset((*filter(_is_for_image, files), *wanted.units)))


def compare_with_image(wanted: wanted_state.WantedState, content: ImageContent) -> ImageSplit:
    """Compare the config with the content of an image."""
    entries = drift_comparison.compute_expected_entries(wanted)
    unit_paths = {*wanted.list_unit_files(), *wanted.list_masks()}
    provided: set[str] = set()
    missing: list[drift_comparison.Drift] = []
    for path in (*wanted.files, *wanted.directories, *wanted.links):
        entry = entries.get(path)
        is_carried = can_image_carry(path, content.resolved_paths.get(path, ""))
        if path in unit_paths or not is_carried or is_machine_state(path):
            continue
        actual = content.entries.get(path, observations.ABSENT_ENTRY)
        # A hard link has no expected entry: its name alone can be compared.
        drifts = drift_comparison.compare_entry(
            entry or drift_comparison.ExpectedEntry(path, observations.EntryKind.FILE), actual
        )
        if drifts and (entry or actual.kind is not observations.EntryKind.FILE):
            if not _can_agent_complete(wanted, path):
                missing += drifts
        else:
            provided.add(path)
    units = dict(wanted.units)
    for unit in wanted.units.values():
        units[unit.name], gaps = _compare_unit(unit, content)
        if unit.contents or not all(map(_can_agent_enable, gaps)):
            missing += gaps
        if not gaps:
            provided.add(unit.name)
            provided.update(
                drift_comparison.list_expected_paths(
                    wanted_state.WantedState(units={unit.name: unit})
                )
            )
    return ImageSplit(replace(wanted, units=units), frozenset(provided), tuple(missing))


def drop_provided(
    wanted: wanted_state.WantedState, provided: frozenset[str]
) -> wanted_state.WantedState:
    """Return the part of the config that the agent writes."""

    def select(parts: Mapping[str, T]) -> dict[str, T]:
        return {name: part for name, part in parts.items() if name not in provided}

    return replace(
        wanted,
        files=select(wanted.files),
        directories=select(wanted.directories),
        links=select(wanted.links),
        units=select(wanted.units),
    )


def list_provided(wanted: wanted_state.WantedState, provided: frozenset[str]) -> tuple[str, ...]:
    """Return the provided paths and units in the order of the config."""
    subjects = (*wanted.files, *wanted.directories, *wanted.links, *wanted.units)
    return tuple(subject for subject in subjects if subject in provided)


def make_missing_error(
    config: str, image: str, missing: Iterable[drift_comparison.Drift]
) -> errors.ConfigError:
    """Return the error for an image that lacks content of the config beside it."""
    drifts = tuple(missing)
    named = "; ".join(map(_format_missing, drifts[:NAMED_LIMIT]))
    more = f"; and {len(drifts) - NAMED_LIMIT} more" if len(drifts) > NAMED_LIMIT else ""
    return errors.ConfigError(
        f"cannot use {image} with {config}: the image differs from the config: {named}{more}",
        remedy=IMAGE_REMEDY,
    )


def _is_for_image(path: str) -> bool:
    return can_image_carry(path) and not is_machine_state(path)


def _can_agent_complete(wanted: wanted_state.WantedState, path: str) -> bool:
    """Return whether the agent writes what the image lacks here, as outside image mode.

    A config layer is made without the tree of the image: it cannot translate names of owners.
    """
    entry = wanted.files.get(path) or wanted.directories.get(path)
    return entry is not None and has_named_owner(entry) and path.startswith("/etc/")


def _can_agent_enable(gap: drift_comparison.Drift) -> bool:
    """Return whether the agent enables or disables the unit, as outside image mode.

    Only the unit file in the image says which links that takes.
    """
    return (
        gap.attribute is drift_comparison.DriftAttribute.ENABLEMENT
        and not gap.actual.startswith("masked")
    )


def _compare_unit(
    unit: wanted_state.WantedUnit, content: ImageContent
) -> tuple[wanted_state.WantedUnit, list[drift_comparison.Drift]]:
    """Return the unit without the files that the image has below /usr, and what the image lacks."""
    only = wanted_state.WantedState(units={unit.name: unit})
    gaps: list[drift_comparison.Drift] = []
    contents, mask, dropins = unit.contents, unit.mask, dict(unit.dropins)
    for path, entry in drift_comparison.compute_expected_entries(only).items():
        drifts = drift_comparison.compare_entry(
            entry, content.entries.get(path, observations.ABSENT_ENTRY)
        )
        if not drifts:
            continue
        if not _has_vendor_entry(entry, content):
            gaps += drifts
        elif path == node_paths.unit_path(unit.name):
            contents, mask = "", None
        else:
            dropins[path.rpartition("/")[2]] = ""
    gaps += drift_comparison.find_unit_drift(only, content.unit_states, {})
    if unit.mask is False and content.unit_states.get(unit.name, "").startswith("masked"):
        state = content.unit_states[unit.name]
        gaps.append(
            drift_comparison.Drift(
                unit.name, drift_comparison.DriftAttribute.ENABLEMENT, "unmasked", state
            )
        )
    if gaps:
        return unit, gaps
    return replace(unit, contents=contents, mask=mask, dropins=dropins), gaps


def _has_vendor_entry(entry: drift_comparison.ExpectedEntry, content: ImageContent) -> bool:
    """Return whether the image has the unit file or drop-in below /usr, and none below /etc."""
    above = content.entries.get(entry.path, observations.ABSENT_ENTRY)
    vendor = content.vendor_entries.get(entry.path, observations.ABSENT_ENTRY)
    if above.kind is not observations.EntryKind.NOTHING or vendor.kind is not entry.kind:
        return False
    if entry.kind is observations.EntryKind.LINK:
        return entry.target == vendor.target == drift_comparison.MASK_TARGET
    return entry.kind is observations.EntryKind.FILE and entry.compute_sha256() == vendor.sha256


def _format_missing(drift: drift_comparison.Drift) -> str:
    if (
        drift.attribute is drift_comparison.DriftAttribute.KIND
        and drift.actual == observations.EntryKind.NOTHING
    ):
        text = f"{drift.subject} is missing"
    elif drift.attribute is drift_comparison.DriftAttribute.CONTENTS:
        text = f"{drift.subject} has other contents"
    else:
        text = (
            f"{drift.subject} has {drift.attribute} {drift.actual or 'nothing'} instead of "
            f"{drift.expected}"
        )
    return sanitize.escape_line(text)
