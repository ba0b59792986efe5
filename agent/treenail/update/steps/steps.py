"""The closed set of steps that change a machine's configuration, and the inverse of each.

A step says itself in a sentence; secrets are in none. An inverse is harmless when its step never
happened: it restores what the undo log knows, and the log knows only what was about to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from treenail.api.contents import Contents
from treenail.config.wanted import ROOT, Who
from treenail.update.steps.ownership import Managed


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Have this file; contents that are a string are written as they are."""

    path: str
    contents: Contents | str = field(repr=False)
    mode: int
    user: Who
    group: Who
    reason: str

    def __str__(self) -> str:
        return f"write {self.path} {_owned(self.mode, self.user, self.group)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str
    mode: int
    user: Who
    group: Who
    reason: str

    def __str__(self) -> str:
        return (
            f"make directory {self.path} {_owned(self.mode, self.user, self.group)}: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class MakeLink:
    """A symbolic link, or another name of the file ``target``."""

    path: str
    target: str
    user: Who
    group: Who
    reason: str
    hard: bool = False

    def __str__(self) -> str:
        from treenail.config.redact import redacted_line  # noqa: PLC0415 - slow, and rarely shown

        kind = "hard link" if self.hard else "link"
        return f"{kind} {self.path} to {redacted_line(self.target)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Relabel:
    """Have what stands there with the SELinux label of the policy; nothing that runs notices."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"relabel {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Remove:
    """Have nothing there; a directory that is not empty stays."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"remove {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Keep:
    """Have a copy of what stands there, for the day when the config lets go of the path."""

    path: str

    def __str__(self) -> str:
        return f"keep a copy of {self.path}: the config takes its place"


@dataclass(frozen=True, slots=True)
class Restore:
    """Have there what was kept, and no copy any more."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"restore {self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Enable:
    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"enable {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class Disable:
    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"disable {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class Preset:
    """Have each unit enabled or disabled as the vendor says."""

    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"preset {', '.join(self.units)}"


@dataclass(frozen=True, slots=True)
class SetKeys:
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
class Remember:
    """Have it written down what belongs to the config."""

    managed: Managed

    def __str__(self) -> str:
        return f"remember what belongs to {self.managed.config or 'the config'}"


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
class PutBack:
    """Have at the path what stood there."""

    path: str

    def __str__(self) -> str:
        return f"put back {self.path}"


@dataclass(frozen=True, slots=True)
class PutLinksBack:
    """Have the links that enable units as they were."""

    def __str__(self) -> str:
        return "put back the links that enable units"


@dataclass(frozen=True, slots=True)
class PutPasswordBack:
    user: str

    def __str__(self) -> str:
        return f"put back the password of {self.user}"


AtPath = WriteFile | MakeDirectory | MakeLink | Relabel | Remove | Keep | Restore
Placing = AtPath | SetKeys | Remember
"""Steps that change what stands at paths; many are carried out at once."""
Enabling = Enable | Disable | Preset
Serving = ReloadDaemon | ReloadUnit | RestartUnit
"""Steps that what runs takes notice of; undone by doing them again, once the rest is undone."""
Step = Placing | Enabling | SetPassword | Serving
Inverse = PutBack | PutLinksBack | PutPasswordBack | Serving


def inverse(step: Step) -> Inverse:
    """The step that undoes it."""
    match step:
        case WriteFile() | MakeDirectory() | MakeLink() | Relabel():
            return PutBack(step.path)
        case Remove() | Keep() | Restore():
            return PutBack(step.path)
        case SetKeys():
            return PutBack(f"the SSH keys of {step.user}")
        case Remember():
            return PutBack("the record of what belongs to the config")
        case Enable() | Disable() | Preset():
            return PutLinksBack()
        case SetPassword():
            return PutPasswordBack(step.user)
        case ReloadDaemon() | ReloadUnit() | RestartUnit():
            return step
        case _:
            assert_never(step)


def undoing(steps: Sequence[Step]) -> tuple[Inverse, ...]:
    """What undoes the steps: the last one first, but what runs takes notice at the end."""
    inverses = [inverse(step) for step in steps]
    serving = [found for found in inverses if isinstance(found, Serving)]
    others = [found for found in reversed(inverses) if not isinstance(found, Serving)]
    return (*dict.fromkeys(others), *dict.fromkeys(serving))


def _owned(mode: int, user: Who, group: Who) -> str:
    owner = "" if (user, group) == (ROOT, ROOT) else f" {user}:{group}"
    return f"({mode:04o}{owner})"
