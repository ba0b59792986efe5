"""Both transports against a real HTTPS server, and features of the agent's transport only."""

import gzip
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.files import write_kubeconfig
from tests.kube.server import Answer, Exchange, Server, serving
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import ClusterError, TooLargeError, UnreachableError, UsageError
from treenail.kube.api_client import Transport
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.transport.kubeconfig import ApiServerConfig, read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.kube.transport.official import OfficialTransport

GET = ApiRequest("GET", "/api/v1/nodes/a", max_bytes=10_000)
MakeTransport = Callable[[str], Transport]


def thin(kubeconfig: str) -> Transport:
    return HttpTransport(read_kubeconfig(kubeconfig), SystemClock(), connect_s=2)


def official(kubeconfig: str) -> Transport:
    return OfficialTransport.from_kubeconfig(kubeconfig, SystemClock())


def kubeconfig(server: Server, user: dict[str, object] | None = None, **cluster: object) -> str:
    user = {"token": "t0ps3cret"} if user is None else user
    authority = {"certificate-authority": str(server.authority.file), **cluster}
    return write_kubeconfig(server.directory / "kubeconfig", user, server=server.url, **authority)


@pytest.fixture(params=[thin, official])
def make(request: pytest.FixtureRequest) -> MakeTransport:
    return request.param


@pytest.fixture
def opened() -> Iterator[list[Transport]]:
    transports: list[Transport] = []
    yield transports
    for transport in transports:
        transport.close()


@pytest.fixture
def connect(make: MakeTransport, opened: list[Transport]) -> Callable[[Server], Transport]:
    def connected(server: Server) -> Transport:
        opened.append(make(kubeconfig(server)))
        return opened[-1]

    return connected


Connect = Callable[[Server], Transport]


class Script:
    """Returns the answers in turn and then repeats the last one."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)

    def __call__(self, exchange: Exchange) -> None:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        answer(exchange)


def ok(exchange: Exchange) -> None:
    exchange.reply({"kind": "Node"})


OK = ApiResponse(200, b'{"kind": "Node"}')


def test_request_arrives_unchanged(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, ok) as server:
        reply = connect(server).send(
            ApiRequest(
                "PATCH", "/api/v1/nodes/a%2Fb", {"force": "true", "x": "a b&c"}, b"[1]", "a/b"
            )
        )

    (seen,) = server.seen
    assert reply == OK
    assert (seen.method, seen.path, seen.params, seen.body) == (
        "PATCH",
        "/api/v1/nodes/a%2Fb",
        {"force": "true", "x": "a b&c"},
        b"[1]",
    )
    assert seen.headers["content-type"] == "a/b"
    assert seen.headers["authorization"] == "Bearer t0ps3cret"


def test_sequential_requests_share_one_connection(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, ok) as server:
        transport = connect(server)
        for _ in range(3):
            assert transport.send(GET) == OK

    assert len({seen.peer for seen in server.seen}) == 1


def test_error_response_keeps_retry_after(tmp_path: Path, connect: Connect) -> None:
    def later(exchange: Exchange) -> None:
        exchange.reply(b"{}", 429, {"Retry-After": "7"})

    with serving(tmp_path, later) as server:
        assert connect(server).send(GET) == ApiResponse(429, b"{}", 7.0)

    assert len(server.seen) == 1


def test_redirect_is_not_followed(tmp_path: Path, connect: Connect) -> None:
    def elsewhere(exchange: Exchange) -> None:
        exchange.reply(b"", 302, {"Location": "https://127.0.0.1:1/"})

    with serving(tmp_path, elsewhere) as server:
        assert connect(server).send(GET).status == 302


def test_gzip_response_is_decompressed(tmp_path: Path, connect: Connect) -> None:
    def zipped(exchange: Exchange) -> None:
        exchange.reply(gzip.compress(b'{"a": 1}'), headers={"Content-Encoding": "gzip"})

    with serving(tmp_path, zipped) as server:
        assert connect(server).send(GET) == ApiResponse(200, b'{"a": 1}')


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
def test_endless_response_is_rejected(
    tmp_path: Path, connect: Connect, headers: dict[str, str]
) -> None:
    body = b"x" * 20_000

    def long(exchange: Exchange) -> None:
        exchange.reply(gzip.compress(body) if headers else body, headers=headers)

    with serving(tmp_path, long) as server, pytest.raises(TooLargeError, match="longer than 10000"):
        connect(server).send(GET)


def test_silent_server_is_unreachable_after_the_limit(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, Exchange.wait_for_the_end) as server:
        with pytest.raises(UnreachableError) as caught:
            connect(server).send(ApiRequest("GET", "/version", limit_s=0.2))

        assert "GET /version" in str(caught.value)
        assert "no response within 0.2 s" in str(caught.value)
        assert len(server.seen) == 1


def test_absent_server_is_unreachable(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, ok) as server:
        transport = connect(server)
        server.stop()

        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1.*[Cc]onnection refused"):
            transport.send(GET)


def test_restarted_server_is_reached_again(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, ok) as server:
        transport = connect(server)
        assert transport.send(GET) == OK
        server.stop()
        with pytest.raises(UnreachableError):
            transport.send(GET)
        server.start()

        assert transport.send(GET) == OK


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_closed_idle_connection_is_replaced(tmp_path: Path, connect: Connect, method: str) -> None:
    with serving(tmp_path, ok) as server:
        transport = connect(server)
        transport.send(GET)
        server.cut()

        assert transport.send(ApiRequest(method, "/api/v1/nodes", body=b"{}")) == OK

    assert [seen.method for seen in server.seen] == ["GET", method]


def test_read_with_lost_response_is_sent_again(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, Script(ok, Exchange.drop, ok)) as server:
        transport = connect(server)
        transport.send(GET)

        assert transport.send(GET) == OK

    assert len(server.seen) == 3


def test_write_with_lost_response_is_not_sent_again(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, Script(ok, Exchange.drop, ok)) as server:
        transport = connect(server)
        transport.send(GET)

        with pytest.raises(UnreachableError, match="ended before the response was complete"):
            transport.send(ApiRequest("POST", "/api/v1/nodes", body=b"{}"))

    assert len(server.seen) == 2


def test_truncated_response_is_unreachable(tmp_path: Path, connect: Connect) -> None:
    def half(exchange: Exchange) -> None:
        exchange.reply(b'{"a"', headers={"Content-Length": "10"})
        exchange.drop()

    with serving(tmp_path, half) as server, pytest.raises(UnreachableError, match="ended before"):
        connect(server).send(ApiRequest("POST", "/api/v1/nodes", body=b"{}"))


def test_server_certificate_of_another_ca_is_rejected(tmp_path: Path, make: MakeTransport) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "one", ok) as server, serving(tmp_path / "two", ok) as other:
        path = kubeconfig(server, **{"certificate-authority": str(other.authority.file)})
        transport = make(path)
        with pytest.raises(UnreachableError, match=r"(?i)certificate"):
            transport.send(GET)
        transport.close()

    assert server.seen == []


def test_server_certificate_is_checked_against_tls_server_name(
    tmp_path: Path, make: MakeTransport
) -> None:
    with serving(tmp_path, ok) as server:
        right = make(kubeconfig(server, **{"tls-server-name": "kubernetes.default.svc"}))
        wrong = make(kubeconfig(server, **{"tls-server-name": "elsewhere.example"}))

        assert right.send(GET) == OK
        with pytest.raises(UnreachableError, match=r"(?i)mismatch|not valid for"):
            wrong.send(GET)
        right.close()
        wrong.close()


def test_client_certificate_authenticates_the_request(tmp_path: Path, make: MakeTransport) -> None:
    with serving(tmp_path, ok) as server:
        pem = str(server.identity("system:node:a"))
        transport = make(kubeconfig(server, {"client-certificate": pem, "client-key": pem}))
        transport.send(GET)
        transport.close()

    assert [seen.user for seen in server.seen] == ["system:node:a"]
    assert "authorization" not in server.seen[0].headers


def test_stream_yields_each_line_as_it_arrives(tmp_path: Path, connect: Connect) -> None:
    goes_on = threading.Event()

    def stream(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b'{"a"')
        exchange.chunk(b": 1}\n{}\n")
        goes_on.wait(10)
        exchange.chunk(b"[]\n")
        exchange.end_stream()

    with serving(tmp_path, stream) as server:
        found = connect(server).open_stream(GET, duration_s=10)
        assert found.read_response() == ApiResponse(200)
        lines = found.iter_lines()
        assert [next(lines), next(lines)] == [b'{"a": 1}', b"{}"]
        goes_on.set()
        assert list(lines) == [b"[]"]


def test_rejected_stream_returns_the_error_response(tmp_path: Path, connect: Connect) -> None:
    with serving(tmp_path, lambda exchange: exchange.reply(b"too old", 410)) as server:
        found = connect(server).open_stream(GET, duration_s=10)

        assert found.read_response() == ApiResponse(410, b"too old")
        assert list(found.iter_lines()) == []


def test_interrupted_stream_raises_unreachable(tmp_path: Path, connect: Connect) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"{}\n")
        exchange.drop()

    with serving(tmp_path, stream) as server:
        found = connect(server).open_stream(GET, duration_s=10)
        found.read_response()
        lines = found.iter_lines()
        assert next(lines) == b"{}"
        with pytest.raises(UnreachableError, match="ended before the response was complete"):
            next(lines)


@pytest.mark.parametrize(
    ("line", "duration_s", "error", "text"),
    [
        (b"", 0.2, UnreachableError, r"no response within 0\.2 s"),
        (b"x" * 20_000, 10, TooLargeError, "longer than 10000"),
        (b"", 60, None, ""),
    ],
    ids=["after its duration", "endless line", "closed between reads"],
)
def test_stream_without_lines_ends(
    tmp_path: Path,
    connect: Connect,
    line: bytes,
    duration_s: float,
    error: type[Exception] | None,
    text: str,
) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.begin_stream()
        if line:
            exchange.chunk(line)
        exchange.wait_for_the_end()

    with serving(tmp_path, stream) as server:
        found = connect(server).open_stream(GET, duration_s=duration_s)
        found.read_response()
        if error is None:
            found.close()
            assert list(found.iter_lines()) == []
        else:
            with pytest.raises(error, match=text):
                next(found.iter_lines())


def test_rejected_stream_with_endless_body_closes_its_connection(
    tmp_path: Path, connect: Connect
) -> None:
    ended = threading.Event()

    def reject(exchange: Exchange) -> None:
        try:
            exchange.reply(b"x" * 1_000_000, 403)
            exchange.wait_for_the_end()
        finally:
            ended.set()

    with serving(tmp_path, reject) as server:
        found = connect(server).open_stream(GET, duration_s=10)
        with pytest.raises(TooLargeError, match="longer than 10000"):
            found.read_response()
        assert ended.wait(10)


def test_closed_stream_wakes_its_reader_at_once(tmp_path: Path, connect: Connect) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"{}\n")
        exchange.wait_for_the_end()

    read: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with serving(tmp_path, stream) as server:
        found = connect(server).open_stream(GET, duration_s=60)

        def reading() -> None:
            found.read_response()
            for line in found.iter_lines():
                read.put(line)
            read.put(b"ended")

        reader = threading.Thread(target=reading)
        reader.start()
        assert read.get(timeout=10) == b"{}"
        found.close()
        reader.join(10)

    assert read.get(timeout=10) == b"ended"
    assert not reader.is_alive()


def test_closed_stream_wakes_the_thread_that_connects(
    tmp_path: Path, opened: list[Transport]
) -> None:
    with serving(tmp_path, Exchange.wait_for_the_end) as server:
        opened.append(thin(kubeconfig(server)))
        found = opened[0].open_stream(ApiRequest("GET", "/version", limit_s=50), duration_s=60)
        failures: list[ClusterError] = []

        def waiting() -> None:
            try:
                found.read_response()
            except ClusterError as error:
                failures.append(error)

        waiter = threading.Thread(target=waiting)
        waiter.start()
        wait_until(lambda: server.seen)
        found.close()
        waiter.join(10)

    assert len(failures) == 1


def test_stream_closed_before_it_began_sends_nothing(
    tmp_path: Path, opened: list[Transport]
) -> None:
    with serving(tmp_path, ok) as server:
        opened.append(thin(kubeconfig(server)))
        found = opened[0].open_stream(GET, duration_s=60)
        found.close()
        with pytest.raises(UnreachableError, match="closed"):
            found.read_response()

    assert server.seen == []


def test_closed_transport_wakes_waiting_requests(tmp_path: Path) -> None:
    with serving(tmp_path, Exchange.wait_for_the_end) as server:
        transport = thin(kubeconfig(server))
        failures: list[ClusterError] = []

        def asking() -> None:
            try:
                transport.send(ApiRequest("POST", "/version", limit_s=50))
            except ClusterError as error:
                failures.append(error)

        asker = threading.Thread(target=asking)
        asker.start()
        wait_until(lambda: server.seen)
        transport.close()
        asker.join(10)

    assert len(failures) == 1


def test_closed_transport_keeps_no_connection(tmp_path: Path) -> None:
    with serving(tmp_path, ok) as server:
        transport = thin(kubeconfig(server))
        transport.close()
        for _ in range(2):
            transport.send(GET)

        assert len({seen.peer for seen in server.seen}) == 2


def test_trickling_server_is_unreachable_after_the_limit(
    tmp_path: Path, opened: list[Transport]
) -> None:
    def trickle(exchange: Exchange) -> None:
        exchange.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(10_000):
            exchange.wfile.write(b"X-%d: x\r\n" % number)
            if threading.Event().wait(0.05):
                return

    with serving(tmp_path, trickle) as server:
        opened.append(thin(kubeconfig(server)))
        with pytest.raises(UnreachableError, match=r"no response within 0\.3 s"):
            opened[0].send(ApiRequest("GET", "/version", limit_s=0.3))


def test_concurrent_requests_do_not_wait_for_each_other(
    tmp_path: Path, opened: list[Transport]
) -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(exchange: Exchange) -> None:
        both.wait()
        ok(exchange)

    with serving(tmp_path, meet) as server:
        opened.append(thin(kubeconfig(server)))
        threads = [threading.Thread(target=opened[0].send, args=(GET,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    assert len(server.seen) == 2


def client_certificate(server: Server) -> ApiServerConfig:
    pem = str(server.identity("first"))
    return read_kubeconfig(kubeconfig(server, {"client-certificate": pem, "client-key": pem}))


def test_replaced_certificate_is_used_for_the_next_request(tmp_path: Path) -> None:
    with serving(tmp_path, ok) as server:
        transport = HttpTransport(client_certificate(server), SystemClock())
        transport.send(GET)
        transport.send(GET)
        server.identity("second")
        transport.send(GET)
        transport.close()

    assert [seen.user for seen in server.seen] == ["first", "first", "second"]


def test_broken_replacement_certificate_keeps_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, ok) as server:
        transport = HttpTransport(client_certificate(server), SystemClock())
        transport.send(GET)
        (tmp_path / "client.pem").write_text("-----BEGIN t0ps3cret")
        transport.send(GET)
        transport.send(GET)
        server.identity("third")
        transport.send(GET)
        transport.close()

    assert [seen.user for seen in server.seen] == ["first", "first", "first", "third"]
    (message,) = caplog.messages
    assert message == (
        f"using the last good credentials: cannot use {tmp_path}/client.pem of kubeconfig "
        f"{tmp_path}/kubeconfig: no usable client certificate with its key in PEM"
    )


def test_missing_certificate_is_rejected_and_read_again(tmp_path: Path) -> None:
    with serving(tmp_path, ok) as server:
        connection = client_certificate(server)
        (tmp_path / "client.pem").unlink()
        transport = HttpTransport(connection, SystemClock())
        with pytest.raises(UnreachableError, match=r"client\.pem .*: No such file or directory$"):
            transport.send(GET)
        server.identity("later")
        transport.send(GET)
        transport.close()

    assert [seen.user for seen in server.seen] == ["later"]


def test_inline_certificate_and_key_are_used_without_files(tmp_path: Path) -> None:
    with serving(tmp_path, ok) as server:
        found = server.authority.make_client_identity("inline", [])
        connection = ApiServerConfig(
            server.url,
            ca=server.authority.pem,
            certificate=found.certificate,
            key=found.private_key,
        )
        transport = HttpTransport(connection, SystemClock())
        transport.send(GET)
        transport.close()

    assert [seen.user for seen in server.seen] == ["inline"]


def test_replaced_token_is_used_for_the_next_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    with serving(tmp_path, ok) as server:
        path = kubeconfig(server, {"tokenFile": str(token)})
        transport = HttpTransport(read_kubeconfig(path), SystemClock())
        transport.send(GET)
        token.write_text("second\n")
        transport.send(GET)
        transport.close()

    assert [seen.headers["authorization"] for seen in server.seen] == [
        "Bearer one",
        "Bearer second",
    ]


def test_multiline_token_is_not_sent(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\r\nX-Remote-User: admin")
    with serving(tmp_path, ok) as server:
        path = kubeconfig(server, {"tokenFile": str(token)})
        transport = HttpTransport(read_kubeconfig(path), SystemClock())
        with pytest.raises(
            UnreachableError, match=r"cannot use .*token of .*: not one line of printable ASCII"
        ):
            transport.send(GET)
        transport.close()

    assert server.seen == []


def test_kubeconfig_unusable_by_the_package_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use kubeconfig"):
        OfficialTransport.from_kubeconfig(str(tmp_path / "none"), SystemClock())


@pytest.mark.parametrize(
    "text", ["users: [{name: x, user: {token: s3cr3t}]", "[]", "s3cr3t", "clusters: 5"]
)
def test_malformed_kubeconfig_for_the_package_is_rejected_without_its_text(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"cannot use kubeconfig \S+: \w+Error$") as caught:
        OfficialTransport.from_kubeconfig(str(path), SystemClock())
    assert "s3cr3t" not in f"{caught.value} {caught.value.remedy}"
