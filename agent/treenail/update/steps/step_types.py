"""The steps that change a machine's configuration, and the inverse of each.

``str(step)`` is its text for users, without secrets. An inverse is harmless if its step did not
run: it restores only what the undo log recorded right before a change.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from treenail.api.ignition.model import Contents
from treenail.config import wanted_state
from treenail.update.steps.inventory import Ownership


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write a file; contents of type ``str`` need no decoding."""

    path: str
    contents: Contents | str = field(repr=False)
    mode: int
    user: wanted_state.UserOrGroup
    group: wanted_state.UserOrGroup
    reason: str

    def __str__(self) -> str:
        return f"write {self.path} {_format_owner(self.mode, self.user, self.group)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str
    mode: int
    user: wanted_state.UserOrGroup
    group: wanted_state.UserOrGroup
    reason: str

    def __str__(self) -> str:
        owner = _format_owner(self.mode, self.user, self.group)
        return f"make directory {self.path} {owner}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MakeLink:
    """Make a symbolic link, or a hard link to the file ``target``."""

    path: str
    target: str
    user: wanted_state.UserOrGroup
    group: wanted_state.UserOrGroup
    reason: str
    is_hard: bool = False

    def __str__(self) -> str:
        from treenail.config.redact import redact_line  # noqa: PLC0415 - slow, and rarely shown

        kind = "hard link" if self.is_hard else "link"
        return f"{kind} {self.path} to {redact_line(self.target)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RelabelEntry:
    """Set the SELinux label that the machine's policy assigns to the path."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"relabel {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RemoveEntry:
    """Remove the entry at a path, but not a directory with entries."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"remove {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BackUpEntry:
    """Copy the entry at a path, to restore it once the config no longer has the path."""

    path: str

    def __str__(self) -> str:
        return f"back up {self.path}: the config replaces it"


@dataclass(frozen=True, slots=True)
class RestoreEntry:
    """Restore the backup of a path, and remove the backup."""

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
    """Enable or disable each unit by the vendor's presets."""

    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"preset {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class SetSshKeys:
    """Write the SSH keys of a user, in directories that only this user can write to."""

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
    """Record which paths, units and users belong to the config."""

    ownership: Ownership

    def __str__(self) -> str:
        return f"record what belongs to {self.ownership.config or 'the config'}"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Store the config itself, to compare the machine with it later."""

    path: str
    encode: Callable[[], Iterable[bytes]] = field(repr=False)
    """Returns the content in parts: a config may be large."""

    def __str__(self) -> str:
        return f"store the config in {self.path}"


@dataclass(frozen=True, slots=True)
class ReloadDaemon:
    """Make systemd reload its units."""

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
    """Restore the entry that was at a path."""

    path: str

    def __str__(self) -> str:
        return f"undo the change of {self.path}"


@dataclass(frozen=True, slots=True)
class UndoEnablement:
    """Restore the links that enable units."""

    def __str__(self) -> str:
        return "undo the change of the links that enable units"


@dataclass(frozen=True, slots=True)
class UndoPassword:
    user: str

    def __str__(self) -> str:
        return f"undo the change of the password of {self.user}"


EntryStep = (
    WriteFile | MakeDirectory | MakeLink | RelabelEntry | RemoveEntry | BackUpEntry | RestoreEntry
)
FileStep = EntryStep | SetSshKeys | RecordOwnership | StoreConfig
"""Steps that change entries at paths; many run in one transaction."""
EnablementStep = EnableUnits | DisableUnits | PresetUnits
ServiceStep = ReloadDaemon | ReloadUnit | RestartUnit
"""Steps that make services notice a change. To undo them, run them again after all other undos."""
ConfigStep = FileStep | EnablementStep | SetPassword | ServiceStep
InverseStep = UndoEntry | UndoEnablement | UndoPassword | ServiceStep


def invert_step(step: ConfigStep) -> InverseStep:
    """Return the step that undoes a step."""
    match step:
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
            return UndoEntry(step.path)


def list_undo_steps(steps: Sequence[ConfigStep]) -> tuple[InverseStep, ...]:
    """Return the steps that undo all steps: the last one first, services at the end."""
    inverses = [invert_step(step) for step in steps]
    services = [inverse for inverse in inverses if isinstance(inverse, ServiceStep)]
    others = [inverse for inverse in reversed(inverses) if not isinstance(inverse, ServiceStep)]
    return (*dict.fromkeys(others), *dict.fromkeys(services))


def _format_owner(
    mode: int, user: wanted_state.UserOrGroup, group: wanted_state.UserOrGroup
) -> str:
    owner = "" if (user, group) == (wanted_state.ROOT, wanted_state.ROOT) else f" {user}:{group}"
    return f"({mode:04o}{owner})"
