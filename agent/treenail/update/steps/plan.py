"""What belongs to the old config, the new config and what is on disk, to the steps to take.

What is as wanted costs no step, so that a second plan is empty. What the config lets go of comes
back as it was before the config took it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treenail.config import names
from treenail.config.drift import MASK, Attribute, Drift, Expected, Found, Kind, drifted, expected
from treenail.config.wanted import ROOT, Wanted
from treenail.update.steps.inventory import NOT_THERE, Seen
from treenail.update.steps.ownership import Managed, managed
from treenail.update.steps.ssh_keys import logins
from treenail.update.steps.steps import (
    AtPath,
    Keep,
    MakeDirectory,
    MakeLink,
    Relabel,
    Remember,
    Remove,
    Restore,
    SetKeys,
    SetPassword,
    Step,
    WriteFile,
)
from treenail.update.steps.unit_enablement import enablement

_LET_GO = "the config no longer has it"
# Where pull secrets stand: no copy of one outlives its time.
_NEVER_KEPT = names.CREDENTIALS | {"/var/lib/kubelet/config.json"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps, in order; ``notes`` are what is left out, one sentence each."""

    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()


def plan(old: Managed, new: Wanted, seen: Seen, *, config: str = "") -> Plan:
    """What brings the machine from what it has to the new config, whose name is ``config``.

    Nothing that runs takes notice yet: that is for `consequences.serving`, once it is known what it
    costs.
    """
    notes: list[str] = []
    now = managed(config, new)
    cleared, placed = _placing(old, now, new, seen)
    before, after = enablement(old, new, seen, (*cleared, *placed), notes)
    of_users = [*logins(old, new, seen, notes)]
    steps: list[Step] = [*before, *cleared, *placed]
    steps += [step for step in of_users if isinstance(step, SetKeys)]
    if now != old:
        steps.append(Remember(now))
    steps += after
    steps += [step for step in of_users if isinstance(step, SetPassword)]
    return Plan(tuple(steps), tuple(notes))


def _placing(
    old: Managed, now: Managed, new: Wanted, seen: Seen
) -> tuple[list[AtPath], list[AtPath]]:
    """What makes room, and what is put there; copies are made before either."""
    owned = {seen.entry(path) for path in (*old.paths, *seen.kept)}
    kept: list[AtPath] = []
    cleared: list[AtPath] = list(_let_go(old, now, new, seen))
    placed: list[AtPath] = []
    for entry in _entries(new, seen):
        found = seen.found.get(entry.path, NOT_THERE)
        if _to_keep(entry.path, found) and seen.entry(entry.path) not in owned:
            kept.append(Keep(entry.path))
        if drifts := drifted(entry, found):
            step = _step(entry, new, drifts)
            (cleared if isinstance(step, Remove) else placed).append(step)
    written = {step.path for step in placed if isinstance(step, WriteFile | Relabel)}
    for path, link in new.links.items():
        if link.hard and (path not in seen.same_files or link.target in written):
            found = seen.found.get(path, NOT_THERE)
            if _to_keep(path, found) and seen.entry(path) not in owned:
                kept.append(Keep(path))
            reason = "it is no name of that file"
            placed.append(MakeLink(path, link.target, link.user, link.group, reason, hard=True))
    return [*kept, *cleared], placed


def _let_go(old: Managed, now: Managed, new: Wanted, seen: Seen) -> Iterator[Remove | Restore]:
    """What the config no longer has, what is below others before them.

    An entry that it has by another path is not let go of.
    """
    left = {seen.entry(path) for path in now.paths}
    copies = {seen.entry(path): path for path in seen.kept}
    for path in sorted(old.paths - now.paths, reverse=True):
        entry = seen.entry(path)
        if names.outlives_config(path) or entry in left:
            continue
        left.add(entry)
        if entry in copies:
            yield Restore(copies[entry], _LET_GO)
        elif seen.found.get(path, NOT_THERE).kind is not Kind.NOTHING:
            yield Remove(path, _LET_GO)
    for unit in new.units.values():
        path = names.unit_path(unit.name)
        found = seen.found.get(path, NOT_THERE)
        masked = found.kind is Kind.LINK and found.target == MASK
        if unit.mask is False and masked and path not in old.paths:
            yield Remove(path, "the unit is not to be masked")


def _entries(new: Wanted, seen: Seen) -> Iterator[Expected]:
    """What to have at each path, directories first, those above before those below."""
    entries = expected(new).values()
    directories = [entry for entry in entries if entry.kind is Kind.DIRECTORY]
    yield from sorted(directories, key=lambda entry: entry.path)
    yield from (entry for entry in entries if entry.kind is not Kind.DIRECTORY)
    # Credentials are renewed from elsewhere; here they are only begun with.
    for path in sorted(names.CREDENTIALS & new.files.keys()):
        if seen.found.get(path, NOT_THERE).kind is Kind.NOTHING:
            file = new.files[path]
            yield Expected(path, Kind.FILE, file.contents, file.mode, file.user, file.group)


def _to_keep(path: str, found: Found) -> bool:
    return path not in _NEVER_KEPT and found.kind in {Kind.FILE, Kind.LINK, Kind.DIRECTORY}


def _step(entry: Expected, new: Wanted, drifts: Sequence[Drift]) -> AtPath:
    reason = _reason(drifts)
    if all(drift.attribute is Attribute.LABEL for drift in drifts):
        return Relabel(entry.path, reason)
    user = ROOT if entry.user is None else entry.user
    group = ROOT if entry.group is None else entry.group
    match entry.kind:
        case Kind.FILE:
            contents = "" if entry.contents is None else entry.contents
            return WriteFile(entry.path, contents, entry.mode or 0, user, group, reason)
        case Kind.DIRECTORY:
            return MakeDirectory(entry.path, entry.mode or 0, user, group, reason)
        case Kind.LINK:
            link = new.links.get(entry.path)
            if link is not None:
                user, group = link.user, link.group
            return MakeLink(entry.path, entry.target or "", user, group, reason)
        case Kind.NOTHING | Kind.OTHER:
            return Remove(entry.path, "the config has it empty")


def _reason(drifts: Iterable[Drift]) -> str:
    """What is not as wanted; contents are only said to be others."""
    return ", ".join(
        "nothing is there"
        if drift.attribute is Attribute.KIND and drift.actual == Kind.NOTHING
        else "other contents"
        if drift.attribute is Attribute.CONTENTS
        else f"{drift.attribute} {drift.expected} instead of {drift.actual}"
        for drift in drifts
    )
