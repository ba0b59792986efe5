"""Limits of connections: whose place a new client gets, on each of our servers without TLS."""

import http.client
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.fakes.clock import FakeClock
from treenail.controllers.runtime.connection_limits import (
    IDLE_GRACE_S,
    RESPONSE_GRACE_S,
    Connection,
    ConnectionLimits,
    find_blocks,
    find_excess,
)
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.health import HealthServer
from treenail.controllers.runtime.http_server import HttpListener, LimitedRequestHandler
from treenail.controllers.status.statuspage.server import EncodedDocument, StatusPageServer

LIMITS = ConnectionLimits(connections=4, per_address=2, per_block=3)
NOW = 1000.0


@pytest.mark.parametrize(
    ("address", "narrow", "broad"),
    [
        ("192.0.2.1", "192.0.2.1/32", "192.0.2.0/24"),
        ("::1", "::/64", "::/48"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("2001:db8:1:3::", "2001:db8:1:3::/64", "2001:db8:1::/48"),
        ("2001:db8:2::", "2001:db8:2::/64", "2001:db8:2::/48"),
        ("fe80::1", "fe80::1/128", "fe80::/64"),
        ("", "", ""),
    ],
)
def test_address_has_a_narrow_and_a_broad_block(address: str, narrow: str, broad: str) -> None:
    assert find_blocks(address) == (narrow, broad)


def hold(address: str, waited_s: float = 0.0, *, is_responding: bool = False) -> Connection:
    blocks = find_blocks(address)
    return Connection(address, blocks, NOW - waited_s, NOW, is_responding=is_responding)


A, B, C, D = "192.0.2.1", "192.0.2.2", "192.0.2.3", "198.51.100.1"
HOST_1, HOST_2 = "2001:db8::1", "2001:db8::ffff:1"  # in one /64
ADDRESS, BLOCK = "more than 2 connections from this address", "more than 3 connections from this bl"
ALL = "more than 4 connections"


@pytest.mark.parametrize(
    ("held", "client", "excess", "victim"),
    [
        ([hold(A), hold(B)], C, "", None),
        ([hold(A), hold(A)], A, ADDRESS, None),
        ([hold(A), hold(A, IDLE_GRACE_S)], A, ADDRESS, 1),
        ([hold(HOST_1), hold(HOST_1)], HOST_2, ADDRESS, None),
        # The address that holds the most places gives one up at once.
        ([hold(A), hold(B), hold(B)], C, BLOCK, 1),
        ([hold(A), hold(B, 1.0), hold(C)], D, "", None),
        ([hold(A), hold(B), hold(C)], "192.0.2.4", BLOCK, None),
        ([hold(A), hold(B), hold(C, IDLE_GRACE_S)], "192.0.2.4", BLOCK, 2),
        ([hold(D), hold(D), hold(A), hold(B)], C, ALL, 0),
        ([hold(D), hold("203.0.113.1"), hold(A), hold(B)], C, ALL, None),
        # A response is ended later, and never that of a client with one connection.
        ([hold(D, 60.0, is_responding=True), hold(D), hold(A), hold(B)], C, ALL, 1),
        (
            [hold(D, RESPONSE_GRACE_S, is_responding=True)] * 2 + [hold(A), hold(B)],
            C,
            ALL,
            0,
        ),
        ([hold(D, 9.0, is_responding=True)] * 2 + [hold(A), hold(B)], C, ALL, None),
        (
            [hold(each, 60.0, is_responding=True) for each in (A, B, D, "203.0.113.1")],
            C,
            ALL,
            None,
        ),
    ],
)
def test_new_client_gets_the_place_of_who_waits_or_has_more(
    held: list[Connection], client: str, excess: str, victim: int | None
) -> None:
    why, ended = find_excess(held, hold(client), LIMITS)
    assert why.startswith(excess)
    assert bool(why) == bool(excess)
    assert (None if ended is None else held.index(ended)) == victim


def make_health_server() -> HealthServer:
    return HealthServer("127.0.0.1", 0, ControllerMetrics(), healthy=str, ready=str)


def make_page() -> StatusPageServer:
    return StatusPageServer("127.0.0.1", 0, lambda: EncodedDocument(b"{}", b""))


SERVERS = pytest.mark.parametrize(
    ("make", "path"), [(make_health_server, "/healthz"), (make_page, "/status.json")]
)


@SERVERS
def test_long_head_is_refused_before_it_is_stored(
    make: Callable[[], HealthServer | StatusPageServer], path: str
) -> None:
    """http.server would read 100 lines of 64 KiB from each of 64 clients: more than 1 GB."""
    with make() as server:
        limit = ConnectionLimits().head_bytes
        for target, value, status in (
            (path, "a" * (limit - 500), 200),
            (path, "a" * limit, 431),
            (f"{path}?{'a' * limit}", "", 414),
        ):
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            # Two lines, of which none alone is too long.
            half = len(value) // 2
            client.request("GET", target, headers={"X-A": value[:half], "X-B": value[half:]})
            assert client.getresponse().status == status
            client.close()


@SERVERS
def test_silent_clients_of_sixteen_addresses_keep_no_other_client_out(
    make: Callable[[], HealthServer | StatusPageServer], path: str
) -> None:
    with make() as server, ExitStack() as clients:
        for number in range(16 * 8):
            source = (f"127.0.{number % 4}.{number % 16 + 2}", 0)
            clients.enter_context(
                socket.create_connection(("127.0.0.1", server.port), 20, source_address=source)
            )
        for number in range(1, 9):
            client = http.client.HTTPConnection(
                "127.0.0.1", server.port, timeout=20, source_address=(f"127.1.0.{number}", 0)
            )
            client.request("GET", path)
            assert client.getresponse().status == 200
            client.close()


def test_threads_of_ended_connections_are_bounded() -> None:
    """Each connection takes the place of the one before, whose thread still runs."""
    clock, limits = FakeClock(), ConnectionLimits(connections=1, per_address=1, per_block=1)
    with HttpListener(("127.0.0.1", 0), LimitedRequestHandler, limits, clock=clock) as listener:
        accepted = []
        for number in range(6):
            clock.sleep(IDLE_GRACE_S)
            with socket.socket() as request:
                accepted.append(listener.verify_request(request, (f"192.0.2.{number}", 1)))
        assert accepted == [True, True, True, True, False, False]
