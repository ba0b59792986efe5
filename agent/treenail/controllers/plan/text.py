"""A plan for people, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from treenail.api.decode import Json
from treenail.controllers.plan.change import NodeChange
from treenail.controllers.plan.plan import PlannedBatch, PoolPlan
from treenail.controllers.rollout.estimate import format_duration
from treenail.controllers.rollout.nodes import RolloutTarget
from treenail.update.impact.explain import DisruptionCause

MAX_REASONS = 20
MAX_BATCHES = 12
MAX_NODES = 8


def format_plans(plans: Sequence[PoolPlan]) -> Iterator[str]:
    """The plan of each pool, the pools apart by an empty line."""
    for index, plan in enumerate(plans):
        if index:
            yield ""
        yield from _format_pool(plan)


def convert_to_json(plans: Sequence[PoolPlan]) -> Json:
    """All of it, with every node."""
    return {"pools": [{**asdict(plan), "drains": plan.needs_drain} for plan in plans]}


def _format_pool(plan: PoolPlan) -> Iterator[str]:
    todo = sum(len(batch.nodes) for batch in plan.batches)
    if plan.problems and not plan.target.config:
        yield f"pool {plan.pool}: can't be planned, and no node changes"
    elif todo == 0:
        yield f"pool {plan.pool}: nothing to do, {_format_count(plan.node_count)} at {_format_target(plan.target)}"
    else:
        yield f"pool {plan.pool}: {todo} of {_format_count(plan.node_count)} to {_format_target(plan.target)}"
    for problem in plan.problems:
        yield f"  problem: {problem}"
    if plan.sources and todo:
        yield f"  rendered from {', '.join(plan.sources)}"
    for change in plan.changes:
        yield from _format_change(change)
    yield from _format_order(plan)
    for budget in plan.budgets:
        yield (
            f"  drains would not end: PodDisruptionBudget {budget.name} never lets a pod go "
            f"({budget.reason}), on {_format_names(budget.nodes)}"
        )


def _format_change(change: NodeChange) -> Iterator[str]:
    before = _format_target(change.before) if change.before.config else "nothing"
    yield f"  {_format_count(len(change.nodes))} from {before}:"
    if change.unknown_reason:
        yield f"    can't be told, at worst drain and reboot: {change.unknown_reason}"
        return
    for step in change.steps:
        yield f"    {step.action}"
        yield from _format_reasons(step.reasons, "because ")
    if not change.steps:
        yield "    written in place, nothing is disturbed"
    if change.undisruptive:
        yield "    at no cost"
        yield from _format_reasons(change.undisruptive, "")


def _format_reasons(reasons: Sequence[DisruptionCause], lead: str) -> Iterator[str]:
    for reason in reasons[:MAX_REASONS]:
        source = f", from {reason.source}" if reason.source else ""
        yield f"      {lead}{reason.subject} ({reason.rule}){source}"
    if len(reasons) > MAX_REASONS:
        yield f"      and {len(reasons) - MAX_REASONS} more"


def _format_order(plan: PoolPlan) -> Iterator[str]:
    if not plan.batches:
        return
    if plan.prestage_max_parallel is not None:
        yield f"  all stage the image first, {plan.prestage_max_parallel} at a time"
    yield f"  order, {plan.max_unavailable} at a time:"
    waves = plan.batches[-1].wave > 1
    for number, batch in enumerate(plan.batches[:MAX_BATCHES], start=1):
        yield f"    {number:>3}. {_format_names(batch.nodes)}{_format_wave(batch, among=waves)}"
    if len(plan.batches) > MAX_BATCHES:
        rest = plan.batches[MAX_BATCHES:]
        yield f"    and {sum(len(each.nodes) for each in rest)} more nodes in {len(rest)} turns"
    if plan.duration_s is None:
        yield "  it would never end: the maintenance windows are too short"
    else:
        yield f"  about {format_duration(plan.duration_s)} in all"
    if plan.waiting_reason:
        yield f"  it does not begin yet: {plan.waiting_reason}"


def _format_wave(batch: PlannedBatch, *, among: bool) -> str:
    return f"  (wave {batch.wave})" if among else ""


def _format_count(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _format_names(nodes: Sequence[str]) -> str:
    more = len(nodes) - MAX_NODES
    return ", ".join(nodes[:MAX_NODES]) + (f" and {more} more" if more > 0 else "")


def _format_target(target: RolloutTarget) -> str:
    return f"{target.config} with image {target.image}" if target.image else target.config
