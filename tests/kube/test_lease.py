"""Leader election of two candidates for one Lease, with fake clocks."""

import logging
import threading

import pytest

from tests.fakes.clock import FakeClock
from tests.kube.cluster import Cluster, Json
from treenail.errors import ForbiddenError, UnreachableError
from treenail.kube.api_client import Client
from treenail.kube.lease import LeaderElectionConfig, LeaderElector

PATH = "/apis/coordination.k8s.io/v1/namespaces/mco/leases/rollout"


class Candidate:
    """An elector and the callbacks that it called."""

    def __init__(self, cluster: Cluster, identity: str, clock: FakeClock) -> None:
        self.callbacks: list[str] = []
        self.election = LeaderElector(
            Client(cluster),
            LeaderElectionConfig("mco", "rollout", identity),
            clock,
            on_started_leading=lambda: self.callbacks.append("started"),
            on_stopped_leading=lambda: self.callbacks.append("stopped"),
            jitter=lambda: 1.0,
        )

    @property
    def leads(self) -> bool:
        return self.election.is_leader


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_700_000_000.0)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def a(cluster: Cluster, clock: FakeClock) -> Candidate:
    return Candidate(cluster, "a", clock)


@pytest.fixture
def b(cluster: Cluster, clock: FakeClock) -> Candidate:
    return Candidate(cluster, "b", clock)


def spec(cluster: Cluster) -> Json:
    return cluster.objects[PATH]["spec"]  # type: ignore[return-value]  # a dict


def test_first_candidate_leads_and_writes_the_lease_of_client_go(
    cluster: Cluster, a: Candidate
) -> None:
    assert a.election.try_acquire_or_renew() == 2.0

    assert (a.leads, a.callbacks) == (True, ["started"])
    assert spec(cluster) == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": "2023-11-14T22:13:20.000000Z",
        "renewTime": "2023-11-14T22:13:20.000000Z",
        "leaseTransitions": 0,
    }


def test_leader_renews_and_the_other_waits(
    cluster: Cluster, a: Candidate, b: Candidate, clock: FakeClock
) -> None:
    for _ in range(20):
        a.election.try_acquire_or_renew()
        assert b.election.try_acquire_or_renew() == 2.4
        clock.move(2)

    assert (a.callbacks, b.callbacks) == (["started"], [])
    assert spec(cluster)["acquireTime"] == "2023-11-14T22:13:20.000000Z"
    assert spec(cluster)["renewTime"] == "2023-11-14T22:13:58.000000Z"


def test_expired_lease_is_acquired(
    cluster: Cluster, a: Candidate, b: Candidate, clock: FakeClock
) -> None:
    a.election.try_acquire_or_renew()
    b.election.try_acquire_or_renew()
    clock.move(14.9)
    b.election.try_acquire_or_renew()
    assert b.callbacks == []
    clock.move(0.1)
    b.election.try_acquire_or_renew()

    assert b.callbacks == ["started"]
    assert (spec(cluster)["holderIdentity"], spec(cluster)["leaseTransitions"]) == ("b", 1)


def test_suspended_leader_never_overlaps_with_another(
    a: Candidate, b: Candidate, clock: FakeClock
) -> None:
    a.election.try_acquire_or_renew()
    b.election.try_acquire_or_renew()
    clock.move(15)
    assert not a.leads
    b.election.try_acquire_or_renew()
    assert (a.leads, b.leads) == (False, True)

    a.election.try_acquire_or_renew()
    assert a.callbacks == ["started", "stopped"]


def test_leader_without_renewal_stops_before_another_leads(
    cluster: Cluster, a: Candidate, b: Candidate, clock: FakeClock
) -> None:
    a.election.try_acquire_or_renew()
    b.election.try_acquire_or_renew()
    while a.callbacks == ["started"]:
        clock.move(2)
        cluster.failures = [UnreachableError("no answer")]
        a.election.try_acquire_or_renew()
        b.election.try_acquire_or_renew()

    assert clock.monotonic() == 1_700_000_010
    assert b.callbacks == []


def test_short_outage_keeps_the_leader(cluster: Cluster, a: Candidate, clock: FakeClock) -> None:
    a.election.try_acquire_or_renew()
    for _ in range(4):
        clock.move(2)
        cluster.failures = [UnreachableError("no answer")]
        a.election.try_acquire_or_renew()
    clock.move(2)
    a.election.try_acquire_or_renew()

    assert (a.leads, a.callbacks) == (True, ["started"])


def test_lost_response_to_the_first_write_is_detected(
    cluster: Cluster, a: Candidate, clock: FakeClock
) -> None:
    cluster.failures, cluster.lost = [None, UnreachableError("no answer")], True
    a.election.try_acquire_or_renew()
    assert a.callbacks == []
    clock.move(2)
    a.election.try_acquire_or_renew()

    assert a.callbacks == ["started"]
    assert spec(cluster)["leaseTransitions"] == 0


def test_released_lease_is_acquired_at_once(
    cluster: Cluster, a: Candidate, b: Candidate, clock: FakeClock
) -> None:
    a.election.try_acquire_or_renew()
    b.election.try_acquire_or_renew()
    a.election.release_lease()
    assert (spec(cluster)["holderIdentity"], spec(cluster)["leaseDurationSeconds"]) == ("", 1)
    b.election.try_acquire_or_renew()

    assert (a.callbacks, b.callbacks) == (["started", "stopped"], ["started"])


def test_stop_releases_the_lease(cluster: Cluster, a: Candidate) -> None:
    stop = threading.Event()
    stop.set()
    a.election.run(stop)

    assert a.callbacks == ["started", "stopped"]
    assert spec(cluster)["holderIdentity"] == ""


def test_release_of_a_foreign_lease_changes_nothing(
    cluster: Cluster, a: Candidate, b: Candidate
) -> None:
    a.election.try_acquire_or_renew()
    b.election.try_acquire_or_renew()
    before = spec(cluster)
    b.election.release_lease()

    assert spec(cluster) == before


def test_reason_for_a_wait_without_the_lease_is_logged_once(
    cluster: Cluster,
    a: Candidate,
    b: Candidate,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "treenail.kube.lease")
    a.election.try_acquire_or_renew()
    for _ in range(3):
        b.election.try_acquire_or_renew()
    refusal = ForbiddenError('leases "rollout" is forbidden: User "b" cannot get it')
    cluster.failures = [refusal] * 3
    for _ in range(3):
        b.election.try_acquire_or_renew()
    clock.move(20)
    b.election.try_acquire_or_renew()
    b.election.try_acquire_or_renew()
    messages = [each.getMessage() for each in caplog.records]
    assert messages == [
        "acquired lease rollout as a",
        "waiting for lease mco/rollout, held by a",
        f"cannot use lease mco/rollout: {refusal}",
        "acquired lease rollout as b",
    ]
