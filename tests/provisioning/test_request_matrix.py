"""Requests of every kind over raw sockets: each gets one response and one line in the log."""

import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.provisioning.samples import NEW, make_config, make_file
from tests.provisioning.serving import LIMIT_S, OneToken, Serving, read_to_end, serve
from tests.waiting import wait_until
from treenail.controllers.runtime.http_server import HEAD_LIMIT_S

TOKEN = "tn_abc_secretsecretsecret"
KUBECONFIG = b"kubeconfig-of-a-machine"
PULL_SECRET = "pull-secret-of-the-cluster"
BEARER = f"Authorization: Bearer {TOKEN}"
ACCEPT = "Accept: application/vnd.coreos.ignition+json;version={}"
SERVED = rf"served config of pool worker to 127\.0\.0\.1 with token abc: {NEW} in Ignition {{}}, \d"
FAILED = r"request of 127\.0\.0\.1 for pool {}{} failed \({}, status {}, \d+ bytes in \S+ s\): {}"
REFUSED = r"refused request from 127\.0\.0\.1: {}: {}"


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Bytes that a client sends, and what it and the log receive."""

    head: str
    status: int
    log: str
    """Regular expression of the line in the log."""
    body: str = ""
    """Part of the error, or of the config."""


def make_request(target: str, *headers: str, method: str = "GET") -> str:
    return "\r\n".join((f"{method} {target} HTTP/1.1", "Host: x", *headers, "", ""))


def describe_failure(
    pool: str, outcome: str, status: int, reason: str, by: str = " with token abc"
) -> str:
    return FAILED.format(pool, by, outcome, status, reason)


REQUESTS = {
    "get": RawRequest(
        make_request("/config/worker", BEARER, ACCEPT.format("3.4.0")),
        200,
        SERVED.format(r"3\.4\.0"),
        '"version": "3.4.0"',
    ),
    "get-with-token-in-query": RawRequest(
        make_request(f"/config/worker?token={TOKEN}"),
        200,
        SERVED.format(r"2\.2\.0"),
        '"version": "2.2.0"',
    ),
    "head": RawRequest(
        make_request("/config/worker", BEARER, method="HEAD"),
        200,
        rf"checked config of pool worker to 127\.0\.0\.1 with token abc: {NEW}.*, 0 bytes",
    ),
    "garbage-accept": RawRequest(
        make_request("/config/worker", BEARER, "Accept: ,;q=x, /;version=3, a;;"),
        200,
        SERVED.format(r"2\.2\.0"),
    ),
    **{
        method.lower(): RawRequest(
            make_request("/config/worker", BEARER, "Content-Length: 0", method=method),
            405,
            REFUSED.format(405, "expected GET or HEAD"),
            "expected GET or HEAD",
        )
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE")
    },
    "no-token": RawRequest(
        make_request("/config/worker"),
        401,
        describe_failure("worker", "refused", 401, "the token is unknown", ""),
        "the token is unknown",
    ),
    "wrong-token": RawRequest(
        make_request("/config/worker", BEARER + "x"),
        401,
        describe_failure("worker", "refused", 401, "the token is unknown", ""),
        "the token is unknown",
    ),
    "unknown-pool": RawRequest(
        make_request("/config/infra", BEARER),
        404,
        describe_failure("infra", "invalid", 404, "no MachineConfigPool has the name infra"),
        "no MachineConfigPool has the name infra",
    ),
    "version-4": RawRequest(
        make_request("/config/worker", BEARER, ACCEPT.format("4.0.0")),
        400,
        describe_failure("worker", "invalid", 400, ".*"),
    ),
    "version-too-old": RawRequest(
        make_request("/config/worker", BEARER, ACCEPT.format("3.2.0")),
        406,
        describe_failure("worker", "invalid", 406, r".*kernelArguments\.shouldNotExist.*3\.3\.0.*"),
        "3.3.0",
    ),
    "pool-of-two-dots": RawRequest(
        make_request("/config/../x", BEARER), 404, REFUSED.format(404, "unknown path")
    ),
    "pool-of-300-characters": RawRequest(
        make_request(f"/config/{'a' * 300}", BEARER), 404, REFUSED.format(404, "unknown path")
    ),
    "pool-with-slash": RawRequest(
        make_request("/config/worker/x", BEARER), 404, REFUSED.format(404, "unknown path")
    ),
    "accept-of-8-kib": RawRequest(
        make_request("/config/worker", BEARER, f"Accept: {'a' * 8192}"),
        431,
        REFUSED.format(431, "the head of the request is too long"),
        "too long",
    ),
    "http-2-preface": RawRequest(
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, REFUSED.format(505, "cannot read the request")
    ),
    "empty-line": RawRequest(
        "\r\n\r\n", 400, REFUSED.format(400, "cannot read the request"), "HTTP/1.1"
    ),
    "garbage": RawRequest(
        f"{TOKEN}\r\n\r\n", 400, REFUSED.format(400, "cannot read the request"), "HTTP/1.1"
    ),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """A server that requires a token, its clock and its log."""

    serving: Serving
    clock: FakeClock
    access: OneToken
    log: pytest.LogCaptureFixture

    def wait_for_line(self, pattern: str) -> None:
        """Wait for a line that matches."""
        wait_until(lambda: re.search(pattern, self.log.text), limit_s=LIMIT_S)

    def fetch_twice_as_usual(self) -> None:
        """Fetch the config as another client."""
        for _ in range(2):
            assert self.serving.get("/config/worker", BEARER).status == 200


@pytest.fixture
def observed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Observed]:
    caplog.set_level(logging.INFO)
    clock, access = FakeClock(), OneToken(TOKEN, KUBECONFIG)
    with serve(tmp_path, access=access, clock=clock) as serving:
        serving.write("config", make_config(NEW, make_file("/etc/pull", PULL_SECRET)))
        yield Observed(serving, clock, access, caplog)
    for secret in ("secretsecret", KUBECONFIG.decode(), PULL_SECRET):
        assert secret not in caplog.text


@pytest.mark.parametrize("name", REQUESTS)
def test_request_has_one_response_and_one_line(observed: Observed, name: str) -> None:
    request = REQUESTS[name]
    if request.status == 406:
        observed.serving.write("config", make_config(kernelArguments={"shouldNotExist": ["a"]}))
    found = observed.serving.send(request.head)
    assert found.status == request.status
    assert found.headers["Cache-Control"] == "no-store"
    text = found.body.decode()
    if request.status != 200:
        assert text.count("\n") == 1
        assert list(found.json) == ["error"]
        for secret in ("secretsecret", KUBECONFIG.decode(), PULL_SECRET):
            assert secret not in text
    assert request.body.replace('": "', '":"') in text
    observed.wait_for_line(request.log)
    lines = [each for each in observed.log.messages if "127.0.0.1" in each]
    assert len(lines) == 1 + ("serving" in lines[0])
    observed.serving.write("config", make_config(NEW, make_file("/etc/a")))
    observed.fetch_twice_as_usual()


def send_slowly(observed: Observed) -> None:
    client = observed.serving.connect()
    for byte in b"GE":
        client.sendall(bytes([byte]))
        observed.fetch_twice_as_usual()
        observed.clock.move(60.0)
    assert read_to_end(client) == b""


def connect_without_handshake(observed: Observed) -> None:
    client = observed.serving.connect_plain()
    observed.fetch_twice_as_usual()
    observed.clock.move(HEAD_LIMIT_S)
    assert read_to_end(client) == b""


def send_plain_text(observed: Observed) -> None:
    client = observed.serving.connect_plain()
    client.sendall(make_request("/config/worker", BEARER).encode())
    assert b"HTTP" not in read_to_end(client)


def begin_to_receive(observed: Observed) -> ssl.SSLSocket:
    """Receive the first bytes of a config that no buffer of a socket can take."""
    big = make_file("/etc/big", "x" * 6_000_000)
    observed.serving.write("config", make_config(NEW, big))
    client = observed.serving.connect()
    client.sendall(make_request("/config/worker", BEARER).encode())
    assert client.recv(100)
    return client


def disconnect_in_the_middle(observed: Observed) -> None:
    client = begin_to_receive(observed)
    client.close()


def receive_slowly(observed: Observed) -> None:
    begin_to_receive(observed)
    observed.clock.move(60.0)


def hold_connections_of_one_address(observed: Observed) -> None:
    held = [observed.serving.connect() for _ in range(8)]
    found = observed.serving.get("/config/worker", BEARER)
    assert (found.status, found.headers["Retry-After"]) == (503, "1")
    for client in held:
        client.close()


def hold_connections_beyond_refusals(observed: Observed) -> None:
    held: list[socket.socket] = [observed.serving.connect() for _ in range(16)]
    assert read_to_end(observed.serving.connect_plain()) == b""
    for client in held:
        client.close()


@pytest.mark.parametrize(
    ("act", "pattern"),
    [
        (send_slowly, r"ended connection from 127\.0\.0\.1: no complete request in 10 s"),
        (
            connect_without_handshake,
            r"ended connection from 127\.0\.0\.1: no complete request in 10 s",
        ),
        (send_plain_text, r"refused connection from 127\.0\.0\.1: TLS: http request"),
        (
            disconnect_in_the_middle,
            describe_failure("worker", "disconnected", 200, "the connection ended: .*"),
        ),
        (
            receive_slowly,
            describe_failure("worker", "disconnected", 200, "the response took more than 60 s"),
        ),
        (
            hold_connections_of_one_address,
            describe_failure("worker", "busy", 503, "too many requests: more than 8 .*", ""),
        ),
        (
            hold_connections_beyond_refusals,
            r"closed connection from 127\.0\.0\.1: more than 8 connections from this address",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_client_that_behaves_badly_is_logged_and_delays_no_other(
    observed: Observed, act: Callable[[Observed], None], pattern: str
) -> None:
    act(observed)
    observed.wait_for_line(pattern)

    def is_served() -> bool:
        try:
            return observed.serving.get("/config/worker", BEARER).status == 200
        except (ConnectionError, ssl.SSLError):
            return False

    wait_until(is_served, limit_s=LIMIT_S)
