"""The watch survives a server that ends, interrupts, expires or rejects it."""

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.kube.nodes import Nodes, lists, watches
from tests.kube.server import Exchange, Json, Server, serving
from tests.kube.test_transport import kubeconfig
from tests.waiting import wait_until
from treenail.clocks import Clock, SystemClock
from treenail.errors import ClusterError, UnreachableError
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.watch import ResourceWatch, WatchScope
from treenail.retry import Backoff


class NoPause(Backoff):
    """Records the pauses instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self.resets = 0

    def next_pause_s(self) -> float:
        self.pauses.append(super().next_pause_s())
        return 0.01

    def reset(self) -> None:
        super().reset()
        self.resets += 1


class HurryingClock(SystemClock):
    """A clock on which ten minutes pass between two looks."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = itertools.count()

    def monotonic(self) -> float:
        return 600.0 * next(self._looks)


class Watcher:
    """A watch and the changes that it reported."""

    def __init__(
        self, server: Server, name: str = "", *, optional: bool = False, clock: Clock | None = None
    ) -> None:
        self.changes: list[tuple[str, str | None]] = []
        self.connected = 0
        self.lost: list[str] = []
        self.backoff = NoPause()
        self._transport = HttpTransport(read_kubeconfig(kubeconfig(server)), SystemClock())
        self.watch = ResourceWatch(
            Client(self._transport, limit_s=5),
            WatchScope(
                NODES, field_selector=f"metadata.name={name}" if name else "", is_optional=optional
            ),
            clock or SystemClock(),
            on_change=self._change,
            on_connected=self._connect,
            on_lost=self._lose,
            backoff=self.backoff,
        )
        self.watch.start()

    def stop(self) -> None:
        self.watch.stop()
        self._transport.close()

    def _change(self, key: str, found: Json | None) -> None:
        metadata = found["metadata"] if found else {}
        self.changes.append((key, metadata.get("resourceVersion")))  # type: ignore[union-attr]  # a dict

    def _connect(self) -> None:
        self.connected += 1

    def _lose(self, error: ClusterError) -> None:
        self.lost.append(str(error))


@pytest.fixture
def nodes() -> Nodes:
    found = Nodes()
    found.put("a")
    return found


@pytest.fixture
def server(tmp_path: Path, nodes: Nodes) -> Iterator[Server]:
    with serving(tmp_path, nodes.answer) as found:
        yield found
        nodes.end_watches()


@pytest.fixture
def watcher(server: Server, nodes: Nodes) -> Iterator[Watcher]:
    found = Watcher(server)
    wait_until(lambda: nodes.watching)
    yield found
    found.stop()


def test_each_object_version_is_reported_once(watcher: Watcher, nodes: Nodes) -> None:
    nodes.put("b")
    nodes.repeat("b")
    nodes.put("a")
    nodes.remove("b")

    wait_until(lambda: len(watcher.changes) == 4)
    assert watcher.changes == [("a", "101"), ("b", "102"), ("a", "103"), ("b", None)]
    assert watcher.connected == 1
    assert watcher.lost == []


def test_watch_of_one_node_requests_only_that_node(server: Server, nodes: Nodes) -> None:
    watcher = Watcher(server, name="a")
    wait_until(lambda: nodes.watching)
    watcher.stop()

    listed, watched = server.seen
    assert listed.params == {"fieldSelector": "metadata.name=a", "limit": "125"}
    assert watched.params.pop("timeoutSeconds") in map(str, range(300, 601))
    assert watched.params == {
        "fieldSelector": "metadata.name=a",
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "101",
    }


def test_open_watch_sends_no_other_requests(watcher: Watcher, nodes: Nodes, server: Server) -> None:
    for _ in range(5):
        nodes.put("a")
    nodes.bookmark()
    wait_until(lambda: len(watcher.changes) == 6)

    assert len(server.seen) == 2


def test_watch_without_a_bookmark_for_minutes_lists_again(server: Server, nodes: Nodes) -> None:
    watcher = Watcher(server, clock=HurryingClock())
    wait_until(lambda: nodes.watching)
    nodes.end_watches()
    wait_until(lambda: len(lists(server.seen)) == 2)
    watcher.stop()


def test_ended_watch_resumes_at_its_version(watcher: Watcher, nodes: Nodes, server: Server) -> None:
    nodes.put("a")
    wait_until(lambda: len(watcher.changes) == 2)
    nodes.end_watches()
    wait_until(lambda: len(server.seen) == 3 and nodes.watching)
    nodes.put("a")
    wait_until(lambda: len(watcher.changes) == 3)

    assert watches(server.seen)[-1].params["resourceVersion"] == "102"
    assert watcher.changes == [("a", "101"), ("a", "102"), ("a", "103")]
    assert (watcher.connected, watcher.lost, len(lists(server.seen))) == (1, [], 1)


def test_watch_resumes_at_a_bookmark(watcher: Watcher, nodes: Nodes, server: Server) -> None:
    nodes.bookmark()
    nodes.expire()
    nodes.end_watches()
    wait_until(lambda: len(server.seen) == 3 and nodes.watching)

    assert watches(server.seen)[-1].params["resourceVersion"] == "1101"
    assert len(lists(server.seen)) == 1


def test_interrupted_watch_resumes_at_its_version(
    watcher: Watcher, nodes: Nodes, server: Server
) -> None:
    nodes.put("a")
    wait_until(lambda: len(watcher.changes) == 2)
    nodes.end_watches(Exchange.drop)
    wait_until(lambda: len(server.seen) == 4 and nodes.watching)
    nodes.put("a")
    wait_until(lambda: len(watcher.changes) == 3)

    assert [each.params["limit"] for each in lists(server.seen)] == ["125", "1"]
    assert watcher.connected == 2
    (lost,) = watcher.lost
    assert lost.endswith("the connection ended before the response was complete")


def test_list_requested_while_the_watch_connects_reports_no_lost_connection(
    server: Server, nodes: Nodes
) -> None:
    is_held = threading.Event()

    def hold(exchange: Exchange) -> None:
        is_held.set()
        exchange.wait_for_the_end()

    nodes.refuse_watches = hold
    found = Watcher(server)
    try:
        assert is_held.wait(10)
        nodes.refuse_watches = None
        found.watch.request_list()
        wait_until(lambda: nodes.watching)
        assert (found.lost, found.backoff.pauses) == ([], [])
        assert len(lists(server.seen)) == 2
    finally:
        found.stop()


def test_version_expired_during_outage_is_listed_again(
    watcher: Watcher, nodes: Nodes, server: Server
) -> None:
    nodes.put("b")
    wait_until(lambda: len(watcher.changes) == 2)
    nodes.refuse_watches = lambda exchange: exchange.refuse(503, "ServiceUnavailable", "later")
    nodes.end_watches()
    wait_until(lambda: watcher.lost)
    nodes.remove("b")
    nodes.put("c")
    nodes.expire()
    nodes.refuse_watches = None
    wait_until(lambda: len(watcher.changes) == 4)

    assert watcher.changes == [("a", "101"), ("b", "102"), ("c", "104"), ("b", None)]
    assert len([each for each in lists(server.seen) if each.params["limit"] != "1"]) == 2


def test_version_expired_in_the_stream_is_listed_again(
    watcher: Watcher, nodes: Nodes, server: Server
) -> None:
    def expired(exchange: Exchange) -> None:
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        exchange.send_line({"type": "ERROR", "object": status})
        exchange.end_stream()

    nodes.end_watches(expired)
    wait_until(lambda: len(server.seen) == 4 and nodes.watching)
    nodes.put("a")
    wait_until(lambda: len(watcher.changes) == 2)

    assert watcher.changes == [("a", "101"), ("a", "102")]
    assert len(lists(server.seen)) == 2
    assert watcher.lost == []


def test_watch_after_outage_resumes_with_two_requests(
    watcher: Watcher, nodes: Nodes, server: Server
) -> None:
    server.stop()
    wait_until(lambda: len(watcher.backoff.pauses) >= 3)
    nodes.put("a")
    before = len(server.seen)
    server.start()
    wait_until(lambda: len(watcher.changes) == 2)

    assert watcher.changes == [("a", "101"), ("a", "102")]
    version, watch = server.seen[before:]
    assert (version.params["limit"], watch.params["watch"]) == ("1", "true")
    assert watcher.connected == 2
    assert "Connection refused" in watcher.lost[-1]
    assert len(watcher.lost) <= 2


def test_watch_waits_for_a_server_unreachable_at_start(server: Server, nodes: Nodes) -> None:
    server.stop()
    watcher = Watcher(server)
    wait_until(lambda: len(watcher.backoff.pauses) >= 2)
    server.start()
    wait_until(lambda: watcher.connected)
    watcher.stop()

    assert watcher.changes == [("a", "101")]
    assert len(watcher.lost) == 1


def test_rejected_version_is_listed_again(watcher: Watcher, nodes: Nodes, server: Server) -> None:
    def too_large(exchange: Exchange) -> None:
        nodes.refuse_watches = None
        exchange.refuse(504, "Timeout", "Too large resource version: 101, current: 7")

    nodes.version, nodes._told = 7, []
    nodes.refuse_watches = too_large
    nodes.end_watches()
    wait_until(lambda: len(server.seen) == 5 and nodes.watching)

    assert watches(server.seen)[-1].params["resourceVersion"] == "7"


def test_watches_that_end_at_once_are_repeated_with_backoff(
    watcher: Watcher, nodes: Nodes, server: Server
) -> None:
    def at_once(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.end_stream()

    nodes.refuse_watches = at_once
    nodes.end_watches()
    wait_until(lambda: len(watcher.backoff.pauses) >= 6)

    assert sorted(watcher.backoff.pauses[:6]) == watcher.backoff.pauses[:6]
    assert watcher.lost == []


def test_forbidden_watch_is_reported_once_and_retried(server: Server, nodes: Nodes) -> None:
    nodes.refuse_lists = lambda exchange: exchange.refuse(403, "Forbidden", "nodes is forbidden")
    watcher = Watcher(server)
    wait_until(lambda: len(watcher.backoff.pauses) >= 3)
    nodes.refuse_lists = None
    wait_until(lambda: watcher.connected)
    watcher.stop()

    assert watcher.lost == ["GET nodes: nodes is forbidden"]


@pytest.mark.parametrize(("code", "reason"), [(404, "NotFound"), (403, "Forbidden")])
def test_optional_missing_kind_is_requested_rarely(
    server: Server, nodes: Nodes, code: int, reason: str
) -> None:
    nodes.refuse_lists = lambda exchange: exchange.refuse(code, reason, "none of that")
    watcher = Watcher(server, optional=True)
    wait_until(lambda: watcher.lost)
    watcher.stop()

    assert watcher.backoff.pauses == []
    assert len(server.seen) == 1


def test_optional_present_kind_is_watched_normally(server: Server, nodes: Nodes) -> None:
    nodes.refuse_lists = lambda exchange: exchange.refuse(
        500, "InternalError", "etcd is unavailable"
    )
    watcher = Watcher(server, optional=True)
    wait_until(lambda: len(watcher.backoff.pauses) >= 2)
    nodes.refuse_lists = None
    wait_until(lambda: watcher.connected)
    watcher.stop()


def test_stop_ends_an_idle_watch_at_once(watcher: Watcher) -> None:
    watcher.stop()

    assert not [one for one in threading.enumerate() if one.name == "watch-nodes"]
    assert watcher.lost == []


def test_stop_ends_a_pause_at_once(server: Server) -> None:
    server.stop()
    errors: list[ClusterError] = []
    transport = HttpTransport(read_kubeconfig(kubeconfig(server)), SystemClock())
    watch = ResourceWatch(
        Client(transport),
        WatchScope(NODES),
        FakeClock(),
        on_change=lambda *_: None,
        on_lost=errors.append,
        backoff=Backoff(first_s=1000),
    )
    watch.start()
    wait_until(lambda: errors)
    watch.stop()

    assert isinstance(errors[0], UnreachableError)
    assert not [one for one in threading.enumerate() if one.name == "watch-nodes"]


def test_backoff_doubles_up_to_the_maximum_with_jitter() -> None:
    even = Backoff(first_s=0.5, max_s=30, jitter=lambda: 0.0)
    cut = Backoff(first_s=0.5, max_s=30, jitter=random.Random(1).random)

    whole = [even.next_pause_s() for _ in range(8)]
    assert whole == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert all(full / 2 < cut.next_pause_s() <= full for full in whole)
    even.reset()
    assert even.next_pause_s() == 0.5
