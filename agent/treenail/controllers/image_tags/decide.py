"""Decides whether to resolve the tag of an image, and whether to follow the answer.

A tag is resolved once. While it is watched, it is resolved again within windows, and a new digest
is followed. A tag that moves back or disappears is reported, and not followed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from treenail.api.meta import Condition
from treenail.clock import format_rfc3339
from treenail.controllers.image_tags.record import MAX_EARLIER, TagProblem, TagRecord
from treenail.image.build_reason import REMEDIES, BuildReason, compute_retry_delay

CHECK_INTERVAL_S = 900.0
"""Time between two resolutions of one tag while a window is open."""
TAG_NOT_FOUND = "TagNotFound"
TAG_MOVED_BACK = "TagMovedBack"
_MESSAGE_LIMIT = 600
_LAST_RETRY_S = 3600.0


@dataclass(frozen=True, slots=True)
class TagTexts:
    """Words of conditions, which depend on who uses the image."""

    condition: str
    """Type of the condition."""
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
class TagAnswer:
    """Answer of a registry."""

    at: float
    image: str = ""
    """By digest; empty with a reason."""
    reason: BuildReason | None = None
    """Why the tag cannot be resolved."""
    message: str = ""
    count: int = 1
    """Failures in a row."""


@dataclass(frozen=True, slots=True)
class TagFacts:
    """A tag, and what is known about it."""

    tag: str
    record: TagRecord | None = None
    """The stored one; it may be that of another tag."""
    is_watched: bool = False
    """The tag is resolved again within windows."""
    opens_in_s: float | None = None
    """Time until a window opens; None while one is open."""
    rebuild_requested: bool = False
    login: str = ""
    """See `TagQuestion`."""


@dataclass(frozen=True, slots=True)
class TagDecision:
    """Writes, questions and the condition of a tag."""

    write: TagRecord | None = None
    """The record to store before anything else."""
    question: TagQuestion | None = None
    is_waiting: bool = False
    """No image is known before the registry answers."""
    holds_rebuild: bool = False
    """A requested rebuild waits for the resolution."""
    problem: TagProblem | None = None
    """Why no image is known."""
    condition: Condition | None = None
    requeue_after_s: float | None = None


FindAnswer = Callable[[TagQuestion], TagAnswer | None]


def decide_tag(
    facts: TagFacts, find_answer: FindAnswer, now: float, texts: TagTexts
) -> TagDecision:
    """Decide the next step for a tag."""
    return _TagDecider(facts, find_answer, now, texts).decide()


class _TagDecider:
    def __init__(
        self, facts: TagFacts, find_answer: FindAnswer, now: float, texts: TagTexts
    ) -> None:
        self._facts = facts
        self._find_answer = find_answer
        self._now = now
        self._texts = texts

    def decide(self) -> TagDecision:
        facts, record = self._facts, self._facts.record
        revision = 0 if record is None else record.revision
        if record is None or record.tag != facts.tag:
            return self._resolve_first(TagQuestion(facts.tag, revision, login=facts.login))
        question = TagQuestion(facts.tag, revision)
        if facts.rebuild_requested and not record.is_for_rebuild:
            return self._resolve_for_rebuild(record, replace(question, is_for_rebuild=True))
        if record.is_for_rebuild and not facts.rebuild_requested:
            return TagDecision(write=replace(record, is_for_rebuild=False))
        if facts.is_watched:
            return self._watch_tag(record, question)
        return TagDecision(condition=self._make_condition(record))

    def _resolve_first(self, question: TagQuestion) -> TagDecision:
        answer = self._find_answer(question)
        if answer is None:
            return TagDecision(question=question, is_waiting=True)
        if answer.reason is not None:
            problem = self._describe_failure(answer)
            retried = self._retry(question, answer, problem)
            return replace(retried, problem=problem)
        found = TagRecord(
            self._facts.tag,
            answer.image,
            format_rfc3339(answer.at),
            revision=question.revision,
            is_for_rebuild=self._facts.rebuild_requested,
        )
        return TagDecision(write=found)

    def _resolve_for_rebuild(self, record: TagRecord, question: TagQuestion) -> TagDecision:
        """Follow the tag wherever it is. A tag that is gone does not block the rebuild."""
        answer = self._find_answer(question)
        if answer is None:
            condition = self._make_condition(record)
            return TagDecision(question=question, holds_rebuild=True, condition=condition)
        changed = replace(record, revision=record.revision + 1, is_for_rebuild=True)
        if answer.reason is not None:
            problem = self._describe_failure(answer, record.image)
            if answer.reason is BuildReason.BASE_NOT_FOUND:
                return TagDecision(write=replace(changed, problem=problem))
            return replace(self._retry(question, answer, problem), holds_rebuild=True)
        return TagDecision(write=_follow(changed, answer))

    def _watch_tag(self, record: TagRecord, question: TagQuestion) -> TagDecision:
        condition = self._make_condition(record)
        if self._facts.opens_in_s is not None:
            return TagDecision(condition=condition, requeue_after_s=self._facts.opens_in_s)
        answer = self._find_answer(question)
        if answer is None or self._now - answer.at >= CHECK_INTERVAL_S:
            # Also of an answer from an earlier window.
            return TagDecision(question=question, condition=condition)
        if answer.reason is not None:
            found = replace(record, problem=self._describe_failure(answer, record.image))
        elif answer.image in record.earlier:
            found = replace(record, problem=self._describe_move_back(record, answer.image))
        else:
            found = _follow(record, answer)
        if found != record:
            return TagDecision(write=found)
        delay = answer.at + CHECK_INTERVAL_S - self._now
        return TagDecision(condition=condition, requeue_after_s=delay)

    def _retry(self, question: TagQuestion, answer: TagAnswer, problem: TagProblem) -> TagDecision:
        delay = compute_retry_delay(answer.count)
        due = answer.at + (_LAST_RETRY_S if delay is None else delay.total_seconds())
        condition = self._make_false_condition(problem)
        if due <= self._now:
            return TagDecision(question=question, condition=condition)
        return TagDecision(condition=condition, requeue_after_s=due - self._now)

    def _describe_failure(self, answer: TagAnswer, image: str = "") -> TagProblem:
        assert answer.reason is not None
        kept = f"; {self._texts.users} keep {image}" if image else ""
        if answer.reason is BuildReason.BASE_NOT_FOUND:
            reason, remedy = TAG_NOT_FOUND, self._texts.missing_remedy
        else:
            reason, remedy = answer.reason.value, REMEDIES[answer.reason]
        cause = f"cannot resolve {self._facts.tag}: {answer.message}"[:_MESSAGE_LIMIT]
        return TagProblem(reason, f"{cause}{kept}; {remedy}")

    def _describe_move_back(self, record: TagRecord, image: str) -> TagProblem:
        return TagProblem(
            TAG_MOVED_BACK,
            f"{record.tag} moved back to {image}, which preceded {record.image}; "
            f"{self._texts.users} keep the latter; {self._texts.moved_back_remedy}",
        )

    def _make_condition(self, record: TagRecord) -> Condition:
        if record.problem is not None:
            return self._make_false_condition(record.problem)
        return Condition(
            self._texts.condition,
            "True",
            "Resolved",
            f"{record.tag} was {record.image} at {record.resolved_at}",
        )

    def _make_false_condition(self, problem: TagProblem) -> Condition:
        return Condition(self._texts.condition, "False", problem.reason, problem.message)


def _follow(record: TagRecord, answer: TagAnswer) -> TagRecord:
    """Return the record with the image of the answer."""
    image = answer.image
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
        earlier=earlier[-MAX_EARLIER:],
        problem=None,
    )
