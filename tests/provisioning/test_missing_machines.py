"""A machine whose Node does not appear gets one Event of its pool, from one of the servers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import install_kinds
from tests.provisioning.logged import NOW, make_refusal, make_row
from tests.provisioning.samples import make_pool
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clocks import SystemClock
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import EVENTS, MACHINECONFIGPOOLS, NODES
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.machines.joined_machines import EXPECT_S
from treenail.provisioning.machines.logged_requests import (
    LoggedRequest,
    RequestOutcome,
    RequestRow,
    log_request,
    merge_requests,
)
from treenail.provisioning.machines.missing_machines import (
    REASON,
    MissingMachineReporter,
    find_due_machines,
    format_messages,
)
from treenail.provisioning.machines.request_log import RequestLogWriter, RequestStore
from treenail_lab.apiserver.serving.server import LabServer

LATE = NOW + EXPECT_S
WORKER = "node-role.kubernetes.io/worker"


def log_rows(*rows: RequestRow) -> tuple[LoggedRequest, ...]:
    return tuple(log_request(f"a-{number:03}", row) for number, row in enumerate(rows))


def test_machine_is_due_once_after_the_expected_time() -> None:
    rows = log_rows(make_row(), make_refusal())
    assert find_due_machines(rows, LATE - 1, EXPECT_S) == []
    (machine,) = find_due_machines(rows, LATE, EXPECT_S)
    assert machine.address == "10.0.0.5"


def test_refused_client_without_a_token_is_never_due() -> None:
    rows = log_rows(make_refusal(), make_row(outcome=RequestOutcome.CHECKED))
    assert find_due_machines(rows, LATE + 3600, EXPECT_S) == []


def test_message_names_address_token_and_last_step() -> None:
    rows = log_rows(make_row(machine="w1"))
    (message,) = format_messages(find_due_machines(rows, LATE, EXPECT_S), EXPECT_S)
    assert message == (
        "no Node appeared within 20 min for 10.0.0.5 (token abc, machine w1); last known step: it "
        "received rendered-worker-1 in Ignition 3.4.0 (165000 bytes), at 2023-11-14T22:13:20Z; "
        "run: treenail-controller machines"
    )


def test_message_names_the_certificate_that_waits() -> None:
    certificate = KubeletRequest("csr-1", "uid", "abc", "abc", "w1", created_at=NOW + 60)
    (machine,) = find_due_machines(log_rows(make_row()), LATE, EXPECT_S)
    (message,) = format_messages([replace(machine, certificate=certificate)], EXPECT_S)
    assert (
        "last known step: the certificate request csr-1 of its kubelet, for node w1, is not "
        "approved, at 2023-11-14T22:14:20Z; run: treenail-controller machines"
    ) in message


def test_many_machines_share_one_message() -> None:
    rows = log_rows(*(make_row(address=f"10.0.1.{number}") for number in range(200)))
    (message,) = format_messages(find_due_machines(rows, LATE, EXPECT_S), EXPECT_S)
    assert message.startswith(
        "no Node appeared within 20 min for 200 machines: 10.0.1.0 (token abc), 10.0.1.1 (token "
        "abc), 10.0.1.2 (token abc) and 197 more; last known step of the first: it received"
    )


def test_text_of_clients_is_one_line_in_a_message() -> None:
    rows = log_rows(make_refusal(address="a\nb", token="\x1b[2J", reason="x\ny"))
    (message,) = format_messages(find_due_machines(rows, LATE, EXPECT_S), EXPECT_S)
    assert message.isprintable()


class Provisioned:
    """A cluster with one pool, and servers that share its log of requests."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.clock = SystemClock()
        install_kinds(client)
        pool = make_pool(nodeSelector={"matchLabels": {WORKER: ""}})
        self.pool = MachineConfigPool.from_json(client.create(MACHINECONFIGPOOLS, pool))
        self.store = RequestStore(client, "default", "requests")

    def write(self, *rows: RequestRow) -> None:
        found, now = log_rows(*rows), self.clock.now()
        self.store.change_rows(lambda stored: merge_requests(stored, found, now))

    def make_reporter(self, name: str, get_pools: Callable[[], Any] | None = None) -> Any:
        recorder = EventRecorder(self.client, "treenail-ignition", name, self.clock)
        return MissingMachineReporter(
            self.client,
            self.store,
            get_pools or (lambda: [self.pool]),
            recorder,
            self.clock,
            expect_s=EXPECT_S,
        )

    def add_node(self, name: str, address: str) -> None:
        metadata = {"name": name, "labels": {WORKER: ""}}
        self.client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        addresses = [{"type": "InternalIP", "address": address}]
        self.client.patch(NODES, name, {"status": {"addresses": addresses}}, subresource="status")

    def list_events(self) -> list[Any]:
        return [each for each in self.client.list(EVENTS).items if each["reason"] == REASON]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Provisioned]:
    with LabServer(tmp_path) as server, open_client(server.admin_kubeconfig) as client:
        yield Provisioned(client)


@pytest.mark.integration
def test_event_of_the_pool_names_the_machine_without_a_node(cluster: Provisioned) -> None:
    late = cluster.clock.now() - EXPECT_S
    cluster.add_node("w1", "10.0.0.1")
    cluster.write(
        make_row(late, address="10.0.0.1", token="one"),
        make_row(late, address="10.0.0.2", token="two"),
        make_row(late + 60, address="10.0.0.3", token="three"),
        make_refusal(late, address="10.0.0.4"),
    )
    cluster.make_reporter("a").check_machines()
    (event,) = cluster.list_events()
    assert event["type"] == "Warning"
    assert event["involvedObject"]["kind"] == "MachineConfigPool"
    assert event["involvedObject"]["uid"] == cluster.pool.metadata.uid
    assert "for 10.0.0.2 (token two); last known step: it received" in event["message"]
    checked = {each.row.token: (each.is_checked, each.node) for each in cluster.store.read_rows()}
    assert checked == {
        "one": (True, "w1"),
        "two": (True, ""),
        "three": (False, ""),
        "": (False, ""),
    }


@pytest.mark.integration
def test_two_servers_record_one_event(cluster: Provisioned) -> None:
    cluster.write(make_row(cluster.clock.now() - EXPECT_S))
    first = cluster.make_reporter("a")

    def check_first() -> list[MachineConfigPool]:
        # The other server writes its result between the read and the write of this one.
        first.check_machines()
        return [cluster.pool]

    cluster.make_reporter("b", check_first).check_machines()
    cluster.make_reporter("c").check_machines()
    (event,) = cluster.list_events()
    assert (event["count"], event["source"]["host"]) == (1, "a")


@pytest.mark.integration
def test_machine_that_repeats_a_failed_request_gets_one_event(cluster: Provisioned) -> None:
    now = cluster.clock.now()
    writer = RequestLogWriter(cluster.store, cluster.clock)
    reporter = cluster.make_reporter("a")
    failed: dict[str, Any] = {"outcome": RequestOutcome.FAILED, "status": 500, "reason": "broken"}
    for at in (now - EXPECT_S, now - 60):
        writer.record(make_row(at, rendered="", **failed))
        writer.write_rows()
        reporter.check_machines()
    writer.record(make_row(now, rendered="", **failed))
    writer.write_rows()
    reporter.check_machines()
    (event,) = cluster.list_events()
    assert event["count"] == 1
    assert "it received no config (status 500): broken" in event["message"]


@pytest.mark.integration
def test_machine_waits_for_its_event_until_the_pools_are_listed(cluster: Provisioned) -> None:
    cluster.write(make_row(cluster.clock.now() - EXPECT_S))
    cluster.make_reporter("a", list).check_machines()
    assert cluster.list_events() == []
    cluster.make_reporter("a").check_machines()
    assert len(cluster.list_events()) == 1


@pytest.mark.integration
def test_check_reads_the_log_every_30_seconds(cluster: Provisioned) -> None:
    clock = FakeClock(cluster.clock.now())
    calls: list[float] = []
    cluster.write(make_row(clock.now() - EXPECT_S))

    def get_pools() -> list[MachineConfigPool]:
        calls.append(clock.now())
        return []

    recorder = EventRecorder(cluster.client, "treenail-ignition", "a", clock)
    reporter = MissingMachineReporter(
        cluster.client, cluster.store, get_pools, recorder, clock, expect_s=EXPECT_S
    )
    for _ in range(13):
        reporter.check_periodically()
        clock.move(5)
    assert len(calls) == 3
