"""What one node state to another costs, why, and which MachineConfig asks for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import Aspect, Diff, diff
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.config.wanted import Wanted, wanted
from treenail.controllers.rollout.gate import OS_IMAGE
from treenail.controllers.rollout.nodes import Target
from treenail.errors import ConfigError
from treenail.update.disruption import Reason, disruption


@dataclass(frozen=True, slots=True)
class Because:
    """One thing that differs, the rule for it, and who brought it."""

    subject: str
    rule: str
    source: str


@dataclass(frozen=True, slots=True)
class Step:
    """One action and everything that asks for it."""

    action: str
    reasons: tuple[Because, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to nodes that are in the same state now."""

    nodes: tuple[str, ...]
    before: Target
    steps: tuple[Step, ...] = ()
    """The least disruptive first; empty when nothing has to notice."""
    free: tuple[Because, ...] = ()
    """What differs and costs nothing."""
    drains: bool = True
    reboots: bool = True
    unknown: str = ""
    """Why it can't be told; then the worst is assumed."""


def change(
    before: Target,
    old: MachineConfig | None,
    after: Target,
    new: MachineConfig | None,
    policy: DisruptionPolicy,
    *,
    nodes: tuple[str, ...],
) -> Change:
    """The change of these nodes."""
    for name, config in ((before.config, old), (after.config, new)):
        if config is None:
            return Change(nodes, before, unknown=f"MachineConfig {name or '?'} is not there")
    assert old is not None
    assert new is not None
    try:
        was, will_be = _with_image(wanted(old), before), _with_image(wanted(new), after)
        found = diff(was, will_be)
        cost = disruption(found, policy)
        sources = dict(_sources(found, _provenance(old), _provenance(new), after))
    except ConfigError as error:
        return Change(nodes, before, unknown=str(error))

    def because(reason: Reason) -> Because:
        return Because(reason.subject, reason.rule, sources.get(reason.subject, ""))

    return Change(
        nodes,
        before,
        steps=tuple(Step(words(each.action), tuple(map(because, each.reasons)))
                    for each in cost.costs),
        free=tuple(map(because, cost.free)),
        drains=cost.drains,
        reboots=cost.reboots,
    )  # fmt: skip


def words(action: Action) -> str:
    """An action for people."""
    match action:
        case Nothing():
            return "nothing"
        case DaemonReload():
            return "systemd reads its units again"
        case Reload(unit):
            return f"reload {unit}"
        case Restart(unit):
            return f"restart {unit}"
        case Drain() | Special():
            return "drain"
        case Reboot():
            return "drain and reboot"


def _with_image(found: Wanted, target: Target) -> Wanted:
    return replace(found, os=replace(found.os, image=target.image)) if target.image else found


def _provenance(config: MachineConfig) -> Provenance:
    text = config.metadata.annotations.get(PROVENANCE)
    return Provenance({}) if text is None else Provenance.from_text(text)


def _sources(
    found: Diff, old: Provenance, new: Provenance, after: Target
) -> Iterator[tuple[str, str]]:
    """Who brought each subject of `disruption`; who had the last word on it."""

    def last(section: str, key: str) -> str:
        names = new.of(section, key) or old.of(section, key)
        return f"MachineConfig {names[-1]}" if names else ""

    for file in found.files:
        yield f"file {file}", last("files", file.key)
    for directory in found.directories:
        yield f"directory {directory}", last("directories", directory.key)
    for link in found.links:
        yield f"link {link}", last("links", link.key)
    for unit in found.units:
        yield f"unit {unit}", last("units", unit.key)
    for user in found.users:
        yield f"keys or password of {user}", last("users", user.key)
    for aspect in found.os:
        names = new.of_section(aspect.value) or old.of_section(aspect.value)
        source = f"MachineConfig {names[-1]}" if names else ""
        if aspect is Aspect.IMAGE and after.image:
            source = f"annotation {OS_IMAGE}"
        yield f"{aspect} changed", source
