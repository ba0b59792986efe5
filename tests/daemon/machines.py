"""Machines in memory, random configs, and applying one to the other."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from tests.fakes.clock import FakeClock
from tests.fakes.disk import Entry, Found, MemoryDisk, Tree
from tests.fakes.host_machine import make_machine
from treenail.api.ignition.model import Contents
from treenail.config.wanted_state import (
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedState,
    WantedUnit,
    WantedUser,
)
from treenail.daemon.configuration.node_configuration import (
    MachineInspector,
    RecoveryOutcome,
    apply_steps,
    recover_interrupted,
    restore_pending,
)
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.errors import UnitError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.rollback.undo_log import UNDO_DIRECTORY as UNDO
from treenail.host.system.users import ShadowFile
from treenail.units.unit_files import UnitFileReader, UnitLinks
from treenail.update.steps.plan import StepPlan, plan_steps

TOP = "/no-such-root"


class Unlinked(Root):
    """Without links on the way, for which the real disk would be has_systemd."""

    def _resolve(self, path: str, *, follow_last: bool, for_change: bool = False) -> Path:
        return self.prefix / path.lstrip("/")


ROOT = Unlinked(TOP)
LABEL = (("security.selinux", b"system_u:object_r:etc_t:s0\0"), ("user.note", b"kept"))


def directory(mode: int = 0o755) -> Entry:
    return Entry("directory", mode, b"")


BASE: Tree = {
    TOP + path: entry
    for path, entry in {
        "": directory(),
        "/etc": directory(),
        "/etc/d": directory(0o750),
        "/etc/d/vendor": Entry("file", 0o640, b"the vendor's own", 7, 8, LABEL),
        "/etc/vendor.link": Entry("link", 0o777, b"d/vendor"),
        "/etc/motd": Entry("file", 0o644, b"welcome", 0, 0, LABEL),
        "/etc/group": Entry("file", 0o644, b"core:x:1001:\nweb:x:44:\n"),
        "/etc/passwd": Entry("file", 0o644, b"core:x:1000:1001::/home/core:/bin/sh\n"),
        "/etc/shadow": Entry("file", 0o600, b"root:!:1::::::\ncore:*:1::::::\nweb:!:1::::::\n"),
        "/etc/systemd": directory(),
        "/etc/systemd/system": directory(),
        "/home": directory(),
        "/home/core": Entry("directory", 0o700, b"", 1000, 1001),
        "/usr": directory(),
        "/usr/lib": directory(),
        "/usr/lib/systemd": directory(),
        "/usr/lib/systemd/system": directory(),
        "/usr/lib/systemd/system-preset": directory(),
        "/usr/lib/systemd/system-preset/99.preset": Entry("file", 0o644, b"disable vendor.*\n"),
        "/usr/lib/systemd/system/vendor.service": Entry(
            "file", 0o644, b"[Install]\nWantedBy=multi-user.target\n"
        ),
        "/var": directory(),
        "/var/lib": directory(),
        "/var/lib/treenail": directory(0o700),
        UNDO: directory(0o700),
    }.items()
}


def machine(found: Tree) -> MemoryDisk:
    disk = MemoryDisk(found)
    disk.chunk = 1 << 20
    return disk


class Unlocked(ShadowFile):
    """A shadow file without the lock, which only a real machine has; the clock stands still."""

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        yield


class Systemd:
    """Makes the links that systemd makes, and flushes none of them."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._units = UnitFileReader(HostFiles(ROOT, disk))

    def enable_units(self, *units: str) -> None:
        self._link(self._units.plan_enable(*units))

    def disable_units(self, *units: str) -> None:
        self._link(self._units.plan_disable(*units))

    def preset_units(self, *units: str) -> None:
        self._link(self._units.plan_preset(*units))

    def reload_daemon(self) -> None:
        pass

    def reload_unit(self, unit: str) -> None:
        pass

    def restart_unit(self, unit: str) -> None:
        pass

    def _link(self, links: UnitLinks) -> None:
        try:
            self._change(links)
        except OSError as error:
            raise UnitError(f"systemd says {error}") from error

    def _change(self, links: UnitLinks) -> None:
        for path in links.removed:
            self._disk.unlink(TOP + path)
        for path, text in links.made.items():
            parent, name = TOP + path.rpartition("/")[0], path.rpartition("/")[2]
            if parent.rpartition("/")[2] not in self._disk.listdir(parent.rpartition("/")[0]):
                self._disk.mkdir(parent)
            if name not in self._disk.listdir(parent):
                self._disk.symlink(TOP + path, text)


def unlocked_machine(disk: MemoryDisk) -> Machine:
    return make_machine(ROOT, disk, shadow=Unlocked(ROOT, FakeClock(), disk))


def runner(disk: MemoryDisk, services: Systemd | None = None) -> StepRunner:
    return StepRunner(unlocked_machine(disk), services)


def planned(disk: MemoryDisk, new: WantedState, name: str) -> StepPlan:
    survey = MachineInspector(unlocked_machine(disk))
    old = survey.read_ownership()
    return plan_steps(old, new, survey.inspect_machine(old, new), config=name)


class Ends(StrEnum):
    """The end of a change after it is made."""

    COMMITTED = "committed"
    CONFIRMED = "pending, then confirmed"
    UNDONE = "pending, then undone"


def apply_config(
    disk: MemoryDisk,
    new: WantedState,
    name: str,
    *,
    has_systemd: bool = False,
    ends: Ends = Ends.COMMITTED,
) -> StepPlan:
    """Apply the config to the machine in memory; with ``has_systemd`` a systemd enables units."""
    found = planned(disk, new, name)
    step_runner = runner(disk, Systemd(disk) if has_systemd else None)
    apply_steps(found.steps, step_runner, owner="" if ends is Ends.COMMITTED else "owner")
    end(step_runner, ends)
    return found


def restart(
    disk: MemoryDisk, *, has_systemd: bool = False, ends: Ends = Ends.COMMITTED
) -> RecoveryOutcome | None:
    step_runner = runner(disk, Systemd(disk) if has_systemd else None)
    recovery = recover_interrupted(step_runner)
    end(step_runner, ends)
    return recovery


def end(step_runner: StepRunner, ends: Ends) -> None:
    """Confirm or undo the pending change, if there is one."""
    if step_runner.pending.find_owner():
        if ends is Ends.UNDONE:
            restore_pending(step_runner)
        else:
            step_runner.pending.confirm_change()


def settled(found: Tree) -> Tree:
    """The tree without the log and without what a file system would not keep of it."""
    return {path: entry for path, entry in found.items() if not path.startswith(TOP + UNDO)}


def names(found: Tree) -> frozenset[frozenset[str]]:
    """The paths that are names of one file."""
    same: dict[int, set[str]] = {}
    for path, inode in (found.inodes if isinstance(found, Found) else {}).items():
        same.setdefault(inode, set()).add(path)
    return frozenset(frozenset(paths) for paths in same.values() if len(paths) > 1)


def visible(found: Tree) -> Tree:
    """The tree that other programs see: without our own and hidden names."""
    return {
        path: entry
        for path, entry in settled(found).items()
        if "/.treenail" not in path and not path.startswith(f"{TOP}/var/lib/treenail")
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A machine with one config, and the config that it gets next."""

    name: str
    before: Tree
    new: WantedState
    made: Tree
    """The tree with the new config, even if the change is undone later."""
    has_systemd: bool = False
    ends: Ends = Ends.COMMITTED
    next: "Case | None" = None
    """The config that the machine gets after that."""

    @property
    def after(self) -> Tree:
        """The tree at the end."""
        return self.before if self.ends is Ends.UNDONE else self.made


def case(
    name: str,
    old: WantedState | None,
    new: WantedState,
    *,
    has_systemd: bool = False,
    ends: Ends = Ends.COMMITTED,
    then: WantedState | None = None,
) -> Case:
    disk = machine(BASE)
    if old is not None:
        apply_config(disk, old, "old", has_systemd=has_systemd)
    before = disk.tree()
    apply_config(disk, new, "new", has_systemd=has_systemd)
    found = Case(name, before, new, disk.tree(), has_systemd, ends)
    if then is None:
        return found
    disk = machine(found.after)
    apply_config(disk, then, "new")
    return replace(found, next=Case(name, found.after, then, disk.tree()))


@cache
def random_case(seed: int, *, has_systemd: bool | None = None) -> Case:
    """Return the case of this seed; by default systemd runs in every third."""
    chance = random.Random(seed)
    old = random_config(chance) if chance.random() < 0.8 else None
    if has_systemd is None:
        has_systemd = seed % 3 == 0
    ends = (Ends.COMMITTED, *Ends)[seed // 3 % 4]
    return case(str(seed), old, random_config(chance), has_systemd=has_systemd, ends=ends)


def wanted(
    files: Sequence[WantedFile] = (),
    directories: Sequence[WantedDirectory] = (),
    links: Sequence[WantedLink] = (),
    units: Sequence[WantedUnit] = (),
    keys: tuple[str, ...] | None = None,
    password_hash: str | None = None,
) -> WantedState:
    core = WantedUser("core", keys or (), password_hash)
    users: Mapping[str, WantedUser] = {} if keys is None else {"core": core}
    return WantedState(
        {file.path: file for file in files},
        {entry.path: entry for entry in directories},
        {link.path: link for link in links},
        {unit.name: unit for unit in units},
        users,
    )


def file(path: str, text: str, mode: int = 0o644, user: int | str = 0) -> WantedFile:
    return WantedFile(path, Contents(f"data:,{text}"), mode, user, 0)


def random_config(chance: random.Random) -> WantedState:
    """A config of a few entries, which often has paths in common with the next one."""

    def some(values: Sequence[str], most: int) -> list[str]:
        return chance.sample(values, chance.randint(0, most))

    texts = ("one", "two", "three-and-longer", "")
    files = [
        file(
            path,
            chance.choice(texts),
            chance.choice((0o644, 0o600, 0o755)),
            chance.choice((0, 5, "core")),
        )
        for path in some(
            ["/etc/a", "/etc/motd", "/etc/d/vendor", "/etc/d/new", "/etc/n/o/p", "/opt/x"], 4
        )
    ]
    units = [
        WantedUnit(
            name,
            contents=chance.choice(
                ("", "[Install]\nWantedBy=a.target\n", "[Install]\nWantedBy=b.target\n")
            ),
            enabled=chance.choice((True, False, None)),
            dropins=chance.choice(({}, {"10-a.conf": "[Unit]\n"}, {"10-a.conf": ""})),
        )
        if chance.random() < 0.8
        else WantedUnit(name, mask=True)
        for name in some(["ours.service", "vendor.service"], 2)
    ]
    links = [WantedLink(path, chance.choice(("a", "b"))) for path in some(["/etc/vendor.link"], 1)]
    targets = [file.path for file in files] + ["/etc/passwd"]
    return wanted(
        files,
        [WantedDirectory(path, chance.choice((0o755, 0o700))) for path in some(["/etc/d"], 1)],
        links
        + [WantedLink(path, chance.choice(targets), is_hard=True) for path in some(["/x"], 1)],
        units,
        chance.choice((None, (), ("ssh-ed25519 AAAA", "ssh-rsa BBBB"))),
        chance.choice((None, "$6$salt$one", "$6$salt$two")),
    )
