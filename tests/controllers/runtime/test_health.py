"""Probes and metrics over HTTP."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.health import HealthServer
from treenail.controllers.runtime.http_server import parse_address
from treenail.errors import UsageError


class State:
    """Results of the checks."""

    problem = ""
    missing = ""
    degraded = ""


@contextmanager
def serving(state: State) -> Iterator[int]:
    metrics = ControllerMetrics()
    metrics.add_gauge("leader", "Whether it leads.").set_function(by=lambda: 0)
    server = HealthServer(
        *("127.0.0.1", 0, metrics),
        healthy=lambda: state.problem,
        ready=lambda: state.missing,
        degraded=lambda: state.degraded,
    )
    with server:
        yield server.port


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def test_pages_report_health_and_metrics() -> None:
    state = State()
    with serving(state) as port:
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz?verbose") == (200, "ok\n")
        state.degraded = "degraded: pods: list pods: forbidden"
        assert get(port, "/readyz") == (200, "ok\ndegraded: pods: list pods: forbidden\n")
        state.problem, state.missing = (
            "a sync has been running for 700 s",
            "nodes are not listed yet",
        )
        assert get(port, "/healthz") == (503, "a sync has been running for 700 s\n")
        assert get(port, "/readyz") == (503, "nodes are not listed yet\n")
        assert get(port, "/metrics")[1].endswith("treenail_controller_leader 0.0\n")
        assert get(port, "/")[0] == 404
        assert get(port, "/healthz", "POST")[0] == 501


def test_silent_client_blocks_no_other_client() -> None:
    with serving(State()) as port, socket.create_connection(("127.0.0.1", port), 10):
        assert get(port, "/healthz") == (200, "ok\n")


def test_address_in_use_is_rejected_in_one_sentence() -> None:
    with serving(State()) as port, pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: "):
        HealthServer("127.0.0.1", port, ControllerMetrics(), healthy=str, ready=str)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (":8080", ("", 8080)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9", ("::1", 9)),
        ("localhost:80", ("localhost", 80)),
    ],
)
def test_address_is_parsed(text: str, found: tuple[str, int]) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize("text", ["", "8080", "host:", "host:http", ":65536", ":-1", ":²"])
def test_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="invalid address"):
        parse_address(text)


def test_address_without_host_listens_everywhere() -> None:
    with HealthServer("", 0, ControllerMetrics(), healthy=str, ready=str) as server:
        assert get(server.port, "/healthz") == (200, "ok\n")
