"""Requests of machines to the Ignition server, and what it keeps in the cluster."""

import atexit
import base64
import contextlib
import json
import socket
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from http.client import HTTPResponse
from io import BytesIO
from typing import Any

from tests import oracle
from tests.fuzz.target import FuzzTarget, Grammar
from tests.fuzz.targets.scratch import make_directory
from tests.provisioning.logged import make_logged
from tests.provisioning.samples import (
    NEW,
    make_config,
    make_controller_config,
    make_file,
    make_pool,
)
from tests.provisioning.serving import OneToken, Rows, write_certificate, write_json
from treenail.controllers.runtime.http_server import read_address
from treenail.encoding.json_text import parse_json
from treenail.errors import TreenailError
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.source import (
    ObservedControllerConfig,
    PackedConfig,
    ServedPool,
    SourceSettings,
)
from treenail.provisioning.machines.logged_requests import (
    DATA_KEY,
    format_requests,
    merge_requests,
    parse_requests,
)
from treenail.provisioning.server.certificate import ServerCertificate
from treenail.provisioning.server.server import (
    IgnitionServer,
    ServerLimits,
    _IgnitionListener,
    _IgnitionRequestHandler,
)
from treenail.provisioning.server.service import ConfigService, choose_version
from treenail.provisioning.tokens.certificates import read_certificates, store_certificates
from treenail.provisioning.tokens.tokens import (
    _DATA_KEY,
    TokenTable,
    TokenTableParser,
    claim_use,
    find_refusal,
    find_state,
    format_token_table,
)
from treenail_lab.apiserver.access.certificates import CertificateAuthority

_NOW = 1_800_000_000.0
_TOKEN = "tn_abc_" + "A" * 32


class _PlainEnd(socket.socket):
    """The server's end of a connection whose handshake is done."""

    def do_handshake(self) -> None:
        """The fuzzed bytes are those inside TLS."""

    def setsockopt(self, *_: Any) -> None:
        """Accept every option: a pair has none of TCP."""


@cache
def _make_listener() -> _IgnitionListener:
    directory = make_directory()
    sources = directory / "sources"
    sources.mkdir()
    write_json(sources / "pool.json", make_pool())
    write_json(sources / "config.json", make_config(NEW, make_file("/etc/a")))
    certificate = directory / "serving.pem"
    write_certificate(CertificateAuthority(directory), certificate)
    service = ConfigService(
        DirectorySource(sources, SourceSettings()), OneToken(_TOKEN, b"kubeconfig")
    )
    server = IgnitionServer(
        ("127.0.0.1", 0),
        ServerCertificate(certificate, certificate),
        service,
        Rows(),
        limits=ServerLimits(),
        describe_status=lambda: {"a": 1},
    )
    atexit.register(server._server.server_close)
    return server._server


def read_request(content: bytes) -> Iterable[str]:
    """Answer the bytes of one connection; the answer is empty, or one valid HTTP response."""
    listener = _make_listener()
    own, client = socket.socketpair()
    server_end = _PlainEnd(fileno=own.detach())
    with client, server_end:
        client.settimeout(10)
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        try:
            _IgnitionRequestHandler(server_end, ("127.0.0.1", 1), listener)
        finally:
            listener.shutdown_request(server_end)
            listener._connections.clear()
        answer = b""
        # The server may close the connection before it has read all.
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                answer += piece
    if answer:
        _check_response(content, answer)
    assert _TOKEN.encode() not in answer
    return ()


def _check_response(content: bytes, answer: bytes) -> None:
    class Source:
        def makefile(self, _mode: str) -> BytesIO:
            return BytesIO(answer)

    # As the server splits the line: at a no-break space, too.
    method = "HEAD" if content.decode("latin-1").split()[:1] == ["HEAD"] else "GET"
    response = HTTPResponse(Source(), method=method)  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    assert response.status in {200, 400, 401, 404, 405, 408, 414, 431, 501, 503, 505}, answer
    assert method == "HEAD" or response.status == 200 or json.loads(body)["error"]


def read_accept(content: bytes) -> Iterable[str]:
    """Choose a version for an Accept header, and read an address."""
    text = content.decode("latin-1")
    read_address((text, 1))
    return [choose_version(text)]


def read_tokens(content: bytes) -> Iterable[str]:
    """Read the Secret with access tokens; its content is compressed in every other input."""
    packed = zlib.compress(content) if len(content) % 2 else content
    encoded = base64.b64encode(packed).decode()
    table = TokenTableParser("Secret").parse({"data": {_DATA_KEY: encoded}})
    assert TokenTableParser("Secret").parse({"data": format_token_table(table)}) == table
    for record in table.tokens.values():
        find_refusal(record, "worker", "10.0.0.1", _NOW, retry_window_s=600.0)
        claim_use(record, "10.0.0.1", _NOW, retry_window_s=600.0)
        yield f"{record.name} {find_state(record, _NOW)} {record.machine} {record.nodes}"


def read_certificate_table(content: bytes) -> Iterable[str]:
    """Read the certificates beside the access tokens."""
    encoded = base64.b64encode(zlib.compress(content)).decode()
    found = read_certificates(TokenTable(certificates=encoded), 0.0)
    again = store_certificates(TokenTable(), found.note_nodes(["worker-1"], _NOW))
    assert len(read_certificates(again, 0.0).rows) >= len(found.rows)
    return [f"{row.node} {row.identity} {row.token} {row.key}" for row in found.rows]


def read_log(content: bytes) -> Iterable[str]:
    """Read the ConfigMap with the log of requests."""
    text = content.decode("utf-8", "replace")
    rows = parse_requests({DATA_KEY: text})
    merged = merge_requests(rows, rows, _NOW)
    again = parse_requests(format_requests(merged))
    assert len(again) == len(merged)
    return [str(each) for each in rows]


def read_kubelet_request(content: bytes) -> Iterable[str]:
    """Read a CertificateSigningRequest."""
    document = _parse(content)
    if not isinstance(document, dict):
        return ()
    found = KubeletRequest.from_json(document)
    return [] if found is None else [found.node, found.problem, found.machine, found.failure]


def read_source_object(content: bytes) -> Iterable[str]:
    """Read the objects that the server answers from."""
    document = _parse(content)
    if not isinstance(document, dict):
        return
    for read in (ServedPool.from_json, ObservedControllerConfig.from_json, _read_packed):
        try:
            read(document)
        except TreenailError as error:
            yield str(error)


def _parse(content: bytes) -> object:
    try:
        return parse_json(content)
    except ValueError:
        return None


def _read_packed(document: dict[str, Any]) -> bytes:
    return PackedConfig.from_json(document).read_text()


def _list_requests() -> Iterator[bytes]:
    accept = "Accept: application/vnd.coreos.ignition+json;version=3.4.0, */*;q=0.1\r\n"
    for line in (
        f"GET /config/worker HTTP/1.1\r\nHost: a\r\n{accept}Authorization: Bearer {_TOKEN}\r\n\r\n",
        f"HEAD /config/worker?token={_TOKEN} HTTP/1.1\r\nHost: a\r\n{accept}\r\n",
        "GET /healthz HTTP/1.0\r\n\r\n",
        "GET /status HTTP/1.1\r\nHost: a\r\n\r\n",
        "POST /config/worker HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
        "GET /config/worker\r\n",
        "GET //config/../x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n folded\r\n\r\n",
        "GET /config/worker HTTP/9.9\r\n\r\n",
        "GET /config/worker?" + "&".join("token=a" for _ in range(20)) + " HTTP/1.1\r\n\r\n",
        "GET /config/worker?token=%FF%00 HTTP/1.1\r\n" + "a: b\r\n" * 200 + "\r\n",
    ):
        yield line.encode("latin-1")


def _list_accepts() -> Iterator[bytes]:
    for record in oracle.records("accept_header")[:100]:
        yield record["accept"].encode()
    yield b"application/vnd.coreos.ignition+json;version=3.5.0, */*;q=0.1"


def _list_certificates() -> Iterator[bytes]:
    rows = ["w1 abc234 abc234 0123456789-_ 1900000000", "w2    1900000000", "w3 a/w3 abc  1"]
    for count in range(4):
        document = {"format": 1, "since": 1, "certificates": rows[:count]}
        yield json.dumps(document).encode()


def _list_tokens() -> Iterator[bytes]:
    digest = base64.b64encode(b"\1" * 32).decode().rstrip("=")
    rows = [
        f"abc {digest} worker 1800001000 2 -",
        f"def {digest} worker 1700000000 1 w1 10.0.0.1,1700000000,sent fd00::1,170,claimed,2",
        *(
            f"x{state} {digest} worker 1800001000 5 w2 10.0.0.1,1700000000,{state} @w1"
            for state in ("claimed", "sent", "joined")
        ),
    ]
    for count in range(len(rows)):
        yield json.dumps({"format": 1, "tokens": rows[: count + 1]}).encode()
        yield json.dumps({"format": 1, "tokens": rows[: count + 1], "x": 1}).encode() + b" "


def _list_logs() -> Iterator[bytes]:
    rows = [make_logged(), make_logged("b-2", reason="x"), make_logged("c-3", token="")]
    yield next(iter(format_requests(rows).values())).encode()


def _list_kubelet_requests() -> Iterator[bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    from treenail.provisioning.tokens import bootstrap_tokens as groups

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:nodes"),
            x509.NameAttribute(NameOID.COMMON_NAME, "system:node:w1"),
        ]
    )
    signed = x509.CertificateSigningRequestBuilder().subject_name(subject)
    pem = signed.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    yield json.dumps(
        {
            "metadata": {"name": "csr-a", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "username": f"{groups.USER_PREFIX}abcdef",
                "groups": [
                    groups.GROUP, f"{groups.GROUP}:worker", f"{groups.TOKEN_GROUP}:abc",
                    f"{groups.MACHINE_GROUP}:w1", f"{groups.USES_GROUP}:3",
                ],
                "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
                "usages": ["digital signature", "client auth"],
                "request": base64.b64encode(pem).decode(),
            },
            "status": {"conditions": [{"type": "Approved", "status": "True", "message": "x"}]},
        }
    ).encode()  # fmt: skip


def _list_source_objects() -> Iterator[bytes]:
    for document in (make_pool(), make_config(NEW, make_file("/a")), make_controller_config()):
        yield json.dumps(document).encode()


TARGETS = (
    FuzzTarget("ignition-request", read_request, _list_requests, Grammar.LINES, max_bytes=16384),
    FuzzTarget("accept-header", read_accept, _list_accepts, max_bytes=1024),
    FuzzTarget("token-secret", read_tokens, _list_tokens, Grammar.JSON),
    FuzzTarget("certificate-table", read_certificate_table, _list_certificates, Grammar.JSON),
    FuzzTarget("request-log", read_log, _list_logs, Grammar.JSON),
    FuzzTarget("kubelet-request", read_kubelet_request, _list_kubelet_requests, Grammar.JSON),
    FuzzTarget("source-objects", read_source_object, _list_source_objects, Grammar.JSON),
)
