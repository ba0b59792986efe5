"""Plan the steps to a new config from what the old config owns and what is on disk.

An entry that is as wanted needs no step, so that a second plan is empty. An entry that the config
no longer has is restored as it was before a config replaced it. The SSH keys and the password of
``core`` are planned here, too: it is the only user that a config may change.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from treenail import observations
from treenail.config import drift_comparison, image_content, node_paths, wanted_state
from treenail.update.steps import step_types
from treenail.update.steps.inventory import (
    KEY_DIRECTORIES,
    Inventory,
    Ownership,
    compute_ownership,
)

_ENABLED = ("enabled", "enabled-runtime")
_ABSENT = ("", "not-found")
_MASKED = ("masked", "masked-runtime")
_NOT_ENABLED = (*_ABSENT, "disabled", *_MASKED)

LOCKED = "*"
"""The password field of a user without a password, as the Machine Config Daemon sets it.

A login by key still works with it.
"""

KEYS_MODE = 0o600
KEY_DIRECTORY_MODE = 0o700


def format_key_file(keys: tuple[str, ...]) -> str:
    """Return the content of the key file, one line for each key."""
    return "".join(f"{key}\n" for key in keys)


def plan_core_user(
    old: Ownership, new: wanted_state.WantedState, inventory: Inventory, notes: list[str]
) -> Iterator[step_types.SetSshKeys | step_types.SetPassword]:
    """Return the steps for ``core``, who loses keys and password if the config no longer has it."""
    notes += [
        f"skipped user {name}: a config can set keys and password of {node_paths.CORE_USER} only"
        for name in new.users
        if name != node_paths.CORE_USER
    ]
    user = new.users.get(node_paths.CORE_USER)
    if user is None and node_paths.CORE_USER not in old.users:
        return
    if not inventory.has_core_user:
        notes.append(
            f"skipped keys and password of {node_paths.CORE_USER}: this machine has no such user"
        )
        return
    keys = user.ssh_keys if user else ()
    reason = "the config no longer has them" if user is None else "keys differ"
    if _has_other_keys(keys, inventory):
        yield step_types.SetSshKeys(node_paths.CORE_USER, keys, reason)
    password = (user.password_hash if user else None) or LOCKED
    # Without a line in the shadow file there is no password to remove.
    present = LOCKED if inventory.password_hash is None else inventory.password_hash
    if password == LOCKED and present.startswith(("*", "!")):
        return
    if password != inventory.password_hash:
        reason = "the config has none" if password == LOCKED else "password differs"
        yield step_types.SetPassword(node_paths.CORE_USER, password, reason)


def _has_other_keys(keys: tuple[str, ...], inventory: Inventory) -> bool:
    key_file = inventory.entries.get(node_paths.AUTHORIZED_KEYS, observations.ABSENT_ENTRY)
    if not keys and key_file.kind is observations.EntryKind.NOTHING:
        return False
    owner = node_paths.CORE_USER
    expected = (
        drift_comparison.ExpectedEntry(
            node_paths.AUTHORIZED_KEYS,
            observations.EntryKind.FILE,
            format_key_file(keys),
            KEYS_MODE,
            owner,
            owner,
        ),
        *(
            drift_comparison.ExpectedEntry(
                path, observations.EntryKind.DIRECTORY, None, KEY_DIRECTORY_MODE, owner, owner
            )
            for path in KEY_DIRECTORIES
        ),
    )
    return any(
        drift_comparison.compare_entry(
            entry, inventory.entries.get(entry.path, observations.ABSENT_ENTRY)
        )
        for entry in expected
    )


_RELEASED = "the config no longer has it"
# Files with pull secrets: a backup would keep a secret after its rotation.
_BACKED_UP_KINDS = frozenset(
    {
        observations.EntryKind.FILE,
        observations.EntryKind.LINK,
        observations.EntryKind.DIRECTORY,
    }
)
_NEVER_BACKED_UP = node_paths.CREDENTIALS | {"/var/lib/kubelet/config.json"}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps, in order; each note is a sentence about something skipped."""

    steps: tuple[step_types.ConfigStep, ...] = ()
    notes: tuple[str, ...] = ()


def plan_steps(
    ownership: Ownership,
    new: wanted_state.WantedState,
    inventory: Inventory,
    *,
    config: str = "",
    provided: frozenset[str] = frozenset(),
) -> StepPlan:
    """Return the steps that bring the machine to the new state, of the config named ``config``.

    What an image has ``provided``, by path and unit, needs a step only where a local change hides
    it: ostree's merge of /etc would keep that change. It does not belong to the config.
    No step makes services notice the change: `plan_service_steps` adds those once the disruption is
    known.
    """
    notes: list[str] = []
    new_ownership = compute_ownership(config, image_content.drop_provided(new, provided))
    cleared, placed = _plan_entries(ownership, new, inventory, provided)
    before, after = _plan_enablement(
        ownership, new, inventory, (*cleared, *placed), notes, provided=provided
    )
    user_steps = [*plan_core_user(ownership, new, inventory, notes)]
    steps: list[step_types.ConfigStep] = [*before, *cleared, *placed]
    steps += [step for step in user_steps if isinstance(step, step_types.SetSshKeys)]
    if new_ownership != ownership:
        steps.append(step_types.RecordOwnership(new_ownership))
    steps += after
    steps += [step for step in user_steps if isinstance(step, step_types.SetPassword)]
    return StepPlan(tuple(steps), tuple(notes))


def _plan_entries(
    old: Ownership, new: wanted_state.WantedState, inventory: Inventory, provided: frozenset[str]
) -> tuple[list[step_types.EntryStep], list[step_types.EntryStep]]:
    """Return the steps that back up and remove entries, and those that create entries."""
    now = compute_ownership("", new)
    owned = {inventory.resolve_path(path) for path in (*old.paths, *inventory.restorable)}
    backups: list[step_types.EntryStep] = []
    cleared: list[step_types.EntryStep] = list(_release_entries(old, now, new, inventory))
    placed: list[step_types.EntryStep] = []
    for entry in _list_entries(new, inventory):
        present = inventory.entries.get(entry.path, observations.ABSENT_ENTRY)
        drifts = drift_comparison.compare_entry(entry, present)
        if entry.path in provided and (not drifts or entry.path in inventory.pristine):
            continue
        if _needs_backup(entry.path, present) and inventory.resolve_path(entry.path) not in owned:
            backups.append(step_types.BackUpEntry(entry.path))
        if drifts:
            step = _make_step(entry, new, drifts)
            (cleared if isinstance(step, step_types.RemoveEntry) else placed).append(step)
    written = {
        step.path
        for step in placed
        if isinstance(step, step_types.WriteFile | step_types.RelabelEntry)
    }
    for path, link in new.links.items():
        if path in provided:
            continue
        if link.is_hard and (path not in inventory.intact_hard_links or link.target in written):
            present = inventory.entries.get(path, observations.ABSENT_ENTRY)
            if _needs_backup(path, present) and inventory.resolve_path(path) not in owned:
                backups.append(step_types.BackUpEntry(path))
            reason = "not a hard link to that file"
            placed.append(
                step_types.MakeLink(path, link.target, link.user, link.group, reason, is_hard=True)
            )
    return [*backups, *cleared], placed


def _release_entries(
    old: Ownership, now: Ownership, new: wanted_state.WantedState, inventory: Inventory
) -> Iterator[step_types.RemoveEntry | step_types.RestoreEntry]:
    """Return the steps for entries that the config no longer has, children before parents.

    An entry that the config has by another path stays.
    """
    handled = {inventory.resolve_path(path) for path in now.paths}
    copies = {inventory.resolve_path(path): path for path in inventory.restorable}
    for path in sorted(old.paths - now.paths, reverse=True):
        entry = inventory.resolve_path(path)
        if node_paths.should_outlive_config(path) or entry in handled:
            continue
        handled.add(entry)
        if entry in copies:
            yield step_types.RestoreEntry(copies[entry], _RELEASED)
        elif (
            inventory.entries.get(path, observations.ABSENT_ENTRY).kind
            is not observations.EntryKind.NOTHING
        ):
            yield step_types.RemoveEntry(path, _RELEASED)
    for unit in new.units.values():
        path = node_paths.unit_path(unit.name)
        present = inventory.entries.get(path, observations.ABSENT_ENTRY)
        is_masked = (
            present.kind is observations.EntryKind.LINK
            and present.target == drift_comparison.MASK_TARGET
        )
        if unit.mask is False and is_masked and path not in old.paths:
            yield step_types.RemoveEntry(path, "the config unmasks the unit")


def _list_entries(
    new: wanted_state.WantedState, inventory: Inventory
) -> Iterator[drift_comparison.ExpectedEntry]:
    """Return the expected entry of each path; directories first, parents before children."""
    entries = drift_comparison.compute_expected_entries(new).values()
    directories = [entry for entry in entries if entry.kind is observations.EntryKind.DIRECTORY]
    yield from sorted(directories, key=lambda entry: entry.path)
    yield from (entry for entry in entries if entry.kind is not observations.EntryKind.DIRECTORY)
    # The agent renews credentials separately; a config only provides the first ones.
    for path in sorted(node_paths.CREDENTIALS & new.files.keys()):
        if (
            inventory.entries.get(path, observations.ABSENT_ENTRY).kind
            is observations.EntryKind.NOTHING
        ):
            file = new.files[path]
            yield drift_comparison.ExpectedEntry(
                path,
                observations.EntryKind.FILE,
                file.contents,
                file.mode,
                file.user,
                file.group,
            )


def _needs_backup(path: str, present: observations.PathEntry) -> bool:
    return path not in _NEVER_BACKED_UP and present.kind in _BACKED_UP_KINDS


def _make_step(
    entry: drift_comparison.ExpectedEntry,
    new: wanted_state.WantedState,
    drifts: Sequence[drift_comparison.Drift],
) -> step_types.EntryStep:
    reason = _format_step_reason(drifts)
    if all(drift.attribute is drift_comparison.DriftAttribute.LABEL for drift in drifts):
        return step_types.RelabelEntry(entry.path, reason)
    user = wanted_state.ROOT if entry.user is None else entry.user
    group = wanted_state.ROOT if entry.group is None else entry.group
    match entry.kind:
        case observations.EntryKind.FILE:
            contents = "" if entry.contents is None else entry.contents
            return step_types.WriteFile(entry.path, contents, entry.mode or 0, user, group, reason)
        case observations.EntryKind.DIRECTORY:
            return step_types.MakeDirectory(entry.path, entry.mode or 0, user, group, reason)
        case observations.EntryKind.LINK:
            link = new.links.get(entry.path)
            if link is not None:
                user, group = link.user, link.group
            return step_types.MakeLink(entry.path, entry.target or "", user, group, reason)
        case observations.EntryKind.NOTHING | observations.EntryKind.OTHER:
            return step_types.RemoveEntry(entry.path, "the config has an empty drop-in")


def _format_step_reason(drifts: Iterable[drift_comparison.Drift]) -> str:
    """Return what differs, without contents."""
    return ", ".join(
        "missing"
        if drift.attribute is drift_comparison.DriftAttribute.KIND
        and drift.actual == observations.EntryKind.NOTHING
        else "contents differ"
        if drift.attribute is drift_comparison.DriftAttribute.CONTENTS
        else f"{drift.attribute} {drift.expected} instead of {drift.actual}"
        for drift in drifts
    )


def _plan_enablement(
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
