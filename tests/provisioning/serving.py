"""A running Ignition server with TLS on loopback, and a client that sends raw bytes."""

import http.client
import io
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.provisioning.samples import NEW, Json, make_config, make_file, make_pool
from treenail.clocks import Clock
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.source import PoolSource, SourceSettings
from treenail.provisioning.machines.logged_requests import RequestRow
from treenail.provisioning.server.certificate import ServerCertificate
from treenail.provisioning.server.server import (
    POOL_ROUTE,
    ConfigRoute,
    IgnitionServer,
    ServerLimits,
)
from treenail.provisioning.server.service import ConfigService
from treenail.provisioning.tokens.tokens import Access, AccessVerdict, OpenAccess
from treenail_lab.apiserver.access.certificates import CertificateAuthority

LIMIT_S = 60.0
IGNITION = "application/vnd.coreos.ignition+json;version={}, */*;q=0.1"


class Rows:
    """Keeps the rows of all requests."""

    def __init__(self) -> None:
        self.rows: list[RequestRow] = []

    def record(self, row: RequestRow) -> None:
        self.rows.append(row)


class OneToken:
    """Accepts one token; a use counts when the config was sent."""

    def __init__(self, token: str, kubeconfig: bytes) -> None:
        self._token = token
        self._kubeconfig = kubeconfig
        self.claims: list[AccessVerdict] = []
        self.uses: list[AccessVerdict] = []
        self.releases: list[AccessVerdict] = []

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:
        if token != self._token:
            return AccessVerdict(http.HTTPStatus.UNAUTHORIZED, "the token is unknown")
        return AccessVerdict(
            token_name="abc", machine="w1", kubeconfig=self._kubeconfig
        )  # a public name

    def claim(self, verdict: AccessVerdict) -> AccessVerdict:
        self.claims.append(verdict)
        return verdict

    def confirm_sent(self, verdict: AccessVerdict) -> None:
        self.uses.append(verdict)

    def release(self, verdict: AccessVerdict) -> None:
        self.releases.append(verdict)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Json:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server and what it recorded."""

    server: IgnitionServer
    authority: CertificateAuthority
    certificate: Path
    requests: Rows
    sources: Path
    """The directory of its inputs."""
    clients: list[socket.socket] = field(default_factory=list)

    def connect(self, **options: Any) -> ssl.SSLSocket:
        """Open a connection with TLS; the end of the test closes it."""
        plain = self.connect_plain()
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        if "maximum_version" in options:
            context.maximum_version = options["maximum_version"]
        if "protocols" in options:
            context.set_alpn_protocols(options["protocols"])
        found = context.wrap_socket(plain, server_hostname="localhost")
        self.clients.append(found)
        return found

    def connect_plain(self, source: str = "127.0.0.1") -> socket.socket:
        found = socket.create_connection(
            ("127.0.0.1", self.server.port), timeout=LIMIT_S, source_address=(source, 0)
        )
        self.clients.append(found)
        return found

    def connect_from(self, source: str) -> ssl.SSLSocket:
        """Open a connection with TLS from an address of loopback; the end of the test closes it."""
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        client = context.wrap_socket(self.connect_plain(source), server_hostname="localhost")
        self.clients.append(client)
        return client

    def fetch_from(self, source: str) -> int:
        """Fetch a config from an address of loopback; return the status."""
        with self.connect_from(source) as client:
            client.sendall(b"GET /config/worker HTTP/1.1\r\n\r\n")
            return read_response(client).status

    def send(self, head: str) -> Response:
        """Send the bytes on a connection of their own; return the response."""
        with self.connect() as client:
            client.sendall(head.encode("latin-1"))
            return read_response(client, head.partition(" ")[0])

    def get(self, path: str, *headers: str, method: str = "GET") -> Response:
        lines = (f"{method} {path} HTTP/1.1", "Host: x", *headers, "", "")
        return self.send("\r\n".join(lines))

    def write(self, name: str, document: Json) -> None:
        """Write an input atomically."""
        write_json(self.sources / f"{name}.json", document)

    def renew_certificate(self) -> bytes:
        """Replace the certificate and its key in one file; return the certificate."""
        return write_certificate(self.authority, self.certificate)


def read_response(client: socket.socket, method: str = "GET") -> Response:
    found = http.client.HTTPResponse(client, method=method)
    found.begin()
    return Response(found.status, found.headers, found.read())


def read_to_end(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    found = io.BytesIO()
    try:
        while received := client.recv(65536):
            found.write(received)
    except (ConnectionError, ssl.SSLError):
        pass
    return found.getvalue()


def write_json(path: Path, document: Json) -> None:
    """Write a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document))
    new.replace(path)


def fetch_config(port: int, ca: bytes, path: str, **headers: str) -> tuple[int, Json]:
    """Return status and body of a GET of a server on loopback."""
    context = ssl.create_default_context(cadata=ca.decode())
    client = http.client.HTTPSConnection("127.0.0.1", port, timeout=LIMIT_S, context=context)
    try:
        client.request("GET", path, headers=headers)
        found = client.getresponse()
        return found.status, json.loads(found.read())
    finally:
        client.close()


def write_certificate(authority: CertificateAuthority, path: Path) -> bytes:
    identity = authority.make_server_identity()
    new = path.with_suffix(".new")
    new.write_bytes(identity.private_key + identity.certificate)
    new.replace(path)
    return identity.certificate


@contextmanager
def serve(
    directory: Path,
    *,
    access: Access | None = None,
    limits: ServerLimits | None = None,
    clock: Clock | None = None,
    source: PoolSource | None = None,
    describe_status: Callable[[], Json] | None = None,
    route: ConfigRoute = POOL_ROUTE,
) -> Iterator[Serving]:
    """Serve one pool with one file."""
    sources = directory / "sources"
    sources.mkdir()
    authority = CertificateAuthority(directory)
    certificate = directory / "serving.pem"
    write_certificate(authority, certificate)
    requests = Rows()
    service = ConfigService(
        source or DirectorySource(sources, SourceSettings()), access or OpenAccess()
    )
    server = IgnitionServer(
        ("127.0.0.1", 0),
        ServerCertificate(certificate, certificate),
        service,
        requests,
        limits=limits or ServerLimits(),
        clock=clock,
        describe_status=describe_status,
        route=route,
    )
    with server:
        found = Serving(server, authority, certificate, requests, sources)
        found.write("pool", make_pool())
        found.write("config", make_config(NEW, make_file("/etc/a")))
        try:
            yield found
        finally:
            for client in found.clients:
                client.close()
