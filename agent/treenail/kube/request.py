"""Requests to the API server and its responses, independent of the transport."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from treenail.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooManyRequestsError,
    UnreachableError,
)

JSON_CONTENT_TYPE = "application/json"
MIB = 1024 * 1024
MAX_BYTES = 64 * MIB
CHUNK_BYTES = 65536

# A message may quote the object that was refused, and that object may hold a secret.
MESSAGE_CHARS = 256

_BY_CODE: Mapping[int, type[ClusterError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    405: InvalidError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
    502: UnreachableError,
    503: UnreachableError,
    504: UnreachableError,
}


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


def read_body(chunks: Iterable[bytes], max_bytes: int, what: str) -> bytes:
    """All pieces; ClusterError beyond ``max_bytes``."""
    body = bytearray()
    for piece in chunks:
        body += piece
        check_length(len(body), max_bytes, what)
    return bytes(body)


def iter_lines(chunks: Iterable[bytes], max_bytes: int, what: str) -> Iterator[bytes]:
    """Each line as soon as it is there, without its end; ClusterError for one too long."""
    pending = bytearray()
    for piece in chunks:
        pending += piece
        if b"\n" in piece:
            *ended, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            yield from ended
        check_length(len(pending), max_bytes, what)


def check_length(length: int, max_bytes: int, what: str) -> None:
    """ClusterError when there is more than allowed."""
    if length > max_bytes:
        raise ClusterError(f"{what}: the answer is longer than {max_bytes} bytes")


def make_response_error(what: str, reply: ApiResponse) -> ClusterError:
    """The error for an answer to ``what`` whose status is not of success."""
    try:
        status = json.loads(reply.body)
    except ValueError:
        status = {}
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {}
    return make_status_error(
        what, {"code": reply.status, **status}, retry_after_s=reply.retry_after_s
    )


def make_status_error(
    what: str, status: Mapping[str, object], *, retry_after_s: float = 0.0
) -> ClusterError:
    """The error for a ``BootcStatus`` object, which is also what a watch ends with."""
    code = status.get("code")
    reason = str(status.get("reason") or "")
    said = _format_message(status)[:MESSAGE_CHARS] or f"HTTP {code}"
    message = f"{what}: {said}"
    if code == 429:
        return TooManyRequestsError(
            message, retry_after_s=retry_after_s or _get_retry_after_s(status)
        )
    if reason == "AlreadyExists":
        return AlreadyExistsError(message)
    if code == 401:
        return ForbiddenError(
            f"{what}: the API server does not accept our credential",
            remedy="check that the kubeconfig's certificate or token is still valid",
        )
    if reason == "Timeout":  # the server's own word, unlike a gateway's 504
        return ClusterError(message)
    kind = _BY_CODE.get(code, ClusterError) if isinstance(code, int) else ClusterError
    return kind(message)


def _format_message(status: Mapping[str, object]) -> str:
    """The message and the causes it does not say already, such as the budget's arithmetic."""
    message = str(status.get("message") or status.get("reason") or "").strip()
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else []:
        said = str(cause.get("message") or "") if isinstance(cause, dict) else ""
        if said and said not in message:
            message = f"{message} {said}"
    return message


def _get_retry_after_s(status: Mapping[str, object]) -> float:
    details = status.get("details")
    seconds = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return float(seconds) if isinstance(seconds, int) else 0.0
