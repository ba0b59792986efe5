"""A hostile registry: each answer ends in a typed error, within limits, and leaks no login."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.registry.images import describe_blob
from tests.registry.scripted_server import Script, ScriptedServer, SeenRequest, make_answer
from treenail.clocks import SystemClock
from treenail.oci_content import OCI_INDEX, OCI_MANIFEST, compute_digest
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.errors import (
    AnswerInvalid,
    DigestMismatch,
    NotFound,
    RegistryError,
    ServerFailure,
    Unreachable,
)
from treenail.registry.images import resolve_image
from treenail.registry.names import Descriptor
from treenail.registry.referrers import get_referrers
from treenail.registry.transport import RegistryLimits, TlsSettings
from treenail.registry.uploads import mount_blob, upload_bytes

PASSWORD = "canary-password-4711"
LOGIN = Login("robot", PASSWORD)
DIGEST = f"sha256:{'a' * 64}"
MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": []}).encode()
LIMITS = RegistryLimits(request_s=3.0, idle_s=1.0, bytes_per_s=1e9)
BASIC = make_answer(401, WWW_Authenticate='Basic realm="x"')


def make_client(
    server: ScriptedServer, limits: RegistryLimits = LIMITS, *, login: Login = LOGIN
) -> RegistryClient:
    return RegistryClient(
        server.host, FakeClock(), login=login, tls=TlsSettings(is_plain=True), limits=limits
    )


def read_manifest(client: RegistryClient) -> object:
    return client.get_manifest("os/node", DIGEST)


def read_tags(client: RegistryClient) -> object:
    return client.list_tags("os/node")


def read_blob(client: RegistryClient) -> object:
    return client.read_blob("os/node", Descriptor("x", DIGEST, 10), lambda _: None)


def push_blob(client: RegistryClient) -> object:
    return upload_bytes(client, "os/node", "x", b"content")


def push_manifest(client: RegistryClient) -> object:
    return client.put_manifest("os/node", "tag", OCI_MANIFEST, MANIFEST)


def read_referrers(client: RegistryClient) -> object:
    return get_referrers(client, "os/node", DIGEST)


def resolve(client: RegistryClient) -> object:
    return resolve_image(client, "os/node", "tag", "amd64")


def answer_upload(location: str, position: str = "0-0") -> Script:
    def script(request: SeenRequest) -> bytes:
        if request.method == "HEAD":
            return make_answer(404)
        return make_answer(202, Location=location, Range=position)

    return script


def repeat(answer: bytes) -> Script:
    return lambda _: answer


def answer_endlessly(head: bytes, piece: bytes) -> Script:
    def endless() -> Iterator[bytes]:
        yield head
        while True:
            yield piece

    return lambda _: endless()


OVERSIZE_INDEX = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [
            {
                "mediaType": OCI_MANIFEST,
                "digest": "sha512:" + "a" * 128,
                "size": 5,
                "platform": {"os": "linux", "architecture": "amd64"},
            }
        ],
    }
).encode()

CASES: dict[str, tuple[Callable[[RegistryClient], object], Script, type[RegistryError]]] = {
    "no-http": (read_manifest, repeat(b"SSH-2.0-OpenSSH\r\n\r\n"), AnswerInvalid),
    "empty": (read_manifest, repeat(b""), Unreachable),
    "huge-header": (
        read_manifest,
        repeat(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"),
        AnswerInvalid,
    ),
    "many-headers": (
        read_manifest,
        repeat(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"),
        AnswerInvalid,
    ),
    "endless-headers": (
        read_manifest,
        answer_endlessly(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100),
        AnswerInvalid,
    ),
    "endless-body": (
        read_manifest,
        answer_endlessly(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        AnswerInvalid,
    ),
    "endless-chunks": (
        read_manifest,
        answer_endlessly(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"10000\r\n" + b"x" * 65536 + b"\r\n",
        ),
        AnswerInvalid,
    ),
    "endless-error": (
        read_manifest,
        answer_endlessly(b"HTTP/1.1 404 OK\r\n\r\n", b"x" * 65536),
        NotFound,
    ),
    "huge-length": (
        read_manifest,
        repeat(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n{}"),
        Unreachable,
    ),
    "negative-length": (
        read_manifest,
        repeat(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
        DigestMismatch,
    ),
    "bad-chunk": (
        read_manifest,
        repeat(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"),
        Unreachable,
    ),
    "wrong-digest": (read_manifest, repeat(make_answer(200, MANIFEST)), DigestMismatch),
    "no-json": (
        resolve,
        repeat(make_answer(200, b"<html>", Content_Type=OCI_MANIFEST)),
        AnswerInvalid,
    ),
    "deep-json": (
        resolve,
        repeat(make_answer(200, b"[" * 100_000, Content_Type=OCI_MANIFEST)),
        AnswerInvalid,
    ),
    "both-kinds": (
        resolve,
        repeat(
            make_answer(
                200,
                json.dumps({"mediaType": OCI_INDEX, "layers": [], "manifests": []}).encode(),
            )
        ),
        AnswerInvalid,
    ),
    "schema-1": (
        resolve,
        repeat(make_answer(200, b'{"schemaVersion": 1, "fsLayers": []}')),
        AnswerInvalid,
    ),
    "other-algorithm": (resolve, repeat(make_answer(200, OVERSIZE_INDEX)), AnswerInvalid),
    "other-header-digest": (
        resolve,
        repeat(make_answer(200, MANIFEST, Docker_Content_Digest=DIGEST)),
        DigestMismatch,
    ),
    "redirect-loop": (
        read_blob,
        repeat(make_answer(307, Location=f"/v2/os/node/blobs/{DIGEST}")),
        AnswerInvalid,
    ),
    "redirect-file": (
        read_blob,
        repeat(make_answer(302, Location="file:///etc/passwd")),
        AnswerInvalid,
    ),
    "redirect-user": (
        read_blob,
        repeat(make_answer(302, Location="http://user:secret@127.0.0.1/")),
        AnswerInvalid,
    ),
    "redirect-nowhere": (read_blob, repeat(make_answer(302)), AnswerInvalid),
    "redirect-control": (
        read_blob,
        repeat(make_answer(302, Location="/a\x0bb c")),
        AnswerInvalid,
    ),
    "long-blob": (read_blob, repeat(make_answer(200, b"x" * 11)), DigestMismatch),
    "short-blob": (read_blob, repeat(make_answer(200, b"x" * 9)), Unreachable),
    "other-range": (
        read_blob,
        lambda request: (
            make_answer(206, b"x", Content_Range="bytes 1-2/10")
            if "range" in request.headers
            else make_answer(200, b"xx")
        ),
        AnswerInvalid,
    ),
    "tags-link-host": (
        read_tags,
        repeat(make_answer(200, b'{"tags": ["a"]}', Link='<http://127.0.0.2:1/v2/x>; rel="next"')),
        AnswerInvalid,
    ),
    "tags-loop": (
        read_tags,
        repeat(make_answer(200, b'{"tags": ["a"]}', Link='</v2/os/node/tags/list>; rel="next"')),
        AnswerInvalid,
    ),
    "tags-numbers": (read_tags, repeat(make_answer(200, b'{"tags": [1, 2]}')), AnswerInvalid),
    "tags-list": (read_tags, repeat(make_answer(200, b"[1]")), AnswerInvalid),
    "upload-host": (push_blob, answer_upload("http://127.0.0.2:1/upload"), AnswerInvalid),
    "upload-nowhere": (push_blob, answer_upload(""), AnswerInvalid),
    "upload-accepted": (push_blob, answer_upload("/v2/os/node/blobs/uploads/1"), AnswerInvalid),
    "push-other-digest": (
        push_manifest,
        repeat(make_answer(201, Docker_Content_Digest=DIGEST)),
        DigestMismatch,
    ),
    "referrers-no-list": (read_referrers, repeat(make_answer(200, b'{"a": 1}')), AnswerInvalid),
    "referrers-digest": (
        read_referrers,
        repeat(
            make_answer(
                200, b'{"manifests": [{"mediaType": "x", "digest": "sha256:..", "size": 1}]}'
            )
        ),
        AnswerInvalid,
    ),
    "no-token-server": (
        read_manifest,
        repeat(make_answer(401, WWW_Authenticate='Bearer service="x"')),
        AnswerInvalid,
    ),
    "mirror": (
        read_manifest,
        lambda request: (
            make_answer(
                500,
                json.dumps(
                    {
                        "errors": [
                            {
                                "code": "X",
                                "message": f"\x1b[31m {request.headers['authorization']} "
                                f"{PASSWORD} no space left on device",
                            }
                        ]
                    }
                ).encode(),
            )
            if "authorization" in request.headers
            else BASIC
        ),
        ServerFailure,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_answer_ends_in_a_typed_error(name: str) -> None:
    call, script, expected = CASES[name]
    with ScriptedServer(script) as server:
        with pytest.raises(expected) as raised:
            call(make_client(server))
        text = f"{raised.value} {raised.value.remedy}"
        assert PASSWORD not in text
        assert LOGIN.basic.removeprefix("Basic ") not in text
        assert text.isprintable()
        assert len(text) < 1500
        assert len(server.requests) < 30


def test_full_registry_is_recognized_and_not_retried() -> None:
    content = b'{"errors": [{"code": "UNKNOWN", "detail": {"Err": 28, "x": "no space left"}}]}'
    with ScriptedServer(repeat(make_answer(500, content))) as server:
        with pytest.raises(ServerFailure) as raised:
            push_manifest(make_client(server))
        assert raised.value.is_full
        assert len(server.requests) == 1


def test_redirect_to_another_host_carries_no_login() -> None:
    content = b"content of the blob"
    blob = describe_blob(content)
    with ScriptedServer(repeat(make_answer(200, content))) as storage:

        def script(request: SeenRequest) -> bytes:
            if "authorization" not in request.headers:
                return BASIC
            return make_answer(307, Location=f"http://localhost:{storage.port}/blob?signature=1")

        with ScriptedServer(script) as server:
            found = bytearray()
            make_client(server).read_blob("os/node", blob, found.extend)
    assert bytes(found) == content
    assert server.requests[-1].headers["authorization"] == LOGIN.basic
    assert [each.target for each in storage.requests] == ["/blob?signature=1"]
    assert "authorization" not in storage.requests[0].headers


REDIRECTS = """
import sys
from tests.registry.test_hostile_registry import follow_redirects
follow_redirects(*sys.argv[1:])
"""


def follow_redirects(*targets: str) -> None:
    """Print the errors of a registry that is not on loopback, and the requests that arrived."""
    ok = repeat(make_answer(200, b"x"))
    with (
        ScriptedServer(ok) as loopback,
        ScriptedServer(ok, "::1") as other,
        ScriptedServer(ok, "169.254.169.254") as link,
    ):
        for target in targets:
            url = target.replace("P4", str(loopback.port)).replace("P6", str(other.port))
            url = url.replace("PL", str(link.port))
            is_token = "token" in target
            answer = (
                make_answer(401, WWW_Authenticate=f'Bearer realm="{url}",service="x"')
                if is_token
                else make_answer(307, Location=url)
            )
            with ScriptedServer(repeat(answer), "192.0.2.1") as server:
                try:
                    read_blob(make_client(server))
                except RegistryError as error:
                    sys.stdout.write(f"{type(error).__name__}: {error}\n")
        counts = [len(server.requests) for server in (loopback, other, link)]
        sys.stdout.write(f"{counts}\n")


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root for a network namespace, and ip",
)
@pytest.mark.process
def test_registry_sends_to_no_address_of_this_host_or_link() -> None:
    targets = (
        "http://127.0.0.1:P4/x", "http://localhost:P4/x", "http://[::1]:P6/x",
        "http://[::ffff:127.0.0.1]:P4/x", "http://169.254.169.254:PL/x", "http://127.0.0.1:P4/token",
    )  # fmt: skip
    setup = (
        "ip link set lo up; ip address add 192.0.2.1/32 dev lo; "
        'ip address add 169.254.169.254/32 dev lo; exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", setup, "sh", sys.executable, "-c", REDIRECTS, *targets],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    *problems, requests = done.stdout.splitlines()
    assert requests == "[0, 0, 0]", done.stdout
    assert len(problems) == len(targets)
    for problem in problems:
        assert "expected no address of this host or link" in problem


def test_error_of_the_other_host_names_no_signed_url() -> None:
    with ScriptedServer(repeat(make_answer(403, b"denied"))) as storage:
        location = f"http://localhost:{storage.port}/blob?signature=canary"
        with (
            ScriptedServer(repeat(make_answer(307, Location=location))) as server,
            pytest.raises(RegistryError) as raised,
        ):
            read_blob(make_client(server))
    assert "canary" not in str(raised.value)
    assert f"localhost:{storage.port}" in str(raised.value)


def test_login_is_sent_only_after_a_challenge() -> None:
    with ScriptedServer(lambda request: BASIC) as server, pytest.raises(RegistryError):
        read_manifest(make_client(server, login=Login()))
    assert all("authorization" not in each.headers for each in server.requests)


def test_interrupted_blob_continues_where_it_ended() -> None:
    content = bytes(range(256)) * 100
    blob = describe_blob(content)

    def script(request: SeenRequest) -> bytes:
        start = int(request.headers.get("range", "bytes=0-")[6:-1])
        head = f"HTTP/1.1 {206 if start else 200} X\r\nContent-Length: {len(content) - start}\r\n"
        if start:
            head += f"Content-Range: bytes {start}-{len(content) - 1}/{len(content)}\r\n"
        return head.encode() + b"\r\n" + content[start : start + 9000]

    with ScriptedServer(script) as server:
        found = bytearray()
        make_client(server).read_blob("os/node", blob, found.extend)
    assert bytes(found) == content
    assert [each.headers.get("range") for each in server.requests] == [
        None,
        "bytes=9000-",
        "bytes=18000-",
    ]


def test_registry_without_ranges_sends_the_blob_again() -> None:
    content = b"0123456789" * 2000
    blob = describe_blob(content)
    lengths = iter([5000, 30000])

    def script(_request: SeenRequest) -> bytes:
        return make_answer(200, content)[: len(make_answer(200)) + next(lengths)]

    with ScriptedServer(script) as server:
        found = bytearray()
        make_client(server).read_blob("os/node", blob, found.extend)
    assert bytes(found) == content


def test_registry_that_does_not_mount_has_its_upload_cancelled() -> None:
    place = "/v2/os/node/blobs/uploads/7"
    script = repeat(make_answer(202, Location=place))
    with ScriptedServer(script) as server:
        assert not mount_blob(make_client(server), "os/node", DIGEST, "base/os")
    assert [(each.method, each.target) for each in server.requests][1:] == [("DELETE", place)]


def test_upload_is_sent_to_no_other_host() -> None:
    with ScriptedServer(repeat(make_answer(201))) as other:
        place = f"http://localhost:{other.port}/v2/os/node/blobs/uploads/7"

        def script(request: SeenRequest) -> bytes:
            return make_answer(404 if request.method == "HEAD" else 202, Location=place)

        with ScriptedServer(script) as server:
            with pytest.raises(AnswerInvalid, match="for the upload, another host"):
                push_blob(make_client(server))
            assert "PUT" not in {each.method for each in server.requests}
        assert other.requests == []


@pytest.mark.parametrize("is_slow_head", [True, False])
def test_dripping_answer_ends_at_the_deadline(is_slow_head: bool) -> None:
    stop = threading.Event()

    def drip() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nX-A: " if is_slow_head else b"HTTP/1.1 200 OK\r\n\r\n"
        while not stop.wait(0.1):
            yield b"x"

    limits = RegistryLimits(request_s=0.4, idle_s=5.0, bytes_per_s=1e9)
    with ScriptedServer(lambda _: drip()) as server:
        client = RegistryClient(
            server.host, SystemClock(), tls=TlsSettings(is_plain=True), limits=limits
        )
        try:
            with pytest.raises(Unreachable, match="does not answer in time"):
                client.get_page("os/node", client.make_url("os/node", "tags/list"), "list tags")
        finally:
            stop.set()


def test_manifest_digest_is_that_of_its_content() -> None:
    script = repeat(make_answer(200, MANIFEST, Content_Type=OCI_MANIFEST))
    with ScriptedServer(script) as server:
        found = make_client(server).get_manifest("os/node", compute_digest(MANIFEST))
    assert found.digest == compute_digest(MANIFEST)
