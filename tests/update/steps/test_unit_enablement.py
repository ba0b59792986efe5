"""Steps that enable, disable and preset units, carried out in memory."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import pytest

from tests.unit_sets import NAMES, make_install_section, make_unit_set
from treenail import observations
from treenail.api.ignition.model import Contents
from treenail.config import node_paths, wanted_state
from treenail.errors import UnitError
from treenail.units.unit_files import ChangedFiles, FileChange, SymbolicLink, UnitFileReader
from treenail.update.steps import inventory, plan, step_types

ETC, VENDOR = "/etc/systemd/system", "/usr/lib/systemd/system"
LOCAL = "/usr/local/lib/systemd/system"
PRESETS = {"/usr/lib/systemd/system-preset/99-default.preset": b"disable *\n"}  # as on RHCOS

SERVICE = "[Service]\nExecStart=/bin/true %i\n"


def install(*lines: str) -> str:
    return "\n".join((f"{SERVICE}[Install]", *lines, ""))


MULTI, GRAPHICAL = install("WantedBy=multi-user.target"), install("WantedBy=graphical.target")
ALSO = install("WantedBy=multi-user.target", "Also=b.socket")
WANTS, OTHER_WANTS = f"{ETC}/multi-user.target.wants", f"{ETC}/graphical.target.wants"


@dataclass
class MemoryMachine:
    """The unit files of a machine, which steps change."""

    files: dict[str, FileChange] = field(default_factory=dict)
    ownership: inventory.Ownership = field(default_factory=inventory.Ownership)

    def plan(self, wanted: wanted_state.WantedState) -> plan.StepPlan:
        paths = inventory.list_inspected_paths(self.ownership, wanted)
        found = inventory.Inventory(
            {path: self.describe(path) for path in paths}, units=self.reader()
        )
        return plan.plan_steps(self.ownership, wanted, found)

    def reader(self) -> UnitFileReader:
        return UnitFileReader(ChangedFiles(None, self.files))

    def describe(self, path: str) -> observations.PathEntry:
        match self.files.get(path):
            case bytes(content):
                digest = hashlib.sha256(content).hexdigest()
                kind = observations.EntryKind.FILE
                return observations.PathEntry(kind, digest, 0o644, user="root", group="root")
            case SymbolicLink(target=target):
                return observations.PathEntry(observations.EntryKind.LINK, target=target)
            case _:
                return observations.ABSENT_ENTRY

    def carry_out(self, steps: Iterable[step_types.ConfigStep]) -> None:
        for step in steps:
            match step:
                case step_types.WriteFile(path=path, contents=text):
                    self.files[path] = (
                        text.encode() if isinstance(text, str) else text.decode_bytes()
                    )
                case step_types.MakeLink(path=path, target=target):
                    self.files[path] = SymbolicLink(target)
                case step_types.RemoveEntry(path=path):
                    self.files.pop(path, None)
                case step_types.EnableUnits(units=units):
                    self.change(self.reader().plan_enable(*units).as_changes())
                case step_types.DisableUnits(units=units):
                    self.change(self.reader().plan_disable(*units).as_changes())
                case step_types.PresetUnits(units=units):
                    for name in units:
                        # The agent logs what a preset cannot do.
                        with suppress(UnitError):
                            self.change(self.reader().plan_preset(name).as_changes())
                case step_types.RecordOwnership(ownership=ownership):
                    self.ownership = ownership

    def change(self, changes: Mapping[str, FileChange]) -> None:
        self.files |= changes
        self.files = {path: change for path, change in self.files.items() if change is not None}

    def links(self) -> set[str]:
        """Return the links below the unit directory, without the directory."""
        return {
            path.removeprefix(f"{ETC}/")
            for path, change in self.files.items()
            if isinstance(change, SymbolicLink) and path.startswith(f"{ETC}/")
        }


def build(*entries: object) -> wanted_state.WantedState:
    wanted = wanted_state.WantedState()
    for entry in entries:
        match entry:
            case wanted_state.WantedUnit(name=name):
                wanted = replace(wanted, units={**wanted.units, name: entry})
            case wanted_state.WantedFile(path=path):
                wanted = replace(wanted, files={**wanted.files, path: entry})
            case wanted_state.WantedLink(path=path):
                wanted = replace(wanted, links={**wanted.links, path: entry})
    return wanted


def unit(name: str, contents: str = "", *, on: bool | None = None, **dropins: str):
    texts = {f"{key}.conf": text for key, text in dropins.items()}
    return wanted_state.WantedUnit(name, contents, enabled=on, dropins=texts)


def file(path: str, text: str) -> wanted_state.WantedFile:
    return wanted_state.WantedFile(path, Contents(f"data:,{quote(text)}"))


TEMPLATE, ONE = unit("p@.service", MULTI), unit("p@one.service", on=True)
A_LINK = {f"{WANTS}/a.service": SymbolicLink(f"{VENDOR}/a.service")}

CASES = {
    "template and instance": ({}, (), (TEMPLATE, ONE), ["p@one multi"]),
    "template is a file": ({}, (), (file(f"{ETC}/p@.service", MULTI), ONE), ["p@one multi"]),
    "template in /usr/local": ({}, (), (file(f"{LOCAL}/p@.service", MULTI), ONE), ["p@one multi"]),
    "template of the vendor": ({f"{VENDOR}/p@.service": MULTI}, (), (ONE,), ["p@one multi"]),
    "unit is a file": (
        {}, (), (file(f"{ETC}/a.service", MULTI), unit("a.service", on=True)), ["a multi"],
    ),
    "unit is a link to a file": (
        {},
        (),
        (
            file("/opt/a.service", MULTI),
            wanted_state.WantedLink(f"{ETC}/a.service", "/opt/a.service"),
            unit("a.service", on=True),
        ),
        ["a.service", "a multi"],
    ),
    "template has other targets": (
        {}, (TEMPLATE, ONE), (unit("p@.service", GRAPHICAL), ONE), ["p@one graphical"],
    ),
    "template as a file has other targets": (
        {},
        (file(f"{ETC}/p@.service", MULTI), ONE),
        (file(f"{ETC}/p@.service", GRAPHICAL), ONE),
        ["p@one graphical"],
    ),
    "template goes, and with it the instance": ({}, (TEMPLATE, ONE), (), []),
    "template goes, and the instance stays in the config": ({}, (TEMPLATE, ONE), (ONE,), []),
    "one instance goes": ({}, (TEMPLATE, ONE, unit("p@two.service", on=True)), (TEMPLATE, ONE),
        ["p@one multi"]),
    "disabled template, enabled instance": (
        {f"{VENDOR}/p@.service": MULTI,
         f"{OTHER_WANTS}/p@x.service": SymbolicLink(f"{VENDOR}/p@.service")},
        (),
        (unit("p@.service", on=False), ONE),
        ["p@one multi"],
    ),
    "drop-in for the template": (
        {f"{VENDOR}/p@.service": SERVICE}, (),
        (unit("p@.service", d="[Install]\nWantedBy=multi-user.target\n"), ONE),
        ["p@one multi"],
    ),
    "drop-in comes": (
        {f"{VENDOR}/a.service": MULTI}, (unit("a.service", on=True),),
        (unit("a.service", on=True, d="[Install]\nWantedBy=graphical.target\n"),),
        ["a graphical", "a multi"],
    ),
    "drop-in changes": (
        {f"{VENDOR}/a.service": MULTI},
        (unit("a.service", on=True, d="[Install]\nWantedBy=graphical.target\n"),),
        (unit("a.service", on=True, d="[Install]\nRequiredBy=graphical.target\n"),),
        ["a multi", "graphical.target.requires/a.service"],
    ),
    "drop-in goes": (
        {f"{VENDOR}/a.service": MULTI},
        (unit("a.service", on=True, d="[Install]\nWantedBy=graphical.target\n"),),
        (unit("a.service", on=True),),
        ["a multi"],
    ),
    "drop-in that is a file goes": (
        {f"{VENDOR}/a.service": MULTI},
        (unit("a.service", on=True),
         file(f"{ETC}/a.service.d/d.conf", "[Install]\nWantedBy=graphical.target\n")),
        (unit("a.service", on=True),),
        ["a multi"],
    ),
    "drop-in of a preset unit goes": (
        {f"{VENDOR}/a.service": MULTI,
         "/usr/lib/systemd/system-preset/1.preset": "enable a.service\n"},
        (unit("a.service", d="[Install]\nWantedBy=graphical.target\n"),),
        (unit("a.service", d=""),),
        ["a multi"],
    ),
    "link is missing": (
        {f"{VENDOR}/a.service": install("WantedBy=multi-user.target graphical.target"), **A_LINK},
        (unit("a.service", on=True),), (unit("a.service", on=True),),
        ["a graphical", "a multi"],
    ),
    "file of the config replaces that of the vendor": (
        {f"{VENDOR}/a.service": MULTI, **A_LINK},
        (unit("a.service", on=True),), (unit("a.service", MULTI, on=True),), ["a multi"],
    ),
    "indirect is enabled": (
        {f"{VENDOR}/a.service": install("Also=b.socket"), f"{VENDOR}/b.socket": MULTI}, (),
        (unit("a.service", on=True),), ["multi-user.target.wants/b.socket"],
    ),
    "indirect is disabled": (
        {f"{VENDOR}/a.service": install("Also=b.socket"), f"{VENDOR}/b.socket": MULTI,
         f"{WANTS}/b.socket": SymbolicLink(f"{VENDOR}/b.socket")}, (),
        (unit("a.service", on=False),), [],
    ),
    "template is disabled": (
        {f"{VENDOR}/p@.service": MULTI,
         f"{WANTS}/p@x.service": SymbolicLink(f"{VENDOR}/p@.service")}, (),
        (unit("p@.service", on=False),), [],
    ),
    "default instance": (
        {f"{VENDOR}/p@.service": install("WantedBy=multi-user.target", "DefaultInstance=one")}, (),
        (unit("p@.service", on=True),), ["p@one multi"],
    ),
    "linked is enabled": (
        {"/opt/a.service": MULTI, f"{ETC}/a.service": SymbolicLink("/opt/a.service")}, (),
        (unit("a.service", on=True),), ["a.service", "a multi"],
    ),
    "linked is disabled": (
        {"/opt/a.service": MULTI, f"{ETC}/a.service": SymbolicLink("/opt/a.service")}, (),
        (unit("a.service", on=False),), [],
    ),
    "alias is disabled": (
        {f"{VENDOR}/a.service": install("WantedBy=multi-user.target", "Alias=al.service"),
         f"{ETC}/al.service": SymbolicLink(f"{VENDOR}/a.service"), **A_LINK}, (),
        (unit("al.service", on=False),), [],
    ),
    "released alias keeps its unit": (
        {f"{VENDOR}/a.service": install("WantedBy=multi-user.target", "Alias=al.service"),
         f"{ETC}/al.service": SymbolicLink(f"{VENDOR}/a.service"), **A_LINK},
        (unit("al.service", d="[Unit]"),), (), ["a multi", "al.service"],
    ),
    "released units": (
        {f"{VENDOR}/b.service": MULTI},
        (unit("a.service", MULTI, on=True), unit("b.service", on=True)), (), [],
    ),
    "unit is masked, then disabled": (
        {f"{VENDOR}/a.service": MULTI, **A_LINK},
        (wanted_state.WantedUnit("a.service", mask=True),),
        (unit("a.service", on=False),), [],
    ),
    "the config disables what an enabled unit names": (
        {f"{VENDOR}/a.service": ALSO, f"{VENDOR}/b.socket": MULTI}, (),
        (unit("a.service", on=True), unit("b.socket", on=False)), ["a multi"],
    ),
    "the config enables what a disabled unit names": (
        {f"{VENDOR}/a.service": ALSO, f"{VENDOR}/b.socket": MULTI, **A_LINK}, (),
        (unit("a.service", on=False), unit("b.socket", on=True)),
        ["multi-user.target.wants/b.socket"],
    ),
    "the config disables what a preset enables": (
        {f"{VENDOR}/a.service": ALSO, f"{VENDOR}/b.socket": MULTI,
         "/usr/lib/systemd/system-preset/1.preset": "enable a.service\n"}, (),
        (unit("a.service"), unit("b.socket", on=False)), ["a multi"],
    ),
    "removed unit leaves enabled what it names": (
        {}, (unit("a.service", ALSO, on=True), unit("b.socket", MULTI, on=True)),
        (unit("b.socket", MULTI, on=True),), ["multi-user.target.wants/b.socket"],
    ),
}  # fmt: skip


def encode(files: Mapping[str, str | FileChange]) -> dict[str, FileChange]:
    return {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}


@pytest.mark.parametrize("case", CASES)
def test_links_are_those_of_the_new_config(case):
    files, old, new, expected = CASES[case]
    machine = MemoryMachine({**PRESETS, **encode(files)})
    machine.carry_out(machine.plan(build(*old)).steps)
    planned = machine.plan(build(*new))
    assert planned.refusals == ()
    machine.carry_out(planned.steps)
    places = {"multi": "multi-user.target.wants", "graphical": "graphical.target.wants"}
    assert sorted(machine.links()) == sorted(
        f"{places[words[1]]}/{words[0]}.service" if words[1:] else words[0]
        for words in map(str.split, expected)
    )
    assert machine.plan(build(*new)).steps == ()


@pytest.mark.parametrize(
    ("files", "units", "refusal"),
    [
        ({f"{VENDOR}/p@.service": MULTI}, (unit("p@.service", on=True),),
         "cannot enable p@.service: it is a template without DefaultInstance="),
        ({}, (unit("p@.service", MULTI, on=True),),
         "cannot enable p@.service: it is a template without DefaultInstance="),
        ({f"{ETC}/a.service": SymbolicLink("/dev/null")}, (unit("a.service", on=True),),
         "cannot enable a.service: it is masked"),
        ({f"{ETC}/al.service": b"x"}, (unit("a.service", install("Alias=al.service"), on=True),),
         f"cannot make the link {ETC}/al.service to {ETC}/a.service: {ETC}/al.service exists"),
        ({}, (unit("a.service", install("WantedBy=everything"), on=True),),
         "cannot enable a.service: everything is no name of a unit"),
        ({}, (unit("a.service", install("Alias=b.socket"), on=True),),
         "cannot enable a.service: b.socket cannot be its alias"),
        ({}, (unit("a.service", ALSO, on=True),
              unit("b.socket", install("WantedBy=x.target", "Also=a.service"), on=False)),
         "cannot enable or disable b.socket: units that name each other"),
        ({f"{VENDOR}/p@.service": MULTI,
          f"{WANTS}/p@x.service": SymbolicLink(f"{VENDOR}/p@.service")},
         (unit("p@.service", on=False), wanted_state.WantedUnit("p@one.service", mask=True)),
         f"cannot disable units: systemctl also removes {ETC}/p@one.service, which the config has"),
    ],
)  # fmt: skip
def test_what_systemctl_refuses_is_known_before_the_update(files, units, refusal):
    planned = MemoryMachine({**PRESETS, **encode(files)}).plan(build(*units))
    assert len(planned.refusals) == 1
    assert str(planned.refusals[0]).startswith(refusal)


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({}, "no such unit on this machine"),
        ({f"{VENDOR}/a.service": SERVICE.encode()},
         "no unit in its [Install] sections"),
        ({f"{VENDOR}/b.service": MULTI.encode(),
          f"{ETC}/a.service": SymbolicLink(f"{VENDOR}/b.service")},
         "an alias of b.service"),
    ],
)  # fmt: skip
def test_enabling_without_effect_is_noted(files, note):
    planned = MemoryMachine({**PRESETS, **files}).plan(build(unit("a.service", on=True)))
    expected = (f"enabling a.service has no effect: {note}",)
    assert (planned.notes, planned.refusals) == (expected, ())
    assert not [step for step in planned.steps if isinstance(step, step_types.EnablementStep)]


def make_config(pick: random.Random) -> wanted_state.WantedState:
    entries = []
    for name in pick.sample(NAMES, k=pick.randrange(5)):
        contents = make_install_section(pick, name) if pick.random() < 0.5 else ""
        dropins = {"d": make_install_section(pick, name)} if pick.random() < 0.3 else {}
        entries.append(unit(name, contents, on=pick.choice((True, True, False, None)), **dropins))
        if pick.random() < 0.1:
            entries[-1] = wanted_state.WantedUnit(name, mask=pick.choice((True, False)))
    if pick.random() < 0.3:
        name = pick.choice(NAMES)
        path = f"{pick.choice((ETC, LOCAL))}/{name}"
        if not any(path == node_paths.unit_path(entry.name) for entry in entries):
            entries.append(file(path, make_install_section(pick, name)))
    return build(*entries)


def test_one_plan_is_enough_for_random_machines_and_configs():
    """A second plan finds nothing to do, or the first one said what systemctl refuses."""
    refused = 0
    for seed in range(300):
        pick = random.Random(seed)
        machine = MemoryMachine(dict(make_unit_set(seed).files))
        for _ in range(3):
            wanted = make_config(pick)
            planned = machine.plan(wanted)
            if planned.refusals:
                refused += 1
                continue
            machine.carry_out(planned.steps)
            assert machine.plan(wanted).steps == (), seed
    assert refused < 300
