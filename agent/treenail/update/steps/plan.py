"""What belongs to the old config, the new config and what is on disk, to the steps to take.

What is as wanted costs no step, so that a second plan is empty. What the config lets go of comes
back as it was before the config took it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treenail.config import names
from treenail.config.drift import (
    MASK_TARGET,
    ActualEntry,
    Drift,
    DriftAttribute,
    EntryKind,
    ExpectedEntry,
    compare_entry,
    compute_expected_entries,
)
from treenail.config.wanted import ROOT, WantedState
from treenail.update.steps.inventory import ABSENT_ENTRY, Inventory
from treenail.update.steps.ownership import Ownership, compute_ownership
from treenail.update.steps.ssh_keys import plan_core_user
from treenail.update.steps.steps import (
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

_RELEASED = "the config no longer has it"
# Where pull secrets stand: no copy of one outlives its time.
_NEVER_BACKED_UP = names.CREDENTIALS | {"/var/lib/kubelet/config.json"}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps, in order; ``notes`` are what is left out, one sentence each."""

    steps: tuple[ConfigStep, ...] = ()
    notes: tuple[str, ...] = ()


def plan_steps(
    ownership: Ownership, new: WantedState, inventory: Inventory, *, config: str = ""
) -> StepPlan:
    """What brings the machine from what it has to the new config, whose name is ``config``.

    Nothing that runs takes notice yet: that is for `consequences.serving`, once it is known what it
    costs.
    """
    notes: list[str] = []
    now = compute_ownership(config, new)
    cleared, placed = _plan_entries(ownership, now, new, inventory)
    before, after = plan_enablement(ownership, new, inventory, (*cleared, *placed), notes)
    of_users = [*plan_core_user(ownership, new, inventory, notes)]
    steps: list[ConfigStep] = [*before, *cleared, *placed]
    steps += [step for step in of_users if isinstance(step, SetSshKeys)]
    if now != ownership:
        steps.append(RecordOwnership(now))
    steps += after
    steps += [step for step in of_users if isinstance(step, SetPassword)]
    return StepPlan(tuple(steps), tuple(notes))


def _plan_entries(
    old: Ownership, now: Ownership, new: WantedState, seen: Inventory
) -> tuple[list[EntryStep], list[EntryStep]]:
    """What makes room, and what is put there; copies are made before either."""
    owned = {seen.resolve_path(path) for path in (*old.paths, *seen.restorable)}
    kept: list[EntryStep] = []
    cleared: list[EntryStep] = list(_release_entries(old, now, new, seen))
    placed: list[EntryStep] = []
    for entry in _list_entries(new, seen):
        found = seen.entries.get(entry.path, ABSENT_ENTRY)
        if _needs_backup(entry.path, found) and seen.resolve_path(entry.path) not in owned:
            kept.append(BackUpEntry(entry.path))
        if drifts := compare_entry(entry, found):
            step = _make_step(entry, new, drifts)
            (cleared if isinstance(step, RemoveEntry) else placed).append(step)
    written = {step.path for step in placed if isinstance(step, WriteFile | RelabelEntry)}
    for path, link in new.links.items():
        if link.is_hard and (path not in seen.intact_hard_links or link.target in written):
            found = seen.entries.get(path, ABSENT_ENTRY)
            if _needs_backup(path, found) and seen.resolve_path(path) not in owned:
                kept.append(BackUpEntry(path))
            reason = "it is no name of that file"
            placed.append(MakeLink(path, link.target, link.user, link.group, reason, is_hard=True))
    return [*kept, *cleared], placed


def _release_entries(
    old: Ownership, now: Ownership, new: WantedState, seen: Inventory
) -> Iterator[RemoveEntry | RestoreEntry]:
    """What the config no longer has, what is below others before them.

    An entry that it has by another path is not let go of.
    """
    left = {seen.resolve_path(path) for path in now.paths}
    copies = {seen.resolve_path(path): path for path in seen.restorable}
    for path in sorted(old.paths - now.paths, reverse=True):
        entry = seen.resolve_path(path)
        if names.should_outlive_config(path) or entry in left:
            continue
        left.add(entry)
        if entry in copies:
            yield RestoreEntry(copies[entry], _RELEASED)
        elif seen.entries.get(path, ABSENT_ENTRY).kind is not EntryKind.NOTHING:
            yield RemoveEntry(path, _RELEASED)
    for unit in new.units.values():
        path = names.unit_path(unit.name)
        found = seen.entries.get(path, ABSENT_ENTRY)
        masked = found.kind is EntryKind.LINK and found.target == MASK_TARGET
        if unit.mask is False and masked and path not in old.paths:
            yield RemoveEntry(path, "the unit is not to be masked")


def _list_entries(new: WantedState, seen: Inventory) -> Iterator[ExpectedEntry]:
    """What to have at each path, directories first, those above before those below."""
    entries = compute_expected_entries(new).values()
    directories = [entry for entry in entries if entry.kind is EntryKind.DIRECTORY]
    yield from sorted(directories, key=lambda entry: entry.path)
    yield from (entry for entry in entries if entry.kind is not EntryKind.DIRECTORY)
    # Credentials are renewed from elsewhere; here they are only begun with.
    for path in sorted(names.CREDENTIALS & new.files.keys()):
        if seen.entries.get(path, ABSENT_ENTRY).kind is EntryKind.NOTHING:
            file = new.files[path]
            yield ExpectedEntry(
                path, EntryKind.FILE, file.contents, file.mode, file.user, file.group
            )


def _needs_backup(path: str, found: ActualEntry) -> bool:
    return path not in _NEVER_BACKED_UP and found.kind in {
        EntryKind.FILE,
        EntryKind.LINK,
        EntryKind.DIRECTORY,
    }


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
            return RemoveEntry(entry.path, "the config has it empty")


def _format_step_reason(drifts: Iterable[Drift]) -> str:
    """What is not as wanted; contents are only said to be others."""
    return ", ".join(
        "nothing is there"
        if drift.attribute is DriftAttribute.KIND and drift.actual == EntryKind.NOTHING
        else "other contents"
        if drift.attribute is DriftAttribute.CONTENTS
        else f"{drift.attribute} {drift.expected} instead of {drift.actual}"
        for drift in drifts
    )
