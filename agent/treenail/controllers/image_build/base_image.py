"""Decide which image the tag in ``treenail.io/base-image`` stands for.

A tag is resolved once. With ``treenail.io/rebuild-schedule`` it is resolved again while a window is
open, and a new digest is followed. The record in an annotation of the MachineOSConfig is what
builds use, so that neither a restart nor the registry changes the base of a build.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from treenail.api import annotations as key
from treenail.api import decode, machineosconfig, object_meta
from treenail.controllers.image_build import build_facts
from treenail.controllers.pools import image_tags, maintenance_windows, rollout_policy
from treenail.errors import ConfigError
from treenail.image.inputs import checks

_MAX_WINDOWS = 20
_NO_TAG = object_meta.Condition(
    machineosconfig.ImageConfigCondition.BASE_RESOLVED,
    "True",
    "NoTag",
    "The base image is not named by tag",
)
_TEXTS = image_tags.TagTexts(
    condition=machineosconfig.ImageConfigCondition.BASE_RESOLVED,
    users="builds",
    missing_remedy=f"push the tag, or name another image in the annotation {key.BASE_IMAGE}",
    moved_back_remedy=(
        f"to follow the tag, set the annotation {key.REBUILD} of the MachineOSConfig"
    ),
)
_SCHEDULE_FORMAT = (
    'a list such as [{"days": ["Sun"], "start": "02:00", "duration": "4h", "timeZone": "UTC"}]'
)


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """Facts about the base image of a MachineOSConfig."""

    owner: str
    """UID of the MachineOSConfig."""
    tag: str = ""
    """Empty if the base is named by digest, or by the rendered config."""
    record: image_tags.TagRecord | None = None
    """The stored one; it may be that of another tag."""
    windows: tuple[maintenance_windows.MaintenanceWindow, ...] = ()
    """Empty without a schedule: then the tag is not resolved again."""
    rebuild_requested: bool = False
    has_condition: bool = False
    """The MachineOSConfig has the condition BaseImageResolved."""

    @property
    def is_unresolved(self) -> bool:
        """No image of the tag is known."""
        return bool(self.tag) and (self.record is None or self.record.tag != self.tag)


@dataclass(frozen=True, slots=True)
class BaseDecision:
    """Writes, questions and conditions for the base image."""

    write: image_tags.TagRecord | None = None
    """The record to store before anything else."""
    drops_record: bool = False
    question: build_facts.ResolveBase | None = None
    is_waiting: bool = False
    """No image is known before the registry answers."""
    holds_rebuild: bool = False
    """A requested rebuild waits for the resolution."""
    problem: build_facts.BuildProblem | None = None
    """Why no build can be planned."""
    condition: object_meta.Condition | None = None
    requeue_after_s: float | None = None
    kept_answers: frozenset[str] = frozenset()
    """`ResolveBase.build` of the questions whose answers are still of use."""


def make_base_facts(config: machineosconfig.MachineOSConfig) -> BaseFacts:
    """Extract the facts; raise `ConfigError` for an invalid schedule."""
    image = config.base_image
    tag = image if image_tags.is_tag(image) else ""
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
        record=image_tags.decode_base_record(
            config.metadata.annotations.get(key.RESOLVED_BASE, "")
        ),
        windows=() if schedule is None else parse_schedule(schedule),
        rebuild_requested=config.needs_rebuild,
        has_condition=any(
            condition.type == machineosconfig.ImageConfigCondition.BASE_RESOLVED
            for condition in config.conditions
        ),
    )


def parse_schedule(text: str) -> tuple[maintenance_windows.MaintenanceWindow, ...]:
    """Parse the windows of the annotation; raise `ConfigError`."""
    where = f"annotation {key.REBUILD_SCHEDULE}"
    try:
        fields = decode.Fields.from_json({"windows": decode.load_json(text, where=where)}, "")
        _check_count(len(fields.get_list("windows")))
        return fields.map_objects(
            "windows",
            lambda window: maintenance_windows.parse_window(
                window, rollout_policy.parse_duration_s(window, "duration")
            ),
        )
    except ConfigError as error:
        # An annotation has one value, and its finding one form.
        finding = checks.InputFinding(
            checks.InputReason.ANNOTATION_INVALID,
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


def decide_base(
    facts: BaseFacts,
    answers: Mapping[build_facts.Question, build_facts.Answer],
    now: float,
    *,
    login: str = "",
) -> BaseDecision:
    """Decide whether to resolve the tag, and whether to follow the answer.

    ``login`` is the version of the login for the base image, while the tag is unresolved.
    """
    record = facts.record
    if not facts.tag:
        return BaseDecision(
            drops_record=record is not None,
            # A merge keeps the conditions of other writers, so it cannot remove one.
            condition=_NO_TAG if facts.has_condition else None,
        )
    state = maintenance_windows.find_window_state(facts.windows, now)
    decision = image_tags.decide_tag(
        image_tags.TagFacts(
            facts.tag,
            record,
            is_watched=bool(facts.windows),
            opens_in_s=state.opens_in_s
            if isinstance(state, maintenance_windows.WindowClosed)
            else None,
            rebuild_requested=facts.rebuild_requested,
            login=login,
        ),
        lambda question: _find_answer(answers, _make_question(facts, question)),
        now,
        _TEXTS,
    )
    problem = None
    if decision.problem is not None:
        problem = build_facts.BuildProblem(
            checks.InputReason.BASE_IMAGE_UNRESOLVED, decision.problem.message
        )
    revision = 0 if record is None else record.revision
    return BaseDecision(
        write=decision.write,
        question=None if decision.question is None else _make_question(facts, decision.question),
        is_waiting=decision.is_waiting,
        holds_rebuild=decision.holds_rebuild,
        problem=problem,
        condition=decision.condition,
        requeue_after_s=decision.requeue_after_s,
        kept_answers=frozenset({build_facts.ResolveBase(facts.owner, facts.tag, revision).build}),
    )


def _make_question(facts: BaseFacts, question: image_tags.TagQuestion) -> build_facts.ResolveBase:
    return build_facts.ResolveBase(
        facts.owner,
        question.image,
        question.revision,
        is_for_rebuild=question.is_for_rebuild,
        login=question.login,
    )


def _find_answer(
    answers: Mapping[build_facts.Question, build_facts.Answer], question: build_facts.ResolveBase
) -> image_tags.TagAnswer | None:
    answer = answers.get(question)
    if answer is None and not question.login:
        # An image is an image, whichever login found it.
        answer = next(
            (
                candidate
                for asked, candidate in answers.items()
                if isinstance(asked, build_facts.ResolveBase)
                and candidate.failure is None
                and replace(asked, login="") == question
            ),
            None,
        )
    if answer is None:
        return None
    failure = answer.failure
    return image_tags.TagAnswer(
        answer.at,
        answer.pull_spec,
        None if failure is None else failure.reason,
        "" if failure is None else failure.message,
        answer.count,
    )
