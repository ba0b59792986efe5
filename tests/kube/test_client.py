"""Each verb sends its request, and each error status raises its class."""

import json
from collections.abc import Callable

import pytest

from tests.kube.cluster import Answers, refusal, reply
from treenail import errors
from treenail.errors import ClusterError, TooManyRequestsError, TreenailError
from treenail.kube.api_client import Client, Listing, PatchType, WatchEvent
from treenail.kube.request import ApiRequest, ApiResponse, parse_retry_after_s
from treenail.kube.resources import (
    EVENTS,
    MACHINECONFIGNODES,
    MACHINECONFIGS,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
    Resource,
)

NODE = {"kind": "Node", "metadata": {"name": "a"}}
OURS = {"fieldManager": "treenail"}


def body(request: ApiRequest) -> object:
    return json.loads(request.body)


@pytest.mark.parametrize(
    ("resource", "name", "namespace", "subresource", "path"),
    [
        (NODES, "a", "", "", "/api/v1/nodes/a"),
        (NODES, "a", "", "status", "/api/v1/nodes/a/status"),
        (PODS, "", "", "", "/api/v1/pods"),
        (PODS, "p", "n", "eviction", "/api/v1/namespaces/n/pods/p/eviction"),
        (
            PODDISRUPTIONBUDGETS,
            "",
            "n",
            "",
            "/apis/policy/v1/namespaces/n/poddisruptionbudgets",
        ),
        (
            MACHINECONFIGS,
            "a/../b?c#d é",
            "",
            "",
            "/apis/machineconfiguration.openshift.io/v1/machineconfigs/a%2F..%2Fb%3Fc%23d%20%C3%A9",
        ),
    ],
)
def test_path_matches_the_api(
    resource: Resource, name: str, namespace: str, subresource: str, path: str
) -> None:
    assert resource.build_path(name, namespace=namespace, subresource=subresource) == path


@pytest.mark.parametrize(
    ("resource", "name", "namespace", "subresource"),
    [
        (PODS, "p", "", ""),
        (NODES, "a", "n", ""),
        (NODES, "", "", "status"),
        (NODES, "..", "", ""),
        (PODS, "p", "..", ""),
    ],
)
def test_impossible_path_raises_value_error(
    resource: Resource, name: str, namespace: str, subresource: str
) -> None:
    with pytest.raises(ValueError, match=resource.plural):
        resource.build_path(name, namespace=namespace, subresource=subresource)


def test_empty_name_never_becomes_the_collection() -> None:
    transport = Answers(reply(NODE))
    client = Client(transport)
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.get(NODES, ""),
        lambda: client.delete(NODES, ""),
        lambda: client.patch(NODES, "", {}),
        lambda: client.update(NODES, "", {}),
    )
    for call in calls:
        with pytest.raises(errors.NotFoundError, match="its name is empty"):
            call()
    assert transport.requests == []


def test_get_requests_one_object() -> None:
    transport = Answers(reply(NODE))

    assert Client(transport, limit_s=3).get(NODES, "a") == NODE
    assert transport.requests == [ApiRequest("GET", "/api/v1/nodes/a", limit_s=3)]


def test_writes_name_their_field_manager() -> None:
    transport = Answers(*[reply(NODE)] * 3)
    client = Client(transport)

    client.create(EVENTS, NODE, namespace="default")
    client.update(NODES, "a", NODE, subresource="status")
    client.patch(NODES, "a", NODE)

    assert [(r.method, r.path, r.params, r.content_type) for r in transport.requests] == [
        (
            "POST",
            "/api/v1/namespaces/default/events",
            OURS,
            "application/json",
        ),
        ("PUT", "/api/v1/nodes/a/status", OURS, "application/json"),
        ("PATCH", "/api/v1/nodes/a", OURS, "application/merge-patch+json"),
    ]
    assert [body(request) for request in transport.requests] == [NODE] * 3


def test_apply_forces_field_ownership() -> None:
    transport = Answers(reply(NODE))

    Client(transport).patch(
        MACHINECONFIGNODES, "a", NODE, PatchType.APPLY, params={"fieldManager": "other"}
    )

    (request,) = transport.requests
    assert request.content_type == "application/apply-patch+yaml"
    assert request.params == {"fieldManager": "other", "force": "true"}


def test_json_patch_is_a_list_of_operations() -> None:
    transport = Answers(reply(NODE))
    operations: list[dict[str, object]] = [{"op": "remove", "path": "/spec/unschedulable"}]

    Client(transport).patch(NODES, "a", operations, PatchType.JSON)

    assert body(transport.requests[0]) == operations


def test_delete_with_uid_sends_preconditions() -> None:
    transport = Answers(reply({}), reply({}))
    client = Client(transport)

    client.delete(PODS, "p", namespace="n", uid="u", grace_s=0)
    client.delete(NODES, "a")

    assert [(r.method, r.path, body(r)) for r in transport.requests] == [
        (
            "DELETE",
            "/api/v1/namespaces/n/pods/p",
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "preconditions": {"uid": "u"},
                "gracePeriodSeconds": 0,
            },
        ),
        ("DELETE", "/api/v1/nodes/a", {"apiVersion": "v1", "kind": "DeleteOptions"}),
    ]


def test_evict_posts_to_the_policy_api() -> None:
    transport = Answers(reply({}, 201), reply({}, 201))
    client = Client(transport)

    client.evict("n", "p")
    client.evict("n", "p", uid="u")

    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "p", "namespace": "n"},
    }
    assert {request.path for request in transport.requests} == {
        "/api/v1/namespaces/n/pods/p/eviction"
    }
    assert [body(request) for request in transport.requests] == [
        eviction,
        eviction | {"deleteOptions": {"preconditions": {"uid": "u"}}},
    ]


def page(version: str, *names: str, more: str = "") -> ApiResponse:
    items = [{"metadata": {"name": name}} for name in names]
    return reply({"metadata": {"resourceVersion": version, "continue": more}, "items": items})


def listing(version: str, *names: str) -> Listing:
    return Listing(tuple({"metadata": {"name": name}} for name in names), version)


def test_list_is_fetched_page_by_page() -> None:
    transport = Answers(page("7", "a", "b", more="next"), page("7", "c"))

    found = Client(transport, page_size=2).list(NODES, params={"labelSelector": "x"})

    assert found == listing("7", "a", "b", "c")
    assert [request.params for request in transport.requests] == [
        {"limit": "2", "labelSelector": "x"},
        {"limit": "2", "labelSelector": "x", "continue": "next"},
    ]


def test_list_with_expired_continue_token_restarts_in_one_page() -> None:
    transport = Answers(page("7", "a", more="next"), refusal(410, "Expired"), page("9", "a", "b"))

    assert Client(transport, page_size=1).list(NODES) == listing("9", "a", "b")
    assert transport.requests[-1].params == {}


def test_list_without_end_is_rejected() -> None:
    transport = Answers(*[page("7", "a", more="next")] * 3)

    with pytest.raises(ClusterError, match="list nodes: more than 3 objects"):
        Client(transport, page_size=1, max_pages=3).list(NODES)


def test_null_items_are_an_empty_list() -> None:
    transport = Answers(reply({"metadata": {"resourceVersion": "7"}, "items": None}))

    assert Client(transport).list(NODES) == Listing((), "7")


def test_watch_yields_events_until_it_ends() -> None:
    events = [{"type": "ADDED", "object": NODE}, {"type": "BOOKMARK", "object": NODE}]
    transport = Answers(ApiResponse(200, "\n".join(map(json.dumps, events)).encode()))

    stream = Client(transport, limit_s=5).watch(
        NODES, params={"resourceVersion": "7"}, duration_s=300
    )
    stream.connect()

    assert list(stream) == [WatchEvent("ADDED", NODE), WatchEvent("BOOKMARK", NODE)]
    assert transport.stream_s == 310
    assert transport.requests[0].params == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "300",
        "resourceVersion": "7",
    }


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", errors.InvalidError),
        (401, "Unauthorized", errors.ForbiddenError),
        (403, "Forbidden", errors.ForbiddenError),
        (404, "NotFound", errors.NotFoundError),
        (409, "AlreadyExists", errors.AlreadyExistsError),
        (409, "Conflict", errors.ConflictError),
        (410, "Gone", errors.GoneError),
        (415, "UnsupportedMediaType", errors.InvalidError),
        (422, "Invalid", errors.InvalidError),
        (429, "TooManyRequests", TooManyRequestsError),
        (500, "InternalError", ClusterError),
        (503, "ServiceUnavailable", errors.UnreachableError),
        (504, "Timeout", ClusterError),
        (302, "", ClusterError),
    ],
)
def test_each_error_status_raises_its_class(
    code: int, reason: str, kind: type[TreenailError]
) -> None:
    with pytest.raises(kind) as caught:
        Client(Answers(refusal(code, reason, "no"))).get(NODES, "a")

    assert type(caught.value) is kind
    assert str(caught.value).startswith("GET nodes a: ")


def test_long_error_message_is_truncated() -> None:
    with pytest.raises(errors.InvalidError) as caught:
        Client(Answers(refusal(422, "Invalid", "x" * 1000))).update(PODS, "p", {}, namespace="n")

    assert str(caught.value) == f"PUT pods n p: {'x' * 256}"


def test_rejected_eviction_includes_the_budget_cause() -> None:
    details = {
        "retryAfterSeconds": 10,
        "causes": [
            {
                "reason": "DisruptionBudget",
                "message": "The disruption budget web needs 2 healthy pods and has 2 currently",
            }
        ],
    }
    message = "Cannot evict pod as it would violate the pod's disruption budget."

    with pytest.raises(TooManyRequestsError) as caught:
        Client(Answers(refusal(429, "TooManyRequests", message, details=details))).evict("n", "p")

    assert str(caught.value) == (
        f"POST pods n p eviction: {message} "
        "The disruption budget web needs 2 healthy pods and has 2 currently"
    )
    assert caught.value.retry_after_s == 10


def test_retry_after_header_is_kept() -> None:
    with pytest.raises(TooManyRequestsError) as caught:
        Client(Answers(ApiResponse(429, b"", 3.0))).get(NODES, "a")

    assert (str(caught.value), caught.value.retry_after_s) == ("GET nodes a: HTTP 429", 3.0)


@pytest.mark.parametrize("text", [b"<html>", b"[]", b"\xff", b""])
def test_success_without_json_object_is_an_error(text: bytes) -> None:
    with pytest.raises(ClusterError, match=r"^GET nodes a: the response is not "):
        Client(Answers(ApiResponse(200, text))).get(NODES, "a")


def test_gateway_error_page_is_not_quoted() -> None:
    with pytest.raises(errors.UnreachableError) as caught:
        Client(Answers(ApiResponse(502, b"<html>t0ps3cret</html>"))).get(NODES, "a")

    assert str(caught.value) == "GET nodes a: HTTP 502"


def test_error_event_in_a_watch_raises_its_class() -> None:
    event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    stream = Client(Answers(ApiResponse(200, json.dumps(event).encode()))).watch(NODES)
    stream.connect()

    with pytest.raises(errors.GoneError, match="watch nodes: too old"):
        list(stream)


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"type": "ADDED", "object": 1}'])
def test_watch_line_without_event_is_an_error(line: bytes) -> None:
    stream = Client(Answers(ApiResponse(200, line))).watch(NODES)
    stream.connect()

    with pytest.raises(ClusterError, match=r"^watch nodes: "):
        list(stream)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("7", 7.0),
        ("Sun, 22 Nov 2026 10:00:00 GMT", 0.0),
        ("9" * 400, 60.0),
    ],
)
def test_retry_after_is_a_minute_at_most(header: str | None, seconds: float) -> None:
    assert parse_retry_after_s(header) == seconds
