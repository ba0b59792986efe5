"""Impact of a change of target: the actions, their causes, and the MachineConfigs behind them."""

from dataclasses import dataclass, replace

from treenail.api.disruptionpolicy import DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import compare_configs
from treenail.config.image_content import assume_provided, drop_provided, list_provided
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.controllers.pools.nodes import RolloutTarget
from treenail.errors import ConfigError
from treenail.update.impact.disruption import (
    ConfigSources,
    DisruptionCause,
    compute_disruption,
    describe_action,
)


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One action and all its causes."""

    action: str
    reasons: tuple[DisruptionCause, ...]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Change of the nodes that have the same current target."""

    nodes: tuple[str, ...]
    before: RolloutTarget
    steps: tuple[PlanStep, ...] = ()
    """Actions, the least disruptive first; empty when none is needed."""
    undisruptive: tuple[DisruptionCause, ...] = ()
    """Differences that need no action."""
    needs_drain: bool = True
    needs_reboot: bool = True
    in_image: tuple[str, ...] = ()
    """Paths and units that the image must contain; each agent checks that before its drain."""
    unknown_reason: str = ""
    """Why the impact is unknown; then the plan assumes drain and reboot."""


def plan_change(
    before: RolloutTarget,
    old: MachineConfig | None,
    after: RolloutTarget,
    new: MachineConfig | None,
    policy: DisruptionPolicy,
    *,
    nodes: tuple[str, ...],
    writes_image_files: bool = False,
    image_source: str = "",
) -> NodeChange:
    """Compute the change of these nodes.

    ``writes_image_files``: in image mode the agents write the files that the image lacks.
    ``image_source`` names what requests the image of ``after``, if it has one.
    """
    for name, config in ((before.config, old), (after.config, new)):
        if config is None:
            return NodeChange(
                nodes, before, unknown_reason=f"MachineConfig {name or '?'} does not exist"
            )
    assert old is not None
    assert new is not None
    try:
        was, will_be = (
            _apply_image(read_wanted_state(old), before),
            _apply_image(read_wanted_state(new), after),
        )
        former, provided = frozenset[str](), frozenset[str]()
        if not writes_image_files:
            former = assume_provided(was).provided if before.image else former
            provided = assume_provided(will_be).provided if after.image else provided
        found = compare_configs(
            drop_provided(was, former | provided), drop_provided(will_be, provided)
        )
        cost = compute_disruption(found, policy)
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
        in_image=list_provided(will_be, provided),
    )  # fmt: skip


def _apply_image(found: WantedState, target: RolloutTarget) -> WantedState:
    return replace(found, os=replace(found.os, image=target.image)) if target.image else found
