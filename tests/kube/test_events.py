"""Events are aggregated, rate limited, and retried with back-off."""

import logging

import pytest

from tests.fakes.clock import FakeClock
from tests.kube.cluster import Cluster, Json
from treenail.api.object_meta import is_object_name
from treenail.errors import ForbiddenError, TooManyRequestsError, UnreachableError
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder, ObjectReference

NODE = ObjectReference("Node", "worker-0", uid="u-0")
POD = ObjectReference("Pod", "web", uid="u-1", namespace="shop")
EVENTS = "/api/v1/namespaces/default/events/"
UNREACHABLE = UnreachableError("no answer")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_700_000_000.0)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def recorder(cluster: Cluster, clock: FakeClock) -> EventRecorder:
    return EventRecorder(Client(cluster), "treenail", "worker-0", clock)


def written(cluster: Cluster) -> list[Json]:
    return list(cluster.objects.values())


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("worker-0.example.com", "worker-0.example.com"),
        ("Johns_Laptop.local-12", "johns-laptop.local-12"),
        ("-a..b_.", "a.b"),
        ("x" * 300, "x" * 200),
        ("ü", "treenail"),
    ],
)
def test_event_has_a_valid_name_on_every_host(
    cluster: Cluster, clock: FakeClock, host: str, prefix: str
) -> None:
    EventRecorder(Client(cluster), "treenail", host, clock).record_normal(NODE, "Staged", "B")
    (event,) = written(cluster)
    name = event["metadata"]["name"]  # type: ignore[index]  # a dict
    assert name == f"{prefix}.{1_700_000_000 * 10**9:x}"
    assert is_object_name(name)
    assert event["source"] == {"component": "treenail", "host": host}


def counted(cluster: Cluster) -> list[tuple[object, object]]:
    return [(event["message"], event["count"]) for event in written(cluster)]


def test_event_has_the_fields_of_client_go(cluster: Cluster, recorder: EventRecorder) -> None:
    recorder.record_normal(NODE, "Staged", "staged image B")

    (event,) = written(cluster)
    metadata = event.pop("metadata")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Node",
            "name": "worker-0",
            "uid": "u-0",
        },
        "type": "Normal",
        "reason": "Staged",
        "message": "staged image B",
        "source": {"component": "treenail", "host": "worker-0"},
        "reportingComponent": "treenail",
        "reportingInstance": "worker-0",
        "firstTimestamp": "2023-11-14T22:13:20Z",
        "lastTimestamp": "2023-11-14T22:13:20Z",
        "count": 1,
    }
    assert metadata == {
        "name": "worker-0.17979cfe362a0000",
        "namespace": "default",
        "resourceVersion": "1",
    }


def test_event_about_a_pod_is_in_the_pods_namespace(
    cluster: Cluster, recorder: EventRecorder
) -> None:
    recorder.record_warning(POD, "Blocked", "its budget allows no disruption")

    assert cluster.requests[0].path == "/api/v1/namespaces/shop/events"
    assert written(cluster)[0]["type"] == "Warning"


def test_repeated_event_is_counted(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    for _ in range(3):
        recorder.record_warning(NODE, "Degraded", "no space")
        clock.move(60)

    (event,) = written(cluster)
    assert (event["count"], event["firstTimestamp"], event["lastTimestamp"]) == (
        3,
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:15:20Z",
    )
    assert [request.method for request in cluster.requests] == ["POST", "PATCH", "PATCH"]


def test_repeated_event_after_ten_minutes_is_a_new_event(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    recorder.record_warning(NODE, "Degraded", "no space")
    clock.move(600)
    recorder.record_warning(NODE, "Degraded", "no space")

    assert counted(cluster) == [("no space", 1), ("no space", 1)]


def test_event_names_differ_within_one_instant(cluster: Cluster, recorder: EventRecorder) -> None:
    for message in "abc":
        recorder.record_normal(NODE, "Staged", message)

    assert counted(cluster) == [("a", 1), ("b", 1), ("c", 1)]


def test_expired_event_is_created_again(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    recorder.record_normal(NODE, "Staged", "again")
    cluster.objects.clear()
    clock.move(60)
    recorder.record_normal(NODE, "Staged", "again")

    (event,) = written(cluster)
    assert (event["count"], event["firstTimestamp"]) == (2, "2023-11-14T22:14:20Z")


def test_long_message_is_truncated_to_the_api_limit(
    cluster: Cluster, recorder: EventRecorder
) -> None:
    recorder.record_normal(NODE, "Staged", "x" * 2000)

    assert counted(cluster) == [("x" * 1024, 1)]


def test_events_of_an_outage_are_written_after_it(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    cluster.failures = [UNREACHABLE]
    recorder.record_normal(NODE, "Staged", "first")
    recorder.record_normal(NODE, "Drained", "second")
    recorder.record_normal(NODE, "Drained", "second")
    assert len(cluster.requests) == 1

    clock.move(30)
    recorder.flush_pending()

    assert counted(cluster) == [("first", 1), ("second", 2)]


def test_lost_response_does_not_write_twice(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    cluster.failures, cluster.lost = [UNREACHABLE], True
    recorder.record_normal(NODE, "Staged", "once")
    clock.move(30)
    recorder.flush_pending()

    assert counted(cluster) == [("once", 1)]
    assert [request.method for request in cluster.requests] == ["POST", "POST"]


def test_retry_after_delays_the_next_write(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    cluster.failures = [TooManyRequestsError("later", retry_after_s=90)]
    recorder.record_normal(NODE, "Staged", "later")
    clock.move(89)
    recorder.flush_pending()
    assert len(cluster.requests) == 1
    clock.move(1)
    recorder.flush_pending()

    assert counted(cluster) == [("later", 1)]


def test_repeated_failure_doubles_the_pause_until_a_write_succeeds(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    cluster.failures = [UNREACHABLE, UNREACHABLE]
    recorder.record_normal(NODE, "Staged", "first")
    clock.move(30)
    recorder.flush_pending()
    clock.move(29)
    recorder.flush_pending()
    assert len(cluster.requests) == 2
    clock.move(16)
    recorder.flush_pending()
    assert counted(cluster) == [("first", 1)]

    cluster.failures = [UNREACHABLE]
    recorder.record_normal(NODE, "Drained", "second")
    clock.move(30)
    recorder.flush_pending()
    assert counted(cluster) == [("first", 1), ("second", 1)]


def test_forbidden_event_is_dropped_and_logged(
    cluster: Cluster, recorder: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.failures = [ForbiddenError("events is forbidden")]
    recorder.record_normal(NODE, "Staged", "never")
    recorder.record_normal(NODE, "Drained", "next")

    assert counted(cluster) == [("next", 1)]
    assert caplog.messages == ["dropped event Staged for worker-0: events is forbidden"]


def test_long_outage_keeps_the_newest_events(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    cluster.failures = [UNREACHABLE]
    for number in range(40):
        recorder.record_normal(
            ObjectReference("Pod", str(number), namespace="default"), "R", str(number)
        )
    clock.move(30)
    recorder.flush_pending()

    assert [message for message, _ in counted(cluster)] == [str(n) for n in range(8, 40)]


def test_object_with_too_many_events_is_rate_limited(
    cluster: Cluster, recorder: EventRecorder, clock: FakeClock
) -> None:
    for number in range(30):
        recorder.record_normal(NODE, "Staged", str(number))
    recorder.record_normal(POD, "Evicted", "another object has its own limit")
    clock.move(300)
    recorder.record_normal(NODE, "Staged", "one more")
    recorder.record_normal(NODE, "Staged", "and no other")

    messages = [message for message, _ in counted(cluster)]
    assert messages == [*map(str, range(25)), "another object has its own limit", "one more"]


def test_memory_of_past_events_is_bounded(
    cluster: Cluster, recorder: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for number in range(1000):
        recorder.record_normal(ObjectReference("Pod", str(number), namespace="default"), "R", "m")

    assert (len(recorder._series), len(recorder._buckets)) == (256, 256)
    assert len(written(cluster)) == 1000
