"""The Secret with access tokens, on the lab's API server."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.provisioning.serving import LIMIT_S
from tests.provisioning.token_cluster import SECRET, TokenCluster, run_token_cluster
from tests.waiting import wait_until
from treenail.errors import ClusterError, ConfigError, UnreachableError, UsageError
from treenail.provisioning.tokens.tokens import TokenRecord, TokenTable, confirm_use, make_token

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path) as found:
        yield found


def test_first_change_creates_the_secret(cluster: TokenCluster) -> None:
    store = cluster.make_store()
    assert store.load() == TokenTable()
    token, record = cluster.create_token()
    assert store.load().find(token) == record
    stored = cluster.admin.get(SECRET).ok()
    assert stored["type"] == "Opaque"
    assert token not in str(stored)


def test_changes_of_many_threads_and_two_servers_are_all_kept(cluster: TokenCluster) -> None:
    stores = [cluster.make_store() for _ in range(2)]
    cluster.create_token()
    barrier = threading.Barrier(20)

    def add(number: int) -> str:
        record = make_token("worker", expires=cluster.clock.now() + 60)[1]
        barrier.wait(LIMIT_S)
        stores[number % 2].change(lambda table: (table.put(record), None))
        return record.name

    with ThreadPoolExecutor(20) as pool:
        names = set(pool.map(add, range(20)))
    assert names < set(cluster.make_store().load().tokens)
    # Changes that wait for a write become the next write.
    writes = cluster.server.count_requests(verb="patch", resource="secrets")
    assert writes < 20


def test_change_without_effect_sends_no_write(cluster: TokenCluster) -> None:
    token, _ = cluster.create_token()
    store = cluster.make_store()
    store.load()
    before = cluster.server.count_requests(verb="get", resource="secrets")
    writes = cluster.server.count_requests(verb="patch", resource="secrets")
    assert store.change(lambda table: (table, table.find(token))) is not None
    assert cluster.server.count_requests(verb="get", resource="secrets") == before + 1
    assert cluster.server.count_requests(verb="patch", resource="secrets") == writes


def test_change_without_effect_is_decided_by_the_cluster(cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    store = cluster.make_store()
    assert store.load().find(token) is not None
    cluster.make_store().change(lambda table: (table.remove(record.name), None))
    assert store.change(lambda table: (table, table.find(token))) is None


def test_error_of_one_change_leaves_the_others(cluster: TokenCluster) -> None:
    store = cluster.make_store()

    def refuse(_: TokenTable) -> tuple[TokenTable, None]:
        raise UsageError("cannot")

    with pytest.raises(UsageError, match="cannot"):
        store.change(refuse)
    _, record = make_token("worker", expires=1.0)
    store.change(lambda table: (table.put(record), None))
    assert store.load().tokens == {record.name: record}


def test_watch_shows_changes_and_the_absence_of_the_secret(cluster: TokenCluster) -> None:
    replica = cluster.start_replica()
    assert replica.store.observed.table == TokenTable()
    token, record = cluster.create_token()

    def find() -> object:
        observed = replica.store.observed
        return observed and observed.table and observed.table.find(token)

    assert wait_until(find, limit_s=LIMIT_S) == record
    cluster.admin.delete(SECRET).ok()
    wait_until(lambda: not find(), limit_s=LIMIT_S)
    replica.store.change(lambda table: (table.put(record), None))
    assert cluster.read_record(record.name) == record


def test_old_copy_costs_a_conflict_and_loses_nothing(cluster: TokenCluster) -> None:
    _, first = cluster.create_token()
    store = cluster.make_store()
    store.load()
    _, second = cluster.create_token()
    store.change(lambda table: (table.put(confirm_use(table.tokens[first.name], "a", 5.0)), None))
    tokens = cluster.make_store().load().tokens
    assert tokens.keys() == {first.name, second.name}
    assert [use.address for use in tokens[first.name].used] == ["a"]


def test_damaged_secret_is_never_replaced(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_token()
    replica = cluster.start_replica()
    damaged = {"data": {"tokens": "e2Jyb2tlbg=="}}
    cluster.admin.patch(SECRET, damaged).ok()
    wait_until(lambda: replica.store.observed and replica.store.observed.problem, limit_s=LIMIT_S)
    for store in (replica.store, cluster.make_store()):
        with pytest.raises(ConfigError, match="not JSON in base64") as caught:
            store.change(lambda table: (table, None))
        assert "restore the Secret" in caught.value.remedy
    assert cluster.admin.get(SECRET).ok()["data"] == damaged["data"]
    assert "cannot read the access tokens of Secret treenail-ignition/" in caplog.text


def test_bug_in_one_change_is_no_success_of_the_others(cluster: TokenCluster) -> None:
    store = cluster.make_store()
    cluster.create_token()
    has_begun, may_fail = threading.Event(), threading.Event()

    def fail(_table: TokenTable) -> tuple[TokenTable, str]:
        has_begun.set()
        assert may_fail.wait(LIMIT_S)
        raise KeyError

    def wait_for_batch() -> None:
        # Both changes wait for this one, and become one write.
        with pytest.raises(KeyError):
            store.change(fail)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(wait_for_batch)
        assert has_begun.wait(LIMIT_S)
        others = [pool.submit(store.change, fail), pool.submit(store.change, lambda b: (b, "ok"))]
        wait_until(lambda: len(store._pending) == 2, limit_s=LIMIT_S)
        may_fail.set()
        first.result(LIMIT_S)
        errors = {type(each.exception(LIMIT_S)) for each in others}
    assert errors == {KeyError, ClusterError}


def test_missing_secret_is_logged_once(
    cluster: TokenCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_token()
    replica = cluster.start_replica()
    assert "does not exist" not in caplog.text
    cluster.admin.delete(SECRET).ok()
    wait_until(lambda: "every access token is unknown" in caplog.text, limit_s=LIMIT_S)
    assert replica.store.observed.table == TokenTable()
    token, record = cluster.create_token()

    def has_token() -> bool:
        observed = replica.store.observed
        return bool(observed and observed.table and observed.table.find(token) == record)

    wait_until(has_token, limit_s=LIMIT_S)
    assert caplog.text.count("every access token is unknown") == 1


def test_tokens_are_seen_after_the_cluster_was_restored_from_a_backup(
    cluster: TokenCluster,
) -> None:
    token, record = cluster.create_token()
    replica = cluster.start_replica()
    # Before the restore the versions were higher.
    later = cluster.admin.get(SECRET).ok()
    later["metadata"]["resourceVersion"] = "999999999"
    later["data"] = {}
    replica.store.observe_secret(later)

    def find_token() -> TokenRecord | None:
        observed = replica.store.observed
        return observed.table.find(token) if observed and observed.table else None

    assert find_token() is None
    replica.informers.request_lists(float("inf"))
    wait_until(lambda: find_token() == record, limit_s=LIMIT_S)


def test_unreachable_server_is_an_error_of_each_change(cluster: TokenCluster) -> None:
    store = cluster.make_store()
    cluster.server.stop()
    for _ in range(2):
        with pytest.raises(UnreachableError):
            store.change(lambda table: (table, None))
    cluster.clock.move(7.0)
    assert store.silence_s == 7.0
    cluster.server.start()
    cluster.create_token()
    assert len(store.load().tokens) == 1
    assert store.silence_s == 0.0


def test_change_without_effect_creates_no_secret(cluster: TokenCluster) -> None:
    assert cluster.make_store().change(lambda table: (table, len(table.tokens))) == 0
    assert cluster.admin.get(SECRET).code == 404
