"""Which units are enabled, disabled and left to the presets, and what is not to be."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from treenail.config import names
from treenail.config.wanted import WantedState, WantedUnit
from treenail.update.steps.inventory import Inventory
from treenail.update.steps.ownership import Ownership
from treenail.update.steps.steps import (
    BackUpEntry,
    DisableUnits,
    EnablementStep,
    EnableUnits,
    EntryStep,
    PresetUnits,
    RelabelEntry,
    RemoveEntry,
)

_ENABLED = ("enabled", "enabled-runtime")
_ABSENT = ("", "not-found")
_NOT_ENABLED = (*_ABSENT, "disabled", "masked", "masked-runtime")


def plan_enablement(
    old: Ownership, new: WantedState, seen: Inventory, steps: Sequence[EntryStep], notes: list[str]
) -> tuple[list[EnablementStep], list[EnablementStep]]:
    """What to do before the ``steps`` change the units' files, and what after.

    A unit whose file changes while it is enabled is disabled first, because only the old file says
    which links it has. What is as wanted is left alone.
    """
    touched = {step.path for step in steps if not isinstance(step, BackUpEntry | RelabelEntry)}
    removed = {step.path for step in steps if isinstance(step, RemoveEntry)}
    gone = sorted(old.units.keys() - new.units.keys())
    first = [name for name in gone if seen.unit_states.get(name) in _ENABLED]
    wishes: list[tuple[type[EnablementStep], str]] = [
        (PresetUnits, name) for name in gone if name in seen.vendor_units
    ]
    for unit in new.units.values():
        if unit.mask:
            continue
        changed = _is_install_changed(unit, touched)
        if changed and seen.unit_states.get(unit.name) in _ENABLED:
            first.append(unit.name)
        if _has_unit(unit, seen, removed):
            wishes += [
                (verb, unit.name) for verb in _choose_steps(unit, old, seen, is_changed=changed)
            ]
        elif unit.enabled:
            notes.append(f"there is no unit {unit.name} on this machine: it is not enabled")
    after = [
        verb(units)
        for verb in (EnableUnits, DisableUnits, PresetUnits)
        if (units := tuple(name for wish, name in wishes if wish is verb))
    ]
    return [DisableUnits(tuple(first))] if first else [], after


def _choose_steps(
    unit: WantedUnit, old: Ownership, seen: Inventory, *, is_changed: bool
) -> Iterator[type[EnablementStep]]:
    state = seen.unit_states.get(unit.name, "")
    if unit.enabled is None:
        if is_changed or old.units.get(unit.name, False) is not None:
            yield PresetUnits
    elif unit.enabled:
        if is_changed or state in _NOT_ENABLED:
            yield EnableUnits
    elif (state in _ENABLED and not is_changed) or (state in _ABSENT and is_changed):
        yield DisableUnits


def _has_unit(unit: WantedUnit, seen: Inventory, removed: AbstractSet[str]) -> bool:
    """Whether the machine has the unit once the steps are done."""
    if unit.contents or unit.name in seen.vendor_units:
        return True
    there = seen.unit_states.get(unit.name, "") not in _ABSENT
    return there and names.unit_path(unit.name) not in removed


def _is_install_changed(unit: WantedUnit, touched: AbstractSet[str]) -> bool:
    """Whether what the unit says about its installation may be new."""
    return names.unit_path(unit.name) in touched or any(
        "[Install]" in text and names.dropin_path(unit.name, name) in touched
        for name, text in unit.dropins.items()
    )
