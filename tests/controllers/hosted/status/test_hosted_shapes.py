"""Objects of an unexpected form become sentences of a row; none of them ends the command."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.fixtures import hosted
from tests.fixtures.objects import Json
from treenail.controllers.hosted.status import rows, snapshot
from treenail.kube.api_client import Client, ResponseStream
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    CONFIGMAPS,
    HOSTEDCLUSTERS,
    HOSTEDCONTROLPLANES,
    MACHINEDEPLOYMENTS,
    MACHINES,
    MACHINESETS,
    NODEPOOLS,
    SECRETS,
    Resource,
)

NOW = 1795860000.0
VALUES: list[Any] = [
    None,
    "",
    "x" * 9000,
    "x\x1b",
    7,
    True,
    [],
    {},
    [None],
    [{"a": []}],
    {"a": None},
]
SERVED: Json = {"versions": [{"version": "v1beta2"}]}
TEXTS = {"token": "t", "reason": "AsExpected", "payload": "p", "kubeconfig": "{}"}
DATA = {key: hosted.encode(text) for key, text in TEXTS.items()}
CONDITIONS = [
    hosted.make_condition("ValidMachineConfig", "False", "ValidationFailed", "text"),
    hosted.make_condition("ReconciliationActive", "True"),
]
NODE_POOL = hosted.make_node_pool(
    "ip", "InPlace", platform={"type": "KubeVirt"}, management={"inPlace": {"maxUnavailable": 1}},
    pausedUntil="false", nodeDrainTimeout="1m0s", autoScaling={"min": 1, "max": 2}, replicas=None,
)  # fmt: skip


def strip(document: Json) -> Json:
    """The object without large fields that the command does not read."""
    unread = {"networking", "etcd", "services", "dns"}
    spec = {key: value for key, value in document["spec"].items() if key not in unread}
    return {**document, "spec": spec}


OBJECTS: list[tuple[Resource, Json]] = [
    (NODEPOOLS, hosted.with_status(NODE_POOL, *CONDITIONS)),
    (HOSTEDCLUSTERS, strip(hosted.with_status(hosted.make_hosted_cluster(), *CONDITIONS))),
    (HOSTEDCONTROLPLANES, strip(hosted.make_control_plane())),
    (MACHINESETS, hosted.make_machine_set("ip")),
    (MACHINES, hosted.with_status(hosted.make_machine("ip-0", "ip"), *CONDITIONS)),
    (CONFIGMAPS, hosted.make_core_config("fips")),
    (SECRETS, hosted.make_secret(f"token-ip-{hosted.NEW_HASH}", "ip", data=DATA)),
    (SECRETS, hosted.make_secret("admin-kubeconfig", "ip", data=DATA)),
    (
        SECRETS,
        hosted.make_secret(
            f"user-data-ip-{hosted.NEW_HASH}-userdata",
            data={"userdata": hosted.make_user_data("t")},
        ),
    ),
]


class StoredDocuments:
    """A transport that answers reads with documents."""

    def __init__(self, objects: list[tuple[Resource, Json]], names: list[str]) -> None:
        self._lists: dict[str, list[Json]] = {MACHINEDEPLOYMENTS.build_path(): []}
        self._objects: dict[str, Json] = {"/apis/cluster.x-k8s.io": SERVED}
        for (resource, document), name in zip(objects, names, strict=True):
            namespace = hosted.NAMESPACE if resource in (NODEPOOLS, HOSTEDCLUSTERS) else ""
            namespace = namespace or hosted.CONTROL_PLANE
            for place in ("", namespace):
                path = resource.build_path(namespace=place)
                self._lists.setdefault(path, []).append(document)
            self._objects[resource.build_path(name, namespace=namespace)] = document

    def send(self, request: ApiRequest) -> ApiResponse:
        assert request.method == "GET"
        if request.path in self._lists:
            body = {"metadata": {}, "items": self._lists[request.path]}
        elif request.path in self._objects:
            body = self._objects[request.path]
        else:
            return ApiResponse(404, b'{"kind": "Status", "reason": "NotFound"}')
        return ApiResponse(200, json.dumps(body).encode())

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream:
        raise AssertionError(request, duration_s)

    def close(self) -> None:
        """Do nothing."""


def list_paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        items: list[tuple[str | int, Any]] = [*value.items()]
    elif isinstance(value, list):
        items = [*enumerate(value)]
    else:
        return
    for key, inner in items:
        yield (*path, key)
        yield from list_paths(inner, (*path, key))


def read_rows(objects: list[tuple[Resource, Json]]) -> tuple[rows.NodePoolRow, ...]:
    names = [document["metadata"]["name"] for _, document in OBJECTS]
    client = Client(StoredDocuments(objects, names))
    return rows.build_rows(snapshot.read_pools(client, FakeClock(NOW)), now=NOW)


def test_objects_of_the_expected_form_are_read() -> None:
    (row,) = read_rows(OBJECTS)
    assert (row.counts, row.wanted_hash) == ({"joined": 1}, hosted.NEW_HASH)
    (unread,) = row.unread
    place = "kubeconfig in Secret admin-kubeconfig in namespace clusters-one"
    assert unread.startswith(f"nodes of the hosted cluster: {place}: ")


def test_control_plane_of_another_provider_has_the_kubeconfig_of_cluster_api() -> None:
    without = [(kind, each) for kind, each in OBJECTS if kind is not HOSTEDCONTROLPLANES]
    client = Client(StoredDocuments(without, [each["metadata"]["name"] for _, each in without]))
    (row,) = rows.build_rows(snapshot.read_pools(client, FakeClock(NOW)), now=NOW)
    (unread,) = row.unread
    name = OBJECTS[3][1]["spec"]["clusterName"]
    assert f"{name}-kubeconfig" in unread, unread
    assert "HostedControlPlane" not in unread


@pytest.mark.parametrize("index", range(len(OBJECTS)))
def test_any_value_in_the_place_of_another_is_read_or_named(index: int) -> None:
    # An API server keeps the types of metadata.
    paths = (path for path in list_paths(OBJECTS[index][1]) if path[0] != "metadata")
    for path in paths:
        for value in VALUES:
            objects = copy.deepcopy(OBJECTS)
            place: Any = objects[index][1]
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
            (row,) = read_rows(objects)
            text = json.dumps(rows.build_document([row]))
            assert row.state in rows.PoolState, (path, value)
            assert len(text) < 20_000
