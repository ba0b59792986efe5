"""The closed set of steps that change a machine's configuration, and the inverse of each.

A step says itself in a sentence; secrets are in none. An inverse is harmless when its step never
happened: it restores what the undo log knows, and the log knows only what was about to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from treenail.api.contents import Contents
from treenail.config.wanted import ROOT, UserOrGroup
from treenail.update.steps.ownership import Ownership


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Have this file; contents that are a string are written as they are."""

    path: str
    contents: Contents | str = field(repr=False)
    mode: int
    user: UserOrGroup
    group: UserOrGroup
    reason: str

    def __str__(self) -> str:
        return f"write {self.path} {_format_owner(self.mode, self.user, self.group)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str
    mode: int
    user: UserOrGroup
    group: UserOrGroup
    reason: str

    def __str__(self) -> str:
        return f"make directory {self.path} {_format_owner(self.mode, self.user, self.group)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MakeLink:
    """A symbolic link, or another name of the file ``target``."""

    path: str
    target: str
    user: UserOrGroup
    group: UserOrGroup
    reason: str
    is_hard: bool = False

    def __str__(self) -> str:
        from treenail.config.redact import redact_line  # noqa: PLC0415 - slow, and rarely shown

        kind = "hard link" if self.is_hard else "link"
        return f"{kind} {self.path} to {redact_line(self.target)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RelabelEntry:
    """Have what stands there with the SELinux label of the policy; nothing that runs notices."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"relabel {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RemoveEntry:
    """Have nothing there; a directory that is not empty stays."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"remove {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BackUpEntry:
    """Have a copy of what stands there, for the day when the config lets go of the path."""

    path: str

    def __str__(self) -> str:
        return f"keep a copy of {self.path}: the config takes its place"


@dataclass(frozen=True, slots=True)
class RestoreEntry:
    """Have there what was kept, and no copy any more."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"restore {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class EnableUnits:
    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"enable {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class DisableUnits:
    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"disable {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class PresetUnits:
    """Have each unit enabled or disabled as the vendor says."""

    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"preset {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class SetSshKeys:
    """Have these SSH keys, and directories to which only their user can add others."""

    user: str
    keys: tuple[str, ...] = field(repr=False)
    reason: str

    def __str__(self) -> str:
        return f"write {len(self.keys)} SSH keys of {self.user}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SetPassword:
    user: str
    password_hash: str = field(repr=False)
    reason: str

    def __str__(self) -> str:
        return f"set the password of {self.user}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RecordOwnership:
    """Have it written down what belongs to the config."""

    ownership: Ownership

    def __str__(self) -> str:
        return f"remember what belongs to {self.ownership.config or 'the config'}"


@dataclass(frozen=True, slots=True)
class ReloadDaemon:
    """Have systemd read its units again."""

    def __str__(self) -> str:
        return "daemon-reload"


@dataclass(frozen=True, slots=True)
class ReloadUnit:
    unit: str

    def __str__(self) -> str:
        return f"reload {self.unit}"


@dataclass(frozen=True, slots=True)
class RestartUnit:
    unit: str

    def __str__(self) -> str:
        return f"restart {self.unit}"


@dataclass(frozen=True, slots=True)
class UndoEntry:
    """Have at the path what stood there."""

    path: str

    def __str__(self) -> str:
        return f"put back {self.path}"


@dataclass(frozen=True, slots=True)
class UndoEnablement:
    """Have the links that enable units as they were."""

    def __str__(self) -> str:
        return "put back the links that enable units"


@dataclass(frozen=True, slots=True)
class UndoPassword:
    user: str

    def __str__(self) -> str:
        return f"put back the password of {self.user}"


EntryStep = (
    WriteFile | MakeDirectory | MakeLink | RelabelEntry | RemoveEntry | BackUpEntry | RestoreEntry
)
FileStep = EntryStep | SetSshKeys | RecordOwnership
"""Steps that change what stands at paths; many are carried out at once."""
EnablementStep = EnableUnits | DisableUnits | PresetUnits
ServiceStep = ReloadDaemon | ReloadUnit | RestartUnit
"""Steps that what runs takes notice of; undone by doing them again, once the rest is undone."""
ConfigStep = FileStep | EnablementStep | SetPassword | ServiceStep
InverseStep = UndoEntry | UndoEnablement | UndoPassword | ServiceStep


def invert_step(step: ConfigStep) -> InverseStep:
    """The step that undoes it."""
    match step:
        case WriteFile() | MakeDirectory() | MakeLink() | RelabelEntry():
            return UndoEntry(step.path)
        case RemoveEntry() | BackUpEntry() | RestoreEntry():
            return UndoEntry(step.path)
        case SetSshKeys():
            return UndoEntry(f"the SSH keys of {step.user}")
        case RecordOwnership():
            return UndoEntry("the record of what belongs to the config")
        case EnableUnits() | DisableUnits() | PresetUnits():
            return UndoEnablement()
        case SetPassword():
            return UndoPassword(step.user)
        case ReloadDaemon() | ReloadUnit() | RestartUnit():
            return step
        case _:
            assert_never(step)


def list_undo_steps(steps: Sequence[ConfigStep]) -> tuple[InverseStep, ...]:
    """What undoes the steps: the last one first, but what runs takes notice at the end."""
    inverses = [invert_step(step) for step in steps]
    serving = [found for found in inverses if isinstance(found, ServiceStep)]
    others = [found for found in reversed(inverses) if not isinstance(found, ServiceStep)]
    return (*dict.fromkeys(others), *dict.fromkeys(serving))


def _format_owner(mode: int, user: UserOrGroup, group: UserOrGroup) -> str:
    owner = "" if (user, group) == (ROOT, ROOT) else f" {user}:{group}"
    return f"({mode:04o}{owner})"
