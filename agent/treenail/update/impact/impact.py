"""The impact of an update on its machine, computed before anything changes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    PolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
)
from treenail.codec import key
from treenail.config import node_paths
from treenail.config.diff import ConfigDiff, EntryChange, compare_configs
from treenail.config.wanted import WantedFile, WantedState
from treenail.update.impact.disruption import ConfigDisruption, DisruptionLevel, DisruptionReason
from treenail.update.impact.os_change import NO_OS_CHANGE, OSChange
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

T = TypeVar("T", bound=object)

REASONS_LIMIT = 20


@dataclass(frozen=True, slots=True)
class UpdateImpact:
    """The part of a planned update that decisions depend on; it holds no contents."""

    os: OSChange = field(default=NO_OS_CHANGE, metadata=key(is_required=True))
    needs_write: bool = field(default=False, metadata=key("needsWrite", is_required=True))
    """Files, units or users must be written."""
    level: DisruptionLevel = field(
        default=DisruptionLevel.NONE,
        metadata=key(fallback=DisruptionLevel.REBOOT, is_required=True),
    )
    reasons: tuple[str, ...] = ()
    """The causes of the most disruptive action, at most `REASONS_LIMIT`."""
    checked_id: str = field(default="", metadata=key("checkedID"))
    """The deployment whose image was compared with the config; empty before, and without an image
    beside the config."""
    writes_image_files: bool = field(default=False, metadata=key("writesImageFiles"))
    """In image mode the agent writes the files and units that the image lacks."""

    @property
    def level_name(self) -> str:
        """The level as a word for users."""
        return self.level.name.lower().replace("_", "-")

    @property
    def needs_drain(self) -> bool:
        """The node must be drained."""
        return self.level >= DisruptionLevel.DRAIN

    @property
    def needs_reboot(self) -> bool:
        return self.level is DisruptionLevel.REBOOT


def compute_impact(
    steps: Sequence[ConfigStep],
    change: OSChange,
    disruption: ConfigDisruption,
    find_cause: Callable[[DisruptionReason], object],
) -> UpdateImpact:
    """Return the impact, with the causes of its most disruptive action."""
    gravest = disruption.costs[-1].reasons if disruption.costs else ()
    reasons = tuple(str(find_cause(reason)) for reason in gravest[: REASONS_LIMIT - 1])
    if len(gravest) > len(reasons):
        reasons += (f"and {len(gravest) - len(reasons)} more",)
    return UpdateImpact(os=change, needs_write=bool(steps), level=disruption.level, reasons=reasons)


def compute_differences(
    old: WantedState, new: WantedState, steps: Sequence[ConfigStep], change: OSChange
) -> ConfigDiff:
    """Return the differences between the configs, and of the machine from the new one.

    Of the operating system only ``change`` counts: the rest is booted already.
    """
    configs, machine = compare_configs(old, new), convert_steps_to_diff(new, steps)
    return ConfigDiff(
        files=tuple(_merge_changes(configs.files, machine.files)),
        directories=tuple(_merge_changes(configs.directories, machine.directories)),
        links=tuple(_merge_changes(configs.links, machine.links)),
        units=tuple(_merge_changes(configs.units, machine.units)),
        users=tuple(_merge_changes(configs.users, machine.users)),
        os=change.aspects,
    )


def plan_service_steps(
    steps: Sequence[ConfigStep], actions: Sequence[PolicyAction]
) -> tuple[ConfigStep, ...]:
    """Return the steps that make services notice other steps: the ``actions`` of a policy.

    systemd reloads its units first if one changed.
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
    """Return the steps as differences of configs, to which a disruption policy applies."""
    written = {step.path for step in steps if isinstance(step, WriteFile | RestoreEntry)}
    removed = {step.path for step in steps if isinstance(step, RemoveEntry)}
    links = {step.path for step in steps if isinstance(step, MakeLink)}

    def is_unit_file(path: str) -> bool:
        return _is_unit_path(path) and path not in new.files

    units = {
        *(name for step in steps if isinstance(step, EnablementStep) for name in step.units),
        *(_parse_unit_name(path) for path in written | removed | links if is_unit_file(path)),
    }
    return ConfigDiff(
        files=tuple(
            EntryChange(path, WantedFile(path), None)
            if path in removed
            else EntryChange(path, None, new.files.get(path, WantedFile(path)))
            for path in sorted(written | removed)
            if not is_unit_file(path)
        ),
        directories=tuple(
            EntryChange(step.path, None, new.directories.get(step.path))
            for step in steps
            if isinstance(step, MakeDirectory)
        ),
        links=tuple(
            EntryChange(path, None, new.links.get(path))
            for path in sorted(links)
            if not is_unit_file(path)
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
    return path.startswith(node_paths.UNIT_DIRECTORY + "/")


def _parse_unit_name(path: str) -> str:
    """Return the unit of a unit file or drop-in."""
    return path.removeprefix(node_paths.UNIT_DIRECTORY + "/").partition("/")[0].removesuffix(".d")


def _merge_changes(
    configs: Sequence[EntryChange[T]], machine: Sequence[EntryChange[T]]
) -> Iterator[EntryChange[T]]:
    """Return all changes; one between configs replaces the less precise one of the machine."""
    yield from configs
    known = {change.key for change in configs}
    yield from (change for change in machine if change.key not in known)
