"""What steps are to whatever runs on the machine, and to a disruption policy."""

from collections.abc import Sequence

from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    PolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
)
from treenail.config import names
from treenail.config.diff import ConfigDiff, EntryChange
from treenail.config.wanted import WantedFile, WantedState
from treenail.update.steps.steps import (
    BackUpEntry,
    ConfigStep,
    EnablementStep,
    EntryStep,
    MakeDirectory,
    MakeLink,
    RelabelEntry,
    ReloadDaemon,
    ReloadUnit,
    RemoveEntry,
    RestartUnit,
    RestoreEntry,
    SetPassword,
    SetSshKeys,
    WriteFile,
)


def plan_service_steps(
    steps: Sequence[ConfigStep], actions: Sequence[PolicyAction]
) -> tuple[ConfigStep, ...]:
    """How what runs takes notice of the steps: the ``actions`` that a disruption policy asks for.

    systemd reads its units again when one of them changed, before any is reloaded or restarted.
    """
    found: list[ConfigStep] = []
    if DaemonReloadPolicyAction() in actions or any(map(_is_unit_step, steps)):
        found.append(ReloadDaemon())
    for action in actions:
        if isinstance(action, ReloadPolicyAction):
            found.append(ReloadUnit(action.unit))
        elif isinstance(action, RestartPolicyAction):
            found.append(RestartUnit(action.unit))
    return tuple(found)


def convert_steps_to_diff(new: WantedState, steps: Sequence[ConfigStep]) -> ConfigDiff:
    """The steps as differences between configs, for a disruption policy to say what they cost."""
    written = {step.path for step in steps if isinstance(step, WriteFile | RestoreEntry)}
    removed = {step.path for step in steps if isinstance(step, RemoveEntry)}
    links = {step.path for step in steps if isinstance(step, MakeLink)}

    def of_unit(path: str) -> bool:
        return _is_unit_path(path) and path not in new.files

    units = {
        *(name for step in steps if isinstance(step, EnablementStep) for name in step.units),
        *(_parse_unit_name(path) for path in written | removed | links if of_unit(path)),
    }
    return ConfigDiff(
        files=tuple(
            EntryChange(path, WantedFile(path), None)
            if path in removed
            else EntryChange(path, None, new.files.get(path, WantedFile(path)))
            for path in sorted(written | removed)
            if not of_unit(path)
        ),
        directories=tuple(
            EntryChange(step.path, None, new.directories.get(step.path))
            for step in steps
            if isinstance(step, MakeDirectory)
        ),
        links=tuple(
            EntryChange(path, None, new.links.get(path))
            for path in sorted(links)
            if not of_unit(path)
        ),
        units=tuple(EntryChange(name, None, new.units.get(name)) for name in sorted(units)),
        users=tuple(
            EntryChange(name, None, new.users.get(name))
            for name in dict.fromkeys(
                step.user for step in steps if isinstance(step, SetSshKeys | SetPassword)
            )
        ),
    )


def _is_unit_step(step: ConfigStep) -> bool:
    if isinstance(step, EnablementStep):
        return True
    return (
        isinstance(step, EntryStep)
        and not isinstance(step, BackUpEntry | RelabelEntry)
        and _is_unit_path(step.path)
    )


def _is_unit_path(path: str) -> bool:
    return path.startswith(names.UNIT_DIRECTORY + "/")


def _parse_unit_name(path: str) -> str:
    """The unit whose file or drop-in is at the path."""
    return path.removeprefix(names.UNIT_DIRECTORY + "/").partition("/")[0].removesuffix(".d")
