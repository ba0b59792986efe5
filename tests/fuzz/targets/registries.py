"""Answers of image registries, of token servers and of the API server."""

import base64
import gzip
import io
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakes.clock import FakeClock
from tests.fuzz.target import FuzzTarget, Grammar
from tests.registry.scripted_server import make_answer
from treenail.encoding.json_text import parse_json
from treenail.errors import ClusterError, TreenailError
from treenail.image.config_layer import ConfigLayer
from treenail.image.oci.attachments import (
    PackageList,
    find_payload_problem,
    make_spdx_document,
    read_signatures,
)
from treenail.image.oci.documents import append_layer, read_labels
from treenail.image.oci.prune import find_digests
from treenail.kube.api_client import Client, WatchStream
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import NODES
from treenail.kube.transport.connection import (
    HttpResponse,
    MalformedResponseError,
    TruncatedResponseError,
)
from treenail.kube.transport.kubeconfig import ApiServerConfig
from treenail.kube.transport.native import _HttpProtocol
from treenail.oci_content import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.images import read_artifact, resolve_image
from treenail.registry.names import Descriptor
from treenail.registry.referrers import get_referrers
from treenail.registry.transport import TlsSettings
from treenail.registry.uploads import upload_bytes

_HOST = "registry.example.com:5000"
_PASSWORD = "canary-password-4711"
_LOGIN = Login("robot", _PASSWORD)
_DIGEST = "sha256:" + "a" * 64
_SEPARATOR = b"\n=====\n"
_MAX_CONNECTIONS = 8

Operation = Callable[[RegistryClient], object]
_OPERATIONS: tuple[Operation, ...] = (
    lambda client: client.get_manifest("os/node", "latest"),
    lambda client: client.head_manifest("os/node", "latest"),
    lambda client: client.list_tags("os/node"),
    lambda client: resolve_image(client, "os/node", "latest", "amd64"),
    lambda client: get_referrers(client, "os/node", _DIGEST),
    lambda client: read_artifact(client, "os/node", _DIGEST),
    lambda client: client.read_blob("os/node", Descriptor("x", _DIGEST, 10), lambda _: None),
    lambda client: upload_bytes(client, "os/node", "x", b"content"),
    lambda client: client.delete_manifest("os/node", _DIGEST),
)


@contextmanager
def answer_connections(answers: list[bytes]) -> Iterator[None]:
    """Answer each connection of this process by the next of these bytes; refuse the ninth."""
    opened: list[socket.socket] = []
    original = socket.create_connection

    def connect(*_: object, **__: object) -> socket.socket:
        if len(opened) >= _MAX_CONNECTIONS:
            raise ConnectionRefusedError(111, "Connection refused")
        own, other = _LoopbackSocket.make_pair()
        other.sendall(answers[len(opened) % len(answers)])
        other.shutdown(socket.SHUT_WR)
        opened.append(other)
        return own

    socket.create_connection = connect  # type: ignore[assignment]
    try:
        yield
    finally:
        socket.create_connection = original
        for each in opened:
            each.close()


class _LoopbackSocket(socket.socket):
    """One end of a pair, which has no options of TCP."""

    @classmethod
    def make_pair(cls) -> tuple["_LoopbackSocket", socket.socket]:
        own, other = socket.socketpair()
        other.setblocking(True)
        return cls(fileno=own.detach()), other

    def setsockopt(self, *_: Any) -> None:
        """Accept every option."""

    def getpeername(self) -> tuple[str, int]:
        """Return an address that no registry of the tests has."""
        return "192.0.2.1", 443


def _run_operations(answers: list[bytes]) -> Iterator[str]:
    for operation in _OPERATIONS:
        client = RegistryClient(_HOST, FakeClock(), login=_LOGIN, tls=TlsSettings(is_plain=True))
        with answer_connections(answers):
            try:
                operation(client)
            except TreenailError as error:
                shown = (str(error), error.remedy)
                _check_secrets(shown)
                yield from shown
            finally:
                client.close()


def _check_secrets(shown: Iterable[str]) -> None:
    for each in shown:
        assert _PASSWORD not in each
        assert _LOGIN.basic not in each


def read_registry(content: bytes) -> Iterable[str]:
    """Send the answers that a JSON document lists to each operation of the client."""
    try:
        document = parse_json(content)
    except ValueError:
        return ()
    found = document.get("answers") if isinstance(document, dict) else None
    answers = (
        [_format_answer(each) for each in found if isinstance(each, dict)]
        if isinstance(found, list)
        else []
    )
    return [*_run_operations(answers[:_MAX_CONNECTIONS])] if answers else ()


def _format_answer(document: dict[str, object]) -> bytes:
    body = document.get("body")
    content = (body if isinstance(body, str) else json.dumps(body)).encode("utf-8", "replace")
    headers = document.get("headers")
    fields = {"Content-Length": len(content), **(headers if isinstance(headers, dict) else {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {document.get('status')} X\r\n{head}\r\n".encode("utf-8", "replace") + content


def read_registry_bytes(content: bytes) -> Iterable[str]:
    """Send raw bytes as answers."""
    return [*_run_operations(content.split(_SEPARATOR)[:_MAX_CONNECTIONS])]


def read_image_documents(content: bytes) -> Iterable[str]:
    """Read documents of images: manifest and config, signatures, packages and references."""
    find_payload_problem(content, "quay.io/os/node", _DIGEST)
    read_labels(content)
    [*read_signatures(content)]
    try:
        document = parse_json(content)
    except ValueError:
        return
    [*find_digests(document)]
    if not isinstance(document, dict):
        return
    manifest, config = (json.dumps(document.get(name)).encode() for name in ("manifest", "config"))
    layer = ConfigLayer(b"x", _DIGEST, _DIGEST)
    for kind in (OCI_MANIFEST, DOCKER_MANIFEST):
        try:
            append_layer(kind, manifest, config, layer, {"a": "b"})
        except TreenailError as error:
            yield str(error)
    packages = PackageList.from_json(document.get("packages") or {})
    make_spdx_document(packages, image="a/b", digest=_DIGEST, version="1", created="x")
    yield str(packages)


class _Pieces:
    """A connection that delivers bytes in pieces."""

    def __init__(self, content: bytes) -> None:
        self._source = io.BytesIO(content)

    def read_some(self) -> bytes:
        return self._source.read(1000)


class _Answers:
    """A transport whose server sends the same bytes to each request, as often as eight times."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._left = _MAX_CONNECTIONS
        self._wire = _HttpProtocol(
            ApiServerConfig(server="https://a.example.com:6443"), FakeClock(), 1.0
        )

    def send(self, request: ApiRequest) -> ApiResponse:
        self._left -= 1
        if self._left < 0:
            raise ClusterError("the answers have ended")
        try:
            return self._wire.read_response(request, HttpResponse(_Pieces(self._content)))
        except (OSError, MalformedResponseError, TruncatedResponseError) as error:
            raise self._wire.make_unreachable(request, error, 1.0) from error

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "_Stream":
        return _Stream(self, request)

    def iter_lines(self, request: ApiRequest) -> Iterator[bytes]:
        try:
            yield from self._wire.iter_lines(request, HttpResponse(_Pieces(self._content)))
        except (OSError, MalformedResponseError, TruncatedResponseError) as error:
            raise self._wire.make_unreachable(request, error, 1.0) from error

    def close(self) -> None:
        """Nothing is open."""


class _Stream:
    def __init__(self, transport: _Answers, request: ApiRequest) -> None:
        self._transport = transport
        self._request = request

    def read_response(self) -> ApiResponse:
        return self._transport.send(self._request)

    def iter_lines(self) -> Iterator[bytes]:
        return self._transport.iter_lines(self._request)

    def close(self) -> None:
        """Nothing is open."""


def read_api_server(content: bytes) -> Iterable[str]:
    """Read a response of the API server as object, list and watch."""
    client = Client(_Answers(content))
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.get(NODES, "a"),
        lambda: [*client.list_pages(NODES)],
        lambda: client.evict("a", "b"),
        lambda: [*_connect(client.watch(NODES))],
    )
    for call in calls:
        try:
            call()
        except TreenailError as error:
            yield from (str(error), error.remedy)


def _connect(stream: WatchStream) -> WatchStream:
    stream.connect()
    return stream


def _list_registry() -> Iterator[bytes]:
    yield from map(_encode, _list_conversations())


def _list_registry_bytes() -> Iterator[bytes]:
    for each in _list_conversations():
        yield _SEPARATOR.join(map(_format_answer, each["answers"]))
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    yield make_answer(301, Location="/v2/x") + b"x"


def _list_conversations() -> Iterator[dict[str, Any]]:
    config = {"mediaType": "x", "digest": _DIGEST, "size": 2}
    manifest = {
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": [config],
    }  # fmt: skip
    platform = {"os": "linux", "architecture": "amd64"}
    index = {
        "schemaVersion": 2, "mediaType": OCI_INDEX,
        "manifests": [{**config, "platform": platform, "annotations": {"a": "b"}}],
    }  # fmt: skip
    bearer = 'Bearer realm="http://auth.example.com/token",service="r",scope="x"'
    challenge = {"status": 401, "headers": {"WWW-Authenticate": bearer}, "body": ""}
    token = {"status": 200, "headers": {}, "body": {"token": "abc", "expires_in": 60}}
    errors = [{"code": "DENIED", "message": "no \x1b[2J", "detail": {"Err": 28}}]

    def ok(body: object, **headers: object) -> dict[str, Any]:
        return {
            "status": 200,
            "headers": {k.replace("_", "-"): v for k, v in headers.items()},
            "body": body,
        }

    yield {"answers": [ok(manifest, Content_Type=OCI_MANIFEST), ok(index), ok("{}")]}
    yield {"answers": [challenge, token, ok(index, Content_Type=OCI_INDEX), ok(manifest)]}
    yield {"answers": [ok({"tags": ["a", "b"]}, Link='</v2/x?n=1>; rel="next"'), ok({"tags": []})]}
    for status in (400, 401, 403, 404, 405, 413, 429, 500, 507):
        yield {
            "answers": [
                {"status": status, "headers": {"Retry-After": "5"}, "body": {"errors": errors}}
            ]
        }
    yield {
        "answers": [{"status": 401, "headers": {"WWW-Authenticate": "Basic realm=x"}, "body": ""}]
    }
    yield {
        "answers": [
            {"status": 307, "headers": {"Location": "http://b.example.com/x?sig=1"}, "body": ""},
            ok("x"),
        ]
    }
    yield {
        "answers": [{"status": 202, "headers": {"Location": "/v2/u/1", "Range": "0-3"}, "body": ""}]
    }


def _list_image_documents() -> Iterator[bytes]:
    layer = {"mediaType": "x", "digest": _DIGEST, "size": 2}
    package = {
        "manager": "rpm",
        "name": "a",
        "version": "1:2-3",
        "architecture": "x",
        "license": "GPL",
        "source": "s",
    }
    yield _encode(
        {
            "manifest": {"config": layer, "layers": [layer]},
            "config": {
                "config": {"Labels": {"a": "b"}}, "rootfs": {"diff_ids": [_DIGEST]},
                "history": [{"created_by": "x"}], "created": "2026-01-01T00:00:00Z",
            },
            "packages": {"distribution": "fedora", "packages": [package]},
        }
    )  # fmt: skip
    yield _encode({"config": {"Labels": {"a": "b"}}})
    critical = {
        "type": "cosign container image signature",
        "image": {"docker-manifest-digest": _DIGEST},
        "identity": {"docker-reference": "quay.io/os/node"},
    }
    yield _encode({"critical": critical})
    signature = base64.b64encode(b"x").decode()
    yield _encode(
        {
            "layers": [
                {
                    "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
                    "digest": _DIGEST, "size": 5,
                    "annotations": {"dev.cosignproject.cosign/signature": signature},
                }
            ]
        }
    )  # fmt: skip


def _list_api_server() -> Iterator[bytes]:
    node = {"metadata": {"name": "a", "resourceVersion": "5"}}
    listed = {
        "kind": "NodeList",
        "metadata": {"resourceVersion": "7", "continue": ""},
        "items": [node],
    }
    status = {
        "kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "no",
        "details": {"causes": [{"reason": "DisruptionBudget", "message": "needs 2"}],
                    "retryAfterSeconds": 5},
    }  # fmt: skip
    event = {"type": "MODIFIED", "object": node}
    for body in (node, listed, status, event, {"type": "ERROR", "object": status}):
        yield make_answer(200, _encode(body) + b"\n")
    for code in (401, 404, 409, 410, 422, 429, 500, 503):
        yield make_answer(code, _encode({**status, "code": code}), Retry_After="3")
    packed = gzip.compress(_encode(listed))
    yield make_answer(200, packed, Content_Encoding="gzip")
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    yield make_answer(500, b'{"a":' * 3000)
    yield make_answer(200, b'{"a":' * 3000)


def _encode(document: object) -> bytes:
    return json.dumps(document).encode()


TARGETS = (
    FuzzTarget("registry", read_registry, _list_registry, Grammar.JSON),
    FuzzTarget("registry-bytes", read_registry_bytes, _list_registry_bytes, Grammar.LINES),
    FuzzTarget("image-documents", read_image_documents, _list_image_documents, Grammar.JSON),
    FuzzTarget("api-server", read_api_server, _list_api_server, Grammar.LINES, max_bytes=16384),
)
