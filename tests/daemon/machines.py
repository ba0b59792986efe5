"""Machines in memory, configs made up for them, and what becomes of both."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.fakes.clock import FakeClock
from tests.fakes.disk import Entry, MemoryDisk, Tree
from treenail.api.contents import Contents
from treenail.config.wanted import (
    Wanted,
    WantedDirectory,
    WantedFile,
    WantedLink,
    WantedUnit,
    WantedUser,
)
from treenail.daemon.apply import Recovery, apply, recover
from treenail.daemon.runner import Runner
from treenail.daemon.survey import Survey
from treenail.host.root import Root
from treenail.host.undolog import DIRECTORY as UNDO
from treenail.host.users import Shadow
from treenail.update.plan import Plan, plan

# Nothing is there on the real disk, so that no link of it is followed.
TOP = "/no-such-root"
ROOT = Root(TOP)
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
        "/etc/shadow": Entry("file", 0o600, b"core:*:1::::::\n"),
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


def runner(disk: MemoryDisk) -> Runner:
    return Runner(ROOT, Shadow(ROOT, FakeClock(), disk), disk)


def planned(disk: MemoryDisk, new: Wanted, name: str) -> Plan:
    survey = Survey(ROOT, Shadow(ROOT, FakeClock(), disk), disk)
    old = survey.managed()
    return plan(old, new, survey.see(old, new), config=name)


def bring(disk: MemoryDisk, new: Wanted, name: str) -> Plan:
    """Have the machine in memory as the config wants it."""
    found = planned(disk, new, name)
    apply(found.steps, runner(disk))
    return found


def restart(disk: MemoryDisk) -> Recovery | None:
    return recover(runner(disk))


def settled(found: Tree) -> Tree:
    """The tree without the log and without what a file system would not keep of it."""
    return {path: entry for path, entry in found.items() if not path.startswith(TOP + UNDO)}


def visible(found: Tree) -> Tree:
    """The tree that other programs see: without our own and hidden names."""
    return {
        path: entry
        for path, entry in settled(found).items()
        if "/.treenail" not in path and not path.startswith(f"{TOP}/var/lib/treenail")
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A machine that has one config and is to have the next."""

    name: str
    before: Tree
    new: Wanted
    after: Tree


def case(name: str, old: Wanted | None, new: Wanted) -> Case:
    disk = machine(BASE)
    if old is not None:
        bring(disk, old, "old")
    before = disk.tree()
    bring(disk, new, "new")
    return Case(name, before, new, disk.tree())


def wanted(
    files: Sequence[WantedFile] = (),
    directories: Sequence[WantedDirectory] = (),
    links: Sequence[WantedLink] = (),
    units: Sequence[WantedUnit] = (),
    keys: tuple[str, ...] | None = None,
) -> Wanted:
    users: Mapping[str, WantedUser] = {} if keys is None else {"core": WantedUser("core", keys)}
    return Wanted(
        {file.path: file for file in files},
        {entry.path: entry for entry in directories},
        {link.path: link for link in links},
        {unit.name: unit for unit in units},
        users,
    )


def file(path: str, text: str, mode: int = 0o644, user: int | str = 0) -> WantedFile:
    return WantedFile(path, Contents(f"data:,{text}"), mode, user, 0)


def made_up(chance: random.Random) -> Wanted:
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
    return wanted(
        files,
        [WantedDirectory(path, chance.choice((0o755, 0o700))) for path in some(["/etc/d"], 1)],
        [WantedLink(path, chance.choice(("a", "b"))) for path in some(["/etc/vendor.link"], 1)],
        units,
        chance.choice((None, (), ("ssh-ed25519 AAAA", "ssh-rsa BBBB"))),
    )
