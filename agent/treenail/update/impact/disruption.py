"""What differs, and the policy, to the least disruption that brings it into effect.

In order: nothing < daemon-reload < reload < restart < drain < reboot. Each action stands once, with
all that asks for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from treenail.api.disruptionpolicy import (
    DaemonReloadPolicyAction,
    DisruptionPolicy,
    DrainPolicyAction,
    NonePolicyAction,
    PolicyAction,
    RebootPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
    SpecialPolicyAction,
)
from treenail.config import names
from treenail.config.diff import ConfigDiff, EntryChange, OSAspect
from treenail.config.wanted import WantedFile

CONTAINER_RUNTIME = "crio.service"


class DisruptionLevel(IntEnum):
    """How much an action disturbs what runs on the node."""

    NONE = 0
    DAEMON_RELOAD = 1
    RELOAD = 2
    RESTART = 3
    DRAIN = 4
    REBOOT = 5


@dataclass(frozen=True, slots=True)
class DisruptionReason:
    """What differs, in a word and a name, and the rule that says what it costs."""

    subject: str
    rule: str

    def __str__(self) -> str:
        return f"{self.subject} ({self.rule})"


@dataclass(frozen=True, slots=True)
class DisruptionCost:
    """One action, and everything that asks for it."""

    action: PolicyAction
    reasons: tuple[DisruptionReason, ...]

    @property
    def level(self) -> DisruptionLevel:
        return rank_action(self.action)


@dataclass(frozen=True, slots=True)
class ConfigDisruption:
    """The actions in order, the least first; one who reboots does nothing else."""

    costs: tuple[DisruptionCost, ...] = ()
    harmless: tuple[DisruptionReason, ...] = ()
    """What differs and costs nothing."""

    @property
    def level(self) -> DisruptionLevel:
        return self.costs[-1].level if self.costs else DisruptionLevel.NONE

    @property
    def needs_drain(self) -> bool:
        """The node has to be out of service."""
        return self.level >= DisruptionLevel.DRAIN

    @property
    def needs_reboot(self) -> bool:
        return self.level is DisruptionLevel.REBOOT


def compute_disruption(diff: ConfigDiff, policy: DisruptionPolicy) -> ConfigDisruption:
    """What the difference costs; free when nothing differs or nothing has to notice."""
    asked: dict[PolicyAction, list[DisruptionReason]] = {}
    for action, reason in _find_actions(diff, policy):
        asked.setdefault(action, []).append(reason)
    free = tuple(asked.pop(NonePolicyAction(), ()))
    if RebootPolicyAction() in asked:
        asked = {RebootPolicyAction(): asked[RebootPolicyAction()]}
    costs = [
        DisruptionCost(action, tuple(reasons))
        for action, reasons in asked.items()
        # A restart reads the configuration again, too.
        if not (
            isinstance(action, ReloadPolicyAction) and RestartPolicyAction(action.unit) in asked
        )
    ]
    return ConfigDisruption(tuple(sorted(costs, key=_rank_cost)), free)


def rank_action(action: PolicyAction) -> DisruptionLevel:
    """Where the action stands in the order."""
    match action:
        case NonePolicyAction():
            return DisruptionLevel.NONE
        case DaemonReloadPolicyAction():
            return DisruptionLevel.DAEMON_RELOAD
        case ReloadPolicyAction():
            return DisruptionLevel.RELOAD
        case RestartPolicyAction():
            return DisruptionLevel.RESTART
        case DrainPolicyAction() | SpecialPolicyAction():
            return DisruptionLevel.DRAIN
        case RebootPolicyAction():
            return DisruptionLevel.REBOOT
        case _:
            assert_never(action)


def _rank_cost(cost: DisruptionCost) -> tuple[DisruptionLevel, str]:
    return cost.level, cost.action.unit if isinstance(
        cost.action, ReloadPolicyAction | RestartPolicyAction
    ) else ""


def _find_actions(
    diff: ConfigDiff, policy: DisruptionPolicy
) -> Iterator[tuple[PolicyAction, DisruptionReason]]:
    for change in diff.files:
        yield from _find_path_actions(
            "file", change, policy, is_safe=_is_safe_registries_change(change)
        )
    for directory in diff.directories:
        yield from _find_path_actions("directory", directory, policy, is_safe=False)
    for link in diff.links:
        yield from _find_path_actions("link", link, policy, is_safe=False)
    units = {found.name: found.actions for found in policy.units}
    for unit in diff.units:
        rule = f"policy for {unit.key}" if unit.key in units else "no policy for this unit"
        for action in units.get(unit.key, (RebootPolicyAction(),)):
            yield action, DisruptionReason(f"unit {unit}", rule)
    for user in diff.users:
        for action in policy.ssh_key_actions:
            yield action, DisruptionReason(f"keys or password of {user}", "policy for sshkey")
    for aspect in diff.os:
        # Another image of extensions alone changes nothing that is installed.
        if aspect is not OSAspect.EXTENSIONS_IMAGE:
            yield (
                RebootPolicyAction(),
                DisruptionReason(f"{aspect} changed", "part of the operating system"),
            )


def _find_path_actions(
    kind: str, change: EntryChange[object], policy: DisruptionPolicy, *, is_safe: bool
) -> Iterator[tuple[PolicyAction, DisruptionReason]]:
    """What the policy says whose path is this one, or the closest directory above it."""
    above = [
        found
        for found in policy.files
        if change.key == found.path or change.key.startswith(found.path.rstrip("/") + "/")
    ]
    if not above:
        yield RebootPolicyAction(), DisruptionReason(f"{kind} {change}", "no policy for this path")
        return
    closest = max(above, key=lambda found: len(found.path))
    reason = DisruptionReason(f"{kind} {change}", f"policy for {closest.path}")
    for action in closest.actions:
        if not isinstance(action, SpecialPolicyAction):
            yield action, reason
            continue
        yield ReloadPolicyAction(CONTAINER_RUNTIME), reason
        if not is_safe:
            yield DrainPolicyAction(), reason


def _is_safe_registries_change(change: EntryChange[WantedFile]) -> bool:
    """Whether what runs can go on while the container runtime reads this file again."""
    if change.key != names.REGISTRIES_CONF or change.old is None or change.new is None:
        return False
    from treenail.config import registries  # noqa: PLC0415 - rare, and it needs tomllib

    return registries.is_safe_change(
        change.old.contents.decode_bytes(), change.new.contents.decode_bytes()
    )
