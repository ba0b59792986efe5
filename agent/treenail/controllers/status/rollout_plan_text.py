"""Format a plan as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from treenail.api.decode import Json
from treenail.controllers.pools import node_facts, rollout_record
from treenail.controllers.status.rollout_plan import NodeChange, RolloutPlan
from treenail.update.impact.impact import DisruptionCause

MAX_REASONS = 20
MAX_BATCHES = 12
MAX_NODES = 8


def format_plans(plans: Sequence[RolloutPlan]) -> Iterator[str]:
    """Yield the lines of each pool's plan, with an empty line between pools."""
    for index, plan in enumerate(plans):
        if index:
            yield ""
        yield from _format_pool(plan)


def convert_to_json(plans: Sequence[RolloutPlan]) -> Json:
    """Convert the complete plan, with every node."""
    return {
        "pools": [
            {**_convert_fields(asdict(plan)), "needsDrain": plan.needs_drain} for plan in plans
        ]
    }


def _convert_fields(fields: dict[str, object]) -> Json:
    """Spell the names of fields as Kubernetes does: ``nodeCount`` for ``node_count``."""
    return {_convert_name(name): _convert_value(value) for name, value in fields.items()}


def _convert_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _convert_value(value: object) -> object:
    match value:
        case dict():
            return _convert_fields(value)
        case list() | tuple():
            return [_convert_value(item) for item in value]
        case _:
            return value


def _format_pool(plan: RolloutPlan) -> Iterator[str]:
    todo = sum(len(batch.nodes) for batch in plan.batches)
    count = _format_count(plan.node_count)
    if plan.problems and not plan.target.config:
        yield f"pool {plan.pool}: cannot be planned; no node changes"
    elif todo == 0:
        yield f"pool {plan.pool}: nothing to do, {count} at {_format_target(plan.target)}"
    else:
        yield f"pool {plan.pool}: {todo} of {count} to {_format_target(plan.target)}"
    for problem in plan.problems:
        yield f"  problem: {problem}"
    if plan.sources and todo:
        yield f"  rendered from {', '.join(plan.sources)}"
    if plan.build is not None:
        like = f", like {plan.build.last_build}" if plan.build.last_build else ""
        what = "builds" if plan.build.needs_job else "adds the config, without a Job, to"
        yield (
            f"  {what} the image of MachineOSConfig {plan.build.image_config} first, about "
            f"{rollout_record.format_limit(plan.build.duration_s)}{like}"
        )
    for change in plan.changes:
        yield from _format_change(change, plan.image_builder)
    yield from _format_order(plan)
    for budget in plan.budgets:
        yield (
            f"  drain blocked: PodDisruptionBudget {budget.name} never allows an eviction "
            f"({budget.reason}), pods on {_format_names(budget.nodes)}"
        )


def _format_change(change: NodeChange, image_builder: str) -> Iterator[str]:
    before = _format_target(change.before) if change.before.config else "nothing"
    yield f"  {_format_count(len(change.nodes))} from {before}:"
    if change.unknown_reason:
        yield f"    impact unknown, assuming drain and reboot: {change.unknown_reason}"
        return
    for step in change.steps:
        yield f"    {step.action}"
        yield from _format_reasons(step.reasons, "because ")
    if not change.steps:
        yield "    no disruption: files are written in place"
    if change.undisruptive:
        yield "    without disruption"
        yield from _format_reasons(change.undisruptive, "")
    if change.in_image:
        more = len(change.in_image) - MAX_REASONS
        named = ", ".join(change.in_image[:MAX_REASONS]) + (f" and {more} more" if more > 0 else "")
        if image_builder:
            yield f"    the build of {image_builder} puts into the image: {named}"
        else:
            yield f"    the image must contain {named}; each node checks that before its drain"


def _format_reasons(reasons: Sequence[DisruptionCause], lead: str) -> Iterator[str]:
    for reason in reasons[:MAX_REASONS]:
        source = f", from {reason.source}" if reason.source else ""
        yield f"      {lead}{reason.subject} ({reason.rule}){source}"
    if len(reasons) > MAX_REASONS:
        yield f"      and {len(reasons) - MAX_REASONS} more"


def _format_order(plan: RolloutPlan) -> Iterator[str]:
    if not plan.batches:
        return
    if plan.prestage_max_parallel is not None:
        yield f"  pre-stage the image first, {plan.prestage_max_parallel} nodes at a time"
    yield f"  order, {plan.max_unavailable} at a time:"
    has_waves = plan.batches[-1].wave > 1
    for number, batch in enumerate(plan.batches[:MAX_BATCHES], start=1):
        wave = f"  (wave {batch.wave})" if has_waves else ""
        yield f"    {number:>3}. {_format_names(batch.nodes)}{wave}"
    if len(plan.batches) > MAX_BATCHES:
        rest = plan.batches[MAX_BATCHES:]
        yield f"    and {sum(len(batch.nodes) for batch in rest)} more nodes in {len(rest)} batches"
    if plan.duration_s is None:
        yield "  never completes: the maintenance windows are too short"
    else:
        yield f"  takes about {rollout_record.format_duration(plan.duration_s)} in total"
    if plan.waiting_reason:
        yield f"  does not start yet: {plan.waiting_reason}"


def _format_count(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _format_names(nodes: Sequence[str]) -> str:
    more = len(nodes) - MAX_NODES
    return ", ".join(nodes[:MAX_NODES]) + (f" and {more} more" if more > 0 else "")


def _format_target(target: node_facts.RolloutTarget) -> str:
    return f"{target.config} with image {target.image}" if target.image else target.config
