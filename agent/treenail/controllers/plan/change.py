"""What one node state to another costs, why, and which MachineConfig asks for it."""

from dataclasses import dataclass, replace

from treenail.api.disruptionpolicy import DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import compare_configs
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.controllers.rollout.gates.os_image import OS_IMAGE
from treenail.controllers.rollout.nodes import RolloutTarget
from treenail.errors import ConfigError
from treenail.update.impact.disruption import compute_disruption
from treenail.update.impact.explain import ConfigSources, DisruptionCause, describe_action


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One action and everything that asks for it."""

    action: str
    reasons: tuple[DisruptionCause, ...]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What happens to nodes that are in the same state now."""

    nodes: tuple[str, ...]
    before: RolloutTarget
    steps: tuple[PlanStep, ...] = ()
    """The least disruptive first; empty when nothing has to notice."""
    undisruptive: tuple[DisruptionCause, ...] = ()
    """What differs and costs nothing."""
    needs_drain: bool = True
    needs_reboot: bool = True
    unknown_reason: str = ""
    """Why it can't be told; then the worst is assumed."""


def plan_change(
    before: RolloutTarget,
    old: MachineConfig | None,
    after: RolloutTarget,
    new: MachineConfig | None,
    policy: DisruptionPolicy,
    *,
    nodes: tuple[str, ...],
) -> NodeChange:
    """The change of these nodes."""
    for name, config in ((before.config, old), (after.config, new)):
        if config is None:
            return NodeChange(
                nodes, before, unknown_reason=f"MachineConfig {name or '?'} is not there"
            )
    assert old is not None
    assert new is not None
    try:
        was, will_be = (
            _apply_image(read_wanted_state(old), before),
            _apply_image(read_wanted_state(new), after),
        )
        found = compare_configs(was, will_be)
        cost = compute_disruption(found, policy)
        image_source = f"annotation {OS_IMAGE}" if after.image else ""
        because = ConfigSources(found, old, new, image_source=image_source).find_cause
    except ConfigError as error:
        return NodeChange(nodes, before, unknown_reason=str(error))

    return NodeChange(
        nodes,
        before,
        steps=tuple(PlanStep(describe_action(each.action), tuple(map(because, each.reasons)))
                    for each in cost.costs),
        undisruptive=tuple(map(because, cost.harmless)),
        needs_drain=cost.needs_drain,
        needs_reboot=cost.needs_reboot,
    )  # fmt: skip


def _apply_image(found: WantedState, target: RolloutTarget) -> WantedState:
    return replace(found, os=replace(found.os, image=target.image)) if target.image else found
