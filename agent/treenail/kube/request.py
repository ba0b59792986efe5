"""What is asked of the API server and what it answers, whichever transport carries them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

JSON_CONTENT_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One HTTP request.

    ``limit_s`` is the time until the whole answer is here; for a stream, until it begins.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    content_type: str = JSON_CONTENT_TYPE
    limit_s: float = 15.0

    @property
    def target(self) -> str:
        """Path and query, percent-encoded."""
        return f"{self.path}?{urlencode(self.params)}" if self.params else self.path


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """One HTTP answer; the body is not kept in the repr, it may be a Secret."""

    status: int
    body: bytes = field(default=b"", repr=False)
    retry_after_s: float = 0.0


def parse_retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header; 0 without one, or for a date, which no API server sends."""
    return float(header) if header and header.isascii() and header.isdigit() else 0.0
