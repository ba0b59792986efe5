"""Tags of images: when to resolve them, and whether to follow the answer.

`decide_tag` decides both, for the image of a pool and for the base image of a build. A tag is
resolved once. While it is watched, it is resolved again within windows, and a new digest is
followed. A tag that moves back or disappears is reported, and not followed.

`TagRecord` keeps how a tag was resolved: in the status of a pool, and in an annotation of a
MachineOSConfig. Nodes and builds use the record, so that neither a restart nor the registry changes
their image.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool, machineosconfig, object_meta, pullspec
from treenail.controllers.pools import maintenance_windows
from treenail.encoding import codec
from treenail.image import build_result

MAX_EARLIER = 20
"""Images that a record remembers. An older one counts as new when the tag returns to it."""


@dataclass(frozen=True, slots=True)
class ImageProblem(codec.JsonObject):
    """Why an image is not built or not followed: a CamelCase reason, a message with the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TagRecord(codec.JsonObject):
    """How a tag was resolved."""

    tag: codec.NonEmptyText
    image: Annotated[
        str, codec.Via(lambda image: str(pullspec.parse_pull_spec(image, where="image")))
    ]
    """Pull spec by digest, which is used."""
    resolved_at: str
    """In RFC 3339."""
    earlier: Annotated[tuple[str, ...], codec.Via(lambda images: images[-MAX_EARLIER:])] = ()
    """Images that the tag stood for before, oldest first."""
    revision: Annotated[int, codec.Key(omit=True)] = 0
    """Counts resolutions for rebuilds: each one needs a new answer of the registry."""
    is_for_rebuild: Annotated[bool, codec.Key("forRebuild", omit=True)] = False
    """Resolved for the rebuild that is requested now."""
    problem: Annotated[
        ImageProblem | None,
        codec.INLINE,
        codec.Via(lambda problem: problem if problem.reason else None, wire=ImageProblem),
    ] = None
    """Why the tag was not followed the last time."""


@dataclass(frozen=True, slots=True)
class TagChange:
    """A change that users must see: the tag moved, or it is no longer followed."""

    reason: str
    message: str
    is_warning: bool = False


TAG_MOVED = "ImageTagMoved"
"""Reason of a change that is followed."""


def find_tag_change(before: TagRecord | None, after: TagRecord | None) -> TagChange | None:
    """Return what changed between two records of one tag; None for nothing to report."""
    if after is None:
        return None
    is_same = before is not None and before.tag == after.tag
    if after.problem is not None:
        is_known = is_same and before is not None and before.problem == after.problem
        problem = after.problem
        return None if is_known else TagChange(problem.reason, problem.message, is_warning=True)
    if before is None or not is_same or before.image == after.image:
        return None
    return TagChange(TAG_MOVED, f"{after.tag} moved from {before.image} to {after.image}")


def parse_tag_record(fields: decode.Fields) -> TagRecord | None:
    """Read a stored record; None for an unreadable one, so that the tag is resolved again."""
    try:
        return fields.read(TagRecord)
    except errors.ConfigError:
        return None


CHECK_INTERVAL_S = 900.0
"""Time between two resolutions of one tag while a window is open."""
TAG_NOT_FOUND = "TagNotFound"
TAG_MOVED_BACK = "TagMovedBack"
_MESSAGE_LIMIT = 600
_LAST_RETRY_S = 3600.0
_RECORD_LIMIT = 16 * 1024


@dataclass(frozen=True, slots=True)
class TagTexts:
    """Words of conditions, which depend on who uses the image."""

    condition: str
    """Type of the condition."""
    subject: str
    """What the tag names, such as: The base image."""
    users: str
    """Who keeps the image, such as builds."""
    missing_remedy: str
    """What to do when the tag does not exist."""
    moved_back_remedy: str
    """What to do to follow a tag that moved back."""


@dataclass(frozen=True, slots=True)
class TagQuestion:
    """Question to a registry which image a tag stands for."""

    image: str
    """The tag, with registry and repository."""
    revision: int = 0
    """Another number asks again."""
    is_for_rebuild: bool = False
    login: str = ""
    """Version of the login, while no image is known: a changed one asks again."""


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """Answer of a registry to a question about an image."""

    at: float
    failure: build_result.AttemptFailure | None = None
    pull_spec: str = ""
    """By digest; empty with a failure, and when the registry has no such image."""
    count: int = 1
    """Failures in a row."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    warning: str = ""
    """What is missing beside the image; empty for nothing."""

    def compute_retry_time(self) -> float:
        """Return when to ask again after a failure."""
        delay = build_result.compute_retry_delay(self.count)
        return self.at + (_LAST_RETRY_S if delay is None else delay.total_seconds())


def find_tag_answer(
    answers: Mapping[TagQuestion, ImageAnswer], question: TagQuestion
) -> ImageAnswer | None:
    """Return the answer to the question; an image is an image, whichever login found it."""
    if (answer := answers.get(question)) is not None or question.login:
        return answer
    return next(
        (
            answer
            for asked, answer in answers.items()
            if answer.failure is None and replace(asked, login="") == question
        ),
        None,
    )


@dataclass(frozen=True, slots=True)
class TagFacts:
    """A tag, and what is known about it."""

    tag: str = ""
    """Empty for an image that is not named by tag."""
    record: TagRecord | None = None
    """The stored one; it may be that of another tag."""
    problem: ImageProblem | None = None
    """Why no image is known, as it was reported."""
    is_watched: bool = False
    """The tag is resolved again within windows."""
    windows: tuple[maintenance_windows.MaintenanceWindow, ...] = ()
    """Empty for a window that is always open."""
    rebuild_requested: bool = False
    is_stored: bool = False
    """The object has a record or a problem of a tag."""
    has_condition: bool = False

    @property
    def is_unresolved(self) -> bool:
        """No image of the tag is known."""
        return bool(self.tag) and (self.record is None or self.record.tag != self.tag)

    @property
    def revision(self) -> int:
        return 0 if self.record is None else self.record.revision

    def concerns(self, question: TagQuestion) -> bool:
        """Return whether an answer to the question is still of use."""
        return (question.image, question.revision) == (self.tag, self.revision)


@dataclass(frozen=True, slots=True)
class TagDecision:
    """Writes, questions and the condition of a tag."""

    write: TagRecord | None = None
    """The record to store before anything else."""
    drops_record: bool = False
    change: TagChange | None = None
    """To report after the write."""
    question: TagQuestion | None = None
    is_waiting: bool = False
    """No image is known before the registry answers."""
    holds_rebuild: bool = False
    """A requested rebuild waits for the resolution."""
    problem: ImageProblem | None = None
    """Why no image is known."""
    condition: object_meta.Condition | None = None
    requeue_after_s: float | None = None


FindAnswer = Callable[[TagQuestion], ImageAnswer | None]


def decide_tag(
    facts: TagFacts, find_answer: FindAnswer, now: float, texts: TagTexts, *, login: str = ""
) -> TagDecision:
    """Decide the next step for a tag.

    ``login`` is the version of the login, while the tag is unresolved.
    """
    decision = _TagDecider(facts, find_answer, now, texts, login).decide()
    if decision.write is not None:
        return replace(decision, change=find_tag_change(facts.record, decision.write))
    if (problem := decision.problem) is not None and problem != facts.problem:
        change = TagChange(problem.reason, problem.message, is_warning=True)
        return replace(decision, change=change)
    return decision


class _TagDecider:
    def __init__(
        self, facts: TagFacts, find_answer: FindAnswer, now: float, texts: TagTexts, login: str
    ) -> None:
        self._facts = facts
        self._find_answer = find_answer
        self._now = now
        self._texts = texts
        self._login = login

    def decide(self) -> TagDecision:
        facts, record = self._facts, self._facts.record
        if not facts.tag:
            # A merge keeps the conditions of other writers, so it cannot remove one.
            condition = self._make_no_tag_condition() if facts.has_condition else None
            return TagDecision(drops_record=facts.is_stored, condition=condition)
        question = TagQuestion(facts.tag, facts.revision)
        if record is None or record.tag != facts.tag:
            return self._resolve_first(replace(question, login=self._login))
        if facts.rebuild_requested and not record.is_for_rebuild:
            return self._resolve_for_rebuild(record, replace(question, is_for_rebuild=True))
        if record.is_for_rebuild and not facts.rebuild_requested:
            return TagDecision(write=replace(record, is_for_rebuild=False))
        if facts.is_watched:
            return self._check_tag(record, question)
        return TagDecision(condition=self._make_condition(record))

    def _resolve_first(self, question: TagQuestion) -> TagDecision:
        answer = self._find_answer(question)
        if answer is None:
            return TagDecision(question=question, is_waiting=True)
        if answer.failure is not None:
            problem = self._describe_failure(answer.failure)
            retried = self._retry_question(question, answer, problem)
            return replace(retried, problem=problem)
        record = make_tag_record(self._facts.tag, answer)
        rebuild_requested = self._facts.rebuild_requested
        return TagDecision(
            write=replace(record, revision=question.revision, is_for_rebuild=rebuild_requested)
        )

    def _resolve_for_rebuild(self, record: TagRecord, question: TagQuestion) -> TagDecision:
        """Follow the tag wherever it is. A tag that is gone does not block the rebuild."""
        answer = self._find_answer(question)
        if answer is None:
            condition = self._make_condition(record)
            return TagDecision(question=question, holds_rebuild=True, condition=condition)
        changed = replace(record, revision=record.revision + 1, is_for_rebuild=True)
        if answer.failure is not None:
            problem = self._describe_failure(answer.failure, record.image)
            if answer.failure.reason is build_result.BuildReason.BASE_NOT_FOUND:
                return TagDecision(write=replace(changed, problem=problem))
            return replace(self._retry_question(question, answer, problem), holds_rebuild=True)
        return TagDecision(write=_follow_tag(changed, answer))

    def _check_tag(self, record: TagRecord, question: TagQuestion) -> TagDecision:
        condition = self._make_condition(record)
        window = maintenance_windows.find_window_state(self._facts.windows, self._now)
        if isinstance(window, maintenance_windows.WindowClosed):
            return TagDecision(condition=condition, requeue_after_s=window.opens_in_s)
        answer = self._find_answer(question)
        if answer is None or self._now - answer.at >= CHECK_INTERVAL_S:
            # Also of an answer from an earlier window.
            return TagDecision(question=question, condition=condition)
        if answer.failure is not None:
            updated = replace(record, problem=self._describe_failure(answer.failure, record.image))
        elif answer.pull_spec in record.earlier:
            updated = replace(record, problem=self._describe_move_back(record, answer.pull_spec))
        else:
            updated = _follow_tag(record, answer)
        if updated != record:
            return TagDecision(write=updated)
        delay = answer.at + CHECK_INTERVAL_S - self._now
        return TagDecision(condition=condition, requeue_after_s=delay)

    def _retry_question(
        self, question: TagQuestion, answer: ImageAnswer, problem: ImageProblem
    ) -> TagDecision:
        due = answer.compute_retry_time()
        condition = self._make_false_condition(problem)
        if due <= self._now:
            return TagDecision(question=question, condition=condition)
        return TagDecision(condition=condition, requeue_after_s=due - self._now)

    def _describe_failure(
        self, failure: build_result.AttemptFailure, image: str = ""
    ) -> ImageProblem:
        kept = f"; {self._texts.users} keep {image}" if image else ""
        if failure.reason is build_result.BuildReason.BASE_NOT_FOUND:
            reason, remedy = TAG_NOT_FOUND, self._texts.missing_remedy
        else:
            reason, remedy = failure.reason.value, build_result.REMEDIES[failure.reason]
        cause = f"cannot resolve {self._facts.tag}: {failure.message}"[:_MESSAGE_LIMIT]
        return ImageProblem(reason, f"{cause}{kept}; {remedy}")

    def _describe_move_back(self, record: TagRecord, image: str) -> ImageProblem:
        return ImageProblem(
            TAG_MOVED_BACK,
            f"{record.tag} moved back to {image}, which preceded {record.image}; "
            f"{self._texts.users} keep the latter; {self._texts.moved_back_remedy}",
        )

    def _make_condition(self, record: TagRecord) -> object_meta.Condition:
        if record.problem is not None:
            return self._make_false_condition(record.problem)
        return object_meta.Condition(
            self._texts.condition,
            "True",
            "Resolved",
            f"{record.tag} was {record.image} at {record.resolved_at}",
        )

    def _make_no_tag_condition(self) -> object_meta.Condition:
        message = f"{self._texts.subject} is not named by tag"
        return object_meta.Condition(self._texts.condition, "True", "NoTag", message)

    def _make_false_condition(self, problem: ImageProblem) -> object_meta.Condition:
        return object_meta.Condition(
            self._texts.condition, "False", problem.reason, problem.message
        )


def make_tag_record(tag: str, answer: ImageAnswer) -> TagRecord:
    """Make the record of a tag that is resolved the first time."""
    return TagRecord(tag, answer.pull_spec, clocks.format_rfc3339(answer.at))


def _follow_tag(record: TagRecord, answer: ImageAnswer) -> TagRecord:
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
        resolved_at=clocks.format_rfc3339(answer.at),
        earlier=earlier[-MAX_EARLIER:],
        problem=None,
    )


# Pools

TAG_STATUS = "osImageTag"
"""Field of a pool's status with the record. Only the rollout controller may write it."""
TAG_RESOLVED = "OSImageResolved"
"""Type of the condition of a pool with a tag."""
UNRESOLVED_CHECK_S = 30.0
"""How often the login is compared while no image is known. Secrets are not watched."""


def make_tag_facts(
    pool: machineconfigpool.MachineConfigPool,
    windows: tuple[maintenance_windows.MaintenanceWindow, ...] = (),
) -> TagFacts:
    """Extract what is known about the tag of the pool."""
    tag = pool.os_image_tag
    fields = decode.Fields.from_json(pool.status, "status").get_object(TAG_STATUS)
    record, problem = parse_tag_record(fields), None
    if tag is not None and record is None and fields.values.get("tag") == tag.name:
        reason, message = fields.get_text("reason"), fields.get_text("message")
        problem = ImageProblem(reason, message) if reason else None
    return TagFacts(
        "" if tag is None else tag.name,
        record,
        problem,
        is_watched=tag is not None and tag.is_followed,
        windows=windows,
        is_stored=bool(pool.status.get(TAG_STATUS)),
        has_condition=any(condition.type == TAG_RESOLVED for condition in pool.conditions),
    )


def make_tag_status(facts: TagFacts, decision: TagDecision) -> decode.Json | None:
    """Return the field of the status to write; empty removes it, None leaves it."""
    if decision.write is not None:
        return decision.write.to_json()
    if decision.drops_record:
        return {}
    problem = decision.problem
    if problem is None or problem == facts.problem:
        return None
    return {"tag": facts.tag, "reason": problem.reason, "message": problem.message}


def check_tag(pool: machineconfigpool.MachineConfigPool) -> None:
    """Raise `errors.ConfigError` if the tag of the pool is invalid."""
    if pool.os_image_tag is not None:
        where = f"spec.osImageTag.name of pool {pool.name}"
        pullspec.parse_push_spec(pool.os_image_tag.name, where=where)


def decide_pool_tag(
    pool: str,
    facts: TagFacts,
    find_answer: FindAnswer,
    now: float,
    *,
    login: str = "",
) -> TagDecision:
    """Decide the next step for the tag of a pool, which is valid."""
    decision = decide_tag(facts, find_answer, now, _make_texts(pool), login=login)
    if not decision.is_waiting and decision.problem is None:
        return decision
    delay = decision.requeue_after_s
    delay = UNRESOLVED_CHECK_S if delay is None else min(delay, UNRESOLVED_CHECK_S)
    return replace(decision, requeue_after_s=delay)


def _make_texts(pool: str) -> TagTexts:
    return TagTexts(
        condition=TAG_RESOLVED,
        subject="The OS image",
        users="nodes",
        missing_remedy="push the tag, or correct spec.osImageTag",
        moved_back_remedy=(
            "to return to it, name its digest: "
            f"kubectl patch mcp {pool} --type=merge "
            '-p \'{"spec":{"osImageTag":null,"osImage":"IMAGE@DIGEST"}}\''
        ),
    )


# Base images of builds

_MAX_WINDOWS = 20
_BASE_TEXTS = TagTexts(
    condition=machineosconfig.ImageConfigCondition.BASE_RESOLVED,
    subject="The base image",
    users="builds",
    missing_remedy=f"push the tag, or name another image in the annotation {key.BASE_IMAGE}",
    moved_back_remedy=(
        f"to follow the tag, set the annotation {key.REBUILD} of the MachineOSConfig"
    ),
)
_SCHEDULE_FORMAT = (
    'a list such as [{"days": ["Sun"], "start": "02:00", "duration": "4h", "timeZone": "UTC"}]'
)


def pin_base_image(config: machineosconfig.MachineOSConfig) -> machineosconfig.MachineOSConfig:
    """Return the MachineOSConfig with its base by digest, if its tag was resolved."""
    notes = config.metadata.annotations
    record = decode_base_record(notes.get(key.RESOLVED_BASE, ""))
    if record is None or record.tag != config.base_image:
        return config
    pinned = {**notes, key.BASE_IMAGE: record.image}
    return replace(config, metadata=replace(config.metadata, annotations=pinned))


def encode_base_record(record: TagRecord) -> str:
    """Encode a record as JSON."""
    return json.dumps(record.to_json(), separators=(",", ":"))


def decode_base_record(text: str) -> TagRecord | None:
    """Decode a record; None for an unreadable one, so that the tag is resolved again."""
    if not text or len(text) > _RECORD_LIMIT:
        return None
    try:
        where = "resolved base"
        return parse_tag_record(decode.Fields.from_json(decode.load_json(text, where=where), where))
    except errors.ConfigError:
        return None


def is_tag(image: str) -> bool:
    """Return whether an image is named by a valid tag, with its registry."""
    try:
        pullspec.parse_push_spec(image, where=key.BASE_IMAGE)
    except errors.ConfigError:
        return False
    return True


def make_base_facts(config: machineosconfig.MachineOSConfig) -> TagFacts:
    """Extract the facts; raise `ConfigError` for an invalid schedule."""
    image = config.base_image
    tag = image if is_tag(image) else ""
    schedule = config.metadata.annotations.get(key.REBUILD_SCHEDULE)
    if schedule is not None and not tag:
        raise errors.ConfigError(
            f"annotation {key.REBUILD_SCHEDULE}: expected a tag in the annotation "
            f"{key.BASE_IMAGE}, found {image[:100] or 'no annotation'!r}; name the base by tag, or "
            "remove the schedule"
        )
    record = decode_base_record(config.metadata.annotations.get(key.RESOLVED_BASE, ""))
    windows = () if schedule is None else parse_schedule(schedule)
    return TagFacts(
        tag,
        record,
        is_watched=bool(windows),
        windows=windows,
        rebuild_requested=config.needs_rebuild,
        is_stored=record is not None,
        has_condition=any(
            condition.type == machineosconfig.ImageConfigCondition.BASE_RESOLVED
            for condition in config.conditions
        ),
    )


def parse_schedule(text: str) -> tuple[maintenance_windows.MaintenanceWindow, ...]:
    """Parse the windows of the annotation; raise `ConfigError`."""
    where = f"annotation {key.REBUILD_SCHEDULE}"
    try:
        windows = decode.load_json(text, where=where)
        fields = decode.Fields.from_json({"windows": windows}, "")
        _check_count(len(fields.get_list("windows")))
        return fields.read_list("windows", maintenance_windows.MaintenanceWindow)
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"{where}: expected {_SCHEDULE_FORMAT}, found {text[:100]!r} ({error}); correct it, or "
            "remove the annotation"
        ) from error


def _check_count(count: int) -> None:
    # Without windows, a schedule would always be open.
    if not 1 <= count <= _MAX_WINDOWS:
        raise errors.ConfigError(f"expected 1 to {_MAX_WINDOWS} windows, found {count}")


def decide_base(
    facts: TagFacts,
    answers: Mapping[TagQuestion, ImageAnswer],
    now: float,
    *,
    login: str = "",
) -> TagDecision:
    """Decide whether to resolve the tag, and whether to follow the answer."""
    find_answer = partial(find_tag_answer, answers)
    decision = decide_tag(facts, find_answer, now, _BASE_TEXTS, login=login)
    if decision.problem is None:
        return decision
    return replace(
        decision, problem=replace(decision.problem, reason=build_result.BASE_IMAGE_UNRESOLVED)
    )
