"""HTTP client for servers other than the API server, with limits of time and size.

It does not follow redirects, so that a server cannot send requests elsewhere.
"""

import http.client
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from treenail import __version__, clocks, deadline_socket, memory

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
        self._clock = clocks.SystemClock()

    def send_request(self, request: WebRequest) -> WebResponse | WebFailure:
        """Send the request; return the response or the reason why there is none."""
        parts = urlsplit(request.url)
        host = parts.netloc
        try:
            connection = self._create_connection(parts.scheme, host, request)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return WebFailure(f"{host}: {_describe_error(error)}")
        deadline = self._clock.monotonic() + self._limit_s
        try:
            connection.connect()
            connection.sock = deadline_socket.DeadlineSocket(
                connection.sock, self._clock, self._limit_s, deadline
            )
            return self._exchange_request(connection, request, parts.path or "/", parts.query)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: the resolver cannot encode the host, or a header is no Latin-1.
            return WebFailure(f"{host}: {_describe_error(error)}")
        finally:
            connection.close()

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


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
