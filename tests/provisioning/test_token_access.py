"""Which requests access tokens permit, with two servers and the lab's API server."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.provisioning.serving import LIMIT_S
from tests.provisioning.token_cluster import (
    NAMESPACE,
    SECRET,
    Replica,
    TokenCluster,
    run_token_cluster,
)
from tests.waiting import wait_until
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.cli.controller.serve import TOKEN_LIMIT_S
from treenail.errors import ForbiddenError
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.provisioning.tokens.bootstrap_tokens import (
    BootstrapCredentials,
    JoinTarget,
    SharedCredentials,
)
from treenail.provisioning.tokens.token_access import TokenAccess, TokenMode, TokenSettings
from treenail.provisioning.tokens.token_store import CONFIRM_S, TokenStore
from treenail.provisioning.tokens.tokens import AccessVerdict, TokenRecord, UseState, settle_use

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
        return bool(
            observed and observed.table and observed.table.tokens.get(record.name) == record
        )

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
    # A machine restarted in its first boot.
    assert serve(replica, token, A) is OK
    assert serve(replica, token, B) is FORBIDDEN
    cluster.clock.move(600)
    assert serve(replica, token, A) is FORBIDDEN


def test_check_writes_nothing_and_reads_once_for_unknown_tokens(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    before = cluster.server.count_requests()
    for text in (token, "x", "", "tn_x"):
        replica.access.check(text, "worker", A)
    assert cluster.server.count_requests() == before
    for number in range(9):
        unknown = f"tn_{record.name}_{number:032}"
        assert replica.access.check(unknown, "worker", A).status is UNAUTHORIZED
    assert cluster.server.count_requests() == before + 1
    assert cluster.read_record(record.name).used == ()


def test_token_that_the_watch_has_not_seen_is_accepted(cluster: TokenCluster) -> None:
    """Ignition gives up at 401."""
    replica = cluster.start_replica()
    replica.informers.stop()
    token, _ = cluster.create_token()
    assert serve(replica, token, A) is OK
    token, _ = cluster.create_token()
    unknown = begin(replica, "tn_new_" + "A" * 32, A)
    assert unknown.status is UNAUTHORIZED
    cluster.clock.move(CONFIRM_S)
    assert serve(replica, token, A) is OK


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


def test_transition_serves_machines_without_token_and_refuses_wrong_ones(
    cluster: TokenCluster,
) -> None:
    cluster.create_token()
    replica = cluster.start_replica(TokenSettings(TokenMode.ASK))
    assert serve(replica, "", A) is OK
    assert serve(replica, "wrong", A) is UNAUTHORIZED


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
    assert verdict.reason == "the access tokens cannot be read: the log of the server has the error"


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


class SilentServer:
    """Accepts connections and never answers, as a machine behind a broken network."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)
        for each in (self._socket, *self.connections):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.connections.append(self._socket.accept()[0])


def test_machine_waits_for_one_request_to_a_silent_api_server(cluster: TokenCluster) -> None:
    """Ignition waits 10 s for the head of a response."""
    token, _ = cluster.create_token()
    silent = SilentServer()
    cluster.stack.callback(silent.close)
    connection = read_kubeconfig(str(cluster.server.admin_kubeconfig))
    transport = HttpTransport(replace(connection, server=silent.url), cluster.real_clock)
    cluster.stack.callback(transport.close)
    client = Client(transport, limit_s=0.2)
    store = TokenStore(client, NAMESPACE, cluster.clock)
    store.observe_secret(cluster.admin.get(SECRET).ok())
    target = JoinTarget("https://api.example:6443", lambda: b"authority")
    credentials = BootstrapCredentials(client, cluster.clock, target)
    access = TokenAccess(store, cluster.clock, TokenSettings(), credentials)
    verdict = access.claim(access.check(token, "worker", A))
    assert (verdict.status, bool(verdict.kubeconfig)) == (OK, True)
    assert len(silent.connections) == 1
    # One that is in progress, one for further machines, and that for the kubelet's credential.
    assert 3 * TOKEN_LIMIT_S < 10


def test_double_use_without_the_api_server_has_an_event_of_the_pool(
    cluster: TokenCluster,
) -> None:
    pool = MachineConfigPool.from_json({"metadata": {"name": "worker", "uid": "uid-1"}})
    other = MachineConfigPool.from_json({"metadata": {"name": "infra", "uid": "uid-2"}})
    token, record = cluster.create_token()
    servers = [cluster.start_replica(pools=(other, pool)) for _ in range(5)]
    cluster.server.stop()
    for number, server in enumerate(servers, 1):
        assert serve(server, token, f"10.0.0.{number}") is OK
    cluster.server.start()
    for server in servers:
        server.access.run_upkeep()
        server.access.run_upkeep()
    events = cluster.admin.get("/api/v1/namespaces/default/events").ok()["items"]
    assert {each["reason"] for each in events} == {"TokenOverused"}
    assert {each["involvedObject"]["uid"] for each in events} == {"uid-1"}
    assert not any(token in str(each) for each in events)
    # One for each server that found out.
    assert len(events) == 4
    (last,) = [each["message"] for each in events if "5 used it" in each["message"]]
    assert last == (
        f"token {record.name} permits 1 machines, and 5 used it while the API server was "
        "unreachable: 10.0.0.1, 10.0.0.2, 10.0.0.3 and 2 more; remove the machines that are not "
        "yours, and rotate the secrets of pool worker"
    )


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
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    assert replica.access.claim(verdict).status is UNAUTHORIZED


def test_revoked_token_is_refused_in_the_retry_window(cluster: TokenCluster) -> None:
    """A repeated request changes nothing, so no conflict shows that the copy is old."""
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    assert serve(replica, token, A) is OK
    verdict = replica.access.check(token, "worker", A)
    replica.informers.stop()
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    assert verdict.is_allowed
    assert replica.access.claim(verdict).status is UNAUTHORIZED


class RevokedNames(SharedCredentials):
    """Credentials that note which of them were revoked."""

    def __init__(self) -> None:
        super().__init__(lambda: b"kubeconfig")
        self.names: list[str] = []

    def revoke(self, name: str) -> None:
        self.names.append(name)


@pytest.mark.parametrize("is_sent", [True, False])
def test_credential_of_a_token_that_was_revoked_meanwhile_is_deleted(
    cluster: TokenCluster, *, is_sent: bool
) -> None:
    token, record = cluster.create_token()
    credentials = RevokedNames()
    replica = cluster.start_replica(credentials=credentials)
    verdict = begin(replica, token, A)
    # The command deletes the bootstrap token before the server creates it.
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    (replica.access.confirm_sent if is_sent else replica.access.release)(verdict)
    assert record.name in credentials.names


def test_unknown_token_is_unavailable_while_the_api_server_is(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    replica = cluster.start_replica()
    cluster.server.stop()
    refused = begin(replica, "tn_new_" + "A" * 32, A)
    assert refused.status is UNAVAILABLE
    assert refused.reason == "the token is unknown, and the API server does not answer"
    assert serve(replica, token, A) is OK


def test_machine_that_joined_uses_its_token_no_longer(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    assert serve(replica, token, A) is OK
    stored = cluster.read_record(record.name)
    joined = settle_use(stored, stored.used[0], UseState.JOINED)
    cluster.make_store().change(lambda table: (table.put(joined), None))
    learn(replica, joined)
    # A pod of the Node has the address of the machine.
    assert serve(replica, token, A) is FORBIDDEN


def test_clock_an_hour_behind_refuses_no_valid_token(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    replica = cluster.start_replica()
    cluster.clock.move(-3600)
    assert serve(replica, token, A) is OK
    assert serve(replica, token, B) is FORBIDDEN
