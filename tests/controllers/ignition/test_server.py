"""The Ignition server over real TLS sockets: paths, errors, limits, and its log of requests."""

import json
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controllers.ignition.samples import (
    IMAGE,
    NEW,
    make_config,
    make_file,
    make_pool,
)
from tests.controllers.ignition.serving import (
    IGNITION,
    LIMIT_S,
    OneToken,
    Serving,
    read_response,
    read_to_end,
    serve,
)
from tests.fakes.clock import FakeClock
from tests.waiting import wait_until
from treenail.controllers.ignition.access import RequestOutcome
from treenail.controllers.ignition.certificate import ServerCertificate
from treenail.controllers.ignition.listener import ServerLimits, read_address
from treenail.controllers.ignition.server import IgnitionServer
from treenail.controllers.runtime.http_listener import (
    HEAD_LIMIT_S,
    HttpListener,
    LimitedRequestHandler,
)
from treenail.errors import UsageError

TOKEN = "tn_abc_secretsecretsecret"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with serve(tmp_path) as found:
        yield found


def test_config_of_a_pool_is_served(serving: Serving) -> None:
    found = serving.get("/config/worker", f"Accept: {IGNITION.format('3.4.0')}")
    assert found.status == 200
    assert found.json["ignition"]["version"] == "3.4.0"
    assert found.headers["Content-Type"] == "application/json"
    assert found.headers["Cache-Control"] == "no-store"
    assert "X-Treenail-Image" not in found.headers
    row = wait_until(lambda: serving.requests.rows, limit_s=LIMIT_S)[0]
    assert (row.outcome, row.status, row.pool) == (RequestOutcome.SERVED, 200, "worker")
    assert (row.version, row.bytes, row.rendered) == ("3.4.0", len(found.body), NEW)
    assert (row.address, row.is_cached) == ("127.0.0.1", False)


def test_client_without_accept_receives_version_2_2(serving: Serving) -> None:
    assert serving.get("/config/worker").json["ignition"]["version"] == "2.2.0"


def test_head_has_the_length_of_get_and_no_body(serving: Serving) -> None:
    head = serving.get("/config/worker", method="HEAD")
    assert head.body == b""
    assert int(head.headers["Content-Length"]) == len(serving.get("/config/worker").body)
    rows = wait_until(lambda: len(serving.requests.rows) == 2 and serving.requests.rows)
    assert [row.outcome for row in rows] == [RequestOutcome.CHECKED, RequestOutcome.SERVED]
    missing = serving.get("/config/missing", method="HEAD")
    assert (missing.status, missing.body) == (404, b"")


def test_health_is_empty(serving: Serving) -> None:
    for method in ("GET", "HEAD"):
        found = serving.get("/healthz", method=method)
        assert (found.status, found.body) == (200, b"")
    assert serving.requests.rows == []


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/", 404, "unknown path"),
        ("/config/", 404, "unknown path"),
        ("/config/../x", 404, "unknown path"),
        ("/config/%2e%2e", 404, "unknown path"),
        ("/config/a/b", 404, "unknown path"),
        ("//config/worker", 404, "unknown path"),
        ("/config/worker/", 404, "unknown path"),
        ("/config/Worker", 404, "unknown path"),
        (f"/config/{'a' * 300}", 404, "unknown path"),
        ("https://x/config/worker", 404, "unknown path"),
        ("/config/infra", 404, "no MachineConfigPool has the name infra"),
        ("/config/worker?token=" + TOKEN, 200, ""),
    ],
)
def test_path_has_one_answer(serving: Serving, path: str, status: int, sentence: str) -> None:
    found = serving.get(path)
    assert found.status == status
    if status != 200:
        assert list(found.json) == ["error"]
        assert sentence in found.json["error"]
        assert found.body.count(b"\n") == 1
        assert found.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused(serving: Serving, method: str) -> None:
    found = serving.get("/config/worker", method=method)
    assert (found.status, found.headers["Allow"]) == (405, "GET, HEAD")
    assert found.json == {"error": "expected GET or HEAD"}
    assert serving.get("/other", method=method).status == 404


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /config/worker?token=secret\r\n\r\n", 400),
        ("GET /config/worker?token=secret HTTP/2.0\r\n\r\n", 505),
        ("GET /config/worker?token=secret HTTX\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        ("secret\r\n\r\n", 400),
        ("GET /config/worker HTTP/1.1\r\nAccept: " + "secret" * 1400 + "\r\n\r\n", 431),
        ("GET /" + "secret" * 1400 + " HTTP/1.1\r\n\r\n", 431),
        ("GET /config/worker HTTP/1.1\r\n" + "Secret: 1\r\n" * 120 + "\r\n", 431),
        ("GET /config/worker HTTP/1.1\r\nAccept: ,;q=x, /;version=3, a;;\r\n\r\n", 200),
        ("GET /config/worker HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_malformed_request_has_one_answer(serving: Serving, head: str, status: int) -> None:
    found = serving.send(head)
    assert found.status == status
    if status != 200:
        assert list(found.json) == ["error"]
        assert b"secret" not in found.body


def test_version_4_is_a_bad_request(serving: Serving) -> None:
    found = serving.get("/config/worker", f"Accept: {IGNITION.format('4.0.0')}")
    assert found.status == 400
    row = wait_until(lambda: serving.requests.rows)[0]
    assert (row.outcome, row.status) == (RequestOutcome.INVALID, 400)


def test_config_that_a_version_lacks_is_not_acceptable(serving: Serving) -> None:
    serving.write("config", make_config(kernelArguments={"shouldNotExist": ["a"]}))
    found = serving.get("/config/worker", f"Accept: {IGNITION.format('3.2.0')}")
    assert found.status == 406
    assert "kernelArguments.shouldNotExist" in found.json["error"]
    assert "3.3.0" in found.json["error"]
    assert serving.get("/config/worker", f"Accept: {IGNITION.format('3.3.0')}").status == 200


def test_broken_config_affects_no_other_pool(serving: Serving) -> None:
    serving.write("infra", make_pool(name="infra", new="broken", old="broken"))
    serving.write("broken", make_config("broken", ignition={"version": "3.6.0"}))
    serving.write("gone", make_pool(name="gone", new="missing", old="missing"))
    found = serving.get("/config/infra")
    assert (found.status, "3.6.0" in found.json["error"]) == (500, True)
    found = serving.get("/config/gone")
    assert (found.status, "missing" in found.json["error"]) == (500, True)
    assert serving.get("/config/worker").status == 200


def test_changed_inputs_are_served_and_equal_ones_are_cached(serving: Serving) -> None:
    before = serving.get("/config/worker").body
    assert serving.get("/config/worker").body == before
    serving.write("pool", make_pool(updated=2))
    assert serving.get("/config/worker").body == before
    serving.write("config", make_config(NEW, make_file("/etc/b")))
    assert b"/etc/b" in serving.get("/config/worker").body
    rows = wait_until(lambda: len(serving.requests.rows) == 4 and serving.requests.rows)
    assert [row.is_cached for row in rows] == [False, True, True, False]


def test_image_that_comes_later_has_a_header(tmp_path: Path) -> None:
    from treenail.controllers.ignition.directory_source import DirectorySource
    from treenail.controllers.ignition.source import SourceSettings

    settings = SourceSettings(needs_cluster=("quay.io",))
    with serve(tmp_path, source=DirectorySource(tmp_path / "sources", settings)) as serving:
        serving.write("pool", make_pool(osImage=IMAGE))
        assert serving.get("/config/worker").headers["X-Treenail-Image"] == "later"


def test_token_of_header_or_query_is_checked_and_counted(tmp_path: Path) -> None:
    access = OneToken(TOKEN, b"kubeconfig of a machine")
    with serve(tmp_path, access=access) as serving:
        for path, header in (
            ("/config/worker", "X: y"),
            ("/config/worker", "Authorization: Basic x"),
            ("/config/missing", "Authorization: Bearer wrong"),
            ("/config/worker?token=wrong", "X: y"),
            ("/config/worker?" + "a=b&" * 20, "X: y"),
        ):
            found = serving.get(path, header)
            assert (found.status, found.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert found.json == {"error": "the token is unknown"}
        bearer = f"Authorization: bearer {TOKEN}"
        assert serving.get("/config/worker", bearer, method="HEAD").status == 200
        assert serving.get("/config/missing", bearer).status == 404
        assert access.uses == []
        first = serving.get("/config/worker", bearer)
        second = serving.get(f"/config/worker?token={TOKEN}")
        assert first.body == second.body
        assert "/etc/kubernetes/kubeconfig" in json.dumps(first.json)
        wait_until(lambda: len(access.uses) == 2, limit_s=LIMIT_S)
        rows = wait_until(lambda: len(serving.requests.rows) == 9 and serving.requests.rows)
        assert [row.outcome for row in rows[:5]] == [RequestOutcome.REFUSED] * 5
        assert (rows[-1].token, rows[-1].machine) == ("abc", "w1")


def test_log_contains_no_token_and_no_kubeconfig(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serve(tmp_path, access=OneToken(TOKEN, b"kubeconfig of a machine")) as serving:
        serving.get(f"/config/worker?token={TOKEN}")
        serving.get(f"/config/{TOKEN}?token={TOKEN}")
        serving.get("/config/worker", f"Authorization: Bearer {TOKEN}x")
        serving.send(f"GET /config/worker?token={TOKEN} HTTX\r\n\r\n")
        wait_until(lambda: len(serving.requests.rows) == 2, limit_s=LIMIT_S)
    assert "secretsecret" not in caplog.text
    assert "kubeconfig of" not in caplog.text
    assert "served config of pool worker to 127.0.0.1 with token abc" in caplog.text


def test_plain_http_is_logged_and_affects_no_other_client(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with serving.connect_plain() as client:
        client.sendall(b"GET /config/worker HTTP/1.1\r\n\r\n")
        assert b"ignition" not in read_to_end(client)
    wait_until(lambda: "TLS: http request" in caplog.text, limit_s=LIMIT_S)
    assert serving.get("/config/worker").status == 200


def test_tls_1_1_is_refused_and_1_2_is_accepted(serving: Serving) -> None:
    with serving.connect(maximum_version=ssl.TLSVersion.TLSv1_2) as client:
        assert client.version() == "TLSv1.2"
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.deprecated_call():
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(serving.connect_plain(), server_hostname="localhost")


def test_client_of_http_2_receives_an_error(serving: Serving) -> None:
    with serving.connect(protocols=["h2"]) as client:
        assert client.selected_alpn_protocol() is None
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert read_response(client).status == 505
    with serving.connect(protocols=["h2", "http/1.1"]) as client:
        assert client.selected_alpn_protocol() == "http/1.1"


def test_body_of_a_get_is_not_read(serving: Serving) -> None:
    with serving.connect() as client:
        client.sendall(
            b"GET /config/worker HTTP/1.1\r\nContent-Length: 99999\r\n"
            b"Expect: 100-continue\r\n\r\nfirst bytes"
        )
        assert read_response(client).status == 200
        assert client.recv(1) == b""


def test_address_above_its_limit_is_asked_to_retry(serving: Serving) -> None:
    held = [serving.connect() for _ in range(8)]
    found = serving.get("/config/worker")
    assert (found.status, found.headers["Retry-After"]) == (503, "1")
    assert "more than 8 connections from this address" in found.json["error"]
    assert serving.get("/healthz").status == 200
    row = wait_until(lambda: serving.requests.rows, limit_s=LIMIT_S)[0]
    assert (row.outcome, row.status) == (RequestOutcome.BUSY, 503)
    with serving.connect_plain("127.0.0.2") as plain:
        context = ssl.create_default_context(cadata=serving.authority.pem.decode())
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(b"GET /config/worker HTTP/1.1\r\n\r\n")
            assert read_response(client).status == 200
    for client in held:
        client.close()
    wait_until(lambda: serving.get("/config/worker").status == 200, limit_s=LIMIT_S)


def test_server_above_its_limit_asks_to_retry_and_closes_what_is_beyond(tmp_path: Path) -> None:
    with serve(tmp_path, limits=ServerLimits(connections=2, per_address=2)) as serving:
        held = [serving.connect() for _ in range(3)]
        assert "more than 2 connections" in serving.get("/config/worker").json["error"]
        held.append(serving.connect())
        beyond = serving.connect_plain()
        assert read_to_end(beyond) == b""


def test_slow_head_is_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    with serve(tmp_path, clock=clock) as serving:
        slow, idle = serving.connect(), serving.connect_plain()
        slow.sendall(b"GET /con")
        assert serving.get("/config/worker").status == 200
        clock.move(HEAD_LIMIT_S)
        assert read_to_end(slow) == b""
        assert read_to_end(idle) == b""
        assert serving.get("/config/worker").status == 200


def test_slow_response_is_ended_and_does_not_count_as_use(tmp_path: Path) -> None:
    clock = FakeClock()
    access = OneToken(TOKEN, b"kubeconfig")
    with serve(tmp_path, access=access, clock=clock) as serving:
        serving.write("config", make_config(NEW, make_file("/etc/big", "x" * 6_000_000)))
        slow = serving.connect()
        slow.sendall(f"GET /config/worker?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
        assert slow.recv(100)
        fast = serving.get(f"/config/worker?token={TOKEN}")
        assert fast.status == 200
        wait_until(lambda: len(access.uses) == 1, limit_s=LIMIT_S)
        clock.move(59)
        assert serving.get(f"/config/worker?token={TOKEN}").status == 200
        clock.move(1)
        rows = serving.requests.rows
        wait_until(lambda: len(rows) == 3, limit_s=LIMIT_S)
        assert rows[-1].outcome == RequestOutcome.DISCONNECTED
        assert 0 < rows[-1].bytes < len(fast.body)
        assert len(access.uses) == 2


def test_connection_that_is_ended_stays_encrypted(serving: Serving) -> None:
    clock = FakeClock()
    context = ServerCertificate(serving.certificate, serving.certificate).context
    plain, other = socket.socketpair()
    listener = HttpListener(("127.0.0.1", 0), LimitedRequestHandler, clock=clock)
    with (
        listener,
        other,
        context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False) as request,
    ):
        listener.verify_request(request, ("127.0.0.1", 1))
        clock.move(HEAD_LIMIT_S)
        listener.service_actions()
        # ValueError would say that the socket has no encryption any longer.
        with pytest.raises(OSError):  # noqa: PT011  # of several kinds
            request.unwrap()


def test_client_that_disconnects_is_recorded(tmp_path: Path) -> None:
    access = OneToken(TOKEN, b"kubeconfig")
    with serve(tmp_path, access=access) as serving:
        serving.write("config", make_config(NEW, make_file("/etc/big", "x" * 6_000_000)))
        client = serving.connect()
        client.sendall(f"GET /config/worker?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
        assert client.recv(100)
        client.close()
        row = wait_until(lambda: serving.requests.rows, limit_s=LIMIT_S)[0]
        assert row.outcome == RequestOutcome.DISCONNECTED
        assert access.uses == []


def test_renewed_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    clock = FakeClock()
    with serve(tmp_path, clock=clock) as serving:

        def read_certificate() -> str:
            with serving.connect() as client:
                return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"")

        old = serving.connect()
        before = read_certificate()
        renewed = serving.renew_certificate().decode()

        def is_renewed() -> bool:
            clock.move(1)
            return read_certificate() == renewed

        wait_until(is_renewed, limit_s=LIMIT_S)
        assert before != renewed
        old.close()


def test_renewed_certificate_that_is_broken_leaves_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path) as serving:
        certificate = ServerCertificate(serving.certificate, serving.certificate)
        context = certificate.context
        for content in (b"", b"broken", serving.authority.pem):
            serving.certificate.write_bytes(content)
            certificate.reload_changed_files()
            certificate.reload_changed_files()
        serving.certificate.unlink()
        certificate.reload_changed_files()
        certificate.reload_changed_files()
        assert certificate.context is context
        assert caplog.text.count("continuing with the old one") == 4
        serving.renew_certificate()
        certificate.reload_changed_files()
        assert certificate.context is not context


@pytest.mark.parametrize("content", [None, b"", b"text"])
def test_certificate_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "x.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot load certificate"):
        ServerCertificate(path, path)


def test_address_in_use_is_a_usage_error(serving: Serving) -> None:
    certificate = ServerCertificate(serving.certificate, serving.certificate)
    with pytest.raises(UsageError, match="cannot listen on"):
        IgnitionServer(
            ("127.0.0.1", serving.server.port),
            certificate,
            None,
            serving.requests,  # type: ignore[arg-type]
        )


def test_address_of_ipv4_on_a_socket_of_ipv6_is_that_of_ipv4() -> None:
    assert read_address(("::ffff:192.0.2.1", 1, 0, 0)) == "192.0.2.1"
    assert read_address(("fe80::1%eth0", 1, 0, 2)) == "fe80::1"
    assert read_address(("192.0.2.1", 1)) == "192.0.2.1"
