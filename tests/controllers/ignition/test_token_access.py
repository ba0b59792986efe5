"""Which requests access tokens permit, with two servers and the lab's API server."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.controllers.ignition.serving import LIMIT_S
from tests.controllers.ignition.token_cluster import (
    SECRET,
    Replica,
    TokenCluster,
    run_token_cluster,
)
from tests.waiting import wait_until
from treenail.controllers.ignition.access import AccessVerdict
from treenail.controllers.ignition.machine_credentials import SharedCredentials
from treenail.controllers.ignition.token_access import TokenAccess, TokenMode, TokenSettings
from treenail.controllers.ignition.tokens import TokenRecord, UseState
from treenail.errors import ForbiddenError

pytestmark = pytest.mark.integration
OK, UNAUTHORIZED, FORBIDDEN = HTTPStatus.OK, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN
UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
A, B = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path) as found:
        yield found


def learn(replica: Replica, record: TokenRecord) -> None:
    """Wait until the replica's watch shows the token with its uses."""

    def is_current() -> bool:
        observed = replica.store.observed
        return bool(observed and observed.book and observed.book.tokens.get(record.name) == record)

    wait_until(is_current, limit_s=LIMIT_S)


def begin(replica: Replica, token: str, address: str, pool: str = "worker") -> AccessVerdict:
    verdict = replica.access.check(token, pool, address)
    return replica.access.claim(verdict) if verdict.is_allowed else verdict


def serve(replica: Replica, token: str, address: str, pool: str = "worker") -> HTTPStatus:
    verdict = begin(replica, token, address, pool)
    if verdict.is_allowed:
        replica.access.confirm_sent(verdict)
    return verdict.status


def test_use_counts_when_sent_and_only_once_for_an_address(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(machine="worker-7")
    replica = cluster.start_replica(credentials=SharedCredentials(lambda: b"kubeconfig"))
    verdict = begin(replica, token, A)
    assert (verdict.status, verdict.kubeconfig) == (OK, b"kubeconfig")
    assert (verdict.token_name, verdict.machine) == (record.name, "worker-7")
    assert token not in repr(verdict)
    assert [use.state for use in cluster.read_record(record.name).used] == [UseState.CLAIMED]
    replica.access.confirm_sent(verdict)
    assert [use.state for use in cluster.read_record(record.name).used] == [UseState.SENT]
    # Ignition requests twice.
    assert serve(replica, token, A) is OK
    assert serve(replica, token, B) is FORBIDDEN
    cluster.clock.move(600)
    assert serve(replica, token, A) is FORBIDDEN


def test_check_writes_nothing_and_sends_no_request(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    before = cluster.server.count_requests()
    for text in (token, token + "x", f"tn_{record.name}_{'A' * 32}", "x", ""):
        replica.access.check(text, "worker", A)
    assert cluster.server.count_requests() == before
    assert cluster.read_record(record.name).used == ()


@pytest.mark.parametrize(
    ("token", "pool", "status", "reason"),
    [
        ("", "worker", UNAUTHORIZED, "the request has no token"),
        ("x", "worker", UNAUTHORIZED, "unknown"),
        ("tn_aaaaaa_" + "A" * 32, "worker", UNAUTHORIZED, "unknown"),
        ("valid", "infra", FORBIDDEN, "another pool"),
    ],
)
def test_refusal_has_a_status_and_a_reason(
    cluster: TokenCluster, token: str, pool: str, status: HTTPStatus, reason: str
) -> None:
    valid, _ = cluster.create_token()
    verdict = begin(cluster.start_replica(), valid if token == "valid" else token, A, pool)
    assert verdict.status is status
    assert reason in verdict.reason
    assert verdict.token == ""


def test_expired_token_is_refused_and_removed_a_day_later(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(ttl_s=60)
    replica = cluster.start_replica()
    cluster.clock.move(60)
    assert begin(replica, token, A).status is UNAUTHORIZED
    cluster.clock.move(86_399)
    replica.access.run_upkeep()
    assert cluster.read_record(record.name) == record
    cluster.clock.move(2)
    replica.access.run_upkeep()
    assert cluster.make_store().load().tokens == {}


def test_step_of_the_upkeep_that_is_forbidden_stops_no_other(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_token(ttl_s=60)
    replica = cluster.start_replica()

    def settle_uses() -> None:
        raise ForbiddenError("cannot list nodes: forbidden")

    access = TokenAccess(
        replica.store, cluster.clock, TokenSettings(), SharedCredentials(), settle_uses=settle_uses
    )
    cluster.clock.move(60 + 86_401)
    access.run_upkeep()
    assert cluster.make_store().load().tokens == {}
    access.run_upkeep()
    assert caplog.text.count("cannot list nodes") == 1


def test_transition_serves_machines_without_token_and_counts_them(cluster: TokenCluster) -> None:
    cluster.create_token()
    replica = cluster.start_replica(TokenSettings(TokenMode.ASK))
    assert serve(replica, "", A) is OK
    assert serve(replica, "wrong", A) is UNAUTHORIZED
    assert replica.access.open_requests == 1


def test_two_servers_never_serve_one_token_to_two_machines(cluster: TokenCluster) -> None:
    token, record = cluster.create_token(uses=3)
    replicas = [cluster.start_replica() for _ in range(2)]
    barrier = threading.Barrier(12)

    def fetch(number: int) -> HTTPStatus:
        barrier.wait(LIMIT_S)
        return serve(replicas[number % 2], token, f"10.0.0.{number}")

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(fetch, range(12)))
    assert found.count(OK) == 3
    assert found.count(FORBIDDEN) == 9
    stored = cluster.read_record(record.name)
    assert [use.state for use in stored.used] == [UseState.SENT] * 3


def test_released_use_is_free_on_the_other_server(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    first, second = cluster.start_replica(), cluster.start_replica()
    claimed = begin(first, token, A)
    assert begin(second, token, B).status is FORBIDDEN
    first.access.release(claimed)
    learn(second, record)
    assert serve(second, token, B) is OK


def test_claim_of_a_killed_server_serves_only_the_same_machine(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    killed, other = cluster.start_replica(), cluster.start_replica()
    begin(killed, token, A)
    cluster.clock.move(1000)
    assert serve(other, token, B) is FORBIDDEN
    assert serve(other, token, A) is OK
    assert len(cluster.read_record(record.name).used) == 1


def test_unreadable_tokens_are_unavailable(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    replica = cluster.start_replica()
    cluster.admin.patch(SECRET, {"data": {"tokens": "e2Jyb2tlbg=="}}).ok()
    wait_until(lambda: replica.store.observed and replica.store.observed.problem, limit_s=LIMIT_S)
    verdict = begin(replica, token, A)
    assert verdict.status is UNAVAILABLE
    assert verdict.reason == "the access tokens cannot be read yet"


def test_server_without_the_api_server_serves_by_its_own_knowledge(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    token, record = cluster.create_token()
    late, _ = cluster.create_token()
    first, second = cluster.start_replica(), cluster.start_replica()
    cluster.server.stop()
    assert serve(first, token, A) is OK
    assert serve(first, token, A) is OK
    assert serve(first, token, B) is FORBIDDEN
    assert serve(first, "wrong", B) is UNAUTHORIZED
    # The other server knows nothing of it.
    assert serve(second, token, B) is OK
    cluster.clock.move(601)
    refused = begin(first, late, B)
    assert refused.status is UNAVAILABLE
    assert refused.reason == "the API server has been unreachable for 601 s"
    cluster.server.start()
    caplog.clear()
    for replica in (first, second):
        replica.access.run_upkeep()
    stored = cluster.read_record(record.name)
    assert {use.address for use in stored.used} == {A, B}
    assert f"token {record.name} permits 1 machines, and 2 used it" in caplog.text
    assert serve(first, late, A) is OK


def test_response_in_progress_at_an_outage_is_recorded_later(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    verdict = begin(replica, token, A)
    cluster.server.stop()
    replica.access.confirm_sent(verdict)
    cluster.server.start()
    replica.access.run_upkeep()
    assert [use.state for use in cluster.read_record(record.name).used] == [UseState.SENT]


def test_use_without_the_api_server_can_be_released(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    cluster.server.stop()
    verdict = begin(replica, token, A)
    assert begin(replica, token, B).status is FORBIDDEN
    replica.access.release(verdict)
    assert serve(replica, token, B) is OK
    cluster.server.start()
    replica.access.run_upkeep()
    assert [use.address for use in cluster.read_record(record.name).used] == [B]


def test_revoked_token_is_refused_although_a_check_permitted_it(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    verdict = replica.access.check(token, "worker", A)
    cluster.make_store().change(lambda book: (book.remove(record.name), None))
    assert replica.access.claim(verdict).status is UNAUTHORIZED


def test_clock_an_hour_behind_refuses_no_valid_token(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    replica = cluster.start_replica()
    cluster.clock.move(-3600)
    assert serve(replica, token, A) is OK
    assert serve(replica, token, B) is FORBIDDEN
