"""TLS, limits and certificates of the Ignition server, over real sockets."""

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.clock import FakeClock
from tests.provisioning.samples import NEW, make_config, make_file
from tests.provisioning.serving import (
    LIMIT_S,
    OneToken,
    Serving,
    read_response,
    read_to_end,
    serve,
    write_certificate,
)
from tests.waiting import wait_until
from treenail.controllers.runtime.connection_limits import (
    IDLE_GRACE_S,
    RESPONSE_GRACE_S,
    ConnectionLimits,
)
from treenail.controllers.runtime.http_server import (
    HEAD_LIMIT_S,
    HttpListener,
    LimitedRequestHandler,
    read_address,
)
from treenail.errors import UsageError
from treenail.provisioning.machines.logged_requests import RequestOutcome
from treenail.provisioning.server.certificate import WARN_S, ServerCertificate, read_expiry
from treenail.provisioning.server.server import (
    CERTIFICATE_CHECK_S,
    REST_LIMIT_S,
    IgnitionServer,
    ServerLimits,
)
from treenail_lab.apiserver.access.certificates import CertificateAuthority

TOKEN = "tn_abc_secretsecretsecret"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with serve(tmp_path) as found:
        yield found


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


def test_address_above_its_limit_is_asked_to_retry(tmp_path: Path) -> None:
    with serve(tmp_path, clock=FakeClock()) as serving:
        held = [serving.connect() for _ in range(8)]
        found = serving.get("/config/worker")
        assert (found.status, found.headers["Retry-After"]) == (503, "1")
        assert "more than 8 connections from this address" in found.json["error"]
        assert serving.get("/healthz").status == 200
        row = wait_until(lambda: serving.requests.rows, limit_s=LIMIT_S)[0]
        assert (row.outcome, row.status) == (RequestOutcome.BUSY, 503)
        assert serving.fetch_from("127.0.0.2") == 200
        for client in held:
            client.close()
        wait_until(lambda: serving.get("/config/worker").status == 200, limit_s=LIMIT_S)


def connect_or_none(serving: Serving) -> ssl.SSLSocket | None:
    try:
        return serving.connect()
    except (ssl.SSLError, ConnectionError):
        return None


def test_server_above_its_limit_asks_to_retry_and_closes_what_is_beyond(tmp_path: Path) -> None:
    limits = ServerLimits(connections=2, per_address=2)
    with serve(tmp_path, clock=FakeClock(), limits=limits) as serving:
        held = [serving.connect() for _ in range(3)]
        assert "more than 2 connections" in serving.get("/config/worker").json["error"]
        # The place of the request above may be taken for a moment after its response.
        held.append(wait_until(lambda: connect_or_none(serving), limit_s=LIMIT_S))
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


def test_client_that_sends_nothing_gives_its_place_to_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    with serve(tmp_path, clock=clock, limits=ServerLimits(connections=2)) as serving:
        held = [serving.connect_plain(f"127.0.0.{number}") for number in (2, 3)]
        assert serving.get("/config/worker").status == 503
        clock.move(IDLE_GRACE_S)
        assert serving.get("/config/worker").status == 200
        assert read_to_end(held[0]) == b""
    assert "ended connection from 127.0.0.2: another client needed its place" in caplog.text


def test_sixteen_addresses_keep_no_machine_out(tmp_path: Path) -> None:
    """They hold more places than there are, and open new connections before each machine comes."""
    with serve(tmp_path, clock=FakeClock()) as serving:
        attackers = [f"127.0.{number % 4}.{number + 2}" for number in range(16)]
        for _ in range(8):
            for attacker in attackers:
                serving.connect_plain(attacker)
        for number in range(1, 9):
            for attacker in attackers:
                serving.connect_plain(attacker)
            assert serving.fetch_from(f"127.1.0.{number}") == 200
            assert serving.fetch_from(f"127.0.0.{number + 200}") == 200


def test_sixteen_addresses_that_read_slowly_keep_no_machine_out(tmp_path: Path) -> None:
    clock = FakeClock()
    with serve(tmp_path, clock=clock) as serving:
        serving.write("config", make_config(NEW, make_file("/etc/big", "x" * 6_000_000)))
        slow = [serving.connect_from(f"127.0.{n % 4}.{n % 16 + 2}") for n in range(64)]
        for client in slow:
            client.sendall(b"GET /config/worker HTTP/1.1\r\n\r\n")
            assert client.recv(1)
        assert serving.fetch_from("127.1.0.1") == 503
        clock.move(RESPONSE_GRACE_S)
        assert serving.fetch_from("127.1.0.1") == 200


@pytest.mark.parametrize(
    "head", ["garbage\r\n", "GET /config/worker HTTP/1.1\r\nContent-Length: 999999\r\n"]
)
def test_client_that_never_ends_its_request_frees_its_place_early(
    tmp_path: Path, head: str
) -> None:
    clock = FakeClock()
    with serve(tmp_path, clock=clock, limits=ServerLimits(connections=1)) as serving:
        held = serving.connect()
        held.sendall(f"{head}\r\n".encode())
        read_response(held)
        stopped = threading.Event()

        def send_slowly() -> None:
            with contextlib.suppress(OSError):
                while not stopped.wait(0.01):
                    held.send(b"x")

        def is_served_later() -> bool:
            # Again: the server may begin to wait after the first move of the clock.
            clock.move(REST_LIMIT_S)
            return bool(serving.get("/config/worker").status == 200)

        sender = threading.Thread(target=send_slowly)
        sender.start()
        try:
            wait_until(is_served_later, limit_s=LIMIT_S)
        finally:
            stopped.set()
            sender.join()


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
    listener = HttpListener(
        ("127.0.0.1", 0), LimitedRequestHandler, ConnectionLimits(), clock=clock
    )
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
        assert access.releases == access.claims
        assert len(access.claims) == 1


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


def test_certificate_renewed_under_load_fails_no_request(tmp_path: Path) -> None:
    clock = FakeClock()
    with serve(tmp_path, clock=clock) as serving, ThreadPoolExecutor(4) as pool:
        seen: set[bytes] = set()

        def fetch(_number: int) -> int:
            with serving.connect() as client:
                seen.add(client.getpeercert(binary_form=True) or b"")
                client.sendall(b"GET /config/worker HTTP/1.1\r\n\r\n")
                return read_response(client).status

        for _ in range(5):
            fetched = [pool.submit(fetch, number) for number in range(20)]
            serving.renew_certificate()
            clock.move(CERTIFICATE_CHECK_S)
            assert {each.result(LIMIT_S) for each in fetched} == {200}
        wait_until(lambda: fetch(0) == 200 and len(seen) > 2, limit_s=LIMIT_S)


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


def test_directory_that_becomes_unreadable_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()
    path = folder / "x.pem"
    write_certificate(CertificateAuthority(tmp_path), path)
    certificate = ServerCertificate(path, path)
    path.unlink()
    folder.rmdir()
    # stat() of the file then fails with ENOTDIR.
    folder.write_text("")
    for _ in range(3):
        certificate.reload_changed_files()
    assert caplog.text.count("continuing with the old one: Not a directory") == 1


def test_end_of_the_certificate_is_logged_before_and_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.pem"
    content = write_certificate(CertificateAuthority(tmp_path), path)
    ends = x509.load_pem_x509_certificate(content).not_valid_after_utc.timestamp()
    assert read_expiry(path.read_text()) == ends
    certificate = ServerCertificate(path, path)
    certificate.check_expiry(ends - WARN_S - 1)
    assert caplog.text == ""
    for second in (0, 1, 5):
        certificate.check_expiry(ends - WARN_S + second)
    assert caplog.text.count("expires at") == 1
    for second in (0, 1, 5):
        certificate.check_expiry(ends + second)
    assert caplog.text.count("expired, and machines refuse it") == 1


def test_server_logs_the_end_of_its_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    with serve(tmp_path, clock=clock) as serving:
        ends = read_expiry(serving.certificate.read_text())
        assert ends is not None
        clock.move(ends - clock.now() + 1.0)
        wait_until(lambda: "expired, and machines refuse it" in caplog.text, limit_s=LIMIT_S)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\n" + "MIAw" * 50 + "\n-----END CERTIFICATE-----",
    ],
)
def test_end_of_a_damaged_certificate_is_unknown(text: str) -> None:
    assert read_expiry(text) is None


@given(st.binary(max_size=200))
def test_end_of_any_certificate_can_be_looked_for(content: bytes) -> None:
    read_expiry(ssl.DER_cert_to_PEM_cert(content))


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
