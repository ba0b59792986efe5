"""What differs, and the policy, to the least disruption that brings it into effect.

In order: nothing < daemon-reload < reload < restart < drain < reboot. Each action stands once, with
all that asks for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from treenail.api.disruptionpolicy import (
    Action,
    DaemonReload,
    DisruptionPolicy,
    Drain,
    Nothing,
    Reboot,
    Reload,
    Restart,
    Special,
)
from treenail.config import names
from treenail.config.diff import Aspect, Change, Diff
from treenail.config.wanted import WantedFile

CONTAINER_RUNTIME = "crio.service"


class Level(IntEnum):
    """How much an action disturbs what runs on the node."""

    NONE = 0
    DAEMON_RELOAD = 1
    RELOAD = 2
    RESTART = 3
    DRAIN = 4
    REBOOT = 5


@dataclass(frozen=True, slots=True)
class Reason:
    """What differs, in a word and a name, and the rule that says what it costs."""

    subject: str
    rule: str

    def __str__(self) -> str:
        return f"{self.subject} ({self.rule})"


@dataclass(frozen=True, slots=True)
class Cost:
    """One action, and everything that asks for it."""

    action: Action
    reasons: tuple[Reason, ...]

    @property
    def level(self) -> Level:
        return level(self.action)


@dataclass(frozen=True, slots=True)
class Disruption:
    """The actions in order, the least first; one who reboots does nothing else."""

    costs: tuple[Cost, ...] = ()
    free: tuple[Reason, ...] = ()
    """What differs and costs nothing."""

    @property
    def level(self) -> Level:
        return self.costs[-1].level if self.costs else Level.NONE

    @property
    def drains(self) -> bool:
        """The node has to be out of service."""
        return self.level >= Level.DRAIN

    @property
    def reboots(self) -> bool:
        return self.level is Level.REBOOT


def disruption(diff: Diff, policy: DisruptionPolicy) -> Disruption:
    """What the difference costs; free when nothing differs or nothing has to notice."""
    asked: dict[Action, list[Reason]] = {}
    for action, reason in _asked(diff, policy):
        asked.setdefault(action, []).append(reason)
    free = tuple(asked.pop(Nothing(), ()))
    if Reboot() in asked:
        asked = {Reboot(): asked[Reboot()]}
    costs = [
        Cost(action, tuple(reasons))
        for action, reasons in asked.items()
        # A restart reads the configuration again, too.
        if not (isinstance(action, Reload) and Restart(action.unit) in asked)
    ]
    return Disruption(tuple(sorted(costs, key=_rank)), free)


def level(action: Action) -> Level:
    """Where the action stands in the order."""
    match action:
        case Nothing():
            return Level.NONE
        case DaemonReload():
            return Level.DAEMON_RELOAD
        case Reload():
            return Level.RELOAD
        case Restart():
            return Level.RESTART
        case Drain() | Special():
            return Level.DRAIN
        case Reboot():
            return Level.REBOOT
        case _:
            assert_never(action)


def _rank(cost: Cost) -> tuple[Level, str]:
    return cost.level, cost.action.unit if isinstance(cost.action, Reload | Restart) else ""


def _asked(diff: Diff, policy: DisruptionPolicy) -> Iterator[tuple[Action, Reason]]:
    for change in diff.files:
        yield from _by_path("file", change, policy, safe=_safe(change))
    for directory in diff.directories:
        yield from _by_path("directory", directory, policy, safe=False)
    for link in diff.links:
        yield from _by_path("link", link, policy, safe=False)
    units = {found.name: found.actions for found in policy.units}
    for unit in diff.units:
        rule = f"policy for {unit.key}" if unit.key in units else "no policy for this unit"
        for action in units.get(unit.key, (Reboot(),)):
            yield action, Reason(f"unit {unit}", rule)
    for user in diff.users:
        for action in policy.logins:
            yield action, Reason(f"keys or password of {user}", "policy for sshkey")
    for aspect in diff.os:
        # Another image of extensions alone changes nothing that is installed.
        if aspect is not Aspect.EXTENSIONS_IMAGE:
            yield Reboot(), Reason(f"{aspect} changed", "part of the operating system")


def _by_path(
    kind: str, change: Change[object], policy: DisruptionPolicy, *, safe: bool
) -> Iterator[tuple[Action, Reason]]:
    """What the policy says whose path is this one, or the closest directory above it."""
    above = [
        found
        for found in policy.files
        if change.key == found.path or change.key.startswith(found.path.rstrip("/") + "/")
    ]
    if not above:
        yield Reboot(), Reason(f"{kind} {change}", "no policy for this path")
        return
    closest = max(above, key=lambda found: len(found.path))
    reason = Reason(f"{kind} {change}", f"policy for {closest.path}")
    for action in closest.actions:
        if not isinstance(action, Special):
            yield action, reason
            continue
        yield Reload(CONTAINER_RUNTIME), reason
        if not safe:
            yield Drain(), reason


def _safe(change: Change[WantedFile]) -> bool:
    """Whether what runs can go on while the container runtime reads this file again."""
    if change.key != names.REGISTRIES_CONF or change.old is None or change.new is None:
        return False
    from treenail.config import registries  # noqa: PLC0415 - rare, and it needs tomllib

    return registries.safe_change(change.old.contents.decode(), change.new.contents.decode())
