"""Custom resources: schema, defaults, pruning, generation and status."""

import re
import secrets

import pytest

from tests.contract.client import STRATEGIC, Cluster, Json
from tests.contract.conftest import GADGET, definition
from tests.contract.space import Space, names, widget
from tests.waiting import wait_until

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def test_defaults_are_set_also_inside_of_defaults(space: Space, group: str) -> None:
    made = space.cluster.post(space.at("widgets", group=group), widget(group)).ok()
    assert made["spec"] == {"size": 1, "mode": "slow", "sure": "yes", "deep": {"level": 1}}


def test_field_outside_the_schema_is_dropped(space: Space, group: str) -> None:
    body = widget(group, nonsense=1, deep={"level": 2, "junk": 1}, free={"any": {"thing": 1}})
    body["extra"] = 1
    made = space.cluster.post(space.at("widgets", group=group), body).ok()
    assert "extra" not in made
    assert made["spec"] == {
        "size": 1,
        "mode": "slow",
        "sure": "yes",
        "deep": {"level": 2},
        "free": {"any": {"thing": 1}},
    }


def test_null_means_unset_unless_the_schema_allows_it(space: Space, group: str) -> None:
    body = widget(group, maybe=None, sure=None, code=None)
    made = space.cluster.post(space.at("widgets", group=group), body).ok()
    assert made["spec"]["maybe"] is None
    assert made["spec"]["sure"] == "yes"
    assert "code" not in made["spec"]


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        ({"mode": "warp"}, "FieldValueNotSupported", "spec.mode"),
        ({"size": 0}, "FieldValueInvalid", "spec.size"),
        ({"size": 11}, "FieldValueInvalid", "spec.size"),
        ({"code": "X1"}, "FieldValueInvalid", "spec.code"),
        ({"code": "a"}, "FieldValueInvalid", "spec.code"),
        ({"tags": ["a", "a"]}, "FieldValueDuplicate", "spec.tags[1]"),
    ],
)
def test_value_forbidden_by_the_schema_is_invalid(
    space: Space, group: str, spec: Json, reason: str, field: str
) -> None:
    answer = space.cluster.post(space.at("widgets", group=group), widget(group, **spec))
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {(reason, field)}
    details = answer.body["details"]
    assert (details["kind"], details["group"]) == ("Widget", group.partition("/")[0])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"size": "big"}, "spec.size"),
        ({"size": 1.5}, "spec.size"),
        ({"mode": 1}, "spec.mode"),
        ({"ratio": "1"}, "spec.ratio"),
        ({"weights": {"a": "x"}}, "spec.weights.a"),
        ({"ports": {}}, "spec.ports"),
        ({"code": "abcdef"}, "spec.code"),
        ({"tags": ["a", "b", "c", "d"]}, "spec.tags"),
        ({"ports": [{"name": "a", "port": 1}] * 2}, "spec.ports[1]"),
    ],
)
def test_value_that_does_not_fit_is_invalid(
    space: Space, group: str, spec: Json, field: str
) -> None:
    answer = space.cluster.post(space.at("widgets", group=group), widget(group, **spec))
    assert answer.verdict == (422, "Invalid")
    assert field in {where for _, where in answer.causes}


def test_missing_required_field_is_invalid(space: Space, group: str) -> None:
    at = space.at("widgets", group=group)
    empty = widget(group) | {"spec": {}}
    answer = space.cluster.post(at, empty)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueRequired", "spec.size")}
    nameless = space.cluster.post(at, widget(group, ports=[{"port": 1}]))
    assert nameless.verdict == (422, "Invalid")
    # Servers before 1.23 do not report the index of the item.
    assert {(reason, re.sub(r"\[\d+\]", "", field)) for reason, field in nameless.causes} == {
        ("FieldValueRequired", "spec.ports.name")
    }


def test_custom_resource_reports_its_kind(space: Space, group: str) -> None:
    body = widget(group)
    del body["kind"]
    answer = space.cluster.post(space.at("widgets", group=group), body)
    assert answer.verdict == (400, "BadRequest")


@pytest.mark.parametrize("limit", [5, "50%"])
def test_int_or_string_is_either(space: Space, group: str, limit: int | str) -> None:
    body = {"apiVersion": group, "kind": "Gadget", "metadata": {"name": "g"}, "limit": limit}
    assert space.cluster.post(space.at("gadgets", group=group), body).ok()["limit"] == limit


def test_int_or_string_of_other_type_is_invalid(space: Space, group: str) -> None:
    body = {"apiVersion": group, "kind": "Gadget", "metadata": {"name": "g"}, "limit": True}
    answer = space.cluster.post(space.at("gadgets", group=group), body)
    assert answer.verdict == (422, "Invalid")
    assert "limit" in {field for _, field in answer.causes}


def test_patch_is_validated_and_defaulted_too(space: Space, group: str) -> None:
    space.cluster.post(space.at("widgets", group=group), widget(group, mode="fast")).ok()
    at = space.at("widgets", "w", group=group)
    assert space.cluster.patch(at, {"spec": {"size": 99}}).verdict == (422, "Invalid")
    changed = space.cluster.patch(at, {"spec": {"mode": None, "junk": 1}}).ok()
    assert changed["spec"]["mode"] == "slow"
    assert "junk" not in changed["spec"]


def test_custom_resources_have_no_strategic_patch(space: Space, group: str) -> None:
    space.cluster.post(space.at("widgets", group=group), widget(group)).ok()
    answer = space.cluster.patch(space.at("widgets", "w", group=group), {}, STRATEGIC)
    assert answer.verdict == (415, "UnsupportedMediaType")


def test_update_without_resource_version_is_invalid(space: Space, group: str) -> None:
    space.cluster.post(space.at("widgets", group=group), widget(group)).ok()
    answer = space.cluster.put(space.at("widgets", "w", group=group), widget(group, size=2))
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "metadata.resourceVersion")}


def test_generation_counts_changes_of_the_spec(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    made = space.cluster.post(space.at("widgets", group=group), widget(group)).ok()
    assert made["metadata"]["generation"] == 1
    steps = [
        (at, {"metadata": {"labels": {"a": "b"}}}, 1),
        (f"{at}/status", {"status": {"phase": "x"}}, 1),
        (at, {"spec": {"size": 2}}, 2),
        (at, {"spec": {"size": 2}}, 2),
        (at, {"metadata": {"generation": 9}}, 2),
        (at, {"spec": {"mode": "fast"}}, 3),
    ]
    for path, patch, expected in steps:
        assert space.cluster.patch(path, patch).ok()["metadata"]["generation"] == expected


def test_without_a_status_subresource_everything_counts(space: Space, group: str) -> None:
    at = space.at("gadgets", "g", group=group)
    body = {
        "apiVersion": group,
        "kind": "Gadget",
        "metadata": {"name": "g"},
        "status": {"x": 1},
        "any": {"thing": [1, {"a": None}]},
    }
    made = space.cluster.post(space.at("gadgets", group=group), body).ok()
    assert (made["status"], made["any"]) == ({"x": 1}, {"thing": [1, {"a": None}]})
    changed = space.cluster.patch(at, {"status": {"x": 2}}).ok()
    assert (changed["status"], changed["metadata"]["generation"]) == ({"x": 2}, 2)
    assert space.cluster.patch(f"{at}/status", {"status": {"x": 3}}).code == 404


def test_status_is_written_through_its_subresource_only(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    body = widget(group) | {"status": {"phase": "early"}}
    assert "status" not in space.cluster.post(space.at("widgets", group=group), body).ok()
    assert "status" not in space.cluster.patch(at, {"status": {"phase": "x"}}).ok()
    patch = {"status": {"phase": "x"}, "spec": {"size": 5}, "metadata": {"labels": {"a": "b"}}}
    changed = space.cluster.patch(f"{at}/status", patch).ok()
    assert (changed["status"], changed["spec"]["size"]) == ({"phase": "x"}, 1)
    assert "labels" not in changed["metadata"]
    changed["status"] = {"phase": "y"}
    assert space.cluster.put(f"{at}/status", changed).ok()["status"] == {"phase": "y"}
    kept = space.cluster.patch(at, {"spec": {"size": 2}}).ok()
    assert kept["status"] == {"phase": "y"}


def test_status_is_validated_and_versioned(space: Space, group: str, minor: int) -> None:
    at = space.at("widgets", "w", group=group)
    made = space.cluster.post(space.at("widgets", group=group), widget(group)).ok()
    answer = space.cluster.patch(f"{at}/status", {"status": {"count": -1}})
    assert answer.verdict == (422, "Invalid")
    # Since 1.31 the path begins with the status.
    assert answer.causes == {("FieldValueInvalid", "status.count" if minor > 30 else "count")}
    space.cluster.patch(f"{at}/status", {"status": {"count": 1}}).ok()
    late = space.cluster.put(f"{at}/status", made | {"status": {"count": 2}})
    assert late.verdict == (409, "Conflict")


def test_kind_is_discovered(cluster: Cluster, group: str) -> None:
    name = group.partition("/")[0]
    assert name in {entry["name"] for entry in cluster.get("/apis").ok()["groups"]}
    resources = {entry["name"]: entry for entry in cluster.get(f"/apis/{group}").ok()["resources"]}
    assert {"widgets", "widgets/status", "gadgets"} == resources.keys()
    widgets = resources["widgets"]
    assert (widgets["kind"], widgets["namespaced"]) == ("Widget", True)
    assert {"get", "list", "watch", "create", "update", "patch", "delete"} <= set(widgets["verbs"])


def test_definition_reports_when_it_is_served(cluster: Cluster, group: str) -> None:
    found = cluster.get(f"{CRDS}/widgets.{group.partition('/')[0]}").ok()
    conditions = {one["type"]: one["status"] for one in found["status"]["conditions"]}
    assert (conditions["Established"], conditions["NamesAccepted"]) == ("True", "True")
    assert found["status"]["storedVersions"] == ["v1"]
    assert found["status"]["acceptedNames"]["listKind"] == "WidgetList"


def test_definition_of_another_name_is_invalid(cluster: Cluster, group: str) -> None:
    document = definition(group.partition("/")[0], "Gizmo", "gizmos", GADGET, None)
    document["metadata"]["name"] = "other.treenail.example"
    answer = cluster.post(CRDS, document)
    assert answer.verdict == (422, "Invalid")
    assert ("FieldValueInvalid", "metadata.name") in answer.causes


def test_deleted_definition_takes_its_objects_with_it(space: Space) -> None:
    group = f"brief-{secrets.token_hex(4)}.treenail.example"
    document = definition(group, "Gizmo", "gizmos", GADGET, None)
    cluster = space.cluster
    at = space.at("gizmos", group=f"{group}/v1")

    def serve() -> None:
        cluster.post(CRDS, document).ok()
        wait_until(lambda: cluster.get(at).code == 200, limit_s=30)

    serve()
    cluster.post(at, {"apiVersion": f"{group}/v1", "kind": "Gizmo", "metadata": {"name": "g"}}).ok()
    cluster.delete(f"{CRDS}/gizmos.{group}").ok()
    wait_until(lambda: cluster.get(f"{CRDS}/gizmos.{group}").code == 404, limit_s=30)
    wait_until(lambda: cluster.get(at).code == 404, limit_s=30)
    serve()
    assert names(cluster.get(at).ok()) == []
    cluster.delete(f"{CRDS}/gizmos.{group}").ok()


def test_unknown_fields_with_strict_validation_are_rejected(
    space: Space, group: str, minor: int
) -> None:
    if minor < 25:
        pytest.skip("servers before 1.25 do not check fields")
    at = space.at("widgets", group=group)
    body = widget(group, nonsense=1, ports=[{"name": "a", "port": 1, "junk": 1}])
    answer = space.cluster.post(at, body, fieldValidation="Strict")
    assert answer.verdict == (400, "BadRequest")
    for field in ("spec.nonsense", "spec.ports[0].junk"):
        assert f'unknown field "{field}"' in answer.body["message"]
    assert space.cluster.get(space.at("widgets", "w", group=group)).code == 404
    assert space.cluster.post(at, widget(group), fieldValidation="Strict").code == 201


def test_apply_of_an_unknown_field_is_an_error_of_the_server(space: Space, group: str) -> None:
    at = space.at("widgets", "w", group=group)
    answers = [space.cluster.apply(at, widget(group, nonsense=1), "a")]
    space.cluster.apply(at, widget(group), "a").ok()
    answers.append(space.cluster.apply(at, widget(group, nonsense=1), "a"))
    for answer in answers:
        assert answer.verdict == (500, "")
        assert answer.body["message"] == (
            # The namespace is that of the body, not that of the path.
            f"failed to create typed patch object (/w; {group}, Kind=Widget): "
            ".spec.nonsense: field not declared in schema"
        )


def test_first_problem_of_a_text_is_reported(space: Space, group: str) -> None:
    at = space.at("widgets", group=group)
    answer = space.cluster.post(at, widget(group, code="A"))
    assert answer.causes == {("FieldValueInvalid", "spec.code")}
    name = group.partition("/")[0]
    assert answer.body["message"] == (
        f'Widget.{name} "w" is invalid: spec.code: Invalid value: "A": '
        "spec.code in body should be at least 2 chars long"
    )
