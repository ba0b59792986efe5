"""Which image the tag of a base stands for: windows, rebuilds, tags that move back or go."""

import json
from dataclasses import dataclass, field, replace

import pytest

from treenail.api import annotations as key
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clocks import parse_rfc3339
from treenail.controllers.pools.image_tags import (
    CHECK_INTERVAL_S,
    ImageAnswer,
    ImageProblem,
    TagDecision,
    TagFacts,
    TagQuestion,
    TagRecord,
    decide_base,
    decode_base_record,
    encode_base_record,
    make_base_facts,
    parse_schedule,
    pin_base_image,
)
from treenail.errors import ConfigError
from treenail.image.build_result import AttemptFailure, BuildReason

TAG = "registry.example.com/os/base:stable"
IMAGES = [f"registry.example.com/os/base@sha256:{digit * 64}" for digit in "abc"]
SCHEDULE = '[{"days": ["Sun"], "start": "02:00", "duration": "4h", "timeZone": "UTC"}]'
SUNDAY = parse_rfc3339("2026-11-22T03:00:00Z") or 0.0
MONDAY = SUNDAY + 86400


@dataclass
class Site:
    """A MachineOSConfig with a base by tag, and its registry."""

    now: float = MONDAY
    schedule: str = SCHEDULE
    image: str = IMAGES[0]
    """What the tag stands for; empty for no such tag."""
    failure: BuildReason | None = None
    record: TagRecord | None = None
    rebuild: bool = False
    tag: str = TAG
    answers: dict[TagQuestion, ImageAnswer] = field(default_factory=dict)
    asked: int = 0
    login: str = "1"
    """Version of the login."""

    def decide(self) -> TagDecision:
        """Decide once; execute the decision."""
        windows = parse_schedule(self.schedule) if self.schedule else ()
        facts = TagFacts(
            self.tag,
            self.record,
            is_watched=bool(windows),
            windows=windows,
            rebuild_requested=self.rebuild,
            is_stored=self.record is not None,
            has_condition=True,
        )
        login = self.login if facts.is_unresolved else ""
        found = decide_base(facts, self.answers, self.now, login=login)
        if found.write is not None:
            self.record = decode_base_record(encode_base_record(found.write))
            assert self.record == found.write
        if found.drops_record:
            self.record = None
        if found.question is not None:
            self.answers[found.question] = self._answer(found.question)
            self.asked += 1
        self.answers = {each: it for each, it in self.answers.items() if facts.concerns(each)}
        return found

    def settle(self) -> TagDecision:
        """Decide until nothing is left to do now."""
        for _ in range(20):
            found = self.decide()
            if found.write is None and found.question is None:
                return found
        raise AssertionError("the decision does not settle")

    def served(self) -> str:
        return self.record.image

    def condition(self) -> tuple[str, str]:
        found = self.settle().condition
        return found.status, found.reason

    def _answer(self, question: TagQuestion) -> ImageAnswer:
        assert question.image == self.tag
        if self.failure is not None or not self.image:
            reason = self.failure or BuildReason.BASE_NOT_FOUND
            return ImageAnswer(self.now, AttemptFailure(reason, "the registry failed"))
        return ImageAnswer(self.now, pull_spec=self.image)


def resolved(**changes: object) -> Site:
    found = Site(**changes)  # type: ignore[arg-type]
    found.settle()
    assert found.served() == IMAGES[0]
    return found


def test_tag_is_resolved_at_once_outside_of_windows() -> None:
    found = Site()
    assert found.decide().is_waiting
    assert found.condition() == ("True", "Resolved")
    assert found.served() == IMAGES[0]


def test_tag_without_schedule_is_resolved_once() -> None:
    found = resolved(schedule="", now=SUNDAY)
    found.image = IMAGES[1]
    found.now += 30 * 86400
    assert found.settle().requeue_after_s is None
    assert (found.served(), found.asked) == (IMAGES[0], 1)


def test_new_digest_is_followed_only_while_a_window_is_open() -> None:
    found = resolved()
    found.image = IMAGES[1]
    delay = found.settle().requeue_after_s
    assert found.served() == IMAGES[0]
    assert delay == 6 * 86400 - 3600
    found.now += delay
    found.settle()
    assert found.served() == IMAGES[1]
    found.image = IMAGES[2]
    found.now += 4 * 3600
    found.settle()
    assert found.served() == IMAGES[1]


def test_open_window_asks_every_quarter_of_an_hour() -> None:
    found = resolved(now=SUNDAY)
    assert found.asked == 1
    assert found.settle().requeue_after_s == CHECK_INTERVAL_S
    found.now += CHECK_INTERVAL_S - 1
    found.settle()
    assert found.asked == 1
    found.now += 1
    assert found.settle().requeue_after_s == CHECK_INTERVAL_S
    assert found.asked == 2


def test_restart_of_the_controller_keeps_the_base() -> None:
    found = resolved()
    found.image = IMAGES[1]
    found.answers = {}
    found.settle()
    assert (found.served(), found.asked) == (IMAGES[0], 1)


def test_tag_that_moves_back_is_reported_and_followed_only_by_a_rebuild() -> None:
    found = resolved(now=SUNDAY)
    for image in (IMAGES[1], IMAGES[0]):
        found.image = image
        found.now += CHECK_INTERVAL_S
        found.settle()
    assert found.served() == IMAGES[1]
    assert found.condition() == ("False", "TagMovedBack")
    found.now = MONDAY
    assert found.condition() == ("False", "TagMovedBack")
    found.rebuild = True
    assert not found.settle().holds_rebuild
    assert found.served() == IMAGES[0]
    found.rebuild = False
    assert found.condition() == ("True", "Resolved")
    assert not found.record.is_for_rebuild
    assert found.record.earlier == ()


def test_tag_that_disappears_is_reported_and_keeps_the_base() -> None:
    found = resolved(now=SUNDAY)
    found.image = ""
    found.now += CHECK_INTERVAL_S
    assert found.condition() == ("False", "TagNotFound")
    assert found.served() == IMAGES[0]
    found.image = IMAGES[0]
    found.now += CHECK_INTERVAL_S
    assert found.condition() == ("True", "Resolved")


def test_each_rebuild_asks_the_registry_again() -> None:
    found = resolved(schedule="")
    for number, image in enumerate((IMAGES[1], IMAGES[2]), 2):
        found.image, found.rebuild = image, True
        assert found.decide().holds_rebuild
        found.settle()
        found.rebuild = False
        found.settle()
        assert (found.served(), found.asked) == (image, number)


def test_rebuild_waits_for_an_unreachable_registry_but_not_for_a_tag_that_is_gone() -> None:
    found = resolved(schedule="", rebuild=False)
    found.rebuild, found.failure = True, BuildReason.REGISTRY_UNREACHABLE
    decision = found.settle()
    assert decision.holds_rebuild
    assert decision.requeue_after_s == 60
    found.now += 60
    found.failure, found.image = None, ""
    assert not found.settle().holds_rebuild
    assert found.served() == IMAGES[0]
    assert found.condition() == ("False", "TagNotFound")


def test_tag_that_was_never_there_is_a_problem_with_remedy() -> None:
    found = Site(image="")
    decision = found.settle()
    assert found.record is None
    assert decision.problem == ImageProblem(
        "BaseImageUnresolved",
        f"cannot resolve {TAG}: the registry failed; push the tag, or name another image in the "
        "annotation treenail.io/base-image",
    )
    found.image = IMAGES[0]
    found.now += decision.requeue_after_s or 0
    assert found.settle().problem is None


def test_failed_resolution_is_repeated_at_once_with_another_login() -> None:
    found = Site(failure=BuildReason.BASE_LOGIN_REFUSED)
    assert found.settle().problem is not None
    found.failure = None
    assert found.settle().problem is not None
    found.login = "2"
    assert found.settle().problem is None
    assert (found.served(), found.asked) == (IMAGES[0], 2)


def test_another_tag_is_resolved_and_a_digest_removes_the_record() -> None:
    found = resolved()
    found.tag, found.image = f"{TAG}-2", IMAGES[1]
    found.settle()
    assert found.served() == IMAGES[1]
    found.tag = ""
    assert found.condition() == ("True", "NoTag")
    assert found.record is None


def make_config(**notes: str) -> MachineOSConfig:
    annotations = {f"treenail.io/{name.replace('_', '-')}": text for name, text in notes.items()}
    return MachineOSConfig.from_json(
        {"metadata": {"name": "worker", "uid": "uid", "annotations": annotations}}
    )


def test_record_replaces_the_tag_that_it_was_made_of() -> None:
    record = encode_base_record(TagRecord(TAG, IMAGES[0], "2026-01-01T00:00:00Z"))
    assert pin_base_image(make_config(base_image=TAG, resolved_base=record)).base_image == IMAGES[0]
    other = make_config(base_image=f"{TAG}-2", resolved_base=record)
    assert pin_base_image(other).base_image == f"{TAG}-2"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tag": 1}', '{"tag": "x", "image": "y"}'])
def test_unreadable_record_counts_as_none(text: str) -> None:
    assert decode_base_record(text) is None


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("sundays", "not JSON"),
        ("[]", "expected 1 to 20 windows, found 0"),
        (json.dumps([{"days": ["Sunday"], "start": "02:00", "duration": "4h"}]), "found 'Sunday'"),
        (json.dumps([{"days": ["Sun"], "start": "02:00"}]), "duration"),
    ],
)
def test_invalid_schedule_names_expected_found_and_remedy(schedule: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        make_base_facts(make_config(base_image=TAG, rebuild_schedule=schedule))
    text = str(found.value)
    assert text.startswith(f"annotation {key.REBUILD_SCHEDULE}: expected a list such as [")
    assert words in text
    assert text.endswith("; correct it, or remove the annotation")


def test_schedule_without_a_tag_is_refused() -> None:
    with pytest.raises(ConfigError, match="name the base by tag, or remove the schedule"):
        make_base_facts(make_config(base_image=IMAGES[0], rebuild_schedule=SCHEDULE))
    facts = make_base_facts(make_config(base_image=TAG, rebuild_schedule=SCHEDULE))
    assert facts == replace(facts, tag=TAG, record=None, rebuild_requested=False)
    assert len(facts.windows) == 1
