"""A plan for people, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from treenail.api.decode import Json
from treenail.controllers.plan.change import Change
from treenail.controllers.plan.plan import Batch, PoolPlan
from treenail.controllers.rollout.estimate import words
from treenail.controllers.rollout.nodes import Target
from treenail.update.impact.explain import Because

REASONS_AT_MOST = 20
BATCHES_AT_MOST = 12
NODES_AT_MOST = 8


def lines(plans: Sequence[PoolPlan]) -> Iterator[str]:
    """The plan of each pool, the pools apart by an empty line."""
    for index, plan in enumerate(plans):
        if index:
            yield ""
        yield from _pool(plan)


def document(plans: Sequence[PoolPlan]) -> Json:
    """All of it, with every node."""
    return {"pools": [{**asdict(plan), "drains": plan.drains} for plan in plans]}


def _pool(plan: PoolPlan) -> Iterator[str]:
    todo = sum(len(batch.nodes) for batch in plan.batches)
    if plan.problems and not plan.target.config:
        yield f"pool {plan.pool}: can't be planned, and no node changes"
    elif todo == 0:
        yield f"pool {plan.pool}: nothing to do, {_nodes(plan.total)} at {_target(plan.target)}"
    else:
        yield f"pool {plan.pool}: {todo} of {_nodes(plan.total)} to {_target(plan.target)}"
    for problem in plan.problems:
        yield f"  problem: {problem}"
    if plan.sources and todo:
        yield f"  rendered from {', '.join(plan.sources)}"
    for change in plan.changes:
        yield from _change(change)
    yield from _order(plan)
    for budget in plan.budgets:
        yield (
            f"  drains would not end: PodDisruptionBudget {budget.name} never lets a pod go "
            f"({budget.why}), on {_named(budget.nodes)}"
        )


def _change(change: Change) -> Iterator[str]:
    before = _target(change.before) if change.before.config else "nothing"
    yield f"  {_nodes(len(change.nodes))} from {before}:"
    if change.unknown:
        yield f"    can't be told, at worst drain and reboot: {change.unknown}"
        return
    for step in change.steps:
        yield f"    {step.action}"
        yield from _reasons(step.reasons, "because ")
    if not change.steps:
        yield "    written in place, nothing is disturbed"
    if change.free:
        yield "    at no cost"
        yield from _reasons(change.free, "")


def _reasons(reasons: Sequence[Because], lead: str) -> Iterator[str]:
    for reason in reasons[:REASONS_AT_MOST]:
        source = f", from {reason.source}" if reason.source else ""
        yield f"      {lead}{reason.subject} ({reason.rule}){source}"
    if len(reasons) > REASONS_AT_MOST:
        yield f"      and {len(reasons) - REASONS_AT_MOST} more"


def _order(plan: PoolPlan) -> Iterator[str]:
    if not plan.batches:
        return
    if plan.staged_at_once is not None:
        yield f"  all stage the image first, {plan.staged_at_once} at a time"
    yield f"  order, {plan.max_unavailable} at a time:"
    waves = plan.batches[-1].wave > 1
    for number, batch in enumerate(plan.batches[:BATCHES_AT_MOST], start=1):
        yield f"    {number:>3}. {_named(batch.nodes)}{_wave(batch, among=waves)}"
    if len(plan.batches) > BATCHES_AT_MOST:
        rest = plan.batches[BATCHES_AT_MOST:]
        yield f"    and {sum(len(each.nodes) for each in rest)} more nodes in {len(rest)} turns"
    if plan.duration_s is None:
        yield "  it would never end: the maintenance windows are too short"
    else:
        yield f"  about {words(plan.duration_s)} in all"
    if plan.waiting:
        yield f"  it does not begin yet: {plan.waiting}"


def _wave(batch: Batch, *, among: bool) -> str:
    return f"  (wave {batch.wave})" if among else ""


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _named(nodes: Sequence[str]) -> str:
    more = len(nodes) - NODES_AT_MOST
    return ", ".join(nodes[:NODES_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _target(target: Target) -> str:
    return f"{target.config} with image {target.image}" if target.image else target.config
