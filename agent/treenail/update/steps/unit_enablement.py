"""Which units are enabled, disabled and left to the presets, and what is not to be."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from treenail.config import names
from treenail.config.wanted import Wanted, WantedUnit
from treenail.update.steps.inventory import Seen
from treenail.update.steps.ownership import Managed
from treenail.update.steps.steps import (
    AtPath,
    Disable,
    Enable,
    Enabling,
    Keep,
    Preset,
    Relabel,
    Remove,
)

_ENABLED = ("enabled", "enabled-runtime")
_ABSENT = ("", "not-found")
_NOT_ENABLED = (*_ABSENT, "disabled", "masked", "masked-runtime")


def enablement(
    old: Managed, new: Wanted, seen: Seen, steps: Sequence[AtPath], notes: list[str]
) -> tuple[list[Enabling], list[Enabling]]:
    """What to do before the ``steps`` change the units' files, and what after.

    A unit whose file changes while it is enabled is disabled first, because only the old file says
    which links it has. What is as wanted is left alone.
    """
    touched = {step.path for step in steps if not isinstance(step, Keep | Relabel)}
    removed = {step.path for step in steps if isinstance(step, Remove)}
    gone = sorted(old.units.keys() - new.units.keys())
    first = [name for name in gone if seen.states.get(name) in _ENABLED]
    wishes: list[tuple[type[Enabling], str]] = [
        (Preset, name) for name in gone if name in seen.vendored
    ]
    for unit in new.units.values():
        if unit.mask:
            continue
        changed = _changed(unit, touched)
        if changed and seen.states.get(unit.name) in _ENABLED:
            first.append(unit.name)
        if _there(unit, seen, removed):
            wishes += [(verb, unit.name) for verb in _verbs(unit, old, seen, changed=changed)]
        elif unit.enabled:
            notes.append(f"there is no unit {unit.name} on this machine: it is not enabled")
    after = [
        verb(units)
        for verb in (Enable, Disable, Preset)
        if (units := tuple(name for wish, name in wishes if wish is verb))
    ]
    return [Disable(tuple(first))] if first else [], after


def _verbs(
    unit: WantedUnit, old: Managed, seen: Seen, *, changed: bool
) -> Iterator[type[Enabling]]:
    state = seen.states.get(unit.name, "")
    if unit.enabled is None:
        if changed or old.units.get(unit.name, False) is not None:
            yield Preset
    elif unit.enabled:
        if changed or state in _NOT_ENABLED:
            yield Enable
    elif (state in _ENABLED and not changed) or (state in _ABSENT and changed):
        yield Disable


def _there(unit: WantedUnit, seen: Seen, removed: AbstractSet[str]) -> bool:
    """Whether the machine has the unit once the steps are done."""
    if unit.contents or unit.name in seen.vendored:
        return True
    there = seen.states.get(unit.name, "") not in _ABSENT
    return there and names.unit_path(unit.name) not in removed


def _changed(unit: WantedUnit, touched: AbstractSet[str]) -> bool:
    """Whether what the unit says about its installation may be new."""
    return names.unit_path(unit.name) in touched or any(
        "[Install]" in text and names.dropin_path(unit.name, name) in touched
        for name, text in unit.dropins.items()
    )
