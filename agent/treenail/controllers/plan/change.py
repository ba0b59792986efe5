"""What one node state to another costs, why, and which MachineConfig asks for it."""

from dataclasses import dataclass, replace

from treenail.api.disruptionpolicy import DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import diff
from treenail.config.wanted import Wanted, wanted
from treenail.controllers.rollout.gates.os_image import OS_IMAGE
from treenail.controllers.rollout.nodes import Target
from treenail.errors import ConfigError
from treenail.update.impact.disruption import disruption
from treenail.update.impact.explain import Because, Sources, words


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
        image_source = f"annotation {OS_IMAGE}" if after.image else ""
        because = Sources(found, old, new, image_source=image_source).because
    except ConfigError as error:
        return Change(nodes, before, unknown=str(error))

    return Change(
        nodes,
        before,
        steps=tuple(Step(words(each.action), tuple(map(because, each.reasons)))
                    for each in cost.costs),
        free=tuple(map(because, cost.free)),
        drains=cost.drains,
        reboots=cost.reboots,
    )  # fmt: skip


def _with_image(found: Wanted, target: Target) -> Wanted:
    return replace(found, os=replace(found.os, image=target.image)) if target.image else found
