"""Patches and selectors, where servers differ or the contract suite does not look."""

from typing import Any

import pytest

from tests.contract.client import Json
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.patch.patches import (
    apply_json_patch,
    apply_merge_patch,
    apply_strategic_merge,
)
from treenail_lab.apiserver.schema.selectors import compile_selector, parse_label_selector


def test_patch_leaves_its_target_as_it_was() -> None:
    target = {"a": {"b": [1]}, "spec": {"containers": [{"name": "c", "x": 1}]}}
    before = str(target)
    apply_json_patch(target, [{"op": "add", "path": "/a/b/0", "value": 2}])
    apply_merge_patch(target, {"a": {"b": None}})
    apply_strategic_merge(target, {"spec": {"containers": [{"name": "c", "x": 2}]}})
    assert str(target) == before


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patches_are_those_of_rfc_7386(target: Any, patch: Any, expected: Any) -> None:
    assert apply_merge_patch(target, patch) == expected


@pytest.mark.parametrize(
    ("target", "operation", "expected"),
    [
        ({"a": [1, 2]}, {"op": "add", "path": "/a/1", "value": 9}, {"a": [1, 9, 2]}),
        ({"a": [1, 2]}, {"op": "add", "path": "/a/-", "value": 9}, {"a": [1, 2, 9]}),
        ({"a": [1, 2]}, {"op": "remove", "path": "/a/0"}, {"a": [2]}),
        ({"a": [1, 2]}, {"op": "replace", "path": "/a/1", "value": 9}, {"a": [1, 9]}),
        ({"a": 1}, {"op": "replace", "path": "", "value": {"b": 2}}, {"b": 2}),
        ({"a": {"b": 1}}, {"op": "move", "from": "/a/b", "path": "/c"}, {"a": {}, "c": 1}),
        ({"a": {"b": 1}}, {"op": "test", "path": "/a", "value": {"b": 1}}, {"a": {"b": 1}}),
        ({}, {"op": "test", "path": "/a", "value": None}, {}),
        ({"a/b": 1, "c~d": 2}, {"op": "remove", "path": "/a~1b"}, {"c~d": 2}),
    ],
)
def test_json_patches_are_those_of_rfc_6902(target: Json, operation: Json, expected: Json) -> None:
    assert apply_json_patch(target, [operation]) == expected


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "add", "path": "/a/9", "value": 1},
        {"op": "add", "path": "/a/x", "value": 1},
        {"op": "add", "path": "/n"},
        {"op": "replace", "path": "/none", "value": 1},
        {"op": "remove", "path": ""},
        {"op": "copy", "path": "/c", "from": "/none"},
        {"op": "test", "path": "/n", "value": True},
    ],
)
def test_json_patch_that_does_not_apply_is_invalid(operation: Json) -> None:
    with pytest.raises(ApiError) as caught:
        apply_json_patch({"a": [1], "n": 1}, [operation])
    assert (caught.value.code, caught.value.reason) == (422, "Invalid")


@pytest.mark.parametrize(
    "patch", [{}, ["add"], [{"op": "jump", "path": "/a"}], [{"op": "add", "path": "a", "value": 1}]]
)
def test_malformed_json_patch_is_bad_request(patch: Any) -> None:
    with pytest.raises(ApiError) as caught:
        apply_json_patch({"a": 1}, patch)
    assert caught.value.code == 400


def test_volumes_drop_what_a_patch_does_not_retain() -> None:
    target = {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    volume = {"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}
    merged = apply_strategic_merge(target, {"spec": {"volumes": [volume]}})
    assert merged == {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]}}


@pytest.mark.parametrize(
    "patch",
    [
        [],
        {"spec": {"containers": [{"image": "x"}]}},
        {"spec": {"$patch": "explode"}},
        {"metadata": {"$deleteFromPrimitiveList/finalizers": "a"}},
    ],
)
def test_malformed_strategic_patch_is_bad_request(patch: Any) -> None:
    target = {"spec": {"containers": []}, "metadata": {"finalizers": ["a"]}}
    with pytest.raises(ApiError) as caught:
        apply_strategic_merge(target, patch)
    assert caught.value.code == 400


def test_label_selector_object_matches_by_all_its_terms() -> None:
    matches = compile_selector(
        {
            "matchLabels": {"a": "1"},
            "matchExpressions": [
                {"key": "b", "operator": "In", "values": ["x", "y"]},
                {"key": "c", "operator": "DoesNotExist"},
            ],
        }
    )
    assert matches({"a": "1", "b": "x"})
    assert not matches({"a": "1", "b": "z"})
    assert not matches({"a": "1", "b": "x", "c": ""})


def test_empty_selector_object_matches_all_and_none_matches_nothing() -> None:
    assert compile_selector({})({})
    assert not compile_selector(None)({})


def test_numbers_are_compared_as_numbers() -> None:
    assert parse_label_selector("size>9")({"metadata": {"labels": {"size": "10"}}})
    assert not parse_label_selector("size>9")({"metadata": {"labels": {"size": "big"}}})
