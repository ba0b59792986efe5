"""Lists: selectors, fields, pages and versions."""

from typing import Any

import pytest

from tests.contract.client import Cluster
from tests.contract.space import Space, names, pod


@pytest.fixture
def shelf(space: Space) -> Space:
    """Create a namespace with four ConfigMaps of different labels."""
    space.config_map("a", labels={"tier": "front", "zone": "x"})
    space.config_map("b", labels={"tier": "back", "zone": "x", "size": "5"})
    space.config_map("c", labels={"tier": "back"})
    space.config_map("d", labels={"shelf": ""})
    return space


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("tier=front", "a"),
        ("tier==back", "bc"),
        ("tier=back,zone=x", "b"),
        ("tier in (front, back),!zone", "c"),
        ("tier in (front,middle)", "a"),
        ("zone", "ab"),
        ("shelf=", "d"),
        ("size>4", "b"),
        ("size<5", ""),
        ("tier=back, zone!=x", "c"),
        ("tier,zone notin (y)", "abc"),
    ],
)
def test_labels_select_objects(shelf: Space, selector: str, expected: str) -> None:
    listed = shelf.cluster.get(shelf.at("configmaps"), labelSelector=selector).ok()
    assert names(listed) == list(expected)


def test_objects_without_the_label_are_not_equal_to_a_value(shelf: Space) -> None:
    listed = shelf.cluster.get(shelf.at("configmaps"), labelSelector="tier!=back").ok()
    assert {"a", "d"} <= set(names(listed))
    assert not {"b", "c"} & set(names(listed))


@pytest.mark.parametrize(
    ("query", "verdict"),
    [
        *(({"labelSelector": each}, (400, "BadRequest"))
          for each in ("tier in back", "a=b=c", "=x", "tier in (back", "a b")),
        ({"fieldSelector": "data.x=1"}, (400, "BadRequest")),
        ({"limit": 1, "continue": "forged"}, (400, "BadRequest")),
        ({"resourceVersion": "9000000000000000"}, (504, "Timeout")),
    ],
)  # fmt: skip
def test_malformed_query_of_a_list_is_rejected(
    space: Space, query: dict[str, Any], verdict: tuple[int, str]
) -> None:
    """A selector that no server knows, a forged page, and a version from the future."""
    assert space.cluster.get(space.at("configmaps"), **query).verdict == verdict


def test_names_select_objects(shelf: Space) -> None:
    at = shelf.at("configmaps")
    assert names(shelf.cluster.get(at, fieldSelector="metadata.name=b").ok()) == ["b"]
    others = shelf.cluster.get(at, fieldSelector="metadata.name!=b", labelSelector="tier").ok()
    assert names(others) == ["a", "c"]
    everywhere = shelf.cluster.get(
        "/api/v1/configmaps", fieldSelector=f"metadata.namespace={shelf.name},metadata.name=c"
    ).ok()
    assert names(everywhere) == ["c"]


def test_fields_of_pods_select_them(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    at = space.at("pods")
    assert names(space.cluster.get(at, fieldSelector="status.phase=Pending").ok()) == ["p"]
    assert names(space.cluster.get(at, fieldSelector="spec.nodeName=n").ok()) == []
    assert names(space.cluster.get(at, fieldSelector="spec.nodeName=").ok()) == ["p"]


def test_nodes_are_schedulable_by_default(cluster: Cluster) -> None:
    everything = cluster.get("/api/v1/nodes").ok()
    schedulable = cluster.get("/api/v1/nodes", fieldSelector="spec.unschedulable=false").ok()
    cordoned = cluster.get("/api/v1/nodes", fieldSelector="spec.unschedulable=true").ok()
    assert sorted(names(schedulable) + names(cordoned)) == sorted(names(everything))


def test_list_reports_its_kind_and_version(shelf: Space) -> None:
    listed = shelf.cluster.get(shelf.at("configmaps")).ok()
    assert (listed["kind"], listed["apiVersion"]) == ("ConfigMapList", "v1")
    assert int(listed["metadata"]["resourceVersion"]) > 0
    assert "continue" not in listed["metadata"]


def test_empty_list_is_a_list(space: Space) -> None:
    assert space.cluster.get(space.at("leases", group="coordination.k8s.io/v1")).ok()["items"] == []


def test_pages_show_one_version_during_changes(space: Space) -> None:
    for name in "abcde":
        space.cluster.post(space.at("secrets"), {"metadata": {"name": name, "labels": {"l": "1"}}})
    at = space.at("secrets")
    first = space.cluster.get(at, limit=2, labelSelector="l").ok()
    space.cluster.delete(space.at("secrets", "d")).ok()
    space.cluster.post(at, {"metadata": {"name": "cc", "labels": {"l": "1"}}}).ok()
    token = first["metadata"]["continue"]
    second = space.cluster.get(at, limit=2, labelSelector="l", **{"continue": token}).ok()
    token = second["metadata"]["continue"]
    third = space.cluster.get(at, limit=2, labelSelector="l", **{"continue": token}).ok()
    assert [names(page) for page in (first, second, third)] == [["a", "b"], ["c", "d"], ["e"]]
    versions = {page["metadata"]["resourceVersion"] for page in (first, second, third)}
    assert len(versions) == 1
    assert "continue" not in third["metadata"]


def test_next_page_can_have_another_limit(space: Space) -> None:
    for name in "abcdef":
        space.cluster.post(space.at("secrets"), {"metadata": {"name": name, "labels": {"l": "1"}}})
    at, pages, token = space.at("secrets"), [], ""
    for limit in (1, 3, 2):
        more = {"continue": token} if token else {}
        page = space.cluster.get(at, limit=limit, labelSelector="l", **more).ok()
        pages.append(names(page))
        token = page["metadata"].get("continue", "")
    assert (pages, token) == ([["a"], ["b", "c", "d"], ["e", "f"]], "")


def test_object_that_is_listed_without_spec_leads_to_the_page_with_it(space: Space) -> None:
    for name in "ab":
        space.cluster.post(space.at("pods"), pod(name)).ok()
    first = space.cluster.get(space.at("pods"), limit=1).ok()
    rest = {"limit": 1, "continue": first["metadata"]["continue"]}
    metadata = space.cluster.accepting(
        "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
    )
    assert names(metadata.get(space.at("pods"), **rest).ok()) == ["b"]
    assert names(space.cluster.get(space.at("pods"), **rest).ok()) == ["b"]


def test_page_reports_the_remaining_count(space: Space) -> None:
    for name in "abc":
        space.cluster.post(
            space.at("leases", group="coordination.k8s.io/v1"), {"metadata": {"name": name}}
        ).ok()
    page = space.cluster.get(space.at("leases", group="coordination.k8s.io/v1"), limit=2).ok()
    assert page["metadata"]["remainingItemCount"] == 1


def test_limit_that_is_not_reached_returns_one_page(shelf: Space) -> None:
    listed = shelf.cluster.get(shelf.at("configmaps"), limit=100, labelSelector="tier").ok()
    assert names(listed) == ["a", "b", "c"]
    assert "continue" not in listed["metadata"]


def test_list_can_be_as_of_an_exact_version(space: Space) -> None:
    version = space.config_map("a", {"x": "old"})["metadata"]["resourceVersion"]
    space.cluster.patch(space.at("configmaps", "a"), {"data": {"x": "new"}}).ok()
    listed = space.cluster.get(
        space.at("configmaps"),
        resourceVersion=version,
        resourceVersionMatch="Exact",
        fieldSelector="metadata.name=a",
    ).ok()
    assert [item["data"] for item in listed["items"]] == [{"x": "old"}]
