"""Patch types: merge, JSON and strategic."""

from typing import Any

import pytest

from tests.contract.client import JSON_PATCH, MERGE, STRATEGIC, Json
from tests.contract.space import Space, pod


@pytest.fixture
def at(space: Space) -> str:
    """The path of a ConfigMap to patch."""
    space.config_map("a", {"x": "1", "y": "1"}, labels={"l": "1"})
    return space.at("configmaps", "a")


def test_merge_patch_sets_and_removes(space: Space, at: str) -> None:
    patch = {"data": {"x": None, "y": "2", "z": "3"}, "metadata": {"labels": None}}
    changed = space.cluster.patch(at, patch).ok()
    assert changed["data"] == {"y": "2", "z": "3"}
    assert "labels" not in changed["metadata"]


def test_merge_patch_replaces_lists(space: Space, at: str) -> None:
    space.cluster.patch(at, {"metadata": {"finalizers": ["example.com/a"]}}).ok()
    changed = space.cluster.patch(at, {"metadata": {"finalizers": ["example.com/b"]}}).ok()
    assert changed["metadata"]["finalizers"] == ["example.com/b"]
    space.cluster.patch(at, {"metadata": {"finalizers": None}}).ok()


def operation(op: str, path: str, *value: Any, **more: str) -> Json:
    return {"op": op, "path": path} | ({"value": value[0]} if value else {}) | more


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([operation("add", "/data/z", "3")], {"x": "1", "y": "1", "z": "3"}),
        ([operation("replace", "/data/x", "2")], {"x": "2", "y": "1"}),
        ([operation("remove", "/data/x")], {"y": "1"}),
        ([operation("test", "/data/x", "1"), operation("remove", "/data/y")], {"x": "1"}),
        ([operation("copy", "/data/z", **{"from": "/data/x"})], {"x": "1", "y": "1", "z": "1"}),
        ([operation("move", "/data/z", **{"from": "/data/x"})], {"y": "1", "z": "1"}),
        ([operation("add", "/data", {"only": "me"})], {"only": "me"}),
    ],
)
def test_json_patch_applies_its_operations(
    space: Space, operations: list[Json], expected: Json
) -> None:
    space.config_map("a", {"x": "1", "y": "1"})
    answer = space.cluster.patch(space.at("configmaps", "a"), operations, JSON_PATCH)
    assert answer.ok()["data"] == expected


def test_slashes_in_a_json_patch_are_escaped(space: Space, at: str) -> None:
    patch = [operation("add", "/metadata/labels/example.com~1a", "2")]
    changed = space.cluster.patch(at, patch, JSON_PATCH).ok()
    assert changed["metadata"]["labels"] == {"l": "1", "example.com/a": "2"}


@pytest.mark.parametrize(
    "operations",
    [
        [operation("test", "/data/x", "2")],
        [operation("remove", "/data/none")],
        [operation("add", "/none/deep", "1")],
    ],
)
def test_json_patch_that_does_not_apply_changes_nothing(
    space: Space, at: str, operations: list[Json]
) -> None:
    answer = space.cluster.patch(at, [operation("add", "/data/z", "3"), *operations], JSON_PATCH)
    assert answer.verdict == (422, "Invalid")
    assert space.cluster.get(at).body["data"] == {"x": "1", "y": "1"}


def test_malformed_json_patch_is_a_bad_request(space: Space, at: str) -> None:
    assert space.cluster.patch(at, {"op": "add"}, JSON_PATCH).verdict == (400, "BadRequest")


def test_strategic_patch_merges_containers_by_name(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    patch = {"spec": {"containers": [{"name": "main", "image": "example.invalid/new"}]}}
    changed = space.cluster.patch(space.at("pods", "p"), patch, STRATEGIC).ok()
    container = changed["spec"]["containers"][0]
    assert container["image"] == "example.invalid/new"
    assert container["terminationMessagePolicy"] == "File"


def condition(name: str, status: str, **more: str) -> Json:
    return {"type": name, "status": status} | more


def test_strategic_patch_merges_conditions_by_type(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    at = space.at("pods", "p", "status")
    both = [condition("Ready", "False", reason="Slow"), condition("example.com/Warm", "True")]
    space.cluster.patch(at, {"status": {"conditions": both}}, STRATEGIC).ok()
    patch = {"status": {"conditions": [condition("Ready", "True")]}}
    changed = space.cluster.patch(at, patch, STRATEGIC).ok()
    found = {one["type"]: (one["status"], one.get("reason")) for one in _conditions(changed)}
    assert found == {"Ready": ("True", "Slow"), "example.com/Warm": ("True", None)}
    patch = {"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}}
    changed = space.cluster.patch(at, patch, STRATEGIC).ok()
    assert [one["type"] for one in _conditions(changed)] == ["example.com/Warm"]
    replaced = [{"$patch": "replace"}, condition("Ready", "False")]
    changed = space.cluster.patch(at, {"status": {"conditions": replaced}}, STRATEGIC).ok()
    assert [one["type"] for one in _conditions(changed)] == ["Ready"]


def _conditions(obj: Json) -> list[Json]:
    return obj["status"]["conditions"]


def test_strategic_patch_places_additions_first(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    at = space.at("pods", "p", "status")
    for names in ("AB", "C", "DBE"):
        conditions = [condition(f"example.com/{name}", "True") for name in names]
        changed = space.cluster.patch(at, {"status": {"conditions": conditions}}, STRATEGIC).ok()
    assert "".join(one["type"][-1] for one in _conditions(changed)) == "DCABE"


def test_merge_patch_replaces_conditions(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    at = space.at("pods", "p", "status")
    for name in ("Ready", "example.com/Warm"):
        patch = {"status": {"conditions": [condition(name, "True")]}}
        changed = space.cluster.patch(at, patch, MERGE).ok()
    assert [one["type"] for one in _conditions(changed)] == ["example.com/Warm"]


def test_strategic_patch_merges_finalizers_as_a_set(space: Space, at: str) -> None:
    for name in ("example.com/a", "example.com/b", "example.com/a"):
        changed = space.cluster.patch(at, {"metadata": {"finalizers": [name]}}, STRATEGIC).ok()
    assert sorted(changed["metadata"]["finalizers"]) == ["example.com/a", "example.com/b"]
    gone = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/a"]}}
    changed = space.cluster.patch(at, gone, STRATEGIC).ok()
    assert changed["metadata"]["finalizers"] == ["example.com/b"]
    space.cluster.patch(at, {"metadata": {"finalizers": None}}).ok()


def test_strategic_patch_sets_and_removes_keys_of_maps(space: Space, at: str) -> None:
    patch = {"data": {"x": None, "z": "3"}, "metadata": {"labels": {"$patch": "replace", "m": "2"}}}
    changed = space.cluster.patch(at, patch, STRATEGIC).ok()
    assert changed["data"] == {"y": "1", "z": "3"}
    assert changed["metadata"]["labels"] == {"m": "2"}


def test_order_of_elements_in_a_strategic_patch_is_only_advice(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    patch = {
        "spec": {
            "$setElementOrder/containers": [{"name": "main"}],
            "containers": [{"name": "main", "image": "example.invalid/new"}],
        }
    }
    changed = space.cluster.patch(space.at("pods", "p"), patch, STRATEGIC).ok()
    assert "$setElementOrder/containers" not in changed["spec"]
    assert changed["spec"]["containers"][0]["image"] == "example.invalid/new"


def test_taints_are_replaced_atomically(space: Space) -> None:
    name = space.name
    taints = [{"key": key, "effect": "NoSchedule"} for key in "ab"]
    node = {"metadata": {"name": name}, "spec": {"taints": taints, "unschedulable": True}}
    space.cluster.post("/api/v1/nodes", node).ok()
    try:
        patch = {"spec": {"taints": [{"key": "c", "effect": "NoSchedule"}]}}
        changed = space.cluster.patch(f"/api/v1/nodes/{name}", patch, STRATEGIC).ok()
        keys = {taint["key"] for taint in changed["spec"]["taints"]}
    finally:
        space.cluster.delete(f"/api/v1/nodes/{name}")
    assert "c" in keys
    assert not {"a", "b"} & keys


def test_unknown_patch_type_is_rejected(space: Space, at: str) -> None:
    answer = space.cluster.patch(at, {}, "application/json")
    assert answer.verdict == (415, "UnsupportedMediaType")


def test_patch_cannot_rename(space: Space, at: str) -> None:
    answer = space.cluster.patch(at, {"metadata": {"name": "b"}})
    assert answer.verdict == (400, "BadRequest")
