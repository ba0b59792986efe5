"""HTTP client for servers other than the API server, with limits of time and size.

It does not follow redirects, so that a server cannot send requests elsewhere.
"""

import http.client
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from treenail import __version__, memory

MAX_BYTES = 4 * memory.MIB
LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class WebResponse:
    """Response of the server with any status."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class WebFailure:
    """No usable response; ``reason`` is for messages."""

    reason: str


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request: a GET, or with a body a POST of JSON."""

    url: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """May contain a token."""
    certificate_authority: str = field(default="", repr=False)
    """PEM of the certificate authority; empty for those of the system."""


class WebClient:
    """Sends each request on its own connection. Thread-safe."""

    def __init__(self, *, limit_s: float = LIMIT_S, max_bytes: int = MAX_BYTES) -> None:
        self._limit_s = limit_s
        self._max_bytes = max_bytes

    def send_request(self, request: WebRequest) -> WebResponse | WebFailure:
        """Send the request; return the response or the reason why there is none."""
        parts = urlsplit(request.url)
        host = parts.netloc
        try:
            connection = self._create_connection(parts.scheme, host, request)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return WebFailure(f"{host}: {_describe_error(error)}")
        # The timeout of a socket is for each read. A server that sends a byte every second would
        # never exceed it.
        deadline = _Deadline(self._limit_s)
        try:
            with deadline:
                connection.connect()
                deadline.watch_socket(connection.sock)
                response = self._exchange_request(
                    connection, request, parts.path or "/", parts.query
                )
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: the resolver cannot encode the host, or a header is no Latin-1.
            reason = "no response in time" if deadline.is_exceeded else _describe_error(error)
            return WebFailure(f"{host}: {reason}")
        finally:
            connection.close()
        # A body that the deadline cut off looks complete.
        return WebFailure(f"{host}: no response in time") if deadline.is_exceeded else response

    def _create_connection(
        self, scheme: str, host: str, request: WebRequest
    ) -> http.client.HTTPConnection:
        if scheme != "https":
            return http.client.HTTPConnection(host, timeout=self._limit_s)
        # With cadata only these CAs are trusted, without it those of the system (ssl.py).
        context = ssl.create_default_context(cadata=request.certificate_authority or None)
        return http.client.HTTPSConnection(host, timeout=self._limit_s, context=context)

    def _exchange_request(
        self, connection: http.client.HTTPConnection, request: WebRequest, path: str, query: str
    ) -> WebResponse | WebFailure:
        headers = {
            "Accept": "application/json",
            "User-Agent": f"treenail/{__version__}",
            **dict(request.headers),
        }
        if request.body:
            headers["Content-Type"] = "application/json"
        target = f"{path}?{query}" if query else path
        connection.request("POST" if request.body else "GET", target, request.body or None, headers)
        # A response that ends with the connection keeps the socket open until it is closed, too.
        with connection.getresponse() as response:
            body = response.read(self._max_bytes + 1)
        if len(body) > self._max_bytes:
            return WebFailure(
                f"{connection.host}: the response is longer than {self._max_bytes} bytes"
            )
        return WebResponse(response.status, body)


class _Deadline:
    """Ends the connection when its exchange takes longer than ``limit_s`` in total."""

    def __init__(self, limit_s: float) -> None:
        # HTTPConnection forgets its socket when the response ends with the connection.
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(limit_s, self._shut_down)
        self._timer.daemon = True
        self.is_exceeded = False

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch_socket(self, sock: socket.socket) -> None:
        """Set the socket to shut down at the deadline."""
        self._socket = sock
        if self.is_exceeded:
            self._shut_down()

    def _shut_down(self) -> None:
        self.is_exceeded = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
