"""Plan the steps to a new config from what the old config owns and what is on disk.

An entry that is as wanted needs no step, so that a second plan is empty. An entry that the config
no longer has is restored as it was before a config replaced it. The SSH keys and the password of
``core`` are planned here, too: it is the only user that a config may change.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treenail import errors, observations
from treenail.config import drift_comparison, image_content, node_paths, wanted_state
from treenail.update.steps import step_types, unit_enablement
from treenail.update.steps.inventory import (
    KEY_DIRECTORIES,
    Inventory,
    Ownership,
    compute_ownership,
)

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
    key_file = inventory.get_entry(node_paths.AUTHORIZED_KEYS)
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
        drift_comparison.compare_entry(entry, inventory.get_entry(entry.path)) for entry in expected
    )


_RELEASED = "the config no longer has it"
# Files with pull secrets: a backup would keep a secret after its rotation.
_NEVER_BACKED_UP = node_paths.CREDENTIALS | {"/var/lib/kubelet/config.json"}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps, in order; each note is a sentence about something skipped."""

    steps: tuple[step_types.ConfigStep, ...] = ()
    notes: tuple[str, ...] = ()
    refusals: tuple[errors.UnitError, ...] = ()
    """Why systemctl will refuse steps."""


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
    new_ownership = compute_ownership(config, image_content.drop_provided(new, provided))
    cleared, placed = _plan_entries(ownership, new, inventory, provided)
    enablement = unit_enablement.plan_enablement(
        ownership, new, inventory, (*cleared, *placed), provided=provided
    )
    notes = [*enablement.notes]
    user_steps = [*plan_core_user(ownership, new, inventory, notes)]
    steps: list[step_types.ConfigStep] = [*enablement.before, *cleared, *placed]
    steps += [step for step in user_steps if isinstance(step, step_types.SetSshKeys)]
    if new_ownership != ownership:
        steps.append(step_types.RecordOwnership(new_ownership))
    steps += enablement.after
    steps += [step for step in user_steps if isinstance(step, step_types.SetPassword)]
    return StepPlan(tuple(steps), tuple(notes), enablement.refusals)


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
        present = inventory.get_entry(entry.path)
        drifts = drift_comparison.compare_entry(entry, present)
        if entry.path in provided and (not drifts or entry.path in inventory.pristine):
            continue
        if _needs_backup(entry.path, inventory, owned):
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
            if _needs_backup(path, inventory, owned):
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
        elif inventory.get_entry(path).kind is not observations.EntryKind.NOTHING:
            yield step_types.RemoveEntry(path, _RELEASED)
    for unit in new.units.values():
        path = node_paths.unit_path(unit.name)
        present = inventory.get_entry(path)
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
        if inventory.get_entry(path).kind is observations.EntryKind.NOTHING:
            yield drift_comparison.expect_file(new.files[path])


def _needs_backup(path: str, inventory: Inventory, owned: set[str]) -> bool:
    if path in _NEVER_BACKED_UP or inventory.resolve_path(path) in owned:
        return False
    kind = inventory.get_entry(path).kind
    return kind not in {observations.EntryKind.NOTHING, observations.EntryKind.OTHER}


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
