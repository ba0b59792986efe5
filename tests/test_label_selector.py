"""Label selectors have the meaning that Kubernetes gives them."""

from typing import Any

import pytest

from treenail.errors import ConfigError
from treenail.label_selector import LabelSelector, matches_selector

LABELS = {"zone": "a", "role": ""}


def selector(document: dict[str, Any]) -> LabelSelector:
    return LabelSelector.from_json(document, "selector")


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("document", "matches"),
    [
        ({}, True),
        ({"matchLabels": {"zone": "a"}}, True),
        ({"matchLabels": {"zone": "a", "role": "x"}}, False),
        ({"matchLabels": {"other": ""}}, False),
        (expression("zone", "In", "a", "b"), True),
        (expression("zone", "In", "b"), False),
        (expression("other", "In", ""), False),
        (expression("zone", "NotIn", "b"), True),
        (expression("zone", "NotIn", "a"), False),
        (expression("other", "NotIn", "a"), True),
        (expression("role", "Exists"), True),
        (expression("other", "Exists"), False),
        (expression("role", "DoesNotExist"), False),
        (expression("other", "DoesNotExist"), True),
        ({"matchLabels": {"zone": "a"}, **expression("role", "DoesNotExist")}, False),
    ],
)
def test_labels_match_when_every_requirement_holds(document: dict[str, Any], matches: bool) -> None:
    found = selector(document)
    assert found.matches(LABELS) is matches
    assert selector(found.to_json()) == found


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            expression("zone", "Is", "a"),
            (
                "selector.matchExpressions[0].operator: expected one of In, NotIn, Exists, "
                "DoesNotExist, found 'Is'"
            ),
        ),
        (
            expression("zone", "In"),
            "selector.matchExpressions[0].values: expected at least one beside In, found 0",
        ),
        (
            expression("zone", "Exists", "a"),
            "selector.matchExpressions[0].values: expected none beside Exists, found 1",
        ),
        (
            expression("", "Exists"),
            "selector.matchExpressions[0].key: expected a string, found an empty string",
        ),
        ({"matchLabels": {"zone": 1}}, "selector.matchLabels.zone: expected a string, found 1"),
    ],
)
def test_selector_invalid_for_kubernetes_is_rejected(
    document: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        selector(document)
    assert str(raised.value) == sentence


def test_absent_selector_differs_from_empty_selector() -> None:
    assert not matches_selector(None, LABELS)
    assert selector({}).is_empty


def test_selector_is_formatted_as_a_query() -> None:
    found = selector(
        {
            "matchLabels": {"b": "1", "a": ""},
            "matchExpressions": [
                {"key": "c", "operator": "In", "values": ["x", "y"]},
                {"key": "d", "operator": "NotIn", "values": ["z"]},
                {"key": "e", "operator": "Exists"},
                {"key": "f", "operator": "DoesNotExist"},
            ],
        }
    )
    assert found.query == "a in (),b in (1),c in (x,y),d notin (z),e,!f"
    assert LabelSelector().query == ""


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "web", "tier": "a"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Near"}]}, False),
        ({"matchExpressions": [{"operator": "Exists"}]}, False),
        ({"matchExpressions": ["app"]}, False),
        ({"matchLabels": ["app"]}, False),
    ],
)
def test_stored_selector_matches_like_the_api(selector: object, matches: bool) -> None:
    assert matches_selector(selector, {"app": "web"}) is matches
