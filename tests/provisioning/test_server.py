"""The Ignition server over real TLS sockets: paths, errors, limits, and its log of requests."""

import http.client
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.provisioning.samples import IMAGE, NEW, make_config, make_file, make_pool
from tests.provisioning.serving import IGNITION, LIMIT_S, OneToken, Serving, read_response, serve
from tests.waiting import wait_until
from treenail.provisioning.content.source import ServedInputs, SourceUnreadyError
from treenail.provisioning.machines.logged_requests import RequestOutcome
from treenail.provisioning.tokens.tokens import AccessVerdict, OpenAccess


class UnreadySource:
    """A source whose API server has not listed the pools."""

    def read_inputs(self, pool: str) -> ServedInputs:
        raise SourceUnreadyError(f"cannot read the cluster yet: {self.describe_unready()}")

    def describe_staleness(self) -> str:
        return ""

    def describe_unready(self) -> str:
        return "pools are not listed yet"


class BrokenAccess(OpenAccess):
    """Fails with an error that no code expects."""

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:
        raise KeyError(token)


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
    from treenail.provisioning.content.directory_source import DirectorySource
    from treenail.provisioning.content.source import SourceSettings

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
        assert access.claims == access.uses == []
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


def test_body_of_a_get_is_not_read(serving: Serving) -> None:
    with serving.connect() as client:
        client.sendall(
            b"GET /config/worker HTTP/1.1\r\nContent-Length: 99999\r\n"
            b"Expect: 100-continue\r\n\r\nfirst bytes"
        )
        assert read_response(client).status == 200
        assert client.recv(1) == b""


@pytest.mark.parametrize(
    "head",
    [
        "GET /config/worker HTTP/1.1\r\nContent-Length: 300000",
        "GET /config/worker HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST /config/worker HTTP/1.1\r\nContent-Length: 300000",
        "GET /config/worker HTTP/1.1\r\nX: " + 9000 * "x",
    ],
    ids=["get", "chunked", "post", "long-head"],
)
def test_client_that_sends_a_body_receives_the_whole_response(serving: Serving, head: str) -> None:
    """A close with unread bytes would reset the connection, and drop what is not sent yet."""
    serving.write("config", make_config(NEW, make_file("/etc/big", "x" * 1_000_000)))
    with serving.connect() as client:
        client.sendall(head.encode() + b"\r\n\r\n" + b"x" * 300_000)
        found = http.client.HTTPResponse(client, method="GET")
        found.begin()
        length = int(found.headers["Content-Length"])
        assert len(found.read()) == length
        assert client.recv(1) == b""


def test_client_that_sends_without_end_is_closed(serving: Serving) -> None:
    with serving.connect() as client:
        client.sendall(b"GET /config/worker HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n")

        def is_refused() -> bool:
            try:
                client.sendall(b"x" * 1_000_000)
            except OSError:
                return True
            return False

        wait_until(is_refused, limit_s=LIMIT_S)


def test_servers_of_equal_inputs_serve_equal_configs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with serve(tmp_path / "a") as one, serve(tmp_path / "b") as other:
        for version in ("2.2.0", "3.5.0"):
            accept = f"Accept: {IGNITION.format(version)}"
            assert (
                one.get("/config/worker", accept).body == other.get("/config/worker", accept).body
            )


def test_cluster_that_is_not_listed_yet_is_unavailable(tmp_path: Path) -> None:
    with serve(tmp_path, source=UnreadySource()) as serving:
        found = serving.get("/config/worker")
        assert (found.status, found.headers["Retry-After"]) == (503, "1")
        assert found.json == {"error": "cannot read the cluster yet: pools are not listed yet"}
        assert serving.get("/healthz").status == 200


def test_status_is_served_when_the_server_has_one(tmp_path: Path) -> None:
    with serve(tmp_path, describe_status=lambda: {"step": "render"}) as serving:
        found = serving.get("/status")
        assert (found.status, found.json) == (200, {"step": "render"})
        assert serving.send("HEAD /status HTTP/1.1\r\n\r\n").status == 200
        assert serving.send("POST /status HTTP/1.1\r\n\r\n").status == 405
        assert serving.requests.rows == []


def test_status_is_unknown_without_one(serving: Serving) -> None:
    assert serving.get("/status").status == 404


def test_source_says_when_to_try_again(tmp_path: Path) -> None:
    class SlowSource(UnreadySource):
        def read_inputs(self, pool: str) -> ServedInputs:
            raise SourceUnreadyError("the image is being built", retry_after_s=15)

    with serve(tmp_path, source=SlowSource()) as serving:
        found = serving.get("/config/worker")
        assert (found.status, found.headers["Retry-After"]) == (503, "15")


def test_error_of_the_program_is_one_sentence_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path, access=BrokenAccess()) as serving:
        found = serving.get("/config/worker", f"Authorization: Bearer {TOKEN}")
        assert found.status == 500
        assert "the log of the server has the error" in found.json["error"]
        assert "secretsecret" not in str(found.json)
        wait_until(lambda: serving.requests.rows, limit_s=LIMIT_S)
    assert "cannot build a config" in caplog.text
    assert "KeyError, message withheld" in caplog.text
    assert "secretsecret" not in caplog.text
