"""What a Node asks for, to what is done next."""

from dataclasses import replace
from typing import Any

import pytest

from treenail.api import annotations as key
from treenail.controllers.drain.decide import (
    Cordon,
    Cordoner,
    Decision,
    Disown,
    Empty,
    NodeSeen,
    Record,
    Refuse,
    Rest,
    Uncordon,
    decide,
)
from treenail.errors import ConfigError

NOW = 1_700_000_000.75
BEGAN = 1_699_999_000.0
OURS = Record("drain-b", BEGAN, Cordoner.US)
THEIRS = Record("drain-b", BEGAN, Cordoner.OTHER)


def node(asked: str = "", applied: str = "", **more: Any) -> NodeSeen:
    return NodeSeen("n", asked, applied, **more)


CORDONED: dict[str, Any] = {"unschedulable": True}

CASES: list[tuple[str, NodeSeen, Decision]] = [
    ("nothing was ever asked for", node(), Rest()),
    ("nothing is asked for any more", node("", "drain-b"), Rest()),
    ("a drain that was withdrawn is named no more", node("", blocked="[]"), Rest(stale=True)),
    ("what is asked for is so", node("drain-b", "drain-b", **CORDONED), Rest()),
    (
        "somebody uncordoned a drained node: that it has to go back is for the agent to say",
        node("drain-b", "drain-b", record=OURS),
        Disown(replace(OURS, cordoner=Cordoner.OTHER)),
    ),
    (
        "somebody uncordoned a drained node, and that is known",
        node("drain-b", "drain-b", record=THEIRS),
        Rest(),
    ),
    (
        "another drain of a node that somebody uncordoned",
        node("drain-c", "drain-b", record=THEIRS),
        Cordon(Record("drain-c", 1_700_000_000.0, Cordoner.US)),
    ),
    ("no verb", node("drain", "uncordon-a"), Refuse("drain")),
    ("another verb", node("reboot-b", "uncordon-a"), Refuse("reboot-b")),
    ("a verb that only begins so", node("drained-b"), Refuse("drained-b")),
    (
        "a drain is asked for",
        node("drain-b", "uncordon-a"),
        Cordon(Record("drain-b", 1_700_000_000.0, Cordoner.US)),
    ),
    (
        "what follows the verb is nobody's business",
        node("drain-"),
        Cordon(Record("drain-", 1_700_000_000.0, Cordoner.US)),
    ),
    (
        "a drain is asked for of a node that somebody cordoned",
        node("drain-b", "uncordon-a", **CORDONED),
        Cordon(Record("drain-b", 1_700_000_000.0, Cordoner.OTHER)),
    ),
    (
        "another drain is asked for while we drain",
        node("drain-c", "uncordon-a", record=OURS, **CORDONED),
        Cordon(Record("drain-c", 1_700_000_000.0, Cordoner.US)),
    ),
    (
        "another drain is asked for of a node that somebody had cordoned",
        node("drain-c", "drain-b", record=THEIRS, **CORDONED),
        Cordon(Record("drain-c", 1_700_000_000.0, Cordoner.OTHER)),
    ),
    (
        "another drain after one that another drain controller acknowledged",
        node("drain-c", "drain-b", **CORDONED),
        Cordon(Record("drain-c", 1_700_000_000.0, Cordoner.US)),
    ),
    ("a drain goes on", node("drain-b", record=OURS, **CORDONED), Empty(OURS)),
    (
        "a drain of a node that somebody had cordoned goes on",
        node("drain-b", record=THEIRS, **CORDONED),
        Empty(THEIRS),
    ),
    (
        "somebody uncordoned the node during the drain",
        node("drain-b", record=OURS),
        Cordon(OURS, again=True),
    ),
    (
        "somebody took their own cordon back during the drain",
        node("drain-b", record=THEIRS),
        Cordon(OURS, again=True),
    ),
    (
        "the uncordon is asked for",
        node("uncordon-b", "drain-b", record=OURS, **CORDONED),
        Uncordon("uncordon-b", lift=True),
    ),
    (
        "the uncordon is asked for in the middle of the drain",
        node("uncordon-b", "uncordon-a", record=OURS, **CORDONED),
        Uncordon("uncordon-b", lift=True),
    ),
    (
        "the uncordon is asked for of a node that somebody had cordoned",
        node("uncordon-b", "drain-b", record=THEIRS, **CORDONED),
        Uncordon("uncordon-b", lift=False),
    ),
    (
        "the uncordon is asked for of a node that somebody cordoned, and nothing was drained",
        node("uncordon-b", "uncordon-a", **CORDONED),
        Uncordon("uncordon-b", lift=False),
    ),
    (
        "the uncordon is asked for after another drain controller's drain",
        node("uncordon-b", "drain-b", **CORDONED),
        Uncordon("uncordon-b", lift=True),
    ),
    (
        "the uncordon is asked for of a node in service",
        node("uncordon-b", "drain-b", record=OURS),
        Uncordon("uncordon-b", lift=False),
    ),
]


@pytest.mark.parametrize(
    ("seen", "decision"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_each_look_at_a_node_has_its_next_step(seen: NodeSeen, decision: Decision) -> None:
    assert decide(seen, NOW) == decision


def test_node_is_read_as_the_server_has_it() -> None:
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
    seen = NodeSeen.from_json(document)

    assert seen == NodeSeen("n", "drain-b", "uncordon-a", True, OURS, "[]", "7")
    assert seen.resource_version == "7"


def test_record_is_what_was_written() -> None:
    assert THEIRS.to_text() == (
        '{"request": "drain-b", "began": "2023-11-14T21:56:40Z", "cordonedBy": "other"}'
    )
    assert Record.from_text(THEIRS.to_text()) == THEIRS


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
def test_spoilt_record_is_no_record(text: str) -> None:
    with pytest.raises(ConfigError):
        Record.from_text(text)
    seen = NodeSeen.from_json({"metadata": {"name": "n", "annotations": {key.DRAIN: text}}})
    assert seen.record is None
