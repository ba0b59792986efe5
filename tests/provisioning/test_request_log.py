"""The log of requests in a ConfigMap: several servers, failures, and no delay of a request."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.kube.cluster import Cluster
from tests.provisioning.logged import NOW, make_refusal, make_row
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import ConflictError, ForbiddenError, NotFoundError, UnreachableError
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.provisioning.machines.logged_requests import (
    DATA_KEY,
    MAX_BYTES,
    MAX_ROWS,
    LoggedRequest,
    format_requests,
    log_request,
)
from treenail.provisioning.machines.request_log import RequestLogWriter, RequestStore

PLACE = ("treenail-ignition", "treenail-ignition-requests")
PATH = "/api/v1/namespaces/treenail-ignition/configmaps/treenail-ignition-requests"
LIMIT_S = 60.0


@pytest.fixture
def cluster() -> Cluster:
    found = Cluster()
    metadata: Any = {"name": PLACE[1], "namespace": PLACE[0], "resourceVersion": "0"}
    found.objects[PATH] = {"metadata": metadata}
    return found


def make_store(cluster: Cluster) -> RequestStore:
    return RequestStore(Client(cluster), *PLACE)


def make_writer(cluster: Cluster, **options: Any) -> RequestLogWriter:
    return RequestLogWriter(make_store(cluster), FakeClock(NOW), **options)


def describe(rows: tuple[LoggedRequest, ...]) -> list[tuple[str, str, int]]:
    return [(each.row.address, each.row.outcome.value, each.count) for each in rows]


def test_servers_add_to_one_log(cluster: Cluster) -> None:
    first, second = make_writer(cluster), make_writer(cluster)
    first.record(make_row(NOW, address="10.0.0.1"))
    second.record(make_row(NOW + 1, address="10.0.0.2"))
    first.write_rows()
    second.write_rows()
    second.record(make_row(NOW + 2, address="10.0.0.3"))
    second.write_rows()
    addresses = [each.row.address for each in make_store(cluster).read_rows()]
    assert addresses == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_log_is_parsed_again_when_another_server_wrote(cluster: Cluster) -> None:
    first, second = make_store(cluster), make_store(cluster)
    row = log_request("a-1", make_row())
    first.change_rows(lambda _: (row,))
    known = first.read_rows()
    assert first.read_rows() is known
    assert second.read_rows() == (row,)
    second.change_rows(lambda stored: (*stored, log_request("b-1", make_row(NOW + 1))))
    assert [each.id for each in first.read_rows()] == ["a-1", "b-1"]


def test_equal_failures_of_one_machine_share_a_row(cluster: Cluster) -> None:
    writer = make_writer(cluster)
    for at in range(3):
        writer.record(make_refusal(NOW + at))
        writer.record(make_row(NOW + at, address="10.0.0.9"))
    writer.write_rows()
    writer.record(make_refusal(NOW + 9))
    writer.write_rows()
    found = make_store(cluster).read_rows()
    assert describe(found)[-1] == ("10.0.0.5", "refused", 4)
    assert (found[-1].first_at, found[-1].row.at) == (NOW, NOW + 9)
    assert [each.row.address for each in found].count("10.0.0.9") == 3


def test_lost_response_adds_no_row_twice(cluster: Cluster) -> None:
    writer = make_writer(cluster)
    writer.record(make_row())
    cluster.lost, cluster.failures = True, [None, UnreachableError("no answer")]
    with pytest.raises(UnreachableError):
        writer.write_rows()
    writer.record(make_row(NOW + 1, address="10.0.0.6"))
    writer.write_rows()
    assert len(make_store(cluster).read_rows()) == 2


def test_write_without_a_new_request_sends_nothing(cluster: Cluster) -> None:
    writer = make_writer(cluster)
    writer.record(make_row())
    writer.write_rows()
    cluster.requests.clear()
    writer.write_rows()
    assert cluster.requests == []


def test_conflicts_end_with_an_error_and_the_rows_stay(cluster: Cluster) -> None:
    writer = make_writer(cluster)
    writer.record(make_row())
    cluster.failures = [error for _ in range(8) for error in (None, ConflictError("changed"))]
    with pytest.raises(ConflictError):
        writer.write_rows()
    writer.write_rows()
    assert len(make_store(cluster).read_rows()) == 1


def test_rows_in_memory_are_bounded_while_the_cluster_is_unreachable(cluster: Cluster) -> None:
    writer = make_writer(cluster)
    for number in range(5 * MAX_ROWS):
        writer.record(make_row(NOW + number, address=f"10.0.{number}"))
    assert len(writer._own) < 2 * MAX_ROWS
    writer.write_rows()
    found = make_store(cluster).read_rows()
    assert (len(found), found[-1].row.address) == (MAX_ROWS, f"10.0.{5 * MAX_ROWS - 1}")
    assert len(writer._own) == MAX_ROWS


def test_missing_configmap_is_created(cluster: Cluster) -> None:
    cluster.objects.clear()
    writer = make_writer(cluster)
    writer.record(make_row())
    writer.write_rows()
    assert len(make_store(cluster).read_rows()) == 1


def test_missing_configmap_that_the_account_cannot_create_has_a_remedy(cluster: Cluster) -> None:
    cluster.objects.clear()
    writer = make_writer(cluster)
    writer.record(make_row())
    cluster.failures = [None, ForbiddenError("forbidden")]
    with pytest.raises(NotFoundError) as raised:
        writer.write_rows()
    assert raised.value.remedy == f"run: kubectl create configmap -n {PLACE[0]} {PLACE[1]}"


class BlockedCluster(Cluster):
    """An API server that answers no request before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()
        self.is_released = threading.Event()

    def send(self, request: Any) -> Any:
        self.is_asked.set()
        self.is_released.wait(LIMIT_S)
        return super().send(request)


def test_record_returns_while_a_write_waits_for_the_api_server() -> None:
    cluster = BlockedCluster()
    writer = make_writer(cluster, period_s=0.01)
    writer.start()
    try:
        writer.record(make_row(address="10.0.0.1"))
        assert cluster.is_asked.wait(LIMIT_S)
        # These would block forever if they waited for the write.
        for number in range(2, 50):
            writer.record(make_row(address=f"10.0.0.{number}"))
        assert not cluster.is_released.is_set()
    finally:
        cluster.is_released.set()
        writer.stop()
    assert len(make_store(cluster).read_rows()) == 49


def test_writer_logs_an_outage_once_and_continues(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.failures = [UnreachableError("no answer")] * 3
    caplog.set_level("INFO")
    writer = make_writer(cluster, period_s=0.01)
    writer.record(make_row())
    writer.start()
    try:
        wait_until(lambda: "wrote the log of requests again" in caplog.text, limit_s=LIMIT_S)
    finally:
        writer.stop()
    assert caplog.text.count("cannot write the log of requests") == 1
    assert len(make_store(cluster).read_rows()) == 1


@pytest.fixture
def shared_store(shared_kubeconfig: Path) -> Iterator[RequestStore]:
    """A log in the lab and in the real cluster."""
    transport = HttpTransport(read_kubeconfig(str(shared_kubeconfig)), SystemClock(), max_kept=8)
    client = Client(transport)
    name = f"treenail-test-{secrets.token_hex(3)}"
    yield RequestStore(client, "default", name)
    with suppress(NotFoundError):
        client.delete(CONFIGMAPS, name, namespace="default")
    transport.close()


@pytest.mark.integration
def test_servers_that_write_at_the_same_time_lose_no_row(shared_store: RequestStore) -> None:
    clock = SystemClock()
    writers = [RequestLogWriter(shared_store, clock, period_s=0.01) for _ in range(4)]
    for each in writers:
        each.start()
    try:
        for number in range(100):
            for index, each in enumerate(writers):
                each.record(make_row(clock.now(), address=f"10.0.{index}.{number}"))
        wait_until(lambda: len(read_rows(shared_store)) == 400, limit_s=LIMIT_S)
    finally:
        for each in writers:
            each.stop()
    assert len({each.row.address for each in shared_store.read_rows()}) == 400


@pytest.mark.integration
def test_largest_log_is_accepted(shared_store: RequestStore) -> None:
    clock = SystemClock()
    writer = RequestLogWriter(shared_store, clock)
    long = "x" * 400
    for number in range(MAX_ROWS):
        row = make_row(clock.now(), address=f"10.{number}", pool=long, machine=long, image=long)
        writer.record(row)
    writer.write_rows()
    found = shared_store.read_rows()
    text = format_requests(found)[DATA_KEY]
    assert MAX_BYTES - 2000 < len(text) <= MAX_BYTES
    assert found[-1].row.address == f"10.{MAX_ROWS - 1}"


def read_rows(store: RequestStore) -> tuple[LoggedRequest, ...]:
    try:
        return store.read_rows()
    except NotFoundError:
        return ()
