"""Lock servers and Prometheus, over real HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from treenail.controllers.rollout.gates.external import (
    GATE_MISCONFIGURED,
    GATE_UNAVAILABLE,
    GateClient,
    LockServer,
    PrometheusAlerts,
)
from treenail.controllers.rollout.gates.os_image import GateBlocked, GateWaiting
from treenail.controllers.runtime.web import WebClient


class Site(ThreadingHTTPServer):
    """Answers every request the same, and notes what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.status = 200
        self.body: Any = {}
        self.asked: list[tuple[str, str, str | None, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    server: Site
    timeout = 5

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self._answer(json.loads(self.rfile.read(length)))

    def _answer(self, body: Any) -> None:
        site = self.server
        site.asked.append((self.command, self.path, self.headers["fleet-lock-protocol"], body))
        found = site.body if isinstance(site.body, bytes) else json.dumps(site.body).encode()
        self.send_response(site.status)
        self.send_header("Content-Length", str(len(found)))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Nothing: a test reads what was asked."""


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join(10)


ASKER = GateClient(WebClient(limit_s=2.0, max_bytes=10_000))


def lock(site: Site) -> GateWaiting | GateBlocked | None:
    return ASKER.acquire_lock(LockServer(f"{site.url}/locks", "workers"), "n0")


def alerts(site: Site, *states: str, name: str = "ApiErrors", health: str = "ok") -> Any:
    rules = [{"name": name, "state": state, "health": health} for state in states]
    site.body = {"status": "success", "data": {"groups": [{"rules": rules}]}}
    return ASKER.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))


def test_a_lock_is_asked_for_and_given_back_by_the_fleet_lock_protocol(site: Site) -> None:
    server = LockServer(f"{site.url}/locks", "workers")
    assert ASKER.acquire_lock(server, "n0") is None
    assert ASKER.release_lock(server, "n0") is None
    body = {"client_params": {"id": "n0", "group": "workers"}}
    assert site.asked == [
        ("POST", "/locks/v1/pre-reboot", "true", body),
        ("POST", "/locks/v1/steady-state", "true", body),
    ]


def test_a_lock_server_that_says_no_is_quoted(site: Site) -> None:
    site.status, site.body = 409, {"kind": "failed_lock", "value": "semaphore is full"}
    assert lock(site) == GateWaiting(
        f"waiting: lock server {site.url}/locks (group workers) refuses a lock for node n0: semaphore is full"
    )


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"kind": 3}'])
def test_a_refusal_that_is_none_is_an_error(site: Site, body: bytes) -> None:
    site.status, site.body = 404, body
    found = lock(site)
    assert isinstance(found, GateBlocked)
    assert found.kind == GATE_MISCONFIGURED
    assert "HTTP 404" in found.reason


def test_a_redirect_is_not_followed(site: Site) -> None:
    site.status = 302
    assert isinstance(lock(site), GateBlocked)
    assert len(site.asked) == 1


def test_silence_is_an_error_and_never_a_yes(site: Site) -> None:
    gone = LockServer("http://127.0.0.1:1", "workers")
    found = ASKER.acquire_lock(gone, "n0")
    assert isinstance(found, GateBlocked)
    assert found.kind == GATE_UNAVAILABLE
    assert "127.0.0.1:1" in found.reason


def test_alerts_that_do_not_fire_let_go_on(site: Site) -> None:
    assert alerts(site, "inactive", "pending") is None
    assert site.asked[0][:2] == (
        "GET",
        "/api/v1/rules?type=alert&rule_name%5B%5D=ApiErrors",
    )


def test_one_rule_of_several_that_fires_holds_up(site: Site) -> None:
    assert alerts(site, "inactive", "firing") == GateWaiting("waiting: alert ApiErrors is firing")


def test_an_alert_that_was_renamed_is_an_error(site: Site) -> None:
    found = alerts(site, "inactive", name="ApiserverErrors")
    assert found == GateBlocked(
        f"Prometheus {site.url} has no alert named ApiErrors", GATE_MISCONFIGURED
    )


def test_an_alert_that_can_not_be_evaluated_is_an_error(site: Site) -> None:
    found = alerts(site, "inactive", health="err")
    assert found == GateBlocked(
        f"Prometheus {site.url} cannot evaluate alert ApiErrors", GATE_MISCONFIGURED
    )


@pytest.mark.parametrize("body", [b"no", b"[]", b'{"data": []}', b"x" * 20_000])
def test_an_answer_that_can_not_be_understood_is_an_error(site: Site, body: bytes) -> None:
    site.body = body
    found = ASKER.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))
    assert isinstance(found, GateBlocked)


def test_a_server_that_fails_is_an_error(site: Site) -> None:
    site.status = 503
    found = ASKER.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))
    assert found == GateBlocked(f"Prometheus {site.url} responded with HTTP 503", GATE_UNAVAILABLE)


def test_nobody_is_asked_without_a_policy() -> None:
    assert ASKER.check_alerts(None) is None
