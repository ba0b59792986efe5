"""Selection and format of reported blockers."""

import json

import pytest

from treenail.controllers.drain.blockers import ReportedBlockers, find_reportable, parse_keys
from treenail.kube.eviction import Blocker, BlockerReason, DisruptionBudget, DrainProgress

NOW = 1_700_000_000.0


def blocker(pod: str, since: float, reason: BlockerReason = BlockerReason.FINALIZER) -> Blocker:
    return Blocker(f"shop/{pod}", reason, "waits for x", (), since)


def progress(*blockers: Blocker, beside: int = 0) -> DrainProgress:
    remaining = tuple(each.pod for each in blockers)
    return DrainProgress(remaining, blockers, len(blockers) + beside, retry_s=5.0)


def test_only_lasting_blockers_are_reported() -> None:
    old, new = blocker("old", NOW - 31), blocker("new", NOW - 10)

    assert find_reportable(progress(old, new), "", NOW) == ReportedBlockers(
        (old,), 0, next_report_in_s=20
    )
    assert find_reportable(progress(new), "", NOW) == ReportedBlockers((), 0, next_report_in_s=20)
    assert find_reportable(progress(), "", NOW) == ReportedBlockers()


def test_start_of_blocker_is_read_from_the_annotation() -> None:
    named = find_reportable(progress(blocker("a", NOW - 1800)), "", NOW).annotation
    again = find_reportable(progress(blocker("a", NOW), blocker("b", NOW)), named, NOW)

    assert again == ReportedBlockers((blocker("a", NOW - 1800),), 0, next_report_in_s=30)
    assert (
        find_reportable(progress(blocker("a", NOW, BlockerReason.VOLUME)), named, NOW).blockers
        == ()
    )


def test_annotation_has_all_facts_of_a_blocker() -> None:
    budgets = (DisruptionBudget("keep", 0),)
    found = Blocker("shop/web", BlockerReason.BUDGET, "no" * 200, budgets, NOW - 60)

    assert json.loads(find_reportable(progress(found), "", NOW).annotation) == [
        {
            "pod": "shop/web",
            "reason": "pdb",
            "message": ("no" * 200)[:300],
            "since": "2023-11-14T22:12:20Z",
            "budgets": [{"name": "keep", "disruptionsAllowed": 0}],
        }
    ]


def test_message_counts_unnamed_blockers() -> None:
    found = find_reportable(
        progress(blocker("a", NOW - 60), blocker("b", NOW - 40), beside=3), "", NOW
    )

    assert found.message == "shop/a: waits for x; shop/b: waits for x; and 3 more"


def test_drain_without_blockers_has_empty_annotation() -> None:
    assert ReportedBlockers().annotation == ""
    assert parse_keys("") == frozenset()


@pytest.mark.parametrize(
    "text", ["x", "{}", "[1]", '[{"pod": 1}]', '[{"pod": "a", "reason": "pdb", "since": "soon"}]']
)
def test_invalid_annotation_has_no_keys(text: str) -> None:
    assert parse_keys(text) == frozenset()


def test_future_start_of_blocker_is_ignored() -> None:
    named = find_reportable(progress(blocker("a", NOW - 60)), "", NOW).annotation

    assert find_reportable(progress(blocker("a", NOW - 100)), named, NOW - 90).blockers == ()
