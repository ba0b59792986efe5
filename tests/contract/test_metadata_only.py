"""Objects without spec and status, which a client requests in its Accept header."""

import itertools

from tests.contract.client import Cluster
from tests.contract.space import Space, pod

KIND = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}


def accepting(space: Space, kind: str) -> Cluster:
    return space.cluster.accepting(
        f"application/json;as={kind};g=meta.k8s.io;v=v1,application/json"
    )


def test_object_is_read_without_spec_and_status(space: Space) -> None:
    whole = space.cluster.post(space.at("pods"), pod("a", app="web")).ok()
    cluster = accepting(space, "PartialObjectMetadata")
    found = cluster.get(space.at("pods", "a")).ok()
    assert found == {**KIND, "metadata": {**whole["metadata"], **found["metadata"]}}
    assert found["metadata"]["uid"] == whole["metadata"]["uid"]
    assert found["metadata"]["labels"] == {"app": "web"}


def test_list_has_metadata_only_and_selects_by_the_hidden_fields(space: Space) -> None:
    for name in ("a", "b"):
        space.cluster.post(space.at("pods"), pod(name)).ok()
    cluster = accepting(space, "PartialObjectMetadataList")
    listed = cluster.get(space.at("pods"), limit=1).ok()
    assert (listed["kind"], listed["apiVersion"]) == (
        "PartialObjectMetadataList",
        "meta.k8s.io/v1",
    )
    (found,) = listed["items"]
    assert {name: found[name] for name in KIND} == KIND
    assert found.keys() == {*KIND, "metadata"}
    rest = cluster.get(space.at("pods"), limit=1, **{"continue": listed["metadata"]["continue"]})
    assert [each["metadata"]["name"] for each in rest.ok()["items"]] == ["b"]
    ended = "status.phase!=Pending,status.phase!=Running,status.phase!=Unknown"
    # Kubernetes 1.30 says null instead of an empty list.
    assert not cluster.get(space.at("pods"), fieldSelector=ended).ok()["items"]


def test_watch_reports_metadata_only(space: Space) -> None:
    cluster = accepting(space, "PartialObjectMetadata")
    version = space.cluster.get(space.at("pods")).metadata["resourceVersion"]
    with cluster.watch(
        space.at("pods"), resourceVersion=version, allowWatchBookmarks="true", timeoutSeconds=20
    ) as events:
        space.cluster.post(space.at("pods"), pod("a", app="web")).ok()
        space.cluster.delete(space.at("pods", "a")).ok()
        seen = list(itertools.takewhile(lambda event: event["type"] != "DELETED", events))
    assert {event["object"]["kind"] for event in seen} == {"PartialObjectMetadata"}
    assert [each["object"]["metadata"]["name"] for each in seen if each["type"] == "ADDED"] == ["a"]
    assert all(event["object"].keys() == {*KIND, "metadata"} for event in seen)


def test_error_is_a_whole_status(space: Space) -> None:
    answer = accepting(space, "PartialObjectMetadata").get(space.at("pods", "missing"))
    assert answer.verdict == (404, "NotFound")
