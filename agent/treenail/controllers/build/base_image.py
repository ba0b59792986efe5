"""Decides which image the tag in ``treenail.io/base-image`` stands for.

A tag is resolved once. With ``treenail.io/rebuild-schedule`` it is resolved again while a window is
open, and a new digest is followed. The record in an annotation of the MachineOSConfig is what
builds use, so that neither a restart nor the registry changes the base of a build.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json, load_json
from treenail.api.machineosconfig import ImageConfigCondition, MachineOSConfig
from treenail.api.meta import Condition
from treenail.api.pullspec import parse_pull_spec
from treenail.clock import format_rfc3339
from treenail.controllers.build.facts import Answer, BuildProblem, Question, ResolveBase
from treenail.controllers.rollout.gates.windows import (
    MaintenanceWindow,
    WindowClosed,
    find_window_state,
    parse_window,
)
from treenail.controllers.rollout.policy import parse_duration_s
from treenail.errors import ConfigError
from treenail.image.build_reason import REMEDIES, BuildReason, compute_retry_delay
from treenail.image.inputs.findings import InputFinding, InputReason
from treenail.image.push_spec import parse_push_spec

CHECK_INTERVAL_S = 900.0
"""Time between two resolutions of one tag while a window is open."""
TAG_NOT_FOUND = "TagNotFound"
TAG_MOVED_BACK = "TagMovedBack"
_MAX_EARLIER = 20
_MAX_WINDOWS = 20
_MESSAGE_LIMIT = 600
_RECORD_LIMIT = 16 * 1024
_LAST_RETRY_S = 3600.0
_NO_TAG = Condition(
    ImageConfigCondition.BASE_RESOLVED, "True", "NoTag", "The base image is not named by tag"
)
_SCHEDULE_FORMAT = (
    'a list such as [{"days": ["Sun"], "start": "02:00", "duration": "4h", "timeZone": "UTC"}]'
)


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """How a tag was resolved; stored in an annotation of the MachineOSConfig."""

    tag: str
    image: str
    """Pull spec by digest, which builds use."""
    resolved_at: str
    """In RFC 3339."""
    earlier: tuple[str, ...] = ()
    """Images that the tag stood for before, oldest first."""
    revision: int = 0
    """Counts resolutions for rebuilds: each one needs a new answer of the registry."""
    is_for_rebuild: bool = False
    """Resolved for the rebuild that is requested now."""
    problem: BuildProblem | None = None
    """Why the tag was not followed the last time."""


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """Facts about the base image of a MachineOSConfig."""

    owner: str
    """UID of the MachineOSConfig."""
    tag: str = ""
    """Empty if the base is named by digest, or by the rendered config."""
    record: BaseRecord | None = None
    """The stored one; it may be that of another tag."""
    windows: tuple[MaintenanceWindow, ...] = ()
    """Empty without a schedule: then the tag is not resolved again."""
    rebuild_requested: bool = False
    has_condition: bool = False
    """The MachineOSConfig has the condition BaseImageResolved."""


@dataclass(frozen=True, slots=True)
class BaseDecision:
    """Writes, questions and conditions for the base image."""

    write: BaseRecord | None = None
    """The record to store before anything else."""
    drops_record: bool = False
    question: ResolveBase | None = None
    is_waiting: bool = False
    """No image is known before the registry answers."""
    holds_rebuild: bool = False
    """A requested rebuild waits for the resolution."""
    problem: BuildProblem | None = None
    """Why no build can be planned."""
    condition: Condition | None = None
    requeue_after_s: float | None = None
    kept_answers: frozenset[str] = frozenset()
    """`ResolveBase.build` of the questions whose answers are still of use."""


def make_base_facts(config: MachineOSConfig) -> BaseFacts:
    """Extract the facts; raise `ConfigError` for an invalid schedule."""
    image = config.base_image
    tag = image if is_tag(image) else ""
    schedule = config.metadata.annotations.get(key.REBUILD_SCHEDULE)
    if schedule is not None and not tag:
        raise ConfigError(
            f"annotation {key.REBUILD_SCHEDULE}: expected a tag in the annotation "
            f"{key.BASE_IMAGE}, found {image[:100] or 'no annotation'!r}; name the base by tag, or "
            "remove the schedule"
        )
    return BaseFacts(
        owner=config.metadata.uid,
        tag=tag,
        record=decode_base_record(config.metadata.annotations.get(key.RESOLVED_BASE, "")),
        windows=() if schedule is None else parse_schedule(schedule),
        rebuild_requested=config.needs_rebuild,
        has_condition=any(
            each.type == ImageConfigCondition.BASE_RESOLVED for each in config.conditions
        ),
    )


def pin_base_image(config: MachineOSConfig) -> MachineOSConfig:
    """Return the MachineOSConfig with its base by digest, if its tag was resolved."""
    notes = config.metadata.annotations
    record = decode_base_record(notes.get(key.RESOLVED_BASE, ""))
    if record is None or record.tag != config.base_image:
        return config
    pinned = {**notes, key.BASE_IMAGE: record.image}
    return replace(config, metadata=replace(config.metadata, annotations=pinned))


def parse_schedule(text: str) -> tuple[MaintenanceWindow, ...]:
    """Parse the windows of the annotation; raise `ConfigError`."""
    where = f"annotation {key.REBUILD_SCHEDULE}"
    try:
        fields = Fields.from_json({"windows": load_json(text, where=where)}, "")
        _check_count(len(fields.get_list("windows")))
        return fields.map_objects(
            "windows", lambda each: parse_window(each, parse_duration_s(each, "duration"))
        )
    except ConfigError as error:
        # An annotation has one value, and its finding one form.
        finding = InputFinding(
            InputReason.ANNOTATION_INVALID,
            where,
            _SCHEDULE_FORMAT,
            f"{text[:100]!r} ({error})",
            "correct it, or remove the annotation",
        )
        raise ConfigError(str(finding)) from error


def _check_count(count: int) -> None:
    # Without windows, a schedule would always be open.
    if not 1 <= count <= _MAX_WINDOWS:
        raise ConfigError(f"expected 1 to {_MAX_WINDOWS} windows, found {count}")


def decide_base(facts: BaseFacts, answers: Mapping[Question, Answer], now: float) -> BaseDecision:
    """Decide whether to resolve the tag, and whether to follow the answer."""
    record = facts.record
    if not facts.tag:
        return BaseDecision(
            drops_record=record is not None,
            # A merge keeps the conditions of other writers, so it cannot remove one.
            condition=_NO_TAG if facts.has_condition else None,
        )
    question = ResolveBase(facts.owner, facts.tag, 0 if record is None else record.revision)
    if record is None or record.tag != facts.tag:
        found = _resolve_first(facts, question, answers.get(question), now)
    elif facts.rebuild_requested and not record.is_for_rebuild:
        fresh = replace(question, is_for_rebuild=True)
        found = _resolve_for_rebuild(record, fresh, answers.get(fresh), now)
    elif record.is_for_rebuild and not facts.rebuild_requested:
        found = BaseDecision(write=replace(record, is_for_rebuild=False))
    elif facts.windows:
        found = _watch_tag(facts, record, question, answers.get(question), now)
    else:
        found = BaseDecision(condition=_make_condition(record))
    return replace(found, kept_answers=frozenset({question.build}))


def encode_base_record(record: BaseRecord) -> str:
    """Encode a record as JSON."""
    found: Json = {
        "tag": record.tag,
        "image": record.image,
        "resolvedAt": record.resolved_at,
        "earlier": list(record.earlier),
        "revision": record.revision,
    }
    if record.is_for_rebuild:
        found["forRebuild"] = True
    if record.problem is not None:
        found |= {"reason": record.problem.reason, "message": record.problem.message}
    return json.dumps(found, separators=(",", ":"))


def decode_base_record(text: str) -> BaseRecord | None:
    """Decode a record; None for an unreadable one, so that the tag is resolved again."""
    if not text or len(text) > _RECORD_LIMIT:
        return None
    try:
        fields = Fields.from_json(load_json(text, where="resolved base"), "resolved base")
        reason = fields.get_text("reason")
        return BaseRecord(
            tag=fields.get_required_text("tag"),
            image=str(parse_pull_spec(fields.get_text("image"), where="image")),
            resolved_at=fields.get_text("resolvedAt"),
            earlier=fields.get_text_list("earlier")[-_MAX_EARLIER:],
            revision=fields.get_optional_integer("revision") or 0,
            is_for_rebuild=fields.get_bool("forRebuild"),
            problem=BuildProblem(reason, fields.get_text("message")) if reason else None,
        )
    except ConfigError:
        return None


def _resolve_first(
    facts: BaseFacts, question: ResolveBase, answer: Answer | None, now: float
) -> BaseDecision:
    if answer is None:
        return BaseDecision(question=question, is_waiting=True)
    if answer.failure is not None:
        problem = _describe_failure(facts.tag, answer)
        refused = BuildProblem(InputReason.BASE_IMAGE_UNRESOLVED, problem.message)
        retried = _retry(question, answer, problem, now)
        return replace(retried, problem=refused)
    found = BaseRecord(
        facts.tag,
        answer.pull_spec,
        format_rfc3339(answer.at),
        revision=question.revision,
        is_for_rebuild=facts.rebuild_requested,
    )
    return BaseDecision(write=found)


def _resolve_for_rebuild(
    record: BaseRecord, question: ResolveBase, answer: Answer | None, now: float
) -> BaseDecision:
    """Follow the tag wherever it is. A tag that is gone does not block the rebuild."""
    if answer is None:
        return BaseDecision(
            question=question, holds_rebuild=True, condition=_make_condition(record)
        )
    changed = replace(record, revision=record.revision + 1, is_for_rebuild=True)
    if answer.failure is not None:
        problem = _describe_failure(record.tag, answer, record.image)
        if answer.failure.reason is BuildReason.BASE_NOT_FOUND:
            return BaseDecision(write=replace(changed, problem=problem))
        return replace(_retry(question, answer, problem, now), holds_rebuild=True)
    return BaseDecision(write=_follow(changed, answer))


def _watch_tag(
    facts: BaseFacts, record: BaseRecord, question: ResolveBase, answer: Answer | None, now: float
) -> BaseDecision:
    state = find_window_state(facts.windows, now)
    condition = _make_condition(record)
    if isinstance(state, WindowClosed):
        return BaseDecision(condition=condition, requeue_after_s=state.opens_in_s)
    if answer is None or now - answer.at >= CHECK_INTERVAL_S:
        # Also of an answer from an earlier window.
        return BaseDecision(question=question, condition=condition)
    if answer.failure is not None:
        found = replace(record, problem=_describe_failure(record.tag, answer, record.image))
    elif answer.pull_spec in record.earlier:
        found = replace(record, problem=_describe_move_back(record, answer.pull_spec))
    else:
        found = _follow(record, answer)
    if found != record:
        return BaseDecision(write=found)
    return BaseDecision(condition=condition, requeue_after_s=answer.at + CHECK_INTERVAL_S - now)


def _follow(record: BaseRecord, answer: Answer) -> BaseRecord:
    """Return the record with the image of the answer."""
    image = answer.pull_spec
    if image == record.image:
        return replace(record, problem=None)
    earlier = (*record.earlier, record.image)
    if image in record.earlier:
        # What came after it counts as new again.
        earlier = record.earlier[: record.earlier.index(image)]
    return replace(
        record,
        image=image,
        resolved_at=format_rfc3339(answer.at),
        earlier=earlier[-_MAX_EARLIER:],
        problem=None,
    )


def _retry(
    question: ResolveBase, answer: Answer, problem: BuildProblem, now: float
) -> BaseDecision:
    delay = compute_retry_delay(answer.count)
    due = answer.at + (_LAST_RETRY_S if delay is None else delay.total_seconds())
    condition = _make_false_condition(problem)
    if due <= now:
        return BaseDecision(question=question, condition=condition)
    return BaseDecision(condition=condition, requeue_after_s=due - now)


def _describe_failure(tag: str, answer: Answer, image: str = "") -> BuildProblem:
    failure = answer.failure
    assert failure is not None
    kept = f"; builds keep {image}" if image else ""
    if failure.reason is BuildReason.BASE_NOT_FOUND:
        remedy = f"push the tag, or name another image in the annotation {key.BASE_IMAGE}"
        reason = TAG_NOT_FOUND
    else:
        reason, remedy = failure.reason.value, REMEDIES[failure.reason]
    cause = f"cannot resolve {tag}: {failure.message}"[:_MESSAGE_LIMIT]
    return BuildProblem(reason, f"{cause}{kept}; {remedy}")


def _describe_move_back(record: BaseRecord, image: str) -> BuildProblem:
    return BuildProblem(
        TAG_MOVED_BACK,
        f"{record.tag} moved back to {image}, which preceded {record.image}; builds keep the "
        f"latter; to follow the tag, set the annotation {key.REBUILD} of the MachineOSConfig",
    )


def _make_condition(record: BaseRecord) -> Condition:
    if record.problem is not None:
        return _make_false_condition(record.problem)
    return Condition(
        ImageConfigCondition.BASE_RESOLVED,
        "True",
        "Resolved",
        f"{record.tag} was {record.image} at {record.resolved_at}",
    )


def _make_false_condition(problem: BuildProblem) -> Condition:
    return Condition(ImageConfigCondition.BASE_RESOLVED, "False", problem.reason, problem.message)


def is_tag(image: str) -> bool:
    """Return whether an image is named by a valid tag, with its registry."""
    try:
        parse_push_spec(image, where=key.BASE_IMAGE)
    except ConfigError:
        return False
    return True
