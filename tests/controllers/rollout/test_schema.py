"""The schemas of the API server and our parsers accept the same values."""

from typing import Any

import pytest

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools.node_selection import compute_max_unavailable
from treenail.controllers.pools.rollout_policy import parse_policy
from treenail.errors import ConfigError
from treenail.manifests.installation import load_crds
from treenail_lab.apiserver.schema.structural_schema import find_problems

WINDOW = {"days": ["Sat"], "start": "01:00", "duration": "4h", "timeZone": "UTC"}
ALERTS = {"url": "https://a.example", "names": ["a"]}
LOCKS = {"url": "http://a.example/b", "group": "workers"}
ARABIC_ONE = "\N{ARABIC-INDIC DIGIT ONE}"


def window(**fields: Any) -> dict[str, Any]:
    return {"windows": [WINDOW | fields]}


VALID_POLICIES: list[dict[str, Any]] = [
    {},
    {"canary": {}},
    {"canary": {"nodes": "5%", "soak": "0s", "nodeSelector": {"matchLabels": {"a": "b"}}}},
    {"waves": ["1%", "10%", "100%"]},
    {"waves": [1, 2, "50%"]},
    {"waves": list(range(1, 21))},
    {"soak": "1h30m"},
    {"soak": "999999h999999m999999s"},
    {"progressDeadline": "0s", "rebootTimeout": "45s", "maxFailures": 0, "order": "spread"},
    {"prestage": {}, "healthMode": "Off"},
    {"prestage": {"maxParallel": 1}},
    window(),
    window(start="1:5", duration="168h"),
    {"windows": [WINDOW] * 50},
    {"alerts": ALERTS, "fleetLock": LOCKS},
    {"alerts": ALERTS | {"secret": "s"}},
    {"resume": {"worker": ""}},
]

INVALID_POLICIES: list[dict[str, Any]] = [
    {"canary": {"nodes": 0}},
    {"canary": {"nodes": "0%"}},
    {"canary": {"nodes": "5"}},
    {"canary": {"nodes": True}},
    {"canary": {"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}}},
    {"waves": list(range(1, 22))},
    {"waves": ["101%"]},
    {"waves": [f"{ARABIC_ONE}%"]},
    {"waves": [1.5]},
    {"soak": ""},
    {"soak": "5"},
    {"soak": "m"},
    {"soak": "1000000s"},
    {"soak": f"{ARABIC_ONE}h"},
    {"soak": "10m\n"},
    {"maxFailures": -1},
    {"maxFailures": 2**31},
    {"order": "random"},
    {"prestage": {"maxParallel": 0}},
    {"prestage": {"maxParallel": 2**31}},
    {"healthMode": "off"},
    {"windows": [WINDOW] * 51},
    window(days=[]),
    window(days=["Sat", "Sat"]),
    window(days=["Saturday"]),
    window(start="24:00"),
    window(start="1"),
    window(start=f"{ARABIC_ONE}:00"),
    window(duration="4"),
    window(timeZone=""),
    {"windows": [{name: WINDOW[name] for name in WINDOW if name != "days"}]},
    {"alerts": {"url": "https://a.example"}},
    {"alerts": ALERTS | {"names": []}},
    {"alerts": ALERTS | {"names": [""]}},
    {"alerts": ALERTS | {"names": ["a", "a"]}},
    {"alerts": ALERTS | {"names": [f"a{number}" for number in range(51)]}},
    {"alerts": ALERTS | {"names": ["a" * 254]}},
    {"alerts": ALERTS | {"secret": ""}},
    {"alerts": ALERTS | {"secret": "s" * 254}},
    {"alerts": ALERTS | {"url": "ftp://a.example"}},
    {"alerts": ALERTS | {"url": "https://user@a.example"}},
    {"alerts": ALERTS | {"url": "https://a.example/?a"}},
    {"alerts": ALERTS | {"url": f"https://a.example/{'a' * 1024}"}},
    {"fleetLock": LOCKS | {"group": ""}},
    {"fleetLock": LOCKS | {"group": "a_b"}},
    {"fleetLock": LOCKS | {"group": "a" * 254}},
    {"resume": {"worker": "a" * 254}},
    {"resume": {f"pool-{number}": "1" for number in range(201)}},
]

# A structural schema cannot express these. Rules in CEL reject the first group; the condition of
# the pool reports the second one.
REJECTED_BY_RULES: list[dict[str, Any]] = [
    {"waves": ["50%", "30%"]},
    {"waves": ["30%", "30%"]},
    {"waves": [2, 2]},
    {"waves": [2, 1]},
    {"alerts": ALERTS | {"url": "http://a.example", "secret": "s"}},
]
REJECTED_BY_THE_CONTROLLER: list[dict[str, Any]] = [
    {"canary": {"nodes": 3}, "waves": [3]},
    window(timeZone="Europe/Atlantis"),
    window(duration="0s"),
    window(duration="169h"),
    {"alerts": ALERTS | {"url": "https://a..example"}},
]

MAX_UNAVAILABLE: list[tuple[object, bool]] = [
    (0, True),
    (5, True),
    ("10%", True),
    ("+10%", True),
    ("150%", True),
    (-1, False),
    ("-1%", False),
    ("10", False),
    ("", False),
    ("10 %", False),
    ("ten", False),
    (f"{ARABIC_ONE}%", False),
    (True, False),
]


def find_schema_problems(kind: str, spec: dict[str, Any]) -> list[str]:
    crds: Any = load_crds()
    (crd,) = (each for each in crds if each["spec"]["names"]["kind"] == kind)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return [each.field for each in find_problems(schema, {"spec": spec})]


def is_parsed(spec: dict[str, Any]) -> bool:
    try:
        parse_policy({"spec": spec}, "careful")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("spec", VALID_POLICIES)
def test_valid_policy_is_accepted_by_schema_and_parser(spec: dict[str, Any]) -> None:
    assert (find_schema_problems("RolloutPolicy", spec), is_parsed(spec)) == ([], True)


@pytest.mark.parametrize("spec", INVALID_POLICIES)
def test_invalid_policy_is_rejected_by_schema_and_parser(spec: dict[str, Any]) -> None:
    assert (bool(find_schema_problems("RolloutPolicy", spec)), is_parsed(spec)) == (True, False)


@pytest.mark.parametrize("spec", REJECTED_BY_RULES + REJECTED_BY_THE_CONTROLLER)
def test_policy_beyond_the_schema_is_rejected_by_the_parser(spec: dict[str, Any]) -> None:
    assert (find_schema_problems("RolloutPolicy", spec), is_parsed(spec)) == ([], False)


@pytest.mark.parametrize(("value", "is_valid"), MAX_UNAVAILABLE)
def test_max_unavailable_is_judged_alike_by_schema_and_parser(
    value: object, is_valid: bool
) -> None:
    problems = find_schema_problems("MachineConfigPool", {"maxUnavailable": value})
    assert (problems == []) is is_valid
    try:
        document = {"metadata": {"name": "worker"}, "spec": {"maxUnavailable": value}}
        pool = MachineConfigPool.from_json(document)
        compute_max_unavailable("worker", pool.max_unavailable, 10)
    except ConfigError:
        assert not is_valid
    else:
        assert is_valid
