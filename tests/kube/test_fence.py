"""Writes are sent only while this process leads."""

import pytest

from tests.fakes.clock import FakeClock
from tests.kube.cluster import Cluster
from treenail.clocks import BootTimeClock
from treenail.errors import NotLeaderError
from treenail.kube.api_client import Client
from treenail.kube.lease import LeaderElectionConfig, LeaderElector, LeaderTransport
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import NODES


class PausedTransport:
    """Stands for a process that is stopped for a time before it sends."""

    def __init__(self, transport: LeaderTransport, clock: FakeClock) -> None:
        self._transport = transport
        self._clock = clock
        self.pause_s = 0.0

    def send(self, request: ApiRequest) -> ApiResponse:
        self._clock.move(self.pause_s)
        return self._transport.send(request)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> object:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing."""


def test_leader_paused_before_its_write_does_not_write_after_the_take_over() -> None:
    clock, cluster = FakeClock(), Cluster()
    config = LeaderElectionConfig("mco", "rollout", "old")

    def elect(identity: str) -> LeaderElector:
        return LeaderElector(
            Client(cluster),
            LeaderElectionConfig("mco", "rollout", identity),
            clock,
            on_started_leading=lambda: None,
            on_stopped_leading=lambda: None,
        )

    old, new = elect("old"), elect("new")
    old.try_acquire_or_renew()
    new.try_acquire_or_renew()
    paused = PausedTransport(LeaderTransport(cluster, lambda: old.is_leader), clock)
    client = Client(paused)  # type: ignore[arg-type]  # it opens no stream
    node = {"metadata": {"name": "worker-0"}}
    client.create(NODES, node)
    before = len(cluster.requests)

    paused.pause_s = config.lease_duration_s
    with pytest.raises(NotLeaderError, match="was not sent: this process no longer leads"):
        client.patch(NODES, "worker-0", {"spec": {"unschedulable": True}})
    new.try_acquire_or_renew()

    assert new.is_leader
    assert not [each for each in cluster.requests[before:] if each.method == "PATCH"]
    assert client.get(NODES, "worker-0")


def test_write_that_begins_before_the_renew_deadline_ends_before_the_lease() -> None:
    clock, cluster = FakeClock(), Cluster()
    config = LeaderElectionConfig("mco", "rollout", "old")
    elector = LeaderElector(
        Client(cluster),
        config,
        clock,
        on_started_leading=lambda: None,
        on_stopped_leading=lambda: None,
    )
    elector.try_acquire_or_renew()
    clock.move(config.renew_deadline_s - 0.1)
    assert elector.is_leader
    clock.move(0.1)
    assert not elector.is_leader


def test_boot_time_clock_counts_at_least_the_running_time() -> None:
    clock = BootTimeClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first > 0.0
