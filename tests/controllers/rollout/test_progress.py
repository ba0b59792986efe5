"""The record of a rollout survives as text; what time alone changes is known in advance."""

import pytest

from tests.controllers.rollout.builders import NEW, failed, image, node, on_its_way, pool
from treenail.controllers.rollout.policy import Policy, policy
from treenail.controllers.rollout.progress import (
    Failure,
    Record,
    advance,
    failures,
    next_look_s,
)
from treenail.errors import ConfigError


@pytest.mark.parametrize(
    "record",
    [
        Record(NEW),
        Record(image("new", "1"), wave=2, settled_at=1234.0, resumed="x", forgiven=("a", "b")),
        Record(NEW, halted=Failure("a", 'it said "no"\nand more')),
    ],
)
def test_a_record_is_read_back_as_it_was_written(record: Record) -> None:
    assert Record.from_text(record.to_text()) == record


def test_a_fresh_record_is_short() -> None:
    assert Record(NEW).to_text() == '{"config":"new"}'


@pytest.mark.parametrize("text", ["", "[]", "{", '{"wave": "1"}', '{"halted": 1}'])
def test_a_record_that_somebody_broke_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Record.from_text(text)


def test_waves_without_a_soak_time_pass_in_one_look() -> None:
    careful = policy(pool({"canary": {}, "waves": [2, 3]}))
    nodes = [node(name, NEW) for name in "abc"] + [node("d")]
    assert advance(None, careful, nodes, NEW, now=0.0).wave == 3


def test_failures_are_told_in_the_order_of_their_start() -> None:
    nodes = [
        failed("c", started_at=30.0),
        failed("a", started_at=10.0, reason=""),
        failed("b", started_at=20.0, reason="x" * 1000),
        node("d", NEW),
        on_its_way("e"),
    ]
    assert failures(nodes, NEW, Policy(), now=1000.0) == (
        Failure("a", "it is Degraded and does not say why"),
        Failure("b", "x" * 400),
        Failure("c", "no space left"),
    )


def test_only_a_node_that_was_degraded_before_is_given_time_to_answer() -> None:
    nodes = [
        failed("a", started_at=100.0),
        failed("b", started_at=100.0, was_degraded=True),
    ]
    told = (Failure("a", "no space left"), Failure("b", "no space left"))
    assert failures(nodes, NEW, Policy(), now=101.0) == told[:1]
    assert failures(nodes, NEW, Policy(), now=160.0) == told


def test_a_node_that_was_never_given_the_target_did_not_fail_on_it() -> None:
    careful = policy(pool({"rebootTimeout": "1m"}))
    ill = node("a", NEW, healthy=False, ready_changed_at=10.0)
    assert failures([ill], NEW, careful, now=1e6) == ()
    assert next_look_s(Record(NEW), careful, [ill], NEW, now=20.0) is None


def test_the_next_look_is_when_the_first_thing_may_change() -> None:
    careful = policy(pool({"canary": {"soak": "10m"}, "rebootTimeout": "20m"}))
    nodes = [
        on_its_way("a", healthy=False, started_at=100.0, ready_changed_at=400.0),
        failed("b", started_at=560.0, was_degraded=True),
    ]
    record = Record(NEW, settled_at=500.0)
    assert next_look_s(record, careful, nodes, NEW, now=600.0) == 20.0
    assert next_look_s(record, careful, nodes, NEW, now=630.0) == 470.0
    assert next_look_s(Record(NEW), careful, nodes, NEW, now=630.0) == 970.0
    assert next_look_s(Record(NEW), careful, [node("a")], NEW, now=630.0) is None
