"""Detect drift from the config, path by path, within seconds of a change."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from treenail.config import drift_comparison, node_paths, wanted_state
from treenail.host.filesystem import path_stat
from treenail.host.machine import Machine
from treenail.units import unit_files

log = logging.getLogger(__name__)

_DROPIN_SUFFIX = ".d"
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

    entries: Mapping[str, drift_comparison.ExpectedEntry] = field(default_factory=dict)
    units: wanted_state.WantedState = field(default_factory=wanted_state.WantedState)
    """The config's units, users and the paths of its files."""
    packages: frozenset[str] = frozenset()
    digest: str = ""
    """The digest of the image; empty when the config names none."""
    image_gaps: frozenset[str] = frozenset()
    """The paths and units that the booted image lacks, in image mode."""

    @classmethod
    def from_wanted(
        cls,
        wanted: wanted_state.WantedState,
        packages: frozenset[str] = frozenset(),
        *,
        digest: str = "",
        image_gaps: frozenset[str] = frozenset(),
    ) -> "ExpectedState":
        """Convert a wanted state. Raises `IgnitionError` for contents that cannot be decoded."""
        return cls(
            entries={
                path: entry.drop_contents()
                for path, entry in drift_comparison.compute_expected_entries(wanted).items()
            },
            units=wanted_state.WantedState(
                files={path: wanted_state.WantedFile(path) for path in wanted.files},
                units={name: _strip_contents(unit) for name, unit in wanted.units.items()},
                users={name: wanted_state.WantedUser(name) for name in wanted.users},
                os=wanted_state.WantedOS(kernel_arguments=wanted.os.kernel_arguments),
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

    def __init__(self, machine: Machine, unit_states: unit_files.UnitStateSource) -> None:
        self._root = machine.root
        self._disk = machine.disk
        self._files = machine.labelled_files
        self._unit_states = unit_states
        self._units = unit_files.UnitFileReader(machine.labelled_files)

    def check_everything(
        self, expected_state: ExpectedState, booted: BootedState
    ) -> dict[str, tuple[drift_comparison.Drift, ...]]:
        """Compare everything; return the drift by subject."""
        drifts = [
            *self._check_paths(expected_state, expected_state.entries),
            *self._check_units(expected_state),
        ]
        has_core_user = path_stat.Accounts(self._files).has_user(node_paths.CORE_USER)
        drifts += drift_comparison.find_user_drift(
            expected_state.units.users, has_core_user=has_core_user
        )
        drifts += drift_comparison.find_argument_drift(
            expected_state.units.os.kernel_arguments, booted.kernel_arguments
        )
        drifts += drift_comparison.find_image_drift(expected_state.digest, booted.digests)
        if booted.packages is not None:
            drifts += drift_comparison.find_package_drift(expected_state.packages, booted.packages)
        return _group_by_subject(drifts)

    def check_touched(
        self, expected_state: ExpectedState, paths: Iterable[str]
    ) -> dict[str, tuple[drift_comparison.Drift, ...]]:
        """Compare these paths; return the drift by subject, empty for a path that matches."""
        expected_paths = {path for path in paths if path in expected_state.entries}
        results: dict[str, tuple[drift_comparison.Drift, ...]] = dict.fromkeys(expected_paths, ())
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
            if name.endswith(unit_files.DEPENDENCY_SUFFIXES)
        )

    def _check_paths(
        self, expected_state: ExpectedState, paths: Iterable[str]
    ) -> Iterator[drift_comparison.Drift]:
        accounts = path_stat.Accounts(self._files)
        for path, entry in path_stat.stat_paths(self._root, self._disk, paths).items():
            yield from drift_comparison.compare_entry(
                expected_state.entries[path], accounts.name_owner(entry)
            )

    def _check_units(self, expected_state: ExpectedState) -> Iterator[drift_comparison.Drift]:
        units = expected_state.units
        if units.units:
            yield from drift_comparison.find_unit_drift(
                units,
                self._unit_states.read_states(*units.units),
                drift_comparison.compare_unit_links(units, self._units.change_files({})),
            )
        present = (
            f"{directory}/{name}"
            for directory in sorted(expected_state.dropin_directories)
            for name in self._files.list_directory(directory)
        )
        yield from drift_comparison.find_unknown_dropins(units, present)


def _strip_contents(unit: wanted_state.WantedUnit) -> wanted_state.WantedUnit:
    return replace(
        unit,
        contents=_PLACEHOLDER if unit.contents else "",
        dropins={name: _PLACEHOLDER if text else "" for name, text in unit.dropins.items()},
    )


def _group_by_subject(
    drifts: Iterable[drift_comparison.Drift],
) -> dict[str, tuple[drift_comparison.Drift, ...]]:
    by_subject: dict[str, tuple[drift_comparison.Drift, ...]] = {}
    for drift in drifts:
        by_subject[drift.subject] = (*by_subject.get(drift.subject, ()), drift)
    return by_subject
