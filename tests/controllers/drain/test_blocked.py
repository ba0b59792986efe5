"""Naming what is in the way: not what is over at once, and not anew for every second."""

import json

import pytest

from treenail.controllers.drain.blocked import Blocked, blocked, keys_of
from treenail.kube.eviction import Blocker, Budget, Progress, Reason

NOW = 1_700_000_000.0


def blocker(pod: str, since: float, reason: Reason = Reason.FINALIZER) -> Blocker:
    return Blocker(f"shop/{pod}", reason, "waits for x", (), since)


def progress(*blockers: Blocker, beside: int = 0) -> Progress:
    remaining = tuple(each.pod for each in blockers)
    return Progress(remaining, blockers, len(blockers) + beside, again_s=5.0)


def test_what_lasts_is_named_and_what_is_new_is_waited_for() -> None:
    old, new = blocker("old", NOW - 31), blocker("new", NOW - 10)

    assert blocked(progress(old, new), "", NOW) == Blocked((old,), 0, due_in_s=20)
    assert blocked(progress(new), "", NOW) == Blocked((), 0, due_in_s=20)
    assert blocked(progress(), "", NOW) == Blocked()


def test_it_is_known_for_how_long_from_the_annotation() -> None:
    named = blocked(progress(blocker("a", NOW - 1800)), "", NOW).text
    again = blocked(progress(blocker("a", NOW), blocker("b", NOW)), named, NOW)

    assert again == Blocked((blocker("a", NOW - 1800),), 0, due_in_s=30)
    assert blocked(progress(blocker("a", NOW, Reason.VOLUME)), named, NOW).blockers == ()


def test_annotation_says_all_there_is_to_say() -> None:
    budgets = (Budget("keep", 0),)
    found = Blocker("shop/web", Reason.BUDGET, "no" * 200, budgets, NOW - 60)

    assert json.loads(blocked(progress(found), "", NOW).text) == [
        {
            "pod": "shop/web",
            "reason": "pdb",
            "message": ("no" * 200)[:300],
            "since": "2023-11-14T22:12:20Z",
            "budgets": [{"name": "keep", "disruptionsAllowed": 0}],
        }
    ]


def test_sentence_counts_those_that_are_not_named() -> None:
    found = blocked(progress(blocker("a", NOW - 60), blocker("b", NOW - 40), beside=3), "", NOW)

    assert found.sentence == "shop/a: waits for x; shop/b: waits for x; and 3 more"


def test_nothing_in_the_way_is_an_empty_annotation() -> None:
    assert Blocked().text == ""
    assert keys_of("") == frozenset()


@pytest.mark.parametrize(
    "text", ["x", "{}", "[1]", '[{"pod": 1}]', '[{"pod": "a", "reason": "pdb", "since": "soon"}]']
)
def test_spoilt_annotation_knows_nothing(text: str) -> None:
    assert keys_of(text) == frozenset()


def test_future_since_is_not_believed() -> None:
    named = blocked(progress(blocker("a", NOW - 60)), "", NOW).text

    assert blocked(progress(blocker("a", NOW - 100)), named, NOW - 90).blockers == ()
