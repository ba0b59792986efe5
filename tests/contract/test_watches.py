"""Watches: events, resource versions, bookmarks and their end."""

import itertools
from collections.abc import Iterator

import pytest

from tests.contract.client import Json
from tests.contract.space import Space, pod

SEEN = {"labels": {"seen": "yes"}}
# A controller creates kube-root-ca.crt in every new namespace, at some moment of the test.
ONLY_SEEN = {"labelSelector": "seen=yes"}


def short(event: Json) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"]["name"]


def first(events: Iterator[Json], count: int) -> list[tuple[str, str]]:
    return [short(event) for event in itertools.islice(events, count)]


def version_of(space: Space) -> str:
    listed = space.cluster.get(space.at("configmaps")).ok()
    return listed["metadata"]["resourceVersion"]


def test_watch_reports_changes_after_a_version(space: Space) -> None:
    space.config_map("before")
    version = version_of(space)
    with space.cluster.watch(
        space.at("configmaps"), resourceVersion=version, timeoutSeconds=20, **ONLY_SEEN
    ) as events:
        space.config_map("a", {"x": "1"}, **SEEN)
        space.cluster.patch(space.at("configmaps", "a"), {"data": {"x": "2"}}).ok()
        space.cluster.delete(space.at("configmaps", "a")).ok()
        seen = list(itertools.islice(events, 3))
    assert [short(event) for event in seen] == [
        ("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a"),
    ]  # fmt: skip
    assert [event["object"]["data"] for event in seen] == [{"x": "1"}, {"x": "2"}, {"x": "2"}]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(set(versions))
    assert versions[0] > int(version)


def test_watch_without_a_version_begins_with_current_objects(space: Space) -> None:
    space.config_map("a", **SEEN)
    space.config_map("b", **SEEN)
    with space.cluster.watch(
        space.at("configmaps"), labelSelector="seen", timeoutSeconds=20
    ) as events:
        assert sorted(first(events, 2)) == [("ADDED", "a"), ("ADDED", "b")]
        space.cluster.delete(space.at("configmaps", "a")).ok()
        assert first(events, 1) == [("DELETED", "a")]


def test_watch_resumes_where_another_one_ended(space: Space) -> None:
    version = version_of(space)
    space.config_map("a", **SEEN)
    with space.cluster.watch(
        space.at("configmaps"), resourceVersion=version, timeoutSeconds=20, **ONLY_SEEN
    ) as events:
        event = next(events)
    space.config_map("b", **SEEN)
    version = event["object"]["metadata"]["resourceVersion"]
    with space.cluster.watch(
        space.at("configmaps"), resourceVersion=version, timeoutSeconds=20, **ONLY_SEEN
    ) as events:
        assert first(events, 1) == [("ADDED", "b")]


def test_object_starting_to_match_is_added_and_stopping_is_deleted(
    space: Space,
) -> None:
    space.config_map("a")
    version = version_of(space)
    at = space.at("configmaps", "a")
    with space.cluster.watch(
        space.at("configmaps"), labelSelector="seen=yes", resourceVersion=version,
        timeoutSeconds=20,
    ) as events:  # fmt: skip
        space.cluster.patch(at, {"metadata": {"labels": {"seen": "yes"}}}).ok()
        space.cluster.patch(at, {"data": {"x": "1"}}).ok()
        gone = space.cluster.patch(at, {"metadata": {"labels": {"seen": "no"}}}).ok()
        seen = list(itertools.islice(events, 3))
    assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED"]
    last = seen[-1]["object"]["metadata"]
    assert last["resourceVersion"] == gone["metadata"]["resourceVersion"]
    assert last["labels"] == {"seen": "yes"}


def test_watch_of_one_name_reports_only_that_object(space: Space) -> None:
    version = version_of(space)
    with space.cluster.watch(
        space.at("configmaps"), fieldSelector="metadata.name=b", resourceVersion=version,
        timeoutSeconds=20,
    ) as events:  # fmt: skip
        for name in "abc":
            space.config_map(name)
        space.cluster.delete(space.at("configmaps", "b")).ok()
        assert first(events, 2) == [("ADDED", "b"), ("DELETED", "b")]


def test_watch_ends_after_its_time(space: Space) -> None:
    with space.cluster.watch(
        space.at("configmaps"),
        resourceVersion=version_of(space),
        timeoutSeconds=1,
        **ONLY_SEEN,
    ) as events:
        assert list(events) == []


def test_bookmark_comes_before_the_end_and_can_be_resumed_from(space: Space) -> None:
    space.config_map("a")
    with space.cluster.watch(
        space.at("configmaps"), resourceVersion=version_of(space), timeoutSeconds=5,
        allowWatchBookmarks=True, **ONLY_SEEN,
    ) as events:  # fmt: skip
        bookmarks = list(events)
    assert {event["type"] for event in bookmarks} == {"BOOKMARK"}
    mark = bookmarks[-1]["object"]
    assert (mark["kind"], mark["apiVersion"]) == ("ConfigMap", "v1")
    assert "data" not in mark
    space.config_map("b", **SEEN)
    with space.cluster.watch(
        space.at("configmaps"),
        resourceVersion=mark["metadata"]["resourceVersion"],
        timeoutSeconds=20,
        **ONLY_SEEN,
    ) as events:
        assert first(events, 1) == [("ADDED", "b")]


def test_version_that_is_too_old_is_gone(space: Space) -> None:
    with space.cluster.watch(
        space.at("configmaps"), resourceVersion="1", timeoutSeconds=5
    ) as events:
        event = next(events, None)
    if event is None or event["type"] != "ERROR":
        pytest.skip("this server is too young to have forgotten anything")
    status = event["object"]
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
    assert status["message"].startswith("too old resource version")


def test_pod_is_added_to_a_field_watch_when_its_phase_matches(space: Space) -> None:
    version = version_of(space)
    with space.cluster.watch(
        space.at("pods"), fieldSelector="status.phase=Running", resourceVersion=version,
        timeoutSeconds=20,
    ) as events:  # fmt: skip
        space.cluster.post(space.at("pods"), pod("p")).ok()
        space.cluster.patch(space.at("pods", "p", "status"), {"status": {"phase": "Running"}}).ok()
        assert first(events, 1) == [("ADDED", "p")]


@pytest.mark.parametrize("version", ["x", "-1"])
def test_version_that_is_none_is_refused(space: Space, version: str) -> None:
    answer = space.cluster.get(space.at("configmaps"), watch="true", resourceVersion=version)
    assert answer.code >= 400
    assert answer.body["status"] == "Failure"
