"""Tags of images: when to resolve them, and whether to follow the answer.

`decide_tag` decides both. A tag is resolved once. While it is watched, it is resolved again within
windows, and a new digest is followed. A tag that moves back or disappears is reported, and not
followed.

`TagRecord` keeps how a tag was resolved. `TagRequests` asks registries on other threads, so that a
slow registry delays no pool.
"""

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineosconfig, object_meta, pullspec
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.image import build_result, push_spec

MAX_EARLIER = 20
"""Images that a record remembers. An older one counts as new when the tag returns to it."""


@dataclass(frozen=True, slots=True)
class TagProblem:
    """Why a tag is not followed: a CamelCase reason and a message with the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TagRecord:
    """How a tag was resolved."""

    tag: str
    image: str
    """Pull spec by digest, which is used."""
    resolved_at: str
    """In RFC 3339."""
    earlier: tuple[str, ...] = ()
    """Images that the tag stood for before, oldest first."""
    revision: int = 0
    """Counts resolutions for rebuilds: each one needs a new answer of the registry."""
    is_for_rebuild: bool = False
    """Resolved for the rebuild that is requested now."""
    problem: TagProblem | None = None
    """Why the tag was not followed the last time."""

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "TagRecord":
        """Read a stored record; raise `ConfigError`."""
        reason = fields.get_text("reason")
        return cls(
            tag=fields.get_required_text("tag"),
            image=str(pullspec.parse_pull_spec(fields.get_text("image"), where="image")),
            resolved_at=fields.get_text("resolvedAt"),
            earlier=fields.get_text_list("earlier")[-MAX_EARLIER:],
            revision=fields.get_optional_integer("revision") or 0,
            is_for_rebuild=fields.get_bool("forRebuild"),
            problem=TagProblem(reason, fields.get_text("message")) if reason else None,
        )

    def to_json(self) -> decode.Json:
        document: decode.Json = {
            "tag": self.tag,
            "image": self.image,
            "resolvedAt": self.resolved_at,
            "earlier": list(self.earlier),
        }
        if self.revision:
            document["revision"] = self.revision
        if self.is_for_rebuild:
            document["forRebuild"] = True
        if self.problem is not None:
            document |= {"reason": self.problem.reason, "message": self.problem.message}
        return document


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
        return TagRecord.from_fields(fields)
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
    reason: build_result.BuildReason | None = None
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
    condition: object_meta.Condition | None = None
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
            return self._check_tag(record, question)
        return TagDecision(condition=self._make_condition(record))

    def _resolve_first(self, question: TagQuestion) -> TagDecision:
        answer = self._find_answer(question)
        if answer is None:
            return TagDecision(question=question, is_waiting=True)
        if answer.reason is not None:
            problem = self._describe_failure(answer)
            retried = self._retry_question(question, answer, problem)
            return replace(retried, problem=problem)
        record = TagRecord(
            self._facts.tag,
            answer.image,
            clocks.format_rfc3339(answer.at),
            revision=question.revision,
            is_for_rebuild=self._facts.rebuild_requested,
        )
        return TagDecision(write=record)

    def _resolve_for_rebuild(self, record: TagRecord, question: TagQuestion) -> TagDecision:
        """Follow the tag wherever it is. A tag that is gone does not block the rebuild."""
        answer = self._find_answer(question)
        if answer is None:
            condition = self._make_condition(record)
            return TagDecision(question=question, holds_rebuild=True, condition=condition)
        changed = replace(record, revision=record.revision + 1, is_for_rebuild=True)
        if answer.reason is not None:
            problem = self._describe_failure(answer, record.image)
            if answer.reason is build_result.BuildReason.BASE_NOT_FOUND:
                return TagDecision(write=replace(changed, problem=problem))
            return replace(self._retry_question(question, answer, problem), holds_rebuild=True)
        return TagDecision(write=_follow_tag(changed, answer))

    def _check_tag(self, record: TagRecord, question: TagQuestion) -> TagDecision:
        condition = self._make_condition(record)
        if self._facts.opens_in_s is not None:
            return TagDecision(condition=condition, requeue_after_s=self._facts.opens_in_s)
        answer = self._find_answer(question)
        if answer is None or self._now - answer.at >= CHECK_INTERVAL_S:
            # Also of an answer from an earlier window.
            return TagDecision(question=question, condition=condition)
        if answer.reason is not None:
            updated = replace(record, problem=self._describe_failure(answer, record.image))
        elif answer.image in record.earlier:
            updated = replace(record, problem=self._describe_move_back(record, answer.image))
        else:
            updated = _follow_tag(record, answer)
        if updated != record:
            return TagDecision(write=updated)
        delay = answer.at + CHECK_INTERVAL_S - self._now
        return TagDecision(condition=condition, requeue_after_s=delay)

    def _retry_question(
        self, question: TagQuestion, answer: TagAnswer, problem: TagProblem
    ) -> TagDecision:
        delay = build_result.compute_retry_delay(answer.count)
        due = answer.at + (_LAST_RETRY_S if delay is None else delay.total_seconds())
        condition = self._make_false_condition(problem)
        if due <= self._now:
            return TagDecision(question=question, condition=condition)
        return TagDecision(condition=condition, requeue_after_s=due - self._now)

    def _describe_failure(self, answer: TagAnswer, image: str = "") -> TagProblem:
        assert answer.reason is not None
        kept = f"; {self._texts.users} keep {image}" if image else ""
        if answer.reason is build_result.BuildReason.BASE_NOT_FOUND:
            reason, remedy = TAG_NOT_FOUND, self._texts.missing_remedy
        else:
            reason, remedy = answer.reason.value, build_result.REMEDIES[answer.reason]
        cause = f"cannot resolve {self._facts.tag}: {answer.message}"[:_MESSAGE_LIMIT]
        return TagProblem(reason, f"{cause}{kept}; {remedy}")

    def _describe_move_back(self, record: TagRecord, image: str) -> TagProblem:
        return TagProblem(
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

    def _make_false_condition(self, problem: TagProblem) -> object_meta.Condition:
        return object_meta.Condition(
            self._texts.condition, "False", problem.reason, problem.message
        )


def _follow_tag(record: TagRecord, answer: TagAnswer) -> TagRecord:
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
        resolved_at=clocks.format_rfc3339(answer.at),
        earlier=earlier[-MAX_EARLIER:],
        problem=None,
    )


log = logging.getLogger(__name__)


class TagSource(Protocol):
    """Finds what tags stand for."""

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> TagAnswer:
        """Return the image by digest, within a time limit; an error becomes part of the answer.

        ``secret`` names the login; empty for that of the cluster. The image must exist for each of
        the architectures.
        """

    def compute_access_version(self, secret: str) -> str:
        """Return a text that changes with the login and with the CAs; raise `ClusterError`."""


class LazyTagSource:
    """A `TagSource` that is made when the first pool has a tag: registry clients cost memory."""

    def __init__(self, make: Callable[[], TagSource]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._source: TagSource | None = None

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> TagAnswer:
        """See `TagSource`."""
        return self._find_source().resolve_tag(image, architectures, secret)

    def compute_access_version(self, secret: str) -> str:
        """See `TagSource`."""
        return self._find_source().compute_access_version(secret)

    def _find_source(self) -> TagSource:
        with self._lock:
            if self._source is None:
                self._source = self._make()
            return self._source


class TagRequests:
    """The last question of each owner and its answer. Thread-safe."""

    def __init__(self, executor: Executor, notify: Callable[[str], None]) -> None:
        self._executor = executor
        self._notify = notify
        self._lock = threading.Lock()
        self._open: set[tuple[str, TagQuestion]] = set()
        self._answers: dict[str, tuple[TagQuestion, TagAnswer]] = {}

    def ask(self, owner: str, question: TagQuestion, work: Callable[[], TagAnswer]) -> None:
        """Ask unless the question is open."""
        with self._lock:
            if (owner, question) in self._open:
                return
            self._open.add((owner, question))
        self._executor.submit(self._run_question, owner, question, work)

    def find_answer(self, owner: str, question: TagQuestion) -> TagAnswer | None:
        """Return the last answer to this question; None without one."""
        with self._lock:
            known = self._answers.get(owner)
        if known is None:
            return None
        asked, answer = known
        if answer.reason is None and not question.login:
            # An image is an image, whichever login found it.
            asked = replace(asked, login="")
        return answer if asked == question else None

    def forget(self, owner: str) -> None:
        """Forget the answer for an owner without a tag."""
        with self._lock:
            self._answers.pop(owner, None)

    def _run_question(
        self, owner: str, question: TagQuestion, work: Callable[[], TagAnswer]
    ) -> None:
        try:
            answer = work()
        except Exception:
            log.exception("cannot resolve %s", question.image)
            answer = None
        before = self.find_answer(owner, question)
        with self._lock:
            self._open.discard((owner, question))
            if answer is not None:
                if answer.reason is not None and before is not None and before.reason is not None:
                    answer = replace(answer, count=before.count + 1)
                self._answers[owner] = question, answer
        if answer is not None:
            self._notify(owner)


class TagMetrics:
    """Counts changes by the pool that gets the image, or an image built on it."""

    def __init__(self, metrics: ControllerMetrics, use: str) -> None:
        """``use`` begins the name of the metric: ``base_image`` or ``pool_image``."""
        self._changes = metrics.add_counter(
            f"{use}_tag_changes_total",
            "Tags that moved or are not followed, by the reason in the Event.",
            ("pool", "reason"),
        )

    def record_change(self, change: TagChange, pool: str) -> None:
        """Count a change that was recorded in the cluster."""
        self._changes.increment(pool, change.reason)


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
        push_spec.parse_push_spec(image, where=key.BASE_IMAGE)
    except errors.ConfigError:
        return False
    return True
