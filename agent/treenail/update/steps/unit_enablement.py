"""Plan which units to enable, disable and preset.

The plan follows the unit files through the other steps: a unit, its template or a drop-in may come
from any of them, or leave. The rule is that of `drift_comparison.compare_unit_links`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treenail import errors
from treenail.config import drift_comparison, wanted_state
from treenail.units import unit_files, unit_install
from treenail.update.steps import step_types
from treenail.update.steps.inventory import Inventory, Ownership


@dataclass(frozen=True, slots=True)
class EnablementPlan:
    """The steps before and after those that change files."""

    before: tuple[step_types.EnablementStep, ...]
    after: tuple[step_types.EnablementStep, ...]
    notes: tuple[str, ...]
    refusals: tuple[errors.UnitError, ...]


def plan_enablement(
    old: Ownership,
    new: wanted_state.WantedState,
    inventory: Inventory,
    entry_steps: Iterable[step_types.EntryStep],
    *,
    provided: frozenset[str],
) -> EnablementPlan:
    """Plan the steps for units; ``entry_steps`` change the unit files between them."""
    remaining = {
        name: unit
        for name, unit in new.units.items()
        # A unit that is as the image has it is left to the image.
        if name not in provided or (unit.enabled is not None and name not in inventory.pristine)
    }
    wanted = replace(new, units=remaining)
    units = [unit for unit in wanted.units.values() if not unit.mask]
    released = sorted(old.units.keys() - new.units.keys())
    present = inventory.units.change_files({})
    changes = dict(_list_changes(entry_steps, inventory))
    later = present.change_files(changes)
    states = present.read_states(*released, *(unit.name for unit in units))
    # A unit is disabled before its file changes: systemctl disable reads Also= of the present file,
    # and refuses a unit without a file.
    simulation = _Simulation(present)
    simulation.run(
        step_types.DisableUnits,
        [
            *(name for name in released if states[name] in unit_files.ENABLED),
            *(
                unit.name
                for unit in units
                if states[unit.name] in unit_files.ENABLED
                and _has_stale_links(unit.name, present, later)
            ),
        ],
    )
    before = tuple(simulation.steps)
    simulation = _Simulation(simulation.reader.change_files(changes))
    # The order is that of the MCD, which presets a unit when it writes it, and removed units at the
    # end (update.go).
    simulation.run(
        step_types.PresetUnits,
        [
            unit.name
            for unit in units
            if unit.enabled is None
            and later.find_unit_file(unit.name)
            and (
                old.units.get(unit.name, False) is not None
                or present.read_install(unit.name) != later.read_install(unit.name)
            )
        ],
    )
    simulation.correct_units(wanted, enabled_first=True, with_errors=True)
    simulation.run(
        step_types.PresetUnits,
        [
            name
            for name in released
            if later.find_unit_file(name, search_path=unit_files.VENDOR_SEARCH_PATH)
        ],
    )
    # Also= of one unit may have changed another one against the config.
    simulation.correct_units(wanted, enabled_first=False)
    compared = drift_comparison.compare_unit_links(wanted, simulation.reader)
    return EnablementPlan(
        before,
        tuple(simulation.steps),
        tuple(
            f"enabling {name} has no effect: {unit.obstacle}"
            for name, unit in compared.items()
            if unit.obstacle
        ),
        tuple(_list_refusals(wanted, compared, simulation)),
    )


def _list_changes(
    steps: Iterable[step_types.EntryStep], inventory: Inventory
) -> Iterator[tuple[str, unit_files.FileChange]]:
    """Yield the unit files, drop-ins and links of units that the steps change."""
    for step in steps:
        # Links lead to units in other directories.
        name = step.path.rpartition("/")[2]
        if not (unit_files.is_unit_path(step.path) or unit_install.is_unit_name(name)):
            continue
        match step:
            case step_types.WriteFile(path=path, contents=contents):
                yield (
                    path,
                    contents.encode() if isinstance(contents, str) else contents.decode_bytes(),
                )
            case step_types.MakeLink(path=path, target=target, is_hard=True):
                yield path, inventory.units.files.read_file(target)
            case step_types.MakeLink(path=path, target=target):
                yield path, unit_files.SymbolicLink(target)
            case step_types.RemoveEntry(path=path):
                yield path, None
            case step_types.RestoreEntry(path=path):
                yield path, inventory.restored_units.get(path)
            case _:
                pass


def _has_stale_links(
    name: str, present: unit_files.UnitFileReader, later: unit_files.UnitFileReader
) -> bool:
    """Return whether the present file made links that the later one does not make."""
    if not later.find_unit_file(name):
        return True
    try:
        links = present.plan_enable(name)
        stale = links.made.keys() - later.plan_enable(name).made.keys()
    except errors.UnitError:
        return False
    return bool(stale - set(present.find_missing_links(links)))


_PLANS: dict[
    type[step_types.EnablementStep],
    Callable[[unit_files.UnitFileReader, str], unit_files.UnitLinks],
] = {
    step_types.EnableUnits: unit_files.UnitFileReader.plan_enable,
    step_types.DisableUnits: unit_files.UnitFileReader.plan_disable,
    step_types.PresetUnits: unit_files.UnitFileReader.plan_preset,
}


class _Simulation:
    """The unit files after the steps so far."""

    def __init__(self, reader: unit_files.UnitFileReader) -> None:
        self.reader = reader
        self.steps: list[step_types.EnablementStep] = []
        self.unpredicted: set[str] = set()

    def run(self, step: type[step_types.EnablementStep], names: Sequence[str]) -> None:
        """Add the step for the units, if there are any."""
        if not names:
            return
        self.steps.append(step(tuple(names)))
        for name in names:
            try:
                links = _PLANS[step](self.reader, name)
            except errors.UnitError:
                self.unpredicted.add(name)
                continue
            self.reader = self.reader.change_files(links.as_changes())

    def correct_units(
        self, wanted: wanted_state.WantedState, *, enabled_first: bool, with_errors: bool = False
    ) -> None:
        """Add the steps for units that are not as the config says.

        ``with_errors``: also for those that systemctl refuses, so that its error is reported.
        """
        for is_enabled in (enabled_first, not enabled_first):
            compared = drift_comparison.compare_unit_links(wanted, self.reader)
            names = [
                name
                for name, unit in compared.items()
                if wanted.units[name].enabled is is_enabled
                and (unit.links or (unit.error and with_errors))
            ]
            self.run(step_types.EnableUnits if is_enabled else step_types.DisableUnits, names)


def _list_refusals(
    wanted: wanted_state.WantedState,
    compared: Mapping[str, drift_comparison.UnitLinkComparison],
    simulation: _Simulation,
) -> Iterator[errors.UnitError]:
    """Yield why the steps will fail, or leave units that are not as the config says."""
    yield from (unit.error for unit in compared.values() if unit.error)
    links = [path for path, link in wanted.links.items() if not link.is_hard]
    removed = [
        path
        for path in (*links, *sorted(wanted.list_masks()))
        if unit_files.is_unit_path(path) and simulation.reader.files.read_link(path) is None
    ]
    if removed:
        yield errors.UnitError(
            f"cannot disable units: systemctl also removes {removed[0]}, which the config has",
            remedy="remove it from the MachineConfig, or do not disable its unit or template",
        )
    opposed = sorted(
        name for name, unit in compared.items() if unit.links and name not in simulation.unpredicted
    )
    if opposed:
        yield errors.UnitError(
            f"cannot enable or disable {' and '.join(opposed)}: units that name each other in "
            "Also= are enabled and disabled together",
            remedy="enable or disable both in the MachineConfig",
        )
