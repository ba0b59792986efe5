"""A config applied while the power goes, or the process is killed, at every call."""

import os
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.daemon.machines import (
    BASE,
    Case,
    bring,
    case,
    file,
    machine,
    made_up,
    planned,
    restart,
    settled,
    visible,
    wanted,
)
from tests.fakes.disk import MemoryDisk, PowerCut, Tree
from treenail.config.wanted import WantedDirectory, WantedLink, WantedUnit
from treenail.daemon.apply import Recovery
from treenail.errors import TreenailError


class Findings:
    """What is wrong with the machines that somebody finds after the power went."""

    def __init__(
        self, case: Case, *, states: int, make: Callable[[Tree], MemoryDisk] = machine
    ) -> None:
        self.case = case
        self.states = states
        self.make = make
        self.starts = 0
        self.wrong: list[str] = []

    def look(self) -> "Findings":
        calls = 0
        while not self.cut_short(calls) and not self.wrong:
            calls += 1
        return self

    def cut_short(self, calls: int) -> bool:
        """Whether all was done by then."""
        disk = self.make(self.case.before)
        disk.calls_left = calls
        try:
            bring(disk, self.case.new, "new")
            done = True
        except PowerCut:
            done = False
        except TreenailError as error:
            self.wrong.append(f"after {calls} calls: {error}")
            return False
        disk.calls_left = None
        allowed = [self.case.after] if done else [self.case.before, self.case.after]
        for found in disk.after_power_cut(self.states):
            self.torn(found, f"power cut after {calls} calls")
            self.start(found, allowed, f"power cut after {calls} calls")
        self.start(disk.tree(), allowed, f"killed after {calls} calls")
        return done

    def torn(self, found: Tree, story: str) -> None:
        """What programs see that start before us: each path as before or as after."""
        before, after, now = map(visible, (self.case.before, self.case.after, found))
        for path in before.keys() | after.keys() | now.keys():
            entry = now.get(path)
            # A new directory may still be without its mode, and a unit that is enabled anew has
            # a moment without links.
            new = path not in before and after.get(path, ("",))[0] == "directory"
            anew = entry is None and ".wants/" in path
            if entry not in (before.get(path), after.get(path)) and not (new or anew):
                self.wrong.append(f"{story}: {path} is torn: {entry}")

    def start(self, found: Tree, allowed: list[Tree], story: str) -> None:
        disk = self.make(found)
        self.starts += 1
        try:
            if self.starts % 5 == 0:
                self.start_cut_short(disk)
            restart(disk)
        except TreenailError as error:
            self.wrong.append(f"{story}: {error}")
            return
        if settled(disk.tree()) not in [settled(tree) for tree in allowed]:
            paths = {path for path, _ in settled(disk.tree()).items() ^ settled(allowed[0]).items()}
            self.wrong.append(f"{story}: neither as before nor as after: {sorted(paths)}")
        for after in disk.after_power_cut(min(self.states, 3)):
            again = self.make(after)
            if restart(again) is Recovery.UNDONE:
                self.wrong.append(f"{story}: undone twice, and who knows what came in between")
            if settled(again.tree()) != settled(disk.tree()):
                self.wrong.append(f"{story}: undone, and that is lost")

    def start_cut_short(self, disk: MemoryDisk) -> None:
        disk.calls_left = self.starts % 17
        try:
            restart(disk)
        except PowerCut:
            disk.replace_by(next(disk.after_power_cut(1)))
        disk.calls_left = None


SEEDS = range(100)


def made_up_case(seed: int) -> Case:
    chance = random.Random(seed)
    old = made_up(chance) if chance.random() < 0.8 else None
    return case(str(seed), old, made_up(chance))


@pytest.mark.parametrize("tens", range(10))
def test_a_machine_has_the_old_config_or_the_new_one_whenever_the_power_goes(tens):
    wrong = {}
    for seed in SEEDS[tens * 10 : tens * 10 + 10]:
        findings = Findings(made_up_case(seed), states=1).look()
        if findings.wrong:
            wrong[seed] = findings.wrong
    assert wrong == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_second_time_nothing_is_to_be_done(seed):
    found = made_up_case(seed)
    assert planned(machine(found.after), found.new, "new").steps == ()


CASES = {
    "few": case(
        "few",
        wanted([file("/etc/motd", "mine")]),
        wanted([file("/etc/motd", "yours", 0o600), file("/etc/n/new", "x")]),
    ),
    "many": case(
        "many",
        wanted([file("/etc/a", "a"), file("/etc/b", "b")]),
        wanted([file(f"/etc/{name}", f"new-{name}") for name in "abcefg"]),
    ),
    "all kinds": case(
        "all kinds",
        wanted([file("/etc/motd", "mine"), file("/etc/d/vendor", "mine")]),
        wanted(
            [file("/etc/motd", "yours")],
            [WantedDirectory("/etc/d", 0o700)],
            [WantedLink("/etc/vendor.link", "motd")],
            [WantedUnit("ours.service", "[Install]\nWantedBy=a.target\n", enabled=True)],
            ("ssh-ed25519 AAAA",),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_state_after_a_power_cut_is_mended(name):
    assert Findings(CASES[name], states=20).look().wrong == []


class Site(NamedTuple):
    """Where in the code a flush is, by the functions that lead to it."""

    functions: tuple[str, ...]

    def __str__(self) -> str:
        return " > ".join(self.functions)


class Deaf(MemoryDisk):
    """Forgets to flush where it is told, and tells where it was asked to."""

    def __init__(self, found: Tree, sites: set[Site], deaf: Site | None = None) -> None:
        super().__init__(found)
        self.chunk = 1 << 20
        self.sites = sites
        self.deaf_to = lambda _: self.site() == deaf

    def site(self) -> Site:
        functions: list[str] = []
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
            if f"{os.sep}host{os.sep}" in code.co_filename and "<" not in code.co_name:
                functions.insert(0, code.co_qualname)
        site = Site(tuple(functions))
        self.sites.add(site)
        return site


def sites(name: str) -> list[Site]:
    """Where flushes are that a config asks for, or mending what a power cut left of it."""
    found: set[Site] = set()
    Findings(CASES[name], states=1, make=lambda tree: Deaf(tree, found)).look()
    return sorted(site for site in found if not spare(site))


def spare(site: Site) -> bool:
    """The log's directory is made once; here it is there and flushed."""
    return "Files.make_directory" in site.functions


@pytest.mark.parametrize(
    ("name", "site"),
    [pytest.param(name, site, id=f"{name}: {site}") for name in CASES for site in sites(name)],
)
def test_without_any_one_of_the_flushes_something_is_lost(name, site):
    def make(found: Tree) -> MemoryDisk:
        return Deaf(found, set(), site)

    assert Findings(CASES[name], states=25, make=make).look().wrong != []


class Unwilling(MemoryDisk):
    """Replaces nothing: it removes what is there, and then gives the new one its name."""

    def replace(self, path, target):
        parent, name = self._split(target)
        if name in parent.entries:
            super().unlink(target)
        super().replace(path, target)

    def exchange(self, path, other):
        third = f"{path}-"
        super().replace(other, third)
        super().replace(path, other)
        super().replace(third, path)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_renamed_in_one_step_is_found_missing(name):
    def make(found: Tree) -> MemoryDisk:
        disk = Unwilling(found)
        disk.chunk = 1 << 20
        return disk

    assert Findings(CASES[name], states=20, make=make).look().wrong != []


def test_letting_go_of_everything_brings_back_what_was_there_and_leaves_directories_at_most():
    for seed in SEEDS:
        disk = machine(BASE)
        bring(disk, made_up(random.Random(seed)), "some")
        bring(disk, wanted(), "")
        left = visible(disk.tree()).items() - visible(BASE).items()
        others = [path for path, entry in left if entry.kind != "directory"]
        assert visible(BASE).items() <= visible(disk.tree()).items(), seed
        # Without keys in it: whoever could log in before the config came can't any more.
        assert others in ([], ["/no-such-root/home/core/.ssh/authorized_keys.d/ignition"]), seed


def test_a_replaced_file_keeps_its_label_and_loses_what_was_noted_on_it():
    after = CASES["few"].after["/no-such-root/etc/motd"]
    assert dict(after.attributes) == {"security.selinux": b"system_u:object_r:etc_t:s0\0"}
