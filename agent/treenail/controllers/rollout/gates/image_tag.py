"""Decides which image the tag in ``spec.osImageTag`` of a pool stands for.

The record in the status of the pool is what nodes get, so that neither a restart nor the registry
changes their image.
"""

from collections.abc import Callable
from dataclasses import dataclass

from treenail.api.decode import Fields, Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import Condition
from treenail.controllers.image_tags.decide import (
    TagAnswer,
    TagFacts,
    TagQuestion,
    TagTexts,
    decide_tag,
)
from treenail.controllers.image_tags.record import (
    TagChange,
    TagProblem,
    TagRecord,
    find_tag_change,
    parse_tag_record,
)
from treenail.controllers.rollout.gates.windows import (
    MaintenanceWindow,
    WindowClosed,
    find_window_state,
)
from treenail.image.push_spec import parse_push_spec

TAG_STATUS = "osImageTag"
"""Field of a pool's status with the record. Only the rollout controller may write it."""
TAG_RESOLVED = "OSImageResolved"
"""Type of the condition of a pool with a tag."""
UNRESOLVED_CHECK_S = 30.0
"""How often the login is compared while no image is known. Secrets are not watched."""
_NO_TAG = Condition(TAG_RESOLVED, "True", "NoTag", "The OS image is not named by tag")


@dataclass(frozen=True, slots=True)
class PoolTagState:
    """Tag record in the status of a pool."""

    record: TagRecord | None = None
    problem: TagProblem | None = None
    """Why no image is known; None with a record."""


@dataclass(frozen=True, slots=True)
class PoolTagDecision:
    """Writes, questions and the condition for the tag of a pool."""

    status: Json | None = None
    """The field of the status to write; empty removes it, None leaves it."""
    change: TagChange | None = None
    """To report after the write."""
    question: TagQuestion | None = None
    condition: Condition | None = None
    requeue_after_s: float | None = None


def read_tag_state(pool: MachineConfigPool) -> PoolTagState:
    """Return what is known about the present tag of the pool."""
    tag = pool.os_image_tag
    fields = Fields.from_json(pool.status, "status").get_object(TAG_STATUS)
    record = parse_tag_record(fields)
    if tag is None or fields.values.get("tag") != tag.name:
        return PoolTagState(record)
    if record is None and (reason := fields.get_text("reason")):
        return PoolTagState(problem=TagProblem(reason, fields.get_text("message")))
    return PoolTagState(record)


def is_tag_unresolved(pool: MachineConfigPool) -> bool:
    """Return whether no image is known for the tag of the pool."""
    tag, record = pool.os_image_tag, read_tag_state(pool).record
    return tag is not None and (record is None or record.tag != tag.name)


def check_tag(pool: MachineConfigPool) -> None:
    """Raise `ConfigError` if the tag of the pool is invalid."""
    if pool.os_image_tag is not None:
        where = f"spec.osImageTag.name of pool {pool.name}"
        parse_push_spec(pool.os_image_tag.name, where=where)


def decide_pool_tag(
    pool: MachineConfigPool,
    windows: tuple[MaintenanceWindow, ...],
    find_answer: Callable[[TagQuestion], TagAnswer | None],
    now: float,
    *,
    login: str = "",
) -> PoolTagDecision:
    """Decide the next step for a pool, whose tag is valid.

    ``login`` is the version of the login, while the tag is unresolved.
    """
    tag, state = pool.os_image_tag, read_tag_state(pool)
    if tag is None:
        has_condition = any(each.type == TAG_RESOLVED for each in pool.conditions)
        return PoolTagDecision(
            status={} if pool.status.get(TAG_STATUS) else None,
            # A merge keeps the conditions of other writers, so it cannot remove one.
            condition=_NO_TAG if has_condition else None,
        )
    window = find_window_state(windows, now)
    found = decide_tag(
        TagFacts(
            tag.name,
            state.record,
            is_watched=tag.is_followed,
            opens_in_s=window.opens_in_s if isinstance(window, WindowClosed) else None,
            login=login,
        ),
        find_answer,
        now,
        _make_texts(pool.name),
    )
    if found.write is not None:
        change = find_tag_change(state.record, found.write)
        return PoolTagDecision(found.write.to_json(), change)
    delay = found.requeue_after_s
    if found.is_waiting or found.problem is not None:
        delay = UNRESOLVED_CHECK_S if delay is None else min(delay, UNRESOLVED_CHECK_S)
    if found.problem is not None and found.problem != state.problem:
        problem = found.problem
        return PoolTagDecision(
            {"tag": tag.name, "reason": problem.reason, "message": problem.message},
            TagChange(problem.reason, problem.message, is_warning=True),
        )
    return PoolTagDecision(
        question=found.question, condition=found.condition, requeue_after_s=delay
    )


def _make_texts(pool: str) -> TagTexts:
    return TagTexts(
        condition=TAG_RESOLVED,
        users="nodes",
        missing_remedy="push the tag, or correct spec.osImageTag",
        moved_back_remedy=(
            "to return to it, name its digest: "
            f"kubectl patch mcp {pool} --type=merge "
            '-p \'{"spec":{"osImageTag":null,"osImage":"IMAGE@DIGEST"}}\''
        ),
    )
