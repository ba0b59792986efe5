"""Lock servers and Prometheus, over real HTTP."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from treenail.controllers.pools.os_image import GateAnswer, GateBlocked, GateWaiting
from treenail.controllers.pools.rollout_policy import LockServer, PrometheusAlerts
from treenail.controllers.rollout.external_gates import (
    GATE_MISCONFIGURED,
    GATE_UNAVAILABLE,
    GateClient,
    GateCredentials,
    LockHolder,
)
from treenail.controllers.runtime.web import WebClient
from treenail.errors import ForbiddenError, NotFoundError

DRIPPED = threading.Event()
"""Never set: its wait ends with its limit."""


class Site(ThreadingHTTPServer):
    """Gives the same response to every request, and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.status = 200
        self.body: Any = {}
        self.requests: list[tuple[str, str, str | None, Any]] = []
        self.tokens: list[str | None] = []
        self.drips = False

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
        site.requests.append((self.command, self.path, self.headers["fleet-lock-protocol"], body))
        site.tokens.append(self.headers["Authorization"])
        if site.drips:
            self._drip()
            return
        found = site.body if isinstance(site.body, bytes) else json.dumps(site.body).encode()
        self.send_response(site.status)
        self.send_header("Content-Length", str(len(found)))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(found)

    def _drip(self) -> None:
        """Send a byte at a time, without an end."""
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                DRIPPED.wait(0.02)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Do nothing: tests read the recorded requests."""


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join(10)


CLIENT = GateClient(WebClient(limit_s=2.0, max_bytes=10_000))


HOLDER = LockHolder("n0", "8c1f")


def lock(site: Site) -> GateAnswer:
    return CLIENT.acquire_lock(LockServer(f"{site.url}/locks", "workers"), HOLDER)


def alerts(site: Site, *states: str, name: str = "ApiErrors", health: str = "ok") -> Any:
    rules = [{"name": name, "state": state, "health": health} for state in states]
    site.body = {"status": "success", "data": {"groups": [{"rules": rules}]}}
    return CLIENT.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))


def test_lock_is_acquired_and_released_by_fleet_lock_protocol(site: Site) -> None:
    server = LockServer(f"{site.url}/locks", "workers")
    assert CLIENT.acquire_lock(server, HOLDER) is None
    assert CLIENT.release_lock(server, HOLDER) is None
    body = {"client_params": {"id": "8c1f", "group": "workers"}}
    assert site.requests == [
        ("POST", "/locks/v1/pre-reboot", "true", body),
        ("POST", "/locks/v1/steady-state", "true", body),
    ]


def test_refused_lock_waits_with_the_servers_reason(site: Site) -> None:
    site.status, site.body = 409, {"kind": "failed_lock", "value": "semaphore is full"}
    assert lock(site) == GateWaiting(
        f"waiting: lock server {site.url}/locks (group workers) refuses a lock for node n0: "
        "semaphore is full"
    )


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"kind": 3}'])
def test_invalid_refusal_blocks(site: Site, body: bytes) -> None:
    site.status, site.body = 404, body
    found = lock(site)
    assert isinstance(found, GateBlocked)
    assert found.kind == GATE_MISCONFIGURED
    assert "HTTP 404" in found.reason


def test_redirect_is_not_followed(site: Site) -> None:
    site.status = 302
    assert isinstance(lock(site), GateBlocked)
    assert len(site.requests) == 1


def test_unreachable_lock_server_blocks(site: Site) -> None:
    gone = LockServer("http://127.0.0.1:1", "workers")
    found = CLIENT.acquire_lock(gone, HOLDER)
    assert isinstance(found, GateBlocked)
    assert found.kind == GATE_UNAVAILABLE
    assert "127.0.0.1:1" in found.reason


def test_quiet_alerts_open_the_gate(site: Site) -> None:
    assert alerts(site, "inactive", "pending") is None
    assert site.requests[0][:2] == (
        "GET",
        "/api/v1/rules?type=alert&rule_name%5B%5D=ApiErrors",
    )


def test_one_firing_rule_of_several_waits(site: Site) -> None:
    assert alerts(site, "inactive", "firing") == GateWaiting("waiting: alert ApiErrors is firing")


def test_missing_alert_blocks(site: Site) -> None:
    found = alerts(site, "inactive", name="ApiserverErrors")
    assert found == GateBlocked(
        f"Prometheus {site.url} has no alert named ApiErrors", GATE_MISCONFIGURED
    )


def test_alert_with_evaluation_error_blocks(site: Site) -> None:
    found = alerts(site, "inactive", health="err")
    assert found == GateBlocked(
        f"Prometheus {site.url} cannot evaluate alert ApiErrors", GATE_MISCONFIGURED
    )


@pytest.mark.parametrize("body", [b"no", b"[]", b'{"data": []}', b"x" * 20_000])
def test_invalid_prometheus_response_blocks(site: Site, body: bytes) -> None:
    site.body = body
    found = CLIENT.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))
    assert isinstance(found, GateBlocked)


def test_failing_prometheus_blocks(site: Site) -> None:
    site.status = 503
    found = CLIENT.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))
    assert found == GateBlocked(f"Prometheus {site.url} responded with HTTP 503", GATE_UNAVAILABLE)


def test_policy_without_alerts_sends_no_request() -> None:
    assert CLIENT.check_alerts(None) is None


@pytest.mark.parametrize("status", [201, 202, 204])
def test_lock_is_granted_by_status_200_only(site: Site, status: int) -> None:
    site.status, site.body = status, b""
    assert isinstance(lock(site), GateBlocked)


def test_response_without_end_is_cut_off(site: Site) -> None:
    site.drips = True
    hasty = GateClient(WebClient(limit_s=0.2, max_bytes=10_000))
    found = hasty.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",)))
    assert isinstance(found, GateBlocked)
    assert found.reason.endswith("no response in time")


def test_host_that_no_resolver_accepts_blocks() -> None:
    found = CLIENT.check_alerts(PrometheusAlerts("http://ex..ample", ("ApiErrors",)))
    assert isinstance(found, GateBlocked)
    assert found.kind == GATE_UNAVAILABLE


def build_secret(kind: str = "treenail.io/gate", **data: str) -> dict[str, Any]:
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}
    return {"type": kind, "data": encoded}


def check_with(site: Site, secret: dict[str, Any] | Exception) -> GateAnswer:
    def load(name: str) -> dict[str, Any]:
        assert name == "prometheus"
        if isinstance(secret, Exception):
            raise secret
        return secret

    client = GateClient(WebClient(limit_s=2.0), load)
    return client.check_alerts(PrometheusAlerts(site.url, ("ApiErrors",), "prometheus"))


def test_alerts_are_read_with_the_token_of_the_secret(site: Site) -> None:
    alerts(site, "inactive")
    assert check_with(site, build_secret(token="s3cr3t\n")) is None
    assert site.tokens == [None, "Bearer s3cr3t"]


@pytest.mark.parametrize(
    ("secret", "sentence"),
    [
        (
            NotFoundError("no"),
            "Secret prometheus in the namespace of the controller does not exist",
        ),
        (ForbiddenError("no"), "cannot read Secret prometheus in the namespace"),
        (
            build_secret("Opaque", token="s3cr3t"),
            "it is of type 'Opaque', expected treenail.io/gate",
        ),
        (build_secret(token="s3\x00t"), "key token contains control characters"),
        ({"type": "treenail.io/gate", "data": {"token": "?"}}, "key token is not base64"),
    ],
)
def test_unusable_secret_blocks_and_sends_nothing(
    site: Site, secret: dict[str, Any] | Exception, sentence: str
) -> None:
    found = check_with(site, secret)
    assert isinstance(found, GateBlocked)
    assert sentence in found.reason
    assert "s3cr3t" not in found.reason
    assert site.requests == []


def test_refused_token_names_the_secret(site: Site) -> None:
    site.status = 401
    found = check_with(site, build_secret(token="s3cr3t"))
    assert isinstance(found, GateBlocked)
    assert found.reason.endswith("HTTP 401 (alerts.secret: Secret prometheus)")


def test_server_is_verified_by_the_authority_of_the_secret(site: Site) -> None:
    secure = PrometheusAlerts(site.url.replace("http:", "https:"), ("ApiErrors",), "prometheus")
    broken = build_secret(**{"ca.crt": "no certificate"})
    found = GateClient(WebClient(limit_s=2.0), lambda _: broken).check_alerts(secure)
    assert isinstance(found, GateBlocked)
    assert site.requests == []


def test_credentials_show_no_token() -> None:
    assert "s3cr3t" not in repr(GateCredentials("s3cr3t", "authority"))
