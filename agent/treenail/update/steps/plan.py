"""Plan the steps to a new config from what the old config owns and what is on disk.

An entry that is as wanted needs no step, so that a second plan is empty. An entry that the config
no longer has is restored as it was before a config replaced it. The SSH keys and the password of
``core`` are planned here, too: it is the only user that a config may change.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treenail.config import node_paths
from treenail.config.drift_comparison import (
    MASK_TARGET,
    ActualEntry,
    Drift,
    DriftAttribute,
    EntryKind,
    ExpectedEntry,
    compare_entry,
    compute_expected_entries,
)
from treenail.config.image_content import drop_provided
from treenail.config.wanted_state import ROOT, WantedState
from treenail.update.steps.inventory import (
    ABSENT_ENTRY,
    KEY_DIRECTORIES,
    Inventory,
    Ownership,
    compute_ownership,
)
from treenail.update.steps.step_types import (
    BackUpEntry,
    ConfigStep,
    EntryStep,
    MakeDirectory,
    MakeLink,
    RecordOwnership,
    RelabelEntry,
    RemoveEntry,
    RestoreEntry,
    SetPassword,
    SetSshKeys,
    WriteFile,
)
from treenail.update.steps.unit_enablement import plan_enablement

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
    old: Ownership, new: WantedState, inventory: Inventory, notes: list[str]
) -> Iterator[SetSshKeys | SetPassword]:
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
        yield SetSshKeys(node_paths.CORE_USER, keys, reason)
    password = (user.password_hash if user else None) or LOCKED
    # Without a line in the shadow file there is no password to remove.
    present = LOCKED if inventory.password_hash is None else inventory.password_hash
    if password == LOCKED and present.startswith(("*", "!")):
        return
    if password != inventory.password_hash:
        reason = "the config has none" if password == LOCKED else "password differs"
        yield SetPassword(node_paths.CORE_USER, password, reason)


def _has_other_keys(keys: tuple[str, ...], inventory: Inventory) -> bool:
    key_file = inventory.entries.get(node_paths.AUTHORIZED_KEYS, ABSENT_ENTRY)
    if not keys and key_file.kind is EntryKind.NOTHING:
        return False
    owner = node_paths.CORE_USER
    expected = (
        ExpectedEntry(
            node_paths.AUTHORIZED_KEYS,
            EntryKind.FILE,
            format_key_file(keys),
            KEYS_MODE,
            owner,
            owner,
        ),
        *(
            ExpectedEntry(path, EntryKind.DIRECTORY, None, KEY_DIRECTORY_MODE, owner, owner)
            for path in KEY_DIRECTORIES
        ),
    )
    return any(
        compare_entry(entry, inventory.entries.get(entry.path, ABSENT_ENTRY)) for entry in expected
    )


_RELEASED = "the config no longer has it"
# Files with pull secrets: a backup would keep a secret after its rotation.
_BACKED_UP_KINDS = frozenset({EntryKind.FILE, EntryKind.LINK, EntryKind.DIRECTORY})
_NEVER_BACKED_UP = node_paths.CREDENTIALS | {"/var/lib/kubelet/config.json"}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps, in order; each note is a sentence about something skipped."""

    steps: tuple[ConfigStep, ...] = ()
    notes: tuple[str, ...] = ()


def plan_steps(
    ownership: Ownership,
    new: WantedState,
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
    new_ownership = compute_ownership(config, drop_provided(new, provided))
    cleared, placed = _plan_entries(ownership, new, inventory, provided)
    before, after = plan_enablement(
        ownership, new, inventory, (*cleared, *placed), notes, provided=provided
    )
    user_steps = [*plan_core_user(ownership, new, inventory, notes)]
    steps: list[ConfigStep] = [*before, *cleared, *placed]
    steps += [step for step in user_steps if isinstance(step, SetSshKeys)]
    if new_ownership != ownership:
        steps.append(RecordOwnership(new_ownership))
    steps += after
    steps += [step for step in user_steps if isinstance(step, SetPassword)]
    return StepPlan(tuple(steps), tuple(notes))


def _plan_entries(
    old: Ownership, new: WantedState, inventory: Inventory, provided: frozenset[str]
) -> tuple[list[EntryStep], list[EntryStep]]:
    """Return the steps that back up and remove entries, and those that create entries."""
    now = compute_ownership("", new)
    owned = {inventory.resolve_path(path) for path in (*old.paths, *inventory.restorable)}
    backups: list[EntryStep] = []
    cleared: list[EntryStep] = list(_release_entries(old, now, new, inventory))
    placed: list[EntryStep] = []
    for entry in _list_entries(new, inventory):
        found = inventory.entries.get(entry.path, ABSENT_ENTRY)
        drifts = compare_entry(entry, found)
        if entry.path in provided and (not drifts or entry.path in inventory.pristine):
            continue
        if _needs_backup(entry.path, found) and inventory.resolve_path(entry.path) not in owned:
            backups.append(BackUpEntry(entry.path))
        if drifts:
            step = _make_step(entry, new, drifts)
            (cleared if isinstance(step, RemoveEntry) else placed).append(step)
    written = {step.path for step in placed if isinstance(step, WriteFile | RelabelEntry)}
    for path, link in new.links.items():
        if path in provided:
            continue
        if link.is_hard and (path not in inventory.intact_hard_links or link.target in written):
            found = inventory.entries.get(path, ABSENT_ENTRY)
            if _needs_backup(path, found) and inventory.resolve_path(path) not in owned:
                backups.append(BackUpEntry(path))
            reason = "not a hard link to that file"
            placed.append(MakeLink(path, link.target, link.user, link.group, reason, is_hard=True))
    return [*backups, *cleared], placed


def _release_entries(
    old: Ownership, now: Ownership, new: WantedState, inventory: Inventory
) -> Iterator[RemoveEntry | RestoreEntry]:
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
            yield RestoreEntry(copies[entry], _RELEASED)
        elif inventory.entries.get(path, ABSENT_ENTRY).kind is not EntryKind.NOTHING:
            yield RemoveEntry(path, _RELEASED)
    for unit in new.units.values():
        path = node_paths.unit_path(unit.name)
        found = inventory.entries.get(path, ABSENT_ENTRY)
        is_masked = found.kind is EntryKind.LINK and found.target == MASK_TARGET
        if unit.mask is False and is_masked and path not in old.paths:
            yield RemoveEntry(path, "the config unmasks the unit")


def _list_entries(new: WantedState, inventory: Inventory) -> Iterator[ExpectedEntry]:
    """Return the expected entry of each path; directories first, parents before children."""
    entries = compute_expected_entries(new).values()
    directories = [entry for entry in entries if entry.kind is EntryKind.DIRECTORY]
    yield from sorted(directories, key=lambda entry: entry.path)
    yield from (entry for entry in entries if entry.kind is not EntryKind.DIRECTORY)
    # The agent renews credentials separately; a config only provides the first ones.
    for path in sorted(node_paths.CREDENTIALS & new.files.keys()):
        if inventory.entries.get(path, ABSENT_ENTRY).kind is EntryKind.NOTHING:
            file = new.files[path]
            yield ExpectedEntry(
                path, EntryKind.FILE, file.contents, file.mode, file.user, file.group
            )


def _needs_backup(path: str, found: ActualEntry) -> bool:
    return path not in _NEVER_BACKED_UP and found.kind in _BACKED_UP_KINDS


def _make_step(entry: ExpectedEntry, new: WantedState, drifts: Sequence[Drift]) -> EntryStep:
    reason = _format_step_reason(drifts)
    if all(drift.attribute is DriftAttribute.LABEL for drift in drifts):
        return RelabelEntry(entry.path, reason)
    user = ROOT if entry.user is None else entry.user
    group = ROOT if entry.group is None else entry.group
    match entry.kind:
        case EntryKind.FILE:
            contents = "" if entry.contents is None else entry.contents
            return WriteFile(entry.path, contents, entry.mode or 0, user, group, reason)
        case EntryKind.DIRECTORY:
            return MakeDirectory(entry.path, entry.mode or 0, user, group, reason)
        case EntryKind.LINK:
            link = new.links.get(entry.path)
            if link is not None:
                user, group = link.user, link.group
            return MakeLink(entry.path, entry.target or "", user, group, reason)
        case EntryKind.NOTHING | EntryKind.OTHER:
            return RemoveEntry(entry.path, "the config has an empty drop-in")


def _format_step_reason(drifts: Iterable[Drift]) -> str:
    """Return what differs, without contents."""
    return ", ".join(
        "missing"
        if drift.attribute is DriftAttribute.KIND and drift.actual == EntryKind.NOTHING
        else "contents differ"
        if drift.attribute is DriftAttribute.CONTENTS
        else f"{drift.attribute} {drift.expected} instead of {drift.actual}"
        for drift in drifts
    )
