"""Plan which units to enable, to disable, and to leave to the presets."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from treenail.config import node_paths, wanted_state
from treenail.update.steps import step_types
from treenail.update.steps.inventory import Inventory, Ownership

_ENABLED = ("enabled", "enabled-runtime")
_ABSENT = ("", "not-found")
_MASKED = ("masked", "masked-runtime")
_NOT_ENABLED = (*_ABSENT, "disabled", *_MASKED)


def plan_enablement(
    old: Ownership,
    new: wanted_state.WantedState,
    inventory: Inventory,
    steps: Sequence[step_types.EntryStep],
    notes: list[str],
    *,
    provided: frozenset[str] = frozenset(),
) -> tuple[list[step_types.EnablementStep], list[step_types.EnablementStep]]:
    """Return the steps before and after ``steps``, which change the unit files."""
    # A unit is disabled before its file changes: systemctl disable removes the links that the
    # [Install] section of the present file names.
    changed_paths = {
        step.path
        for step in steps
        if not isinstance(step, step_types.BackUpEntry | step_types.RelabelEntry)
    }
    removed = {step.path for step in steps if isinstance(step, step_types.RemoveEntry)}
    released = sorted(old.units.keys() - new.units.keys())
    to_disable = [name for name in released if inventory.unit_states.get(name) in _ENABLED]
    planned: list[tuple[type[step_types.EnablementStep], str]] = []
    present: list[wanted_state.WantedUnit] = []
    for unit in new.units.values():
        if unit.mask or (unit.name in provided and _is_left_to_image(unit, inventory)):
            continue
        is_changed = _is_install_changed(unit, changed_paths)
        if is_changed and inventory.unit_states.get(unit.name) in _ENABLED:
            to_disable.append(unit.name)
        if _has_unit(unit, inventory, removed):
            present.append(unit)
            is_unmasked = node_paths.unit_path(unit.name) in changed_paths
            steps_of_unit = _choose_steps(
                unit, old, inventory, is_changed=is_changed, is_unmasked=is_unmasked
            )
            planned += [(step, unit.name) for step in steps_of_unit]
        elif unit.enabled:
            notes.append(f"cannot enable {unit.name}: this machine has no such unit")
    # The order is that of the MCD, which presets a unit when it writes it, and removed units at the
    # end (update.go).
    after = [
        step(units)
        for step in (step_types.PresetUnits, step_types.EnableUnits, step_types.DisableUnits)
        if (units := tuple(name for kind, name in planned if kind is step))
    ]
    if restored := tuple(name for name in released if name in inventory.vendor_units):
        after.append(step_types.PresetUnits(restored))
    before: list[step_types.EnablementStep] = (
        [step_types.DisableUnits(tuple(to_disable))] if to_disable else []
    )
    return before, [*after, *_correct_named_units(present, inventory, [*before, *after])]


def _correct_named_units(
    units: Sequence[wanted_state.WantedUnit],
    inventory: Inventory,
    steps: Sequence[step_types.EnablementStep],
) -> Iterator[step_types.EnablementStep]:
    """Return the steps for units that ``steps`` change against the config by ``Also=``.

    Where an enabled unit names a disabled one and the other way round, the config has no result;
    the check after the update finds that.
    """
    changes = _predict_changes(steps, inventory)
    off = tuple(
        unit.name
        for unit in units
        if unit.enabled is False
        and changes.get(unit.name, False) is not False
        and inventory.unit_states.get(unit.name, "") not in _MASKED
    )
    if off:
        yield step_types.DisableUnits(off)
        changes |= _predict_changes([step_types.DisableUnits(off)], inventory)
    on = tuple(
        unit.name for unit in units if unit.enabled and changes.get(unit.name, True) is not True
    )
    if on:
        yield step_types.EnableUnits(on)


def _predict_changes(
    steps: Iterable[step_types.EnablementStep], inventory: Inventory
) -> dict[str, bool | None]:
    """Return whether each unit that the steps change is enabled afterwards; None for a preset."""
    changes: dict[str, bool | None] = {}
    for step in steps:
        is_enabled = (
            None
            if isinstance(step, step_types.PresetUnits)
            else isinstance(step, step_types.EnableUnits)
        )
        for name in step.units:
            changes |= dict.fromkeys({name, *inventory.named_units.get(name, ())}, is_enabled)
    return changes


def _is_left_to_image(unit: wanted_state.WantedUnit, inventory: Inventory) -> bool:
    return unit.enabled is None or unit.name in inventory.pristine


def _choose_steps(
    unit: wanted_state.WantedUnit,
    old: Ownership,
    inventory: Inventory,
    *,
    is_changed: bool,
    is_unmasked: bool,
) -> Iterator[type[step_types.EnablementStep]]:
    state = inventory.unit_states.get(unit.name, "")
    if unit.enabled is None:
        if is_changed or old.units.get(unit.name, False) is not None:
            yield step_types.PresetUnits
    elif unit.enabled:
        if is_changed or state in _NOT_ENABLED:
            yield step_types.EnableUnits
    elif (
        (state in _ENABLED and not is_changed)
        or (state in _ABSENT and is_changed)
        # Links that enabled the unit before it was masked count again.
        or (state in _MASKED and is_unmasked)
    ):
        yield step_types.DisableUnits


def _has_unit(
    unit: wanted_state.WantedUnit, inventory: Inventory, removed: AbstractSet[str]
) -> bool:
    """Return whether the machine has the unit after the steps."""
    if unit.contents or unit.name in inventory.vendor_units:
        return True
    is_present = inventory.unit_states.get(unit.name, "") not in _ABSENT
    return is_present and node_paths.unit_path(unit.name) not in removed


def _is_install_changed(unit: wanted_state.WantedUnit, changed_paths: AbstractSet[str]) -> bool:
    """Return whether the [Install] section of the unit may have changed."""
    return node_paths.unit_path(unit.name) in changed_paths or any(
        "[Install]" in text and node_paths.dropin_path(unit.name, name) in changed_paths
        for name, text in unit.dropins.items()
    )
