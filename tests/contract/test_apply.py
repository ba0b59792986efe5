"""Server-side apply: ownership, conflicts and removed fields."""

from typing import Any

import pytest

from tests.contract.client import APPLY, Json
from tests.contract.space import Space, config_map, fields_of, pod, widget


@pytest.fixture
def at(space: Space) -> str:
    """The path of a ConfigMap that does not exist yet."""
    return space.at("configmaps", "a")


def wish(**contents: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": contents}


def owned(*names: str) -> Json:
    return {"f:data": {f"f:{name}": {} for name in names}}


def test_apply_creates_a_missing_object(space: Space, at: str) -> None:
    made = space.cluster.apply(at, wish(x="1"), "left")
    assert (made.code, made.body["data"]) == (201, {"x": "1"})
    assert fields_of(made.body, "left") == [owned("x")]
    entry = made.metadata["managedFields"][0]
    assert (entry["operation"], entry["apiVersion"], entry["fieldsType"]) == (
        "Apply", "v1", "FieldsV1",
    )  # fmt: skip


def test_repeated_apply_changes_nothing(space: Space, at: str) -> None:
    made = space.cluster.apply(at, wish(x="1"), "left").ok()
    again = space.cluster.apply(at, wish(x="1"), "left")
    assert (again.code, again.body) == (200, made)


def test_appliers_share_an_object(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1"), "left").ok()
    both = space.cluster.apply(at, wish(y="2"), "right").ok()
    assert both["data"] == {"x": "1", "y": "2"}
    assert fields_of(both, "left") == [owned("x")]
    assert fields_of(both, "right") == [owned("y")]


def test_field_dropped_by_its_only_applier_is_removed(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    left = space.cluster.apply(at, wish(x="1"), "left").ok()
    assert left["data"] == {"x": "1"}
    assert fields_of(left, "left") == [owned("x")]


def test_field_owned_by_another_applier_stays(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    space.cluster.apply(at, wish(x="1"), "right").ok()
    changed = space.cluster.apply(at, wish(y="1"), "left").ok()
    assert changed["data"] == {"x": "1", "y": "1"}
    assert fields_of(changed, "right") == [owned("x")]
    assert space.cluster.apply(at, wish(), "right").ok()["data"] == {"y": "1"}


def test_another_value_for_an_owned_field_conflicts(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    answer = space.cluster.apply(at, wish(x="2", z="2"), "right")
    assert answer.verdict == (409, "Conflict")
    assert answer.causes == {("FieldManagerConflict", ".data.x")}
    assert answer.body["message"] == 'Apply failed with 1 conflict: conflict with "left": .data.x'
    assert space.cluster.get(at).body["data"] == {"x": "1", "y": "1"}


def test_every_contested_field_is_a_cause(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    answer = space.cluster.apply(at, wish(x="2", y="2"), "right")
    assert answer.causes == {
        ("FieldManagerConflict", ".data.x"),
        ("FieldManagerConflict", ".data.y"),
    }


def test_forced_apply_takes_ownership(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    taken = space.cluster.apply(at, wish(x="2"), "right", force=True).ok()
    assert taken["data"] == {"x": "2", "y": "1"}
    assert fields_of(taken, "left") == [owned("y")]
    assert fields_of(taken, "right") == [owned("x")]


def test_plain_write_owns_its_changes_and_conflicts_later(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    changed = space.cluster.patch(at, {"data": {"x": "2"}}, fieldManager="hand").ok()
    assert fields_of(changed, "left") == [owned("y")]
    assert fields_of(changed, "hand") == [owned("x")]
    answer = space.cluster.apply(at, wish(x="1", y="1"), "left")
    assert answer.verdict == (409, "Conflict")
    assert answer.causes == {("FieldManagerConflict", ".data.x")}
    back = space.cluster.apply(at, wish(x="1", y="1"), "left", force=True).ok()
    assert back["data"] == {"x": "1", "y": "1"}
    assert fields_of(back, "hand") == []


def test_plain_write_that_removes_a_field_takes_it_from_its_owner(space: Space, at: str) -> None:
    space.cluster.apply(at, wish(x="1", y="1"), "left").ok()
    changed = space.cluster.patch(at, {"data": {"x": None}}, fieldManager="hand").ok()
    assert fields_of(changed, "left") == [owned("y")]


def test_apply_beside_plain_writes_leaves_their_fields(space: Space, at: str) -> None:
    space.cluster.post(space.at("configmaps"), config_map("a", {"x": "1"})).ok()
    applied = space.cluster.apply(at, wish(y="1"), "left").ok()
    assert applied["data"] == {"x": "1", "y": "1"}
    assert space.cluster.apply(at, wish(), "left").ok()["data"] == {"x": "1"}


def test_apply_needs_a_field_manager(space: Space, at: str) -> None:
    answer = space.cluster.patch(at, wish(x="1"), APPLY)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueRequired", "fieldManager")}


def test_managed_fields_cannot_be_applied(space: Space, at: str) -> None:
    made = space.cluster.apply(at, wish(x="1"), "left").ok()
    again = wish(x="1")
    again["metadata"]["managedFields"] = made["metadata"]["managedFields"]
    assert space.cluster.apply(at, again, "left").verdict == (400, "BadRequest")


def test_apply_as_a_dry_run_changes_nothing(space: Space, at: str) -> None:
    assert space.cluster.apply(at, wish(x="1"), "left", dryRun="All").code == 201
    assert space.cluster.get(at).code == 404


def test_yaml_can_be_applied(space: Space, at: str) -> None:
    text = b"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata:\n  x: '1'\n"
    made = space.cluster.request("PATCH", at, text, content_type=APPLY, fieldManager="left")
    assert (made.code, made.body["data"]) == (201, {"x": "1"})


def labelled(**labels: str) -> Json:
    # Empty labels would be a field of their own, over which two managers conflict.
    metadata: Json = {"name": "a"} | ({"labels": labels} if labels else {})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def test_labels_are_owned_one_by_one(space: Space, at: str) -> None:
    space.cluster.apply(at, labelled(l="1"), "left").ok()
    space.cluster.apply(at, labelled(r="1"), "right").ok()
    changed = space.cluster.apply(at, labelled(), "left").ok()
    assert changed["metadata"]["labels"] == {"r": "1"}


def test_finalizers_are_a_set(space: Space, at: str) -> None:
    for owner, name in (("left", "example.com/l"), ("right", "example.com/r")):
        body = labelled()
        body["metadata"]["finalizers"] = [name]
        changed = space.cluster.apply(at, body, owner).ok()
    assert sorted(changed["metadata"]["finalizers"]) == ["example.com/l", "example.com/r"]
    changed = space.cluster.apply(at, labelled(), "left").ok()
    assert changed["metadata"]["finalizers"] == ["example.com/r"]
    space.cluster.apply(at, labelled(), "right").ok()


def status_of(kind: str, group: str, name: str, **status: Any) -> Json:
    return {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "status": status}


def condition(name: str, status: str) -> Json:
    return {"type": name, "status": status}


def test_conditions_of_a_pod_are_owned_by_type(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    at = space.at("pods", "p", "status")
    for owner in ("left", "right"):
        body = status_of("Pod", "v1", "p", conditions=[condition(f"example.com/{owner}", "True")])
        changed = space.cluster.apply(at, body, owner).ok()
    found = {one["type"] for one in changed["status"]["conditions"]}
    assert {"example.com/left", "example.com/right"} <= found
    changed = space.cluster.apply(at, status_of("Pod", "v1", "p", phase="Running"), "left").ok()
    found = {one["type"] for one in changed["status"]["conditions"]}
    assert "example.com/left" not in found
    assert "example.com/right" in found


def port(name: str, number: int, **more: str) -> Json:
    return {"name": name, "port": number} | more


def test_lists_of_custom_resources_are_merged_by_their_keys(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    space.cluster.apply(at, widget(group, ports=[port("a", 1)]), "left").ok()
    body = widget(group, ports=[port("b", 2)])
    del body["spec"]["size"]
    both = space.cluster.apply(at, body, "right").ok()
    assert sorted(one["name"] for one in both["spec"]["ports"]) == ["a", "b"]
    body["spec"]["ports"] = [port("b", 2), port("a", 7)]
    answer = space.cluster.apply(at, body, "right")
    assert answer.causes == {("FieldManagerConflict", '.spec.ports[name="a"].port')}
    gone = space.cluster.apply(at, widget(group), "left").ok()
    assert gone["spec"]["ports"] == [port("b", 2)]


def test_item_that_two_appliers_describe_is_kept_for_the_other_one(
    space: Space, group: str
) -> None:
    at = space.at("widgets", "w", group=group)
    alone = widget(group, ports=[port("b", 2)])
    space.cluster.apply(at, widget(group, ports=[port("a", 1), port("b", 2)]), "left").ok()
    body = widget(group, ports=[port("a", 1, note="mine")])
    space.cluster.apply(at, body, "right").ok()
    changed = space.cluster.apply(at, alone, "left").ok()
    ports = {one["name"]: one for one in changed["spec"]["ports"]}
    assert ports == {"a": port("a", 1, note="mine"), "b": port("b", 2)}
    changed = space.cluster.apply(at, widget(group), "right").ok()
    assert changed["spec"]["ports"] == [port("b", 2)]


def test_sets_are_merged_and_other_lists_replaced(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    space.cluster.apply(at, widget(group, tags=["a"], words=["a"]), "left").ok()
    both = space.cluster.apply(at, widget(group, tags=["b"]), "right").ok()
    assert sorted(both["spec"]["tags"]) == ["a", "b"]
    answer = space.cluster.apply(at, widget(group, tags=["b"], words=["b"]), "right")
    assert answer.causes == {("FieldManagerConflict", ".spec.words")}


def test_status_is_applied_through_its_subresource(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    space.cluster.apply(at, widget(group), "left").ok()
    applied = space.cluster.apply(
        f"{at}/status", status_of("Widget", group, "w", phase="Fine"), "right"
    ).ok()
    assert (applied["status"], applied["spec"]["size"]) == ({"phase": "Fine"}, 1)
    answer = space.cluster.apply(
        f"{at}/status", status_of("Widget", group, "w", phase="Bad"), "other"
    )
    assert answer.causes == {("FieldManagerConflict", ".status.phase")}


def test_status_applied_with_the_rest_has_no_owner(space: Space, group: str, minor: int) -> None:
    if minor < 22:
        pytest.skip("servers before 1.22 make an owner of who does this")
    at = space.at("widgets", "w", group=group)
    body = widget(group) | {"status": {"phase": "ignored"}}
    made = space.cluster.apply(at, body, "left").ok()
    assert "status" not in made
    assert "f:status" not in fields_of(made, "left")[0]


def test_status_of_a_missing_object_cannot_be_applied(space: Space, group: str) -> None:
    at = space.at("widgets", "absent", "status", group=group)
    answer = space.cluster.apply(at, status_of("Widget", group, "absent", phase="x"), "left")
    assert answer.verdict == (404, "NotFound")


def test_conditions_of_a_custom_resource_are_owned_by_type(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    space.cluster.apply(at, widget(group), "left").ok()
    for owner, name in (("left", "Ready"), ("right", "Warm")):
        body = status_of("Widget", group, "w", conditions=[condition(name, "True")])
        changed = space.cluster.apply(f"{at}/status", body, owner).ok()
    found = [one["type"] for one in changed["status"]["conditions"]]
    assert sorted(found) == ["Ready", "Warm"]
    changed = space.cluster.apply(
        f"{at}/status", status_of("Widget", group, "w", phase="x"), "left"
    ).ok()
    assert [one["type"] for one in changed["status"]["conditions"]] == ["Warm"]
