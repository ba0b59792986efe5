"""The read-only page over HTTP: two documents, strict headers, no other method, path or host."""

import contextlib
import gzip
import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.controllers.status.statuspage.samples import encode, make_document
from tests.fakes.clock import FakeClock
from tests.waiting import wait_until
from treenail.controllers.runtime.http_server import HEAD_LIMIT_S, RESPONSE_LIMIT_S
from treenail.controllers.status.statuspage.server import (
    LIMITS,
    MAX_REQUESTS,
    EncodedDocument,
    StatusPageServer,
    build_headers,
    is_expected_host,
    limit_nodes,
    load_page,
)
from treenail.errors import UsageError


@pytest.fixture(scope="module")
def server() -> Iterator[StatusPageServer]:
    document = encode(make_document())
    with StatusPageServer("127.0.0.1", 0, lambda: document) as running:
        yield running


def ask(
    server: StatusPageServer, method: str, path: str, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_page_and_document_are_served(server: StatusPageServer) -> None:
    answer, body = ask(server, "GET", "/")
    assert (answer.status, body.decode()) == (200, load_page())
    answer, body = ask(server, "GET", "/status.json?any=1")
    assert answer.headers["Content-Type"] == "application/json"
    assert [pool["name"] for pool in json.loads(body)["pools"]] == ["gpu", "infra", "worker"]


def test_document_is_compressed_on_request(server: StatusPageServer) -> None:
    answer, body = ask(server, "GET", "/status.json", Accept_Encoding="gzip, br")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert "pools" in json.loads(gzip.decompress(body))


def test_head_has_headers_without_body(server: StatusPageServer) -> None:
    answer, body = ask(server, "HEAD", "/")
    assert (answer.status, body) == (200, b"")
    assert int(answer.headers["Content-Length"]) == len(load_page().encode())


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(server: StatusPageServer, method: str) -> None:
    answer, body = ask(server, method, "/")
    assert (answer.status, body) == (405, b"405 this page is read-only\n")


def test_other_paths_do_not_exist(server: StatusPageServer) -> None:
    for path in ("/index.html", "/../etc/passwd", "/status.json/", "/<script>"):
        answer, body = ask(server, "GET", path)
        assert (answer.status, body) == (404, b"404 no such page\n")


@pytest.mark.parametrize("path", ["/", "/status.json", "/absent"])
def test_every_answer_has_the_security_headers(server: StatusPageServer, path: str) -> None:
    answer, _ = ask(server, "GET", path)
    for name, value in build_headers(load_page()).items():
        assert answer.headers[name] == value
    assert "treenail" in answer.headers["Server"]
    assert "Python" not in answer.headers["Server"]


def test_policy_permits_only_the_own_style_and_script() -> None:
    policy = build_headers(load_page())["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert "http" not in policy


def test_page_builds_no_markup_from_texts() -> None:
    page = load_page()
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in page
    assert "https://" not in page
    assert "http://" not in page


@pytest.mark.parametrize(
    ("host", "is_expected"),
    [
        ("localhost:8081", True),
        ("127.0.0.1:8081", True),
        ("[::1]:8081", True),
        ("", True),
        ("evil.example.com:8081", False),
        ("localhost.evil.example.com", False),
        ("192.0.2.1", False),
    ],
)
def test_loopback_answers_only_its_own_names(host: str, is_expected: bool) -> None:
    assert is_expected_host(host, is_loopback=True) is is_expected


@pytest.mark.parametrize(
    ("host", "is_expected"),
    [
        ("localhost:8081", True),
        ("192.0.2.1:8081", True),
        ("[2001:db8::1]:8081", True),
        ("", True),
        ("Rollouts.example.com:443", True),
        ("rollouts.example.com.", True),
        ("evil.example.com:8081", False),
        ("rollouts.example.com.evil.example", False),
        ("192.0.2.1.evil.example", False),
    ],
)
def test_page_in_a_network_answers_addresses_and_allowed_names(
    host: str, is_expected: bool
) -> None:
    names = {"rollouts.example.com"}
    assert is_expected_host(host, is_loopback=False, allowed_hosts=names) is is_expected


def test_allowed_name_is_answered_and_another_one_is_told_the_option() -> None:
    document = EncodedDocument(b"{}", b"")
    with StatusPageServer(
        "0.0.0.0", 0, lambda: document, allowed_hosts=["rollouts.example.com"]
    ) as server:
        assert ask(server, "GET", "/status.json", Host="rollouts.example.com")[0].status == 200
        answer, body = ask(server, "GET", "/status.json", Host="evil.example.com")
    assert answer.status == 421
    assert b"--web-host" in body
    assert b"evil" not in body


def test_request_sent_byte_by_byte_ends_at_the_limit_of_the_head() -> None:
    clock = FakeClock()
    document = EncodedDocument(b"{}", b"")
    with (
        StatusPageServer("127.0.0.1", 0, lambda: document, clock=clock) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=20) as client,
    ):
        wait_until(lambda: answers(running))
        for byte in b"GE":
            client.sendall(bytes([byte]))
            clock.move(HEAD_LIMIT_S / 2)
        assert client.recv(1) == b""


def test_response_that_nobody_reads_ends_at_its_limit() -> None:
    clock = FakeClock()
    large = EncodedDocument(b" " * 16_000_000, b"")
    with (
        StatusPageServer("127.0.0.1", 0, lambda: large, clock=clock) as running,
        contextlib.ExitStack() as clients,
    ):
        for _ in range(MAX_REQUESTS):
            address = ("127.0.0.1", running.port)
            client = clients.enter_context(socket.create_connection(address, timeout=20))
            client.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
            assert client.recv(1) == b"H"
        assert not answers(running)
        clock.move(RESPONSE_LIMIT_S)
        wait_until(lambda: answers(running), limit_s=20.0)


def test_rebound_name_is_refused(server: StatusPageServer) -> None:
    answer, _ = ask(server, "GET", "/status.json", Host="evil.example.com")
    assert answer.status == 421


def test_requests_beyond_the_limit_are_refused() -> None:
    running, release = threading.Semaphore(0), threading.Event()

    def read_slowly() -> EncodedDocument:
        running.release()
        release.wait(20.0)
        return EncodedDocument(b"{}", b"")

    with StatusPageServer("127.0.0.1", 0, read_slowly) as server:
        threads = [
            threading.Thread(target=ask, args=(server, "GET", "/status.json"))
            for _ in range(MAX_REQUESTS)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert running.acquire(timeout=20.0)
        answer, _ = ask(server, "GET", "/status.json")
        release.set()
        for thread in threads:
            thread.join(20.0)
        assert answer.status == 503


def test_clients_that_hang_up_leave_no_traceback_and_no_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = EncodedDocument(b" " * 16_000_000, b"")
    with StatusPageServer("127.0.0.1", 0, lambda: large) as running:
        for _ in range(LIMITS.per_address + 1):
            with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
                client.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
                # Reset the connection instead of closing it in order.
                linger = struct.pack("ii", 1, 0)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        wait_until(lambda: answers(running), limit_s=20.0)
    assert capsys.readouterr().err == ""


def test_connections_beyond_the_limit_are_closed() -> None:
    with (
        StatusPageServer(
            "127.0.0.1", 0, lambda: EncodedDocument(b"{}", b""), clock=FakeClock()
        ) as running,
        contextlib.ExitStack() as clients,
    ):
        address = ("127.0.0.1", running.port)
        silent = [
            clients.enter_context(socket.create_connection(address, timeout=10))
            for _ in range(LIMITS.per_address + 1)
        ]
        assert silent[-1].recv(1) == b""
        silent[0].sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
        assert silent[0].recv(8) == b"HTTP/1.0"


def answers(server: StatusPageServer) -> bool:
    """Return whether the server accepts a further connection."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(server, "HEAD", "/")[0].status == 200
    return False


def test_address_in_use_names_the_option(server: StatusPageServer) -> None:
    with pytest.raises(UsageError) as caught:
        StatusPageServer("127.0.0.1", server.port, lambda: EncodedDocument(b"", b""))
    assert "--web" in caught.value.remedy


def test_nodes_beyond_the_limit_are_counted_idle_ones_first() -> None:
    document = make_document(20)
    assert limit_nodes(document, 5) == 17
    (*_, worker) = document["pools"]  # type: ignore[misc]  # a list
    assert [node["name"] for node in worker["nodes"]] == [
        "worker-0001",
        "worker-0002",
        "worker-0003",
    ]
