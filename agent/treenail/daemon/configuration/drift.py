"""Detects drift from the config, path by path, within seconds of a change."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from treenail.config import node_paths
from treenail.config.drift_comparison import (
    Drift,
    ExpectedEntry,
    compare_entry,
    compute_expected_entries,
    find_argument_drift,
    find_image_drift,
    find_package_drift,
    find_unit_drift,
    find_unknown_dropins,
)
from treenail.config.wanted_state import WantedFile, WantedOS, WantedState, WantedUnit
from treenail.daemon.configuration.inspect import UnitStateSource, describe_path
from treenail.host.filesystem.path_stat import stat_paths
from treenail.host.machine import Machine
from treenail.host.system.accounts import Accounts

log = logging.getLogger(__name__)

_DROPIN_SUFFIX = ".d"
_LINK_DIRECTORY_SUFFIXES = (".wants", ".requires")
_PLACEHOLDER = "x"


@dataclass(frozen=True, slots=True)
class BootedState:
    """The booted system, as far as a config determines it."""

    kernel_arguments: tuple[str, ...] = ()
    packages: frozenset[str] | None = None
    """The layered packages; None when reading them would start rpm-ostreed."""
    digests: frozenset[str] = frozenset()
    """The digests of the image, of manifest and manifest list; empty when unknown."""


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """The state that a config wants, with digests in place of contents."""

    entries: Mapping[str, ExpectedEntry] = field(default_factory=dict)
    units: WantedState = field(default_factory=WantedState)
    """The config's units and the paths of its files."""
    packages: frozenset[str] = frozenset()
    digest: str = ""
    """The digest of the image; empty when the config names none."""
    image_gaps: frozenset[str] = frozenset()
    """The paths and units that the booted image lacks, in image mode."""

    @classmethod
    def from_wanted(
        cls,
        wanted: WantedState,
        packages: frozenset[str] = frozenset(),
        *,
        digest: str = "",
        image_gaps: frozenset[str] = frozenset(),
    ) -> "ExpectedState":
        """Convert a wanted state. Raises `IgnitionError` for contents that cannot be decoded."""
        return cls(
            entries={
                path: each.drop_contents()
                for path, each in compute_expected_entries(wanted).items()
            },
            units=WantedState(
                files={path: WantedFile(path) for path in wanted.files},
                units={name: _strip_contents(unit) for name, unit in wanted.units.items()},
                os=WantedOS(kernel_arguments=wanted.os.kernel_arguments),
            ),
            packages=packages,
            digest=digest,
            image_gaps=image_gaps,
        )

    @property
    def dropin_directories(self) -> frozenset[str]:
        """The directories that contain drop-ins of the config's units."""
        return frozenset(
            f"{node_paths.unit_path(name)}{_DROPIN_SUFFIX}" for name in self.units.units
        )


class DriftCheck:
    """Compares the machine with an expected state. Raises `HostError` when it cannot read it."""

    def __init__(self, machine: Machine, unit_states: UnitStateSource) -> None:
        self._root = machine.root
        self._disk = machine.disk
        self._files = machine.labelled_files
        self._unit_states = unit_states

    def check_everything(
        self, expected_state: ExpectedState, booted: BootedState
    ) -> dict[str, tuple[Drift, ...]]:
        """Compare everything; return the drift by subject."""
        found = [
            *self._check_paths(expected_state, expected_state.entries),
            *self._check_units(expected_state),
        ]
        found += find_argument_drift(
            expected_state.units.os.kernel_arguments, booted.kernel_arguments
        )
        found += find_image_drift(expected_state.digest, booted.digests)
        if booted.packages is not None:
            found += find_package_drift(expected_state.packages, booted.packages)
        return _group_by_subject(found)

    def check_touched(
        self, expected_state: ExpectedState, paths: Iterable[str]
    ) -> dict[str, tuple[Drift, ...]]:
        """Compare these paths; return the drift by subject, empty for a path that matches."""
        expected_paths = {path for path in paths if path in expected_state.entries}
        results: dict[str, tuple[Drift, ...]] = dict.fromkeys(expected_paths, ())
        results |= _group_by_subject(self._check_paths(expected_state, expected_paths))
        if any(path.startswith(f"{node_paths.UNIT_DIRECTORY}/") for path in paths):
            results |= dict.fromkeys(expected_state.units.units, ()) | _group_by_subject(
                self._check_units(expected_state)
            )
        return results

    def find_link_directories(self) -> tuple[str, ...]:
        """List the directories whose symlinks enable units."""
        return tuple(
            f"{node_paths.UNIT_DIRECTORY}/{name}"
            for name in self._files.list_directory(node_paths.UNIT_DIRECTORY)
            if name.endswith(_LINK_DIRECTORY_SUFFIXES)
        )

    def _check_paths(self, expected_state: ExpectedState, paths: Iterable[str]) -> Iterator[Drift]:
        accounts = Accounts(self._files)
        for path, path_stat in stat_paths(self._root, self._disk, paths).items():
            yield from compare_entry(
                expected_state.entries[path], describe_path(path_stat, accounts)
            )

    def _check_units(self, expected_state: ExpectedState) -> Iterator[Drift]:
        units = expected_state.units
        if units.units:
            yield from find_unit_drift(units, self._unit_states.read_states(*units.units))
        present = (
            f"{directory}/{name}"
            for directory in sorted(expected_state.dropin_directories)
            for name in self._files.list_directory(directory)
        )
        yield from find_unknown_dropins(units, present)


def _strip_contents(unit: WantedUnit) -> WantedUnit:
    return replace(
        unit,
        contents=_PLACEHOLDER if unit.contents else "",
        dropins={name: _PLACEHOLDER if text else "" for name, text in unit.dropins.items()},
    )


def _group_by_subject(drifts: Iterable[Drift]) -> dict[str, tuple[Drift, ...]]:
    found: dict[str, tuple[Drift, ...]] = {}
    for drift in drifts:
        found[drift.subject] = (*found.get(drift.subject, ()), drift)
    return found
