"""An HTTPS server on loopback; a function of the test answers the requests."""

import http.server
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from treenail_lab.apiserver.access.certificates import CertificateAuthority, write_private_file

Json = dict[str, object]


@dataclass(frozen=True)
class Seen:
    """A received request with header names in lower case; ``user`` is the certificate's name."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    user: str
    peer: int

    @property
    def json(self) -> object:
        return json.loads(self.body)


class Exchange(http.server.BaseHTTPRequestHandler):
    """One connection, one request after the other; the test's function answers each."""

    protocol_version = "HTTP/1.1"
    server: "_Listener"
    seen: Seen

    def setup(self) -> None:
        self.request.settimeout(30)
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.request.close()

    def reply(
        self,
        body: object = None,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with JSON or raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, reason: str, message: str, **more: object) -> None:
        """Answer with a Status."""
        self.reply(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "code": status,
                "reason": reason,
                "message": message,
                **more,
            },
            status,
        )

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_line(self, event: object) -> None:
        self.chunk(json.dumps(event).encode() + b"\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def drop(self) -> None:
        """Close the connection without another byte."""
        self.close_connection = True
        socket.socket.shutdown(self.request, socket.SHUT_RDWR)

    def wait_for_the_end(self) -> None:
        """Send nothing until the client disconnects or the server stops."""
        with suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing: the tests check what the client sees."""

    def _answer(self) -> None:
        address = urlsplit(self.path)
        certificate = self.request.getpeercert() or {}
        names = {key: value for pair in certificate.get("subject", ()) for key, value in pair}
        self.seen = Seen(
            self.command,
            address.path,
            dict(parse_qsl(address.query, keep_blank_values=True)),
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            names.get("commonName", ""),
            self.client_address[1],
        )
        self.server.seen.append(self.seen)
        try:
            self.server.answer(self)
        except OSError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815  http.server's names


Answer = Callable[[Exchange], None]


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, context: ssl.SSLContext, answer: Answer) -> None:
        super().__init__(("127.0.0.1", port), Exchange)
        self.context = context
        self.answer = answer
        self.seen: list[Seen] = []
        self.open: list[socket.socket] = []

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]  # one kind of socket
        self.open.append(request.dup())
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: many tests disconnect the client."""


@dataclass
class Server:
    """A server that can be stopped and started again on the same port."""

    directory: Path
    answer: Answer
    authority: CertificateAuthority = field(init=False)
    port: int = 0
    _listener: _Listener | None = None
    _before: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authority = CertificateAuthority(self.directory)
        self._context = self.authority.make_server_context(self.directory)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def seen(self) -> list[Seen]:
        """All requests so far."""
        return self._before + (self._listener.seen if self._listener else [])

    def start(self) -> None:
        self._listener = _Listener(self.port, self._context, self.answer)
        self.port = self._listener.server_port
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        self._before += listener.seen
        listener.shutdown()
        listener.server_close()
        self.cut(listener)

    def cut(self, listener: _Listener | None = None) -> None:
        """Close every connection and continue to listen."""
        found = (listener or self._listener).open  # type: ignore[union-attr]  # started
        while found:
            connection = found.pop()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def identity(self, user: str) -> Path:
        """Write a file with a client certificate and its key."""
        path = self.directory / "client.pem"
        found = self.authority.make_client_identity(user, ["system:nodes"])
        write_private_file(path, found.certificate + found.private_key)
        return path


@contextmanager
def serving(directory: Path, answer: Answer) -> Iterator[Server]:
    """Run a server that answers with ``answer`` until the end of the block."""
    server = Server(directory, answer)
    server.start()
    try:
        yield server
    finally:
        server.stop()
