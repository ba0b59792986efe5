"""HTTP client for servers other than the API server, with limits of time and size.

It does not follow redirects, so that a server cannot send requests elsewhere.
"""

import http.client
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from treenail import __version__

MAX_BYTES = 4 * 1024 * 1024
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
    headers: tuple[tuple[str, str], ...] = ()


class WebClient:
    """Sends each request on its own connection. Thread-safe."""

    def __init__(self, *, limit_s: float = LIMIT_S, max_bytes: int = MAX_BYTES) -> None:
        self._limit_s = limit_s
        self._max_bytes = max_bytes

    def send_request(self, request: WebRequest) -> WebResponse | WebFailure:
        """Send the request; return the response or the reason why there is none."""
        parts = urlsplit(request.url)
        host = parts.netloc
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, timeout=self._limit_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, timeout=self._limit_s)
        try:
            return self._exchange_request(connection, request, parts.path or "/", parts.query)
        except (OSError, http.client.HTTPException) as error:
            return WebFailure(f"{host}: {_describe_error(error)}")
        finally:
            connection.close()

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
        response = connection.getresponse()
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
