"""A config applied while the power goes, the process is killed or a call fails, at every call.

Pairs of configs are made up from seeds, as many as `tests.daemon.walk_budget` allows.
TREENAIL_STATES is the number of states in which each power cut may leave the disk (default: 1).
"""

import ast
import inspect
import os
import random
from collections.abc import Iterator
from functools import cache, partial
from types import ModuleType

import pytest

from tests.daemon import walk_budget
from tests.daemon.machines import (
    BASE,
    TOP,
    Case,
    Ends,
    Systemd,
    apply_config,
    case,
    file,
    machine,
    planned,
    random_case,
    random_config,
    unlocked_machine,
    visible,
    wanted,
)
from tests.daemon.power import CALLS, Findings, Site, WitnessedDisk, failing_calls
from tests.fakes.disk import MemoryDisk
from treenail.config import node_paths
from treenail.config.wanted_state import WantedDirectory, WantedLink, WantedUnit
from treenail.daemon.configuration.node_configuration import apply_steps
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.host.filesystem import atomic_files, entries
from treenail.host.rollback import transaction, undo_log
from treenail.update.steps.inventory import KEY_DIRECTORIES
from treenail.update.steps.step_types import (
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

STATES = int(os.environ.get("TREENAIL_STATES", "1"))


@walk_budget.walk
def test_power_cut_at_any_call_leaves_old_or_new_config(part):
    found = {
        seed: Findings(random_case(seed), states=STATES).check().wrong
        for seed in walk_budget.seeds(part)
    }
    assert not any(found.values()), found


@walk_budget.walk
def test_failure_at_any_call_is_undone_and_reported(part):
    # Without systemd, which may fail to preset a unit: that is only logged.
    found = {
        seed: failing_calls(random_case(seed, has_systemd=False), sample_calls(seed))
        for seed in walk_budget.seeds(part)
    }
    assert not any(found.values()), found


def sample_calls(seed: int):
    chance = random.Random(seed)
    return lambda calls: iter(sorted(chance.sample(range(calls), min(calls, 4 * STATES))))


@walk_budget.walk
def test_second_apply_has_no_steps(part):
    for seed in walk_budget.seeds(part):
        found = random_case(seed)
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
        "systemd enables units",
        wanted(units=[WantedUnit("ours.service", UNIT, enabled=True)]),
        wanted(
            units=[
                WantedUnit("ours.service", OTHER_UNIT, enabled=True),
                WantedUnit("vendor.service", enabled=True),
            ]
        ),
        has_systemd=True,
    ),
    *(
        case(
            ends,
            wanted([file("/etc/motd", "mine"), file("/etc/gone", "x")]),
            wanted([file("/etc/motd", "yours", 0o600)], keys=(), password_hash="$6$one"),
            ends=ends,
            then=wanted([file("/etc/motd", "others'"), file("/etc/d/vendor", "new")]),
        )
        for ends in (Ends.CONFIRMED, Ends.UNDONE)
    ),
]


@pytest.mark.parametrize("states", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("found", CASES, ids=lambda each: each.name)
def test_state_after_power_cut_is_always_recovered(found, states):
    assert Findings(found, states=states).check().wrong == []


@pytest.mark.parametrize("found", CASES, ids=lambda each: each.name)
def test_failure_of_every_call_is_undone(found):
    assert failing_calls(found, lambda calls: iter(range(calls))) == []


@cache
def sites() -> dict[Site, list[Case]]:
    """The calls in the code that make changes durable or atomic, and the cases that reach them."""
    found: dict[Site, list[Case]] = {}
    for each in CASES:
        for site in Findings(each, states=1).check().sites:
            found.setdefault(site, []).append(each)
    return dict(sorted(found.items()))


def is_spare(site: Site) -> bool:
    """True for the flush of a directory that exists: an earlier process may have been killed.

    `tests.host.filesystem.test_power_cut` has that case.
    """
    return bool({"HostFiles.make_directory", "HostFiles._ensure_directory"} & set(site.functions))


@pytest.mark.parametrize("call", CALLS)
@walk_budget.exhaustive
def test_omitted_flush_or_rename_loses_data(call):
    needed = [site for site in sites() if site.call == call and not is_spare(site)]
    for site in walk_budget.sample(needed):
        make = partial(WitnessedDisk, without=site)
        assert any(Findings(each, states=15, make=make).check().wrong for each in sites()[site]), (
            site
        )


def test_flushes_and_renames_in_the_code_are_all_covered():
    in_code = {found for module in (transaction, undo_log, entries, atomic_files)
               for found in calls(module)}  # fmt: skip
    # Those of Files that no config needs; tests.host.filesystem.test_power_cut has them.
    elsewhere = {
        ("HostFiles.make_symlink", "replace"),
        ("HostFiles._sync_file_systems", "syncfs"),
        ("HostFiles._ensure_directory", "replace"),
        ("HostFiles._ensure_directory", "fsync"),
    }
    assert {(site.functions[-1], site.call) for site in sites()} == in_code - elsewhere


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
def test_non_atomic_rename_is_detected(found):
    assert Findings(found, states=20, make=UnwillingWitness).check().wrong != []


@walk_budget.walk
def test_empty_config_restores_original_files(part):
    for seed in walk_budget.seeds(part):
        disk = machine(BASE)
        apply_config(disk, random_config(random.Random(seed)), "some")
        apply_config(disk, wanted(), "")
        left = visible(disk.tree()).items() - visible(BASE).items()
        others = [path for path, entry in left if entry.kind != "directory"]
        lost = visible(BASE).items() - visible(disk.tree()).items()
        # Without keys and locked: a user who could log in before the config came no longer can.
        assert {path for path, _ in lost} <= {"/no-such-root/etc/shadow"}, seed
        assert set(others) <= {
            "/no-such-root/etc/shadow",
            "/no-such-root/home/core/.ssh/authorized_keys.d/ignition",
        }, seed


def test_replaced_file_keeps_label_and_loses_other_attributes():
    after = CASES[0].after["/no-such-root/etc/motd"]
    assert dict(after.attributes) == {"security.selinux": b"system_u:object_r:etc_t:s0\0"}


class RecordingRunner(StepRunner):
    """Records the steps that it runs."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.steps_run: list[str] = []

    def compute_changes(self, step):
        self.steps_run.append(str(step))
        return super().compute_changes(step)

    def change_enablement(self, step):
        self.steps_run.append(str(step))
        super().change_enablement(step)

    def set_password(self, step):
        self.steps_run.append(str(step))
        super().set_password(step)


@walk_budget.walk
def test_applied_steps_match_printed_steps(part):
    for seed in walk_budget.seeds(part):
        found = random_case(seed)
        disk = machine(found.before)
        steps = planned(disk, found.new, "new").steps
        services = Systemd(disk) if found.has_systemd else None
        runner = RecordingRunner(unlocked_machine(disk), services)
        apply_steps(steps, runner)
        assert runner.steps_run == [str(step) for step in steps], seed
        named = set().union(*map(paths, steps))
        before, after = visible(found.before), visible(disk.tree())
        changed = {path for path, _ in before.items() ^ after.items()}
        above = {parent for path in named for parent in parents(path)}
        enabling = {path for path in changed if ".wants" in path}
        assert changed - named - above - enabling == set(), seed
        assert {path for step in steps for path in always_changed(step)} <= changed, seed


def paths(step: ConfigStep) -> set[str]:
    """The paths that the step says it changes, as far as other programs see them."""
    match step:
        case BackUpEntry() | RecordOwnership() | EnableUnits() | DisableUnits() | PresetUnits():
            return set()
        case SetSshKeys():
            return {TOP + node_paths.AUTHORIZED_KEYS, *(TOP + path for path in KEY_DIRECTORIES)}
        case SetPassword():
            return {f"{TOP}/etc/shadow"}
        case _:
            return {TOP + step.path}


def always_changed(step: ConfigStep) -> set[str]:
    """The paths that change in any case."""
    if isinstance(step, WriteFile | MakeDirectory | SetPassword):
        return paths(step)
    return set()


def parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
