"""A pool's rollout policy: all fields are parsed, unknown ones are rejected."""

from typing import Any

import pytest

from tests.controllers.rollout.builders import pool
from treenail.controllers.rollout.policy import (
    DEFAULT_MAX_PARALLEL,
    NodeOrder,
    PoolShare,
    RolloutPolicy,
    Wave,
    parse_policy,
)
from treenail.errors import ConfigError
from treenail.label_selector import LabelRequirement, LabelSelector, SelectorOperator

WHERE = "annotation treenail.io/rollout of pool worker"


def test_pool_without_policy_has_no_limits() -> None:
    assert parse_policy(pool()) == RolloutPolicy()
    assert RolloutPolicy().max_failures is None


def test_empty_policy_tolerates_no_failure() -> None:
    assert parse_policy(pool("{}")) == RolloutPolicy(max_failures=0)


def test_policy_fields_are_parsed() -> None:
    text = """
    canary: {nodes: 2, soak: 1h30m, nodeSelector: {matchLabels: {canary: ""}}}
    waves: [5, 50%]
    soak: 90s
    maxFailures: 3
    rebootTimeout: 20m
    prestage: {maxParallel: 7}
    order: spread
    windows:
    - {days: [Sat], start: "1:20", duration: 4h, timeZone: UTC}
    """
    found = parse_policy(pool(text))
    canaries = LabelSelector((LabelRequirement("canary", SelectorOperator.IN, ("",)),))
    assert found.waves == (
        Wave(PoolShare(2), 5400.0, canaries),
        Wave(PoolShare(5), 90.0),
        Wave(PoolShare(percent=50), 90.0),
    )
    assert (found.max_failures, found.reboot_timeout_s, found.order) == (
        3,
        1200.0,
        NodeOrder.SPREAD,
    )
    assert found.prestage_max_parallel == 7
    (only,) = found.windows
    assert (only.days, only.start.isoformat(), only.duration.seconds) == ({5}, "01:20:00", 14400)


def test_staging_without_limit_uses_default() -> None:
    assert parse_policy(pool({"prestage": {}})).prestage_max_parallel == DEFAULT_MAX_PARALLEL
    assert parse_policy(pool({"canary": {}})).prestage_max_parallel is None


def test_canary_defaults_to_one_node_with_common_soak() -> None:
    assert parse_policy(pool({"canary": {}, "soak": "5m"})).waves == (Wave(PoolShare(1), 300.0),)
    assert parse_policy(pool({"canary": {"soak": "0s"}, "soak": "5m"})).waves == (
        Wave(PoolShare(1), 0.0),
    )


@pytest.mark.parametrize(
    ("share", "total", "expected"),
    [
        (PoolShare(3), 10, 3),
        (PoolShare(30), 10, 10),
        (PoolShare(percent=10), 500, 50),
        (PoolShare(percent=10), 9, 1),
        (PoolShare(percent=100), 7, 7),
        (PoolShare(1), 0, 0),
    ],
)
def test_share_is_between_one_node_and_all(share: PoolShare, total: int, expected: int) -> None:
    assert share.compute_count(total) == expected


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"canari": {}}, "unknown field 'canari'"),
        ({"canary": 1}, "canary: expected an object, found 1"),
        (
            {"canary": {"nodes": 0}},
            "canary.nodes: expected a count of nodes or a percentage from 1% to 100%, found 0",
        ),
        (
            {"waves": ["110%"]},
            "waves[0]: expected a count of nodes or a percentage from 1% to 100%, found '110%'",
        ),
        (
            {"waves": ["50%", "30%"]},
            "waves[1]: expected more than in the previous wave, found '30%'",
        ),
        (
            {"canary": {"nodes": 3}, "waves": [3]},
            "waves[0]: expected more than in the previous wave",
        ),
        ({"soak": 5}, "soak: expected a string, found 5"),
        ({"soak": "5 min"}, "soak: expected a duration such as 10m or 1h30m, found '5 min'"),
        ({"soak": ""}, "soak: expected a duration such as 10m or 1h30m, found ''"),
        ({"maxFailures": -1}, "maxFailures: expected a count of nodes, found -1"),
        ({"maxFailures": "1"}, "maxFailures: expected an integer, found a string"),
        ({"order": "random"}, "order: expected one of zones, spread, found 'random'"),
        (
            {"windows": [{"start": "01:00", "duration": "4h", "timeZone": "CET/CEST"}]},
            "windows[0].timeZone: expected a time zone such as Europe/Berlin, found 'CET/CEST'",
        ),
    ],
)
def test_invalid_policy_is_rejected_with_the_field(document: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_policy(pool(document))
    assert str(raised.value).startswith(f"{WHERE}: {sentence}")


@pytest.mark.parametrize("text", ["", "  ", "- a", "canary: [", "just words"])
def test_policy_that_is_no_object_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_policy(pool(text))
    assert WHERE in str(raised.value)
