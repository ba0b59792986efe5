"""Links and states of unit files, compared with those of systemctl where this machine has it."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import unit_sets
from tests.fixtures.files import read_links
from treenail.errors import UnitError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.units.unit_files import ChangedFiles, SymbolicLink, UnitFileReader, UnitLinks
from treenail.units.unit_install import UNIT_DIRECTORY

VENDOR = "/usr/lib/systemd/system"
PRESET = "/usr/lib/systemd/system-preset"

WANTED = "[Unit]\nDescription=a\n[Install]\nWantedBy=multi-user.target\n"

UNITS = {
    f"{VENDOR}/plain.service": WANTED,
    f"{VENDOR}/static.service": "[Service]\nExecStart=/bin/true\n",
    f"{VENDOR}/many.service": (
        "[Install]\nWantedBy=multi-user.target graphical.target\nRequiredBy=a.service\n"
        "Alias=other.service another.service\n"
    ),
    f"{VENDOR}/also.service": "[Install]\nAlso=also.socket plain.service\n",
    f"{VENDOR}/also.socket": "[Install]\nWantedBy=sockets.target\nAlso=none.service\n",
    f"{VENDOR}/reset.service": "[Install]\nWantedBy=a.target\nWantedBy=\nWantedBy=b.target\n",
    f"{VENDOR}/continued.service": "[Install]\nWantedBy=a.target \\\n# note\n  b.target\n",
    f"{VENDOR}/get@.service": "[Install]\nWantedBy=multi-user.target\n",
    f"{VENDOR}/default@.service": "[Install]\nDefaultInstance=one\nWantedBy=multi-user.target\n",
    f"{VENDOR}/specified@.service": "[Install]\nWantedBy=at-%i.target %p.target\n",
    f"{UNIT_DIRECTORY}/ours.service": WANTED,
    f"{VENDOR}/dropped.service": "[Service]\nExecStart=/bin/true\n",
    f"{UNIT_DIRECTORY}/dropped.service.d/10-install.conf": "[Install]\nWantedBy=basic.target\n",
    f"{VENDOR}/real.service": "[Install]\nWantedBy=multi-user.target\nAlias=famous.service\n",
    f"{VENDOR}/a.timer": "[Install]\nWantedBy=timers.target\n",
}
LINKS = {
    f"{VENDOR}/short.service": "real.service",
    f"{UNIT_DIRECTORY}/masked.service": "/dev/null",
}
PRESETS = {
    f"{PRESET}/90-default.preset": "disable *\n",
    f"{PRESET}/50-some.preset": (
        "# these\nenable plain.service\nenable get@.service x y\n;and\nenable ma*.service\n"
        "disable ours.service\n"
    ),
    "/etc/systemd/system-preset/10-admin.preset": "enable ours.service\n",
}


@dataclass(frozen=True, slots=True)
class Machine:
    prefix: Path
    files: HostFiles = field(init=False)
    units: UnitFileReader = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", HostFiles(Root(self.prefix)))
        object.__setattr__(self, "units", UnitFileReader(self.files))
        for path, text in {**UNITS, **PRESETS}.items():
            place = self.prefix / path[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        for path, text in LINKS.items():
            (self.prefix / path[1:]).symlink_to(text)

    def carry_out(self, links: UnitLinks) -> None:
        for path in links.removed:
            self.files.remove_file(path)
        for path, text in links.made.items():
            self.files.make_symlink(path, text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "ours")


def test_plan_enable_links_the_unit_to_all_targets(machine):
    assert machine.units.plan_enable("many.service") == UnitLinks(
        {
            f"{UNIT_DIRECTORY}/other.service": f"{VENDOR}/many.service",
            f"{UNIT_DIRECTORY}/another.service": f"{VENDOR}/many.service",
            f"{UNIT_DIRECTORY}/multi-user.target.wants/many.service": f"{VENDOR}/many.service",
            f"{UNIT_DIRECTORY}/graphical.target.wants/many.service": f"{VENDOR}/many.service",
            f"{UNIT_DIRECTORY}/a.service.requires/many.service": f"{VENDOR}/many.service",
        }
    )


def test_plan_disable_removes_all_links_to_the_unit(machine):
    before = read_links(machine.prefix / "etc/systemd/system")
    machine.carry_out(machine.units.plan_enable("many.service", "plain.service"))
    machine.carry_out(machine.units.plan_disable("many.service", "plain.service"))
    assert read_links(machine.prefix / "etc/systemd/system") == before


def test_disable_and_enable_after_new_targets_removes_old_links(machine):
    machine.carry_out(machine.units.plan_enable("ours.service"))
    machine.files.write_file(
        f"{UNIT_DIRECTORY}/ours.service", b"[Install]\nWantedBy=other.target\n"
    )
    machine.carry_out(machine.units.plan_disable("ours.service"))
    machine.carry_out(machine.units.plan_enable("ours.service"))
    assert read_links(machine.prefix / "etc/systemd/system") == {
        "masked.service": "/dev/null",
        "other.target.wants/ours.service": f"{UNIT_DIRECTORY}/ours.service",
    }


def test_states_have_the_words_of_systemctl(machine):
    machine.carry_out(machine.units.plan_enable("plain.service", "get@a.service"))
    names = ("plain.service", "many.service", "static.service", "masked.service", "none.service")
    others = ("short.service", "get@a.service", "get@b.service", "also.service")
    assert machine.units.read_states(*names, *others) == {
        "plain.service": "enabled",
        "many.service": "disabled",
        "static.service": "static",
        "masked.service": "masked",
        "none.service": "",
        "short.service": "alias",
        "get@a.service": "enabled",
        "get@b.service": "disabled",
        "also.service": "indirect",
    }


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ("none.service", "cannot enable none.service: no such unit file"),
        ("masked.service", "cannot enable masked.service: it is masked"),
    ],
)
def test_plan_enable_of_missing_or_masked_unit_is_refused(machine, unit, message):
    with pytest.raises(UnitError, match=message):
        machine.units.plan_enable(unit)


def test_plan_enable_with_taken_alias_is_refused(machine):
    machine.files.write_file(f"{UNIT_DIRECTORY}/other.service", b"[Service]\n")
    with pytest.raises(UnitError, match=r"cannot make the link .*/other\.service to .*: .* exists"):
        machine.units.plan_enable("many.service")


def test_preset_of_the_administrator_comes_first(machine):
    names = ("plain.service", "many.service", "static.service", "ours.service")
    assert {name: machine.units.read_preset(name).is_enabled for name in names} == {
        "plain.service": True,
        "many.service": True,
        "static.service": False,
        "ours.service": True,
    }
    assert machine.units.read_preset("get@.service").instances == ("x", "y")


SYSTEMCTL = shutil.which("systemctl")
CALLS = [
    *(["enable", name] for name in ("plain.service", "many.service", "also.service", "a.timer")),
    *(["enable", name] for name in ("reset.service", "continued.service", "get@a.service")),
    *(["enable", name] for name in ("default@.service", "default@two.service", "ours.service")),
    *(["enable", name] for name in ("specified@x.service", "dropped.service", "static.service")),
    *(["enable", name] for name in ("short.service", "real.service", "get@.service")),
    *(["enable", name] for name in ("none.service", "masked.service")),
    *(["preset", name] for name in ("plain.service", "a.timer", "get@.service", "ours.service")),
    *(["preset", name] for name in ("many.service", "static.service", "get@x.service")),
    *(["disable", name] for name in ("plain.service", "many.service", "get@.service")),
    *(["disable", name] for name in ("get@a.service", "also.service", "default@one.service")),
    *(["disable", name] for name in ("ours.service", "none.service", "masked.service")),
]


def systemctl(prefix: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SYSTEMCTL), f"--root={prefix}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def ours(units: UnitFileReader, verb: str, *names: str) -> UnitLinks:
    return {
        "enable": units.plan_enable,
        "disable": units.plan_disable,
        "preset": units.plan_preset,
    }[verb](*names)


@pytest.mark.process
@pytest.mark.skipif(SYSTEMCTL is None, reason="no systemctl here")
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_links_are_those_of_systemctl(tmp_path, machine, call):
    theirs = Machine(tmp_path / "theirs")
    verb, name = call
    if verb != "enable":
        enabled = ("plain.service", "many.service", "get@a.service", "get@b.service", "also.socket")
        for each in (*enabled, "default@.service", "ours.service", "a.timer"):
            systemctl(theirs.prefix, "enable", each)
            machine.carry_out(machine.units.plan_enable(each))
    assert read_links(machine.prefix / "etc/systemd/system") == read_links(
        theirs.prefix / "etc/systemd/system"
    )
    done = systemctl(theirs.prefix, verb, name)
    try:
        machine.carry_out(ours(machine.units, verb, name))
        refused = False
    except UnitError:
        refused = True
    assert read_links(machine.prefix / "etc/systemd/system") == read_links(
        theirs.prefix / "etc/systemd/system"
    )
    if verb == "enable":
        assert refused == (done.returncode != 0), done.stderr


@pytest.mark.process
@pytest.mark.skipif(SYSTEMCTL is None, reason="no systemctl here")
def test_states_are_those_of_systemctl(machine):
    for each in ("plain.service", "many.service", "get@a.service", "default@.service"):
        machine.carry_out(machine.units.plan_enable(each))
    names = sorted({Path(path).name for path in (*UNITS, *LINKS)} - {"10-install.conf"})
    names += ["get@a.service", "get@b.service", "other.service", "none.service"]
    expected = {}
    for name in names:
        expected[name] = systemctl(machine.prefix, "is-enabled", name).stdout.strip()
    found = machine.units.read_states(*names)
    assert found == {name: state.replace("not-found", "") for name, state in expected.items()}


def test_upheld_by_makes_links_for_a_systemd_that_knows_it():
    files = {f"{VENDOR}/a.service": b"[Install]\nUpheldBy=x.target\n"}
    expected = {None: 1, "libsystemd-shared-254.so": 1, "libsystemd-shared-252-64.el9.so": 0}
    for library, count in expected.items():
        known = {**files, f"/usr/lib64/systemd/{library}": b"x"} if library else files
        reader = UnitFileReader(ChangedFiles(None, known))
        assert len(reader.plan_enable("a.service").made) == count, library


def test_changed_files_are_read_like_files(machine):
    changed = machine.units.change_files(
        {
            f"{VENDOR}/plain.service": None,
            f"{UNIT_DIRECTORY}/new@.service": b"[Install]\nWantedBy=a.target\n",
            f"{UNIT_DIRECTORY}/masked.service": None,
            f"{UNIT_DIRECTORY}/a.target.wants/new@x.service": SymbolicLink("../new@.service"),
        }
    )
    names = ("plain.service", "new@x.service", "new@y.service", "masked.service", "many.service")
    assert list(changed.read_states(*names).values()) == ["", "enabled", "disabled", "", "disabled"]
    assert changed.plan_disable("new@.service").removed == (
        f"{UNIT_DIRECTORY}/a.target.wants/new@x.service",
    )
    assert machine.units.read_states("plain.service") == {"plain.service": "disabled"}


BLOCK = 20
"""Seeds of one test."""
ORDINARY, ALL = 60, 2000
# Debian's 252 follows no link in a directory of units to a unit of the same name in another one.
# RHEL's 252 does.
SELF_ALIAS = ("Too many levels of symbolic links", "refusing to operate on linked unit file")
# It looks for an init script of the same name first.
INIT_SCRIPT = "Failed to look up unit file state"


@pytest.mark.process
@pytest.mark.skipif(SYSTEMCTL is None, reason="no systemctl here")
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(seed, marks=[pytest.mark.long][seed < ORDINARY :])
        for seed in range(0, ALL, BLOCK)
    ],
)
def test_random_units_are_handled_as_by_systemctl(tmp_path, first, record_property):
    counts: Counter[str] = Counter()
    differences: list[object] = []
    for seed in range(first, first + BLOCK):
        unit_set, root = unit_sets.make_unit_set(seed), tmp_path / str(seed)
        unit_sets.write_files(root, unit_set.files)
        differences += compare_states(root, seed, counts)
        for command in unit_set.commands:
            differences += compare_command(root, seed, command, counts)
        differences += compare_states(root, seed, counts)
        shutil.rmtree(root)
    for name, count in counts.items():
        record_property(name, count)
    assert differences == []


def compare_states(root: Path, seed: int, counts: Counter[str]) -> Iterator[object]:
    states = UnitFileReader(unit_sets.read_files(root)).read_states(*unit_sets.NAMES)
    for name, state in states.items():
        done = systemctl(root, "is-enabled", name)
        if SELF_ALIAS[0] in done.stderr:
            counts["self-alias"] += 1
            continue
        counts["states"] += 1
        if done.stdout.strip().replace("not-found", "") != state:
            yield seed, "is-enabled", name, state, done.stdout, done.stderr


def compare_command(
    root: Path, seed: int, command: tuple[str, ...], counts: Counter[str]
) -> Iterator[object]:
    files, before = unit_sets.read_files(root), unit_sets.read_links(root)
    try:
        links = ours(UnitFileReader(files), *command)
    except UnitError:
        links = None
    done = systemctl(root, *command)
    if INIT_SCRIPT in done.stderr:
        counts["init script"] += 1
        return
    if links is not None and SELF_ALIAS[1] in done.stderr:
        counts["self-alias"] += 1
        return
    counts["refused" if done.returncode else command[0]] += 1
    if (links is None) != (done.returncode != 0):
        yield seed, command, links, done.stderr
    elif links:
        kept = {path: text for path, text in before.items() if path not in links.removed}
        if {**kept, **links.made} != unit_sets.read_links(root):
            yield seed, command, links, unit_sets.read_links(root), done.stderr
