"""What steps are to whatever runs on the machine, and to a disruption policy."""

from collections.abc import Sequence

from treenail.api.disruptionpolicy import Action, DaemonReload, Reload, Restart
from treenail.config import names
from treenail.config.diff import Change, Diff
from treenail.config.wanted import Wanted, WantedFile
from treenail.update.steps.steps import (
    AtPath,
    Enabling,
    Keep,
    MakeDirectory,
    MakeLink,
    Relabel,
    ReloadDaemon,
    ReloadUnit,
    Remove,
    RestartUnit,
    Restore,
    SetKeys,
    SetPassword,
    Step,
    WriteFile,
)


def serving(steps: Sequence[Step], actions: Sequence[Action]) -> tuple[Step, ...]:
    """How what runs takes notice of the steps: the ``actions`` that a disruption policy asks for.

    systemd reads its units again when one of them changed, before any is reloaded or restarted.
    """
    found: list[Step] = []
    if DaemonReload() in actions or any(map(_touches_units, steps)):
        found.append(ReloadDaemon())
    for action in actions:
        if isinstance(action, Reload):
            found.append(ReloadUnit(action.unit))
        elif isinstance(action, Restart):
            found.append(RestartUnit(action.unit))
    return tuple(found)


def as_diff(new: Wanted, steps: Sequence[Step]) -> Diff:
    """The steps as differences between configs, for a disruption policy to say what they cost."""
    written = {step.path for step in steps if isinstance(step, WriteFile | Restore)}
    removed = {step.path for step in steps if isinstance(step, Remove)}
    links = {step.path for step in steps if isinstance(step, MakeLink)}

    def of_unit(path: str) -> bool:
        return _of_unit(path) and path not in new.files

    units = {
        *(name for step in steps if isinstance(step, Enabling) for name in step.units),
        *(_unit_of(path) for path in written | removed | links if of_unit(path)),
    }
    return Diff(
        files=tuple(
            Change(path, WantedFile(path), None)
            if path in removed
            else Change(path, None, new.files.get(path, WantedFile(path)))
            for path in sorted(written | removed)
            if not of_unit(path)
        ),
        directories=tuple(
            Change(step.path, None, new.directories.get(step.path))
            for step in steps
            if isinstance(step, MakeDirectory)
        ),
        links=tuple(
            Change(path, None, new.links.get(path)) for path in sorted(links) if not of_unit(path)
        ),
        units=tuple(Change(name, None, new.units.get(name)) for name in sorted(units)),
        users=tuple(
            Change(name, None, new.users.get(name))
            for name in dict.fromkeys(
                step.user for step in steps if isinstance(step, SetKeys | SetPassword)
            )
        ),
    )


def _touches_units(step: Step) -> bool:
    if isinstance(step, Enabling):
        return True
    return isinstance(step, AtPath) and not isinstance(step, Keep | Relabel) and _of_unit(step.path)


def _of_unit(path: str) -> bool:
    return path.startswith(names.UNITS + "/")


def _unit_of(path: str) -> str:
    """The unit whose file or drop-in is at the path."""
    return path.removeprefix(names.UNITS + "/").partition("/")[0].removesuffix(".d")
