"""A pool's rollout policy: all fields are parsed, unknown ones are rejected."""

from typing import Any

import pytest
import yaml

from tests.controllers.rollout.builders import pool
from treenail.controllers.pools.rollout_policy import (
    DEFAULT_MAX_PARALLEL,
    KIND,
    MissingPolicyError,
    NodeOrder,
    ObservedPolicy,
    PoolShare,
    RolloutPolicy,
    Wave,
    find_policy,
    parse_policy,
)
from treenail.controllers.rollout.policy_status import summarize_entries
from treenail.errors import ConfigError
from treenail.label_selector import LabelRequirement, LabelSelector, SelectorOperator
from treenail.manifests.installation import load_crds

WHERE = "RolloutPolicy careful"


def parse(spec: Any) -> RolloutPolicy:
    return parse_policy({"spec": spec}, "careful")


def test_pool_without_policy_has_no_limits() -> None:
    assert find_policy(pool(), {}) == RolloutPolicy()
    assert RolloutPolicy().max_failures is None


def test_missing_policy_is_an_error_that_names_both() -> None:
    named = pool(rolloutPolicy="carefull")
    with pytest.raises(MissingPolicyError) as raised:
        find_policy(named, {"careful": ObservedPolicy("careful")})
    assert str(raised.value) == (
        "RolloutPolicy carefull does not exist, and spec.rolloutPolicy of pool worker names it"
    )


def test_empty_policy_tolerates_no_failure() -> None:
    assert parse({}) == RolloutPolicy(max_failures=0)


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
    found = parse(yaml.safe_load(text))
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
    assert parse({"prestage": {}}).prestage_max_parallel == DEFAULT_MAX_PARALLEL
    assert parse({"canary": {}}).prestage_max_parallel is None


def test_canary_defaults_to_one_node_with_common_soak() -> None:
    assert parse({"canary": {}, "soak": "5m"}).waves == (Wave(PoolShare(1), 300.0),)
    assert parse({"canary": {"soak": "0s"}, "soak": "5m"}).waves == (Wave(PoolShare(1), 0.0),)


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
        ({"canary": 1}, "canary: expected an object, found 1"),
        (
            {"canary": {"nodes": 0}},
            "canary.nodes: expected a count of nodes or a percentage from 1% to 100%, found 0",
        ),
        (
            {"waves": [None, "50%"]},
            "waves[0]: expected a count of nodes or a percentage from 1% to 100%, found null",
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
            "waves[0]: expected more than in the previous wave, found 3",
        ),
        ({"soak": 5}, "soak: expected a string, found 5"),
        ({"soak": "5 min"}, "soak: expected a duration such as 10m or 1h30m, found '5 min'"),
        ({"soak": ""}, "soak: expected a duration such as 10m or 1h30m, found an empty string"),
        ({"maxFailures": -1}, "maxFailures: expected a count of nodes, found -1"),
        ({"maxFailures": "1"}, "maxFailures: expected an integer, found a string"),
        (
            {"alerts": {"url": "http://ex..ample", "names": ["a"]}},
            "alerts.url: expected an http or https URL without user, query and fragment",
        ),
        (
            {"alerts": {"url": "http://a.example", "names": ["a"], "secret": "token"}},
            "alerts.url: expected an https URL, because a token is sent there",
        ),
        ({"healthMode": "off"}, "healthMode: expected one of Enforce, Report, Off, found 'off'"),
        ({"order": "random"}, "order: expected zones or spread, found 'random'"),
        (
            {
                "windows": [
                    {"days": ["Sat"], "start": "01:00", "duration": "4h", "timeZone": "CET/CEST"}
                ]
            },
            "windows[0].timeZone: expected a time zone such as Europe/Berlin, found 'CET/CEST'",
        ),
    ],
)
def test_invalid_policy_is_rejected_with_the_field(document: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(document)
    assert str(raised.value).startswith(f"{WHERE}: spec.{sentence}")


@pytest.mark.parametrize(
    ("document", "field", "remedy"),
    [
        ({"canari": {}}, "canari", "did you mean canary?"),
        ({"soakTime": "5m"}, "soakTime", "did you mean soak?"),
        ({"canary": {"nodeselector": {}}}, "canary.nodeselector", "did you mean nodeSelector?"),
        (
            {"canary": {"nodeSelector": {"matchlabels": {}}}},
            "canary.nodeSelector.matchlabels",
            "did you mean matchLabels?",
        ),
        (
            {"windows": [{"day": ["Sat"], "start": "01:00", "duration": "4h", "timeZone": "UTC"}]},
            "windows[0].day",
            "did you mean days?",
        ),
        ({"prestage": {"parallel": 2}}, "prestage.parallel", "did you mean maxParallel?"),
        ({"fleetLock": {"groups": "a"}}, "fleetLock.groups", "did you mean group?"),
        ({"alerts": {"token": "a"}}, "alerts.token", "use one of: names, secret, url"),
    ],
)
def test_unknown_field_is_rejected_with_path_and_suggestion(
    document: Any, field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(document)
    assert str(raised.value) == f"{WHERE}: spec.{field}: unknown field"
    assert raised.value.remedy.startswith(remedy)


@pytest.mark.parametrize("document", [{"spec": []}, {"spec": "canary"}, {"specs": {}}])
def test_policy_that_is_no_object_is_rejected(document: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_policy(document, "careful")
    assert WHERE in str(raised.value)


def test_every_field_of_the_schema_is_parsed_and_no_other() -> None:
    (crd,) = (each for each in load_crds() if each["spec"]["names"]["kind"] == KIND)  # type: ignore[index]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]  # type: ignore[index]
    with pytest.raises(ConfigError) as raised:
        parse({"?": 1})
    fields = sorted(schema["properties"]["spec"]["properties"])
    assert raised.value.remedy == f"use one of: {', '.join(fields)}"


def test_summary_names_each_pool_and_is_bounded() -> None:
    halted: dict[str, Any] = {
        "pool": "a",
        "state": "Halted",
        "haltedBy": {"node": "n1", "reason": "x"},
    }
    updated: dict[str, Any] = {"pool": "b", "state": "Updated"}
    assert summarize_entries([]) == ""
    assert summarize_entries([halted, updated]) == "a Halted by n1, b Updated"
    assert summarize_entries([updated] * 12).endswith(", b Updated, 2 more")
