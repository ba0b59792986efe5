"""Whether the machine still is as its config says: by path, seconds after somebody touched it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from treenail.clock import Clock
from treenail.config import names
from treenail.config.drift import (
    Drift,
    Expected,
    argument_drifts,
    drifted,
    expected,
    extra_dropins,
    package_drifts,
    unit_drifts,
)
from treenail.config.wanted import Wanted, WantedFile, WantedOS, WantedUnit
from treenail.daemon.configuration.inspect import UnitStates, found_at
from treenail.daemon.configuration.path_watcher import Touched, Watcher
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.path_stat import standing
from treenail.host.filesystem.root import Root
from treenail.host.system.users import Accounts
from treenail.update.drift.drift_policy import Drifted, DriftPolicy, weigh
from treenail.update.state.record import Target

log = logging.getLogger(__name__)

_DROPINS = ".d"
_LINKS = (".wants", ".requires")
_SOME = "x"


@dataclass(frozen=True, slots=True)
class Booted:
    """What of the booted system a config asks for."""

    arguments: tuple[str, ...] = ()
    """The kernel's."""
    packages: frozenset[str] | None = None
    """Those that were layered; None where that can't be told without starting rpm-ostreed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a config says, without its contents."""

    entries: Mapping[str, Expected] = field(default_factory=dict)
    units: Wanted = field(default_factory=Wanted)
    """Its units, and the paths of its files, to compare with."""
    packages: frozenset[str] = frozenset()

    @classmethod
    def of(cls, wish: Wanted, packages: frozenset[str] = frozenset()) -> "Asked":
        """Raises `IgnitionError` for contents that can't be decoded."""
        return cls(
            entries={path: each.by_digest() for path, each in expected(wish).items()},
            units=Wanted(
                files={path: WantedFile(path) for path in wish.files},
                units={name: _without_contents(unit) for name, unit in wish.units.items()},
                os=WantedOS(kernel_arguments=wish.os.kernel_arguments),
            ),
            packages=packages,
        )

    @property
    def dropins(self) -> frozenset[str]:
        """The directories that the drop-ins of its units stand in."""
        return frozenset(f"{names.unit_path(name)}{_DROPINS}" for name in self.units.units)


class DriftCheck:
    """Compares. Raises `HostError` when the machine can't be looked at."""

    def __init__(self, root: Root, states: UnitStates, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._files = Files(root, self._disk)
        self._states = states

    def everything(self, asked: Asked, booted: Booted) -> dict[str, tuple[Drift, ...]]:
        """All there is to find, by what drifted."""
        found = [*self._paths(asked, asked.entries), *self._units(asked)]
        found += argument_drifts(asked.units.os.kernel_arguments, booted.arguments)
        if booted.packages is not None:
            found += package_drifts(asked.packages, booted.packages)
        return _by_subject(found)

    def touched(self, asked: Asked, paths: Iterable[str]) -> dict[str, tuple[Drift, ...]]:
        """What is found at these paths now; empty for each that is as it should be."""
        concerned = {path for path in paths if path in asked.entries}
        looked: dict[str, tuple[Drift, ...]] = dict.fromkeys(concerned, ())
        looked |= _by_subject(self._paths(asked, concerned))
        if any(path.startswith(f"{names.UNITS}/") for path in paths):
            looked |= dict.fromkeys(asked.units.units, ()) | _by_subject(self._units(asked))
        return looked

    def link_directories(self) -> tuple[str, ...]:
        """The directories whose links enable units."""
        return tuple(
            f"{names.UNITS}/{name}"
            for name in self._files.names(names.UNITS)
            if name.endswith(_LINKS)
        )

    def _paths(self, asked: Asked, paths: Iterable[str]) -> Iterator[Drift]:
        accounts = Accounts(self._files)
        for path, stands in standing(self._root, self._disk, paths).items():
            yield from drifted(asked.entries[path], found_at(stands, accounts))

    def _units(self, asked: Asked) -> Iterator[Drift]:
        units = asked.units
        if units.units:
            yield from unit_drifts(units, self._states.states(*units.units))
        present = (
            f"{directory}/{name}"
            for directory in sorted(asked.dropins)
            for name in self._files.names(directory)
        )
        yield from extra_dropins(units, present)


class DriftWatch:
    """What has drifted from the current config; to be asked whenever the node is at rest."""

    def __init__(
        self,
        check: DriftCheck,
        watcher: Watcher,
        ask: Callable[[Target], Asked | None],
        clock: Clock,
        *,
        policy: DriftPolicy,
        full_every_s: float,
    ) -> None:
        """``ask`` tells what the current config says; None when nobody knows."""
        self._check = check
        self._watcher = watcher
        self._ask = ask
        self._clock = clock
        self._policy = policy
        self._full_every_s = full_every_s
        self._current = Target()
        self._asked: Asked | None = None
        self._found: dict[str, tuple[Drift, ...]] = {}
        self._looked_at = float("-inf")
        self._heals: dict[str, tuple[float, ...]] = {}

    def look(self, current: Target, booted: Booted) -> Drifted:
        """What drifted, as of now; raises `HostError` and `ConfigError`."""
        now = self._clock.monotonic()
        overdue = now - self._looked_at >= self._full_every_s
        fresh = current != self._current or (self._asked is None and overdue)
        if fresh:
            self._looked_at = now
            self._current, self._asked, self._found = current, self._ask(current), {}
            self._watch()
        if self._asked is None:
            return Drifted(looked=False)
        touched = self._watcher.take()
        if fresh or touched.all or overdue:
            self._found = self._check.everything(self._asked, booted)
            self._looked_at = now
        elif touched.paths:
            self._look_at(self._asked, touched)
        found = (each for drifts in self._found.values() for each in drifts)
        return weigh(found, self._policy, self._heals, now)

    def healed(self, drifts: Iterable[Drift]) -> None:
        """Take note that these were put right, or that it was tried."""
        now = self._clock.monotonic()
        for subject in {drift.subject for drift in drifts}:
            earlier = self._heals.get(subject, ())
            self._heals[subject] = (*earlier, now)[-self._policy.heals_per_hour - 1 :]
            self._found.pop(subject, None)

    def _look_at(self, asked: Asked, touched: Touched) -> None:
        looked = self._check.touched(asked, touched.paths)
        if any(path.startswith(f"{names.UNITS}/") for path in touched.paths):
            # Extra drop-ins that are gone are not found any more.
            self._found = {
                subject: drifts
                for subject, drifts in self._found.items()
                if subject in asked.entries or not subject.startswith(f"{names.UNITS}/")
            }
        self._found |= looked
        self._found = {subject: drifts for subject, drifts in self._found.items() if drifts}

    def _watch(self) -> None:
        if self._asked is None:
            self._watcher.watch((), below=())
            return
        units = (names.UNITS, *self._check.link_directories()) if self._asked.units.units else ()
        self._watcher.watch(self._asked.entries, below=(*self._asked.dropins, *units))


def _without_contents(unit: WantedUnit) -> WantedUnit:
    return replace(
        unit,
        contents=_SOME if unit.contents else "",
        dropins={name: _SOME if text else "" for name, text in unit.dropins.items()},
    )


def _by_subject(drifts: Iterable[Drift]) -> dict[str, tuple[Drift, ...]]:
    found: dict[str, tuple[Drift, ...]] = {}
    for drift in drifts:
        found[drift.subject] = (*found.get(drift.subject, ()), drift)
    return found
