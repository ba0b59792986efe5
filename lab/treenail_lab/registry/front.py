"""A front before a registry on a Unix socket: TLS, a login that may only pull, and faults.

The registry's own htpasswd knows no permissions: each login may push. A test or a demo injects the
faults between the registry and its clients.
"""

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol


class FaultKind(StrEnum):
    """How a request goes wrong."""

    STATUS = "status"
    """Answer `RegistryFault.status` without asking the registry."""
    DROP = "drop"
    """Close the connection without an answer; the registry never gets the request."""
    CUT = "cut"
    """Give the registry only ``after_bytes`` of the body, then close without an answer."""
    LOSE = "lose"
    """Give the registry the whole request, then close without an answer."""
    HANG = "hang"
    """Answer nothing until the front stops."""
    TRUNCATE = "truncate"
    """Announce the whole answer, send ``after_bytes`` of its body, and close."""
    CORRUPT = "corrupt"
    """Change the first byte of the answer's body."""
    WRONG_DIGEST = "wrong digest"
    """Answer another Docker-Content-Digest than the registry."""
    REDIRECT = "redirect"
    """Answer 307 with `RegistryFault.location`."""


@dataclass(frozen=True, slots=True)
class RegistryFault:
    """One fault; it applies to the next ``times`` requests that match, or to all with 0."""

    kind: FaultKind
    method: str = ""
    """Methods as a regular expression; empty for all."""
    path: str = ""
    """A regular expression that is searched in the path with its query; empty for all."""
    times: int = 1
    status: int = 500
    text: str = ""
    """The message in the body of the answer."""
    code: str = ""
    """The error code in the body of the answer."""
    retry_after: str = ""
    challenge: str = 'Basic realm="lab"'
    """WWW-Authenticate of an answer with the status 401."""
    after_bytes: int = 0
    location: str = ""


class FaultPlan:
    """The faults that wait for a request; safe for several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._faults: list[tuple[RegistryFault, int]] = []

    def add(self, fault: RegistryFault) -> None:
        """Add a fault after those that wait."""
        with self._guard:
            self._faults.append((fault, fault.times))

    def clear(self) -> None:
        """Drop all faults."""
        with self._guard:
            self._faults.clear()

    @property
    def is_empty(self) -> bool:
        """Whether every fault was applied as often as it should."""
        with self._guard:
            return not self._faults

    def take(self, method: str, path: str) -> RegistryFault | None:
        """Return the fault of this request, which counts as one of its times."""
        with self._guard:
            for index, (fault, left) in enumerate(self._faults):
                if _matches(fault, method, path):
                    if left == 1:
                        del self._faults[index]
                    elif left:
                        self._faults[index] = fault, left - 1
                    return fault
        return None


def _matches(fault: RegistryFault, method: str, path: str) -> bool:
    is_method = not fault.method or re.fullmatch(fault.method, method) is not None
    return is_method and re.search(fault.path, path) is not None


_PIECE = 256 * 1024
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "expect"}
_BACKEND_TIMEOUT_S = 120.0


class RefusedRequest(Exception):
    """A request that the front answers itself."""

    def __init__(self, status: int, code: str, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class RegistryAuthorizer(Protocol):
    """Decides about a request before the registry does."""

    def authorize(self, method: str, path: str, authorization: str) -> str:
        """Return the Authorization for the registry; raise `RefusedRequest`."""


class RegistryFront:
    """Serves a registry over HTTPS on a port of loopback while entered."""

    def __init__(
        self, backend: Path, context: ssl.SSLContext | None, authorizer: RegistryAuthorizer
    ) -> None:
        self.faults = FaultPlan()
        self.requests: list[tuple[str, str, int]] = []
        """Method, path with query, and status of each answered request; 0 without an answer."""
        self.backend = backend
        self.authorizer = authorizer
        self.stopping = threading.Event()
        front = self

        class FrontHandler(_FrontHandler):
            server_front = front

        class FrontServer(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def get_request(self) -> tuple[socket.socket, object]:
                connection, address = super().get_request()
                if context is None:
                    return connection, address
                # The handshake happens in the thread of the connection.
                wrapped = context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                return wrapped, address

            def handle_error(self, request: object, client_address: object) -> None:
                """Stay silent: clients break connections in tests."""

        self._server = FrontServer(("127.0.0.1", 0), FrontHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def host(self) -> str:
        """The address that pull specs begin with."""
        return f"127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class UnixConnection(http.client.HTTPConnection):
    """A connection to an HTTP server on a Unix socket."""

    def __init__(self, path: Path, *, timeout_s: float = _BACKEND_TIMEOUT_S) -> None:
        super().__init__("registry", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise


class _FrontHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    server_front: RegistryFront

    def handle_request(self) -> None:
        front = self.server_front
        self._unread = _BodyReader(self)
        fault = front.faults.take(self.command, self.path)
        try:
            if fault is not None:
                self._fail_early(fault)
            authorization = front.authorizer.authorize(
                self.command, self.path, self.headers.get("Authorization", "")
            )
        except RefusedRequest as refusal:
            self._refuse(refusal)
            return
        except ConnectionAbortedError:
            front.requests.append((self.command, self.path, 0))
            self.close_connection = True
            return
        connection = UnixConnection(front.backend)
        try:
            self._forward(connection, authorization, fault)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            connection.close()

    def log_message(self, *_: object) -> None:
        """Stay silent: `RegistryFront.requests` is the log."""

    def _fail_early(self, fault: RegistryFault) -> None:
        if fault.kind is FaultKind.STATUS:
            retry_after = {"Retry_After": fault.retry_after} if fault.retry_after else {}
            challenge = {"WWW_Authenticate": fault.challenge} if fault.status == 401 else {}
            raise RefusedRequest(
                fault.status, fault.code or "UNKNOWN", fault.text, **retry_after, **challenge
            )
        if fault.kind is FaultKind.REDIRECT:
            raise RefusedRequest(307, "", "", Location=fault.location)
        if fault.kind is FaultKind.HANG:
            self.server_front.stopping.wait()
        if fault.kind in {FaultKind.HANG, FaultKind.DROP}:
            raise ConnectionAbortedError

    def _refuse(self, refusal: RefusedRequest) -> None:
        # A client that still sends would get a reset instead of the answer.
        for _piece in self._unread:
            pass
        errors = {"errors": [{"code": refusal.code, "message": str(refusal)}]}
        content = json.dumps(errors).encode()
        self.server_front.requests.append((self.command, self.path, refusal.status))
        self.send_response(refusal.status)
        for name, value in refusal.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _forward(
        self, connection: UnixConnection, authorization: str, fault: RegistryFault | None
    ) -> None:
        # buildah and skopeo send one Accept for each media type.
        headers = {
            name: ", ".join(self.headers.get_all(name, []))
            for name in self.headers
            if name.lower() not in _HOP_BY_HOP
        }
        headers.pop("Authorization", None)
        if authorization:
            headers["Authorization"] = authorization
        headers["X-Forwarded-Proto"] = "https"
        body: Iterator[bytes] | bytes = iter(self._unread)
        if fault is not None and fault.kind is FaultKind.CUT:
            body = self._unread.read_up_to(fault.after_bytes)
            headers["Content-Length"] = str(len(body))
        elif self._unread.is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        try:
            connection.request(
                self.command,
                self.path,
                body if self._unread.has_body else None,
                headers,
                encode_chunked="Transfer-Encoding" in headers,
            )
        except BrokenPipeError:
            # A registry whose disk is full answers before it has read the body.
            for _piece in self._unread:
                pass
        response = connection.getresponse()
        if fault is not None and fault.kind in {FaultKind.CUT, FaultKind.LOSE}:
            response.read()
            self.server_front.requests.append((self.command, self.path, 0))
            self.close_connection = True
            return
        self.server_front.requests.append((self.command, self.path, response.status))
        self._answer(response, fault)

    def _answer(self, response: http.client.HTTPResponse, fault: RegistryFault | None) -> None:
        kind = fault.kind if fault is not None else None
        self.send_response(response.status)
        has_length = False
        for name, value in response.getheaders():
            has_length = has_length or name.lower() == "content-length"
            if kind is FaultKind.WRONG_DIGEST and name.lower() == "docker-content-digest":
                self.send_header(name, f"sha256:{'0' * 64}")
            elif name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        is_chunked = not has_length and self.command != "HEAD" and response.status != 204
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        while piece := response.read(_PIECE):
            if kind is FaultKind.CORRUPT and not sent:
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            if kind is FaultKind.TRUNCATE and fault is not None:
                self.wfile.write(piece[: fault.after_bytes])
                self.close_connection = True
                return
            sent += len(piece)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")


for _method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
    setattr(_FrontHandler, f"do_{_method}", _FrontHandler.handle_request)


class _BodyReader:
    """The body of a request, which is read once."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._file = handler.rfile
        encoding = handler.headers.get("Transfer-Encoding", "")
        self.is_chunked = encoding.lower() == "chunked"
        self._left = int(handler.headers.get("Content-Length", 0))
        self.has_body = self.is_chunked or "Content-Length" in handler.headers

    def __iter__(self) -> Iterator[bytes]:
        if self.is_chunked:
            while length := int(self._file.readline(64).partition(b";")[0], 16):
                yield self._file.read(length)
                self._file.readline(64)
            self._file.readline(64)
            self.is_chunked = False
        while self._left > 0:
            piece = self._file.read(min(self._left, _PIECE))
            if not piece:
                raise ConnectionResetError("the client sent less than it announced")
            self._left -= len(piece)
            yield piece

    def read_up_to(self, limit: int) -> bytes:
        """Return the first bytes and drop the rest."""
        return b"".join(self)[:limit]


class LoginAuthorizer:
    """Leaves the password to the registry, and refuses writes of logins that may only pull."""

    def __init__(self, find_user: Callable[[str], str], pull_only: frozenset[str]) -> None:
        self._find_user = find_user
        self._pull_only = pull_only

    def authorize(self, method: str, path: str, authorization: str) -> str:  # noqa: ARG002 - the protocol's
        is_write = method in {"POST", "PUT", "PATCH", "DELETE"}
        if is_write and self._find_user(authorization) in self._pull_only:
            raise RefusedRequest(403, "DENIED", "requested access to the resource is denied")
        return authorization
