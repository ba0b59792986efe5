"""Decisions about drain requests."""

from dataclasses import replace
from typing import Any

import pytest

from treenail.api import annotations as key
from treenail.controllers.drain.decide import (
    CordonDecision,
    CordonOwner,
    DisownCordonDecision,
    DrainDecision,
    DrainNode,
    DrainRecord,
    EvictDecision,
    IdleDecision,
    RejectDecision,
    UncordonDecision,
    decide_drain,
)
from treenail.errors import ConfigError

NOW = 1_700_000_000.75
BEGAN = 1_699_999_000.0
OURS = DrainRecord("drain-b", BEGAN, CordonOwner.DRAIN_CONTROLLER)
THEIRS = DrainRecord("drain-b", BEGAN, CordonOwner.OTHER)


def node(asked: str = "", applied: str = "", **more: Any) -> DrainNode:
    return DrainNode("n", asked, applied, **more)


CORDONED: dict[str, Any] = {"unschedulable": True}

CASES: list[tuple[str, DrainNode, DrainDecision]] = [
    ("no request was ever written", node(), IdleDecision()),
    ("the request was withdrawn", node("", "drain-b"), IdleDecision()),
    (
        "a withdrawn drain is no longer reported",
        node("", drain_blocked="[]"),
        IdleDecision(has_stale_blockers=True),
    ),
    ("the request is applied", node("drain-b", "drain-b", **CORDONED), IdleDecision()),
    (
        "a user uncordoned a drained node; only the agent may request another drain",
        node("drain-b", "drain-b", record=OURS),
        DisownCordonDecision(replace(OURS, cordon_owner=CordonOwner.OTHER)),
    ),
    (
        "a user uncordoned a drained node, and the record has it",
        node("drain-b", "drain-b", record=THEIRS),
        IdleDecision(),
    ),
    (
        "another drain of a node that a user uncordoned",
        node("drain-c", "drain-b", record=THEIRS),
        CordonDecision(DrainRecord("drain-c", 1_700_000_000.0, CordonOwner.DRAIN_CONTROLLER)),
    ),
    (
        "a drain after the last applied uncordon was cancelled with the same request",
        node("uncordon-b", "uncordon-b", record=OURS, **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=True),
    ),
    (
        "such a drain of a node that a user cordoned",
        node("uncordon-b", "uncordon-b", record=THEIRS, **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=False),
    ),
    ("no verb", node("drain", "uncordon-a"), RejectDecision("drain")),
    ("another verb", node("reboot-b", "uncordon-a"), RejectDecision("reboot-b")),
    ("a verb that only begins so", node("drained-b"), RejectDecision("drained-b")),
    (
        "a drain is requested",
        node("drain-b", "uncordon-a"),
        CordonDecision(DrainRecord("drain-b", 1_700_000_000.0, CordonOwner.DRAIN_CONTROLLER)),
    ),
    (
        "the text after the verb is opaque",
        node("drain-"),
        CordonDecision(DrainRecord("drain-", 1_700_000_000.0, CordonOwner.DRAIN_CONTROLLER)),
    ),
    (
        "a drain is requested of a node that a user cordoned",
        node("drain-b", "uncordon-a", **CORDONED),
        CordonDecision(DrainRecord("drain-b", 1_700_000_000.0, CordonOwner.OTHER)),
    ),
    (
        "another drain is requested during a drain",
        node("drain-c", "uncordon-a", record=OURS, **CORDONED),
        CordonDecision(DrainRecord("drain-c", 1_700_000_000.0, CordonOwner.DRAIN_CONTROLLER)),
    ),
    (
        "another drain is requested of a node that a user cordoned",
        node("drain-c", "drain-b", record=THEIRS, **CORDONED),
        CordonDecision(DrainRecord("drain-c", 1_700_000_000.0, CordonOwner.OTHER)),
    ),
    (
        "another drain after one that another drain controller acknowledged",
        node("drain-c", "drain-b", **CORDONED),
        CordonDecision(DrainRecord("drain-c", 1_700_000_000.0, CordonOwner.DRAIN_CONTROLLER)),
    ),
    ("a drain goes on", node("drain-b", record=OURS, **CORDONED), EvictDecision(OURS)),
    (
        "a drain of a node that a user cordoned continues",
        node("drain-b", record=THEIRS, **CORDONED),
        EvictDecision(THEIRS),
    ),
    (
        "a user uncordoned the node during the drain",
        node("drain-b", record=OURS),
        CordonDecision(OURS, is_repeated=True),
    ),
    (
        "a user lifted their own cordon during the drain",
        node("drain-b", record=THEIRS),
        CordonDecision(OURS, is_repeated=True),
    ),
    (
        "the uncordon is requested",
        node("uncordon-b", "drain-b", record=OURS, **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=True),
    ),
    (
        "the uncordon is requested during the drain",
        node("uncordon-b", "uncordon-a", record=OURS, **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=True),
    ),
    (
        "the uncordon is requested of a node that a user had cordoned",
        node("uncordon-b", "drain-b", record=THEIRS, **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=False),
    ),
    (
        "the uncordon is requested of a node that a user cordoned, without a drain",
        node("uncordon-b", "uncordon-a", **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=False),
    ),
    (
        "the uncordon is requested after another drain controller's drain",
        node("uncordon-b", "drain-b", **CORDONED),
        UncordonDecision("uncordon-b", should_uncordon=True),
    ),
    (
        "the uncordon is requested of a node in service",
        node("uncordon-b", "drain-b", record=OURS),
        UncordonDecision("uncordon-b", should_uncordon=False),
    ),
]


@pytest.mark.parametrize(
    ("seen", "decision"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_decision_follows_from_node_facts(seen: DrainNode, decision: DrainDecision) -> None:
    assert decide_drain(seen, NOW) == decision


def test_node_is_parsed_from_json() -> None:
    document = {
        "metadata": {
            "name": "n",
            "resourceVersion": "7",
            "annotations": {
                key.DESIRED_DRAIN: "drain-b",
                key.LAST_APPLIED_DRAIN: "uncordon-a",
                key.DRAIN: OURS.to_text(),
                key.DRAIN_BLOCKED: "[]",
            },
        },
        "spec": {"unschedulable": True},
    }
    seen = DrainNode.from_json(document)

    assert seen == DrainNode("n", "drain-b", "uncordon-a", True, OURS, "[]", "7")
    assert seen.resource_version == "7"


def test_record_survives_round_trip() -> None:
    assert THEIRS.to_text() == (
        '{"request": "drain-b", "began": "2023-11-14T21:56:40Z", "cordonedBy": "other"}'
    )
    assert DrainRecord.from_text(THEIRS.to_text()) == THEIRS


SPOILT = [
    "",
    "[]",
    "{}",
    '{"request": "drain-b", "began": "yesterday", "cordonedBy": "other"}',
    '{"request": "drain-b", "began": "2023-11-14T21:56:40", "cordonedBy": "other"}',
    '{"request": "drain-b", "began": "2023-11-14T21:56:40Z", "cordonedBy": "a cat"}',
    '{"request": 1, "began": "2023-11-14T21:56:40Z", "cordonedBy": "other"}',
]


@pytest.mark.parametrize("text", SPOILT)
def test_invalid_record_counts_as_none(text: str) -> None:
    with pytest.raises(ConfigError):
        DrainRecord.from_text(text)
    seen = DrainNode.from_json({"metadata": {"name": "n", "annotations": {key.DRAIN: text}}})
    assert seen.record is None
