"""Schemas of custom resources: what the contract suite does not try."""

from typing import Any

import pytest

from tests.contract.client import Json
from treenail_lab.apiserver.schema.structural_schema import (
    conform_object,
    find_problems,
)


def schema_of(**properties: Any) -> Json:
    return {"type": "object", "properties": properties}


def wrong(schema: Json, value: Any) -> list[tuple[str, str]]:
    found = find_problems(schema_of(x=schema), {"x": value})
    return [(cause.reason.removeprefix("FieldValue"), cause.field) for cause in found]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, 2, 1),
        ({"type": "number", "maximum": 1, "exclusiveMaximum": True}, 0.5, 1),
        ({"type": "integer", "multipleOf": 5}, 15, 16),
        ({"type": "integer", "format": "int32"}, 2**31 - 1, 2**31),
        ({"type": "integer"}, 2.0, 2.5),
        ({"type": "number"}, 2, True),
        ({"type": "boolean"}, False, 0),
        ({"type": "string", "format": "date-time"}, "2026-01-01T00:00:00Z", "yesterday"),
        ({"type": "string", "format": "byte"}, "aGk=", "a!"),
        ({"type": "string", "format": "made-up"}, "anything", 1),
        ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
        ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
        ({"type": "array", "minItems": 1}, [1], []),
        ({"type": "string", "not": {"enum": ["a"]}}, "b", "a"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 1, True),
        ({"type": "integer", "oneOf": [{"minimum": 5}, {"maximum": 6}]}, 9, 5),
        ({"type": "integer", "allOf": [{"minimum": 5}, {"maximum": 6}]}, 5, 7),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": "b"}, {"a": 1}),
        ({"x-kubernetes-int-or-string": True}, "50%", 1.5),
        ({"type": "string", "nullable": True}, None, 1),
        ({"type": "string", "nullable": True, "enum": ["a"]}, None, "b"),
        ({"x-kubernetes-preserve-unknown-fields": True}, [{"any": None}], ...),
    ],
)
def test_values_are_validated_by_schema(schema: Json, good: Any, bad: Any) -> None:
    assert wrong(schema, good) == []
    if bad is not ...:
        assert wrong(schema, bad) != []


def test_every_violation_is_reported_with_its_path() -> None:
    item = schema_of(name={"type": "string"}, port={"type": "integer"}) | {"required": ["name"]}
    schema = {
        "type": "array",
        "items": item,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    }
    value = [{"name": "a", "port": "x"}, {"port": 1}, {"name": "a"}]
    assert wrong(schema, value) == [
        ("TypeInvalid", "x[0].port"),
        ("Required", "x[1].name"),
        ("Duplicate", "x[2]"),
    ]


def test_embedded_resources_keep_what_makes_them_resources() -> None:
    embedded = schema_of(spec=schema_of(a={"type": "string"}))
    schema = schema_of(template=embedded | {"x-kubernetes-embedded-resource": True})
    template = {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "a"}, "junk": 1}
    kept = conform_object(schema, {"template": template})
    assert kept == {"template": {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "a"}}}


def test_items_of_lists_and_values_of_maps_are_pruned_and_defaulted() -> None:
    inner = schema_of(a={"type": "integer", "default": 1})
    schema = schema_of(
        many={"type": "array", "items": inner},
        by_name={"type": "object", "additionalProperties": inner},
    )
    kept = conform_object(schema, {"many": [{"b": 1}, {"a": 2}], "by_name": {"x": {"b": 1}}})
    assert kept == {"many": [{"a": 1}, {"a": 2}], "by_name": {"x": {"a": 1}}}


def test_known_fields_below_free_ones_are_still_defaulted() -> None:
    schema = schema_of(a=schema_of(b={"default": 1})) | {
        "x-kubernetes-preserve-unknown-fields": True
    }
    assert conform_object(schema, {"a": {"c": 1}, "free": {"d": 1}}) == {
        "a": {"b": 1},
        "free": {"d": 1},
    }
