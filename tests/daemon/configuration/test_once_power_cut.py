"""A config applied while the power goes, the process is killed or a call fails, at every call.

TREENAIL_PAIRS is how many pairs of configs are made up (100), TREENAIL_STATES in how many states
each power cut may leave the disk of each (1).
"""

import ast
import inspect
import os
import random
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.daemon.machines import (
    BASE,
    ROOT,
    TOP,
    Case,
    Ends,
    Systemd,
    Unlocked,
    bring,
    case,
    file,
    machine,
    made_up,
    made_up_case,
    planned,
    visible,
    wanted,
)
from tests.daemon.power import CALLS, Findings, Site, WitnessedDisk, failing_calls
from tests.fakes.clock import FakeClock
from tests.fakes.disk import MemoryDisk, Tree
from treenail.config import names
from treenail.config.wanted import WantedDirectory, WantedLink, WantedUnit
from treenail.daemon.configuration.apply import apply_steps
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.host.filesystem import entries, files, fsync
from treenail.host.rollback import symlinks, transaction, undo_log
from treenail.update.steps.inventory import KEY_DIRECTORIES
from treenail.update.steps.steps import (
    BackUpEntry,
    ConfigStep,
    DisableUnits,
    EnableUnits,
    MakeDirectory,
    PresetUnits,
    RecordOwnership,
    SetPassword,
    SetSshKeys,
    WriteFile,
)

PAIRS = int(os.environ.get("TREENAIL_PAIRS", "100"))
STATES = int(os.environ.get("TREENAIL_STATES", "1"))
IN_TENS = range(-(-PAIRS // 10))


def seeds(tens: int) -> range:
    return range(tens * 10, min(tens * 10 + 10, PAIRS))


@pytest.mark.parametrize("tens", IN_TENS)
def test_a_machine_has_the_old_config_or_the_new_one_whenever_the_power_goes(tens):
    found = {seed: Findings(made_up_case(seed), states=STATES).look().wrong for seed in seeds(tens)}
    assert found == {seed: [] for seed in seeds(tens)}


@pytest.mark.parametrize("tens", IN_TENS)
def test_whichever_call_fails_all_is_as_before_and_says_so(tens):
    # Without systemd, which may fail to preset a unit: that is only told.
    found = {
        seed: failing_calls(made_up_case(seed, asked=False), a_few_of(seed)) for seed in seeds(tens)
    }
    assert found == {seed: [] for seed in seeds(tens)}


def a_few_of(seed: int):
    chance = random.Random(seed)
    return lambda calls: iter(sorted(chance.sample(range(calls), min(calls, 4 * STATES))))


@pytest.mark.parametrize("tens", IN_TENS)
def test_the_second_time_nothing_is_to_be_done(tens):
    for seed in seeds(tens):
        found = made_up_case(seed)
        assert planned(machine(found.made), found.new, "new").steps == (), seed


UNIT = "[Install]\nWantedBy=a.target\n"
OTHER_UNIT = "[Install]\nWantedBy=b.target\n"
CASES = [
    case(
        "few",
        wanted([file("/etc/motd", "mine")]),
        wanted([file("/etc/motd", "yours", 0o600), file("/etc/n/new", "x")]),
    ),
    case(
        "many",
        wanted([file("/etc/a", "a"), file("/etc/b", "b")]),
        wanted([file(f"/etc/{name}", f"new-{name}") for name in "abcefg"]),
    ),
    case(
        "many directories",
        wanted([file(f"/etc/{name}/it", "old") for name in "abcef"]),
        wanted([file(f"/etc/{name}/it", "new") for name in "abcef"]),
    ),
    case(
        "all kinds",
        wanted([file("/etc/motd", "mine"), file("/etc/d/vendor", "mine")]),
        wanted(
            [file("/etc/motd", "yours")],
            [WantedDirectory("/etc/d", 0o700)],
            [WantedLink("/etc/vendor.link", "motd"), WantedLink("/x", "/etc/motd", is_hard=True)],
            [WantedUnit("ours.service", UNIT, enabled=True)],
            ("ssh-ed25519 AAAA",),
            "$6$one",
        ),
    ),
    case(
        "a password",
        wanted(keys=("ssh-rsa BBBB",), password_hash="$6$one"),
        wanted(keys=("ssh-rsa BBBB",), password_hash="$6$two"),
    ),
    case(
        "a password alone",
        None,
        wanted(keys=("ssh-rsa BBBB",), password_hash="$6$one"),
        then=wanted(keys=("ssh-rsa BBBB",), password_hash="$6$two"),
    ),
    case(
        "systemd is asked",
        wanted(units=[WantedUnit("ours.service", UNIT, enabled=True)]),
        wanted(
            units=[
                WantedUnit("ours.service", OTHER_UNIT, enabled=True),
                WantedUnit("vendor.service", enabled=True),
            ]
        ),
        asked=True,
    ),
    *(
        case(
            ends,
            wanted([file("/etc/motd", "mine"), file("/etc/gone", "x")]),
            wanted([file("/etc/motd", "yours", 0o600)], keys=(), password_hash="$6$one"),
            ends=ends,
            then=wanted([file("/etc/motd", "others'"), file("/etc/d/vendor", "new")]),
        )
        for ends in (Ends.CONFIRMED, Ends.PUT_BACK)
    ),
]


@pytest.mark.parametrize("found", CASES, ids=lambda each: each.name)
def test_every_state_after_a_power_cut_is_mended(found):
    assert Findings(found, states=20).look().wrong == []


@pytest.mark.parametrize("found", CASES, ids=lambda each: each.name)
def test_every_call_may_fail(found):
    assert failing_calls(found, lambda calls: iter(range(calls))) == []


def sites() -> dict[Site, list[Case]]:
    """Where the calls are that promises rest on, and the cases in which they are made."""
    found: dict[Site, list[Case]] = {}
    for each in CASES:
        for site in Findings(each, states=4).look().sites:
            found.setdefault(site, []).append(each)
    return dict(sorted(found.items()))


SITES = sites()


def spare(site: Site) -> bool:
    """Directories that are there are flushed in case an earlier process was killed meanwhile.

    `tests.host.filesystem.test_power_cut` has that case.
    """
    return bool({"Files.make_directory", "Files._have_directory"} & set(site.functions))


@pytest.mark.parametrize("site", [site for site in SITES if not spare(site)], ids=str)
def test_without_any_one_of_the_flushes_and_renames_something_is_lost(site):
    def make(found: Tree) -> MemoryDisk:
        return WitnessedDisk(found, site)

    assert any(Findings(each, states=15, make=make).look().wrong for each in SITES[site])


def test_every_flush_and_rename_in_the_code_is_among_them():
    in_code = {found for module in (transaction, undo_log, entries, fsync, symlinks, files)
               for found in calls(module)}  # fmt: skip
    # Those of Files that no config needs; tests.host.filesystem.test_power_cut has them.
    elsewhere = {
        ("Files.symlink", "replace"),
        ("Files._file_systems_flushed", "sync_filesystem"),
        ("Files._have_directory", "replace"),
        ("Files._have_directory", "sync"),
    }
    assert {(site.functions[-1], site.call) for site in SITES} == in_code - elsewhere


def calls(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Each function that makes such a call of the disk itself, and which."""
    for kind in ast.parse(inspect.getsource(module)).body:
        for function in kind.body if isinstance(kind, ast.ClassDef) else ():
            for node in ast.walk(function):
                match node:
                    case ast.Attribute(value=disk, attr=call) if call in CALLS:
                        if ast.unparse(disk) in {"disk", "self._disk"}:
                            yield f"{kind.name}.{function.name}", call


class Unwilling(MemoryDisk):
    """Renames nothing in one step: what is there goes first."""

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


class UnwillingWitness(Unwilling, WitnessedDisk):
    pass


@pytest.mark.parametrize("found", CASES[:4], ids=lambda each: each.name)
def test_what_is_not_renamed_in_one_step_is_found_missing(found):
    assert Findings(found, states=20, make=UnwillingWitness).look().wrong != []


def test_letting_go_of_everything_brings_back_what_was_there_and_leaves_directories_at_most():
    for seed in range(PAIRS):
        disk = machine(BASE)
        bring(disk, made_up(random.Random(seed)), "some")
        bring(disk, wanted(), "")
        left = visible(disk.tree()).items() - visible(BASE).items()
        others = [path for path, entry in left if entry.kind != "directory"]
        lost = visible(BASE).items() - visible(disk.tree()).items()
        # Without keys in it, and locked: whoever could log in before the config came can't any
        # more.
        assert {path for path, _ in lost} <= {"/no-such-root/etc/shadow"}, seed
        assert set(others) <= {
            "/no-such-root/etc/shadow",
            "/no-such-root/home/core/.ssh/authorized_keys.d/ignition",
        }, seed


def test_a_replaced_file_keeps_its_label_and_loses_what_was_noted_on_it():
    after = CASES[0].after["/no-such-root/etc/motd"]
    assert dict(after.attributes) == {"security.selinux": b"system_u:object_r:etc_t:s0\0"}


class ToldRunner(StepRunner):
    """Remembers the steps that it carried out."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.told: list[str] = []

    def compute_changes(self, step):
        self.told.append(str(step))
        return super().compute_changes(step)

    def change_enablement(self, step):
        self.told.append(str(step))
        super().change_enablement(step)

    def set_password(self, step):
        self.told.append(str(step))
        super().set_password(step)


@pytest.mark.parametrize("tens", IN_TENS)
def test_the_steps_that_are_carried_out_are_those_that_are_printed_and_nothing_else_changes(tens):
    for seed in seeds(tens):
        found = made_up_case(seed)
        disk = machine(found.before)
        steps = planned(disk, found.new, "new").steps
        services = Systemd(disk) if found.asked else None
        runner = ToldRunner(ROOT, Unlocked(ROOT, FakeClock(), disk), disk, services)
        apply_steps(steps, runner)
        assert runner.told == [str(step) for step in steps], seed
        named = set().union(*map(paths, steps))
        before, after = visible(found.before), visible(disk.tree())
        changed = {path for path, _ in before.items() ^ after.items()}
        above = {parent for path in named for parent in parents(path)}
        enabling = {path for path in changed if ".wants" in path}
        assert changed - named - above - enabling == set(), seed
        assert {path for step in steps for path in certain(step)} <= changed, seed


def paths(step: ConfigStep) -> set[str]:
    """The paths that the step says it changes, as far as other programs see them."""
    match step:
        case BackUpEntry() | RecordOwnership() | EnableUnits() | DisableUnits() | PresetUnits():
            return set()
        case SetSshKeys():
            return {TOP + names.AUTHORIZED_KEYS, *(TOP + path for path in KEY_DIRECTORIES)}
        case SetPassword():
            return {f"{TOP}/etc/shadow"}
        case _:
            return {TOP + step.path}


def certain(step: ConfigStep) -> set[str]:
    """The paths that are others afterwards, whatever stood there."""
    if isinstance(step, WriteFile | MakeDirectory | SetPassword):
        return paths(step)
    return set()


def parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
