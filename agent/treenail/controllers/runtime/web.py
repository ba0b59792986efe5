"""HTTP to servers that are not the API server: one request, one short answer, a limit on both.

Redirects are not followed: who names a server means that one.
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
    """What the server said, whatever the status."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class WebFailure:
    """There was no answer that can be used; ``reason`` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request; with a body it is a POST of JSON."""

    url: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class WebClient:
    """Asks servers, each time on a connection of its own. Thread-safe."""

    def __init__(self, *, limit_s: float = LIMIT_S, max_bytes: int = MAX_BYTES) -> None:
        self._limit_s = limit_s
        self._max_bytes = max_bytes

    def send_request(self, asked: WebRequest) -> WebResponse | WebFailure:
        """The answer, or why there is none."""
        parts = urlsplit(asked.url)
        place = parts.netloc
        link: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            link = http.client.HTTPSConnection(place, timeout=self._limit_s, context=context)
        else:
            link = http.client.HTTPConnection(place, timeout=self._limit_s)
        try:
            return self._exchange_request(link, asked, parts.path or "/", parts.query)
        except (OSError, http.client.HTTPException) as error:
            return WebFailure(f"{place}: {_describe_error(error)}")
        finally:
            link.close()

    def _exchange_request(
        self, link: http.client.HTTPConnection, asked: WebRequest, path: str, query: str
    ) -> WebResponse | WebFailure:
        headers = {
            "Accept": "application/json",
            "User-Agent": f"treenail/{__version__}",
            **dict(asked.headers),
        }
        if asked.body:
            headers["Content-Type"] = "application/json"
        target = f"{path}?{query}" if query else path
        link.request("POST" if asked.body else "GET", target, asked.body or None, headers)
        response = link.getresponse()
        body = response.read(self._max_bytes + 1)
        if len(body) > self._max_bytes:
            return WebFailure(f"{link.host}: an answer of more than {self._max_bytes} bytes")
        return WebResponse(response.status, body)


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
