"""Requests to the API server and its responses, independent of the transport."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from treenail import errors, memory
from treenail.encoding import json_text

JSON_CONTENT_TYPE = "application/json"
MAX_BYTES = 64 * memory.MIB
PAGE_BYTES = 2 * memory.MIB
"""Of a page of a list. Any user can create objects of more than 1 MB, and each is parsed."""
OBJECT_PAGES = 8
"""One object may have the bytes of 8 pages: etcd stores 1.5 MiB, and JSON can have 6 times that."""
CHUNK_BYTES = 65536
# An API server sends 1 to 10 s. A caller must not wait for longer without a report.
_MAX_RETRY_AFTER_S = 60.0

# The message may quote the rejected object, which may contain a secret.
MESSAGE_CHARS = 256

_BY_CODE: Mapping[int, type[errors.ClusterError]] = {
    400: errors.InvalidError,
    401: errors.ForbiddenError,
    403: errors.ForbiddenError,
    404: errors.NotFoundError,
    405: errors.InvalidError,
    409: errors.ConflictError,
    410: errors.GoneError,
    413: errors.InvalidError,
    415: errors.InvalidError,
    422: errors.InvalidError,
    502: errors.UnreachableError,
    503: errors.UnreachableError,
    504: errors.UnreachableError,
}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One HTTP request.

    ``limit_s`` limits the time until the response is complete, or until a stream begins.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    content_type: str = JSON_CONTENT_TYPE
    limit_s: float = 15.0
    accept: str = JSON_CONTENT_TYPE
    max_bytes: int = MAX_BYTES
    """Of the response, or of a line of a stream."""

    @property
    def target(self) -> str:
        """Path and query, percent-encoded."""
        return f"{self.path}?{urlencode(self.params)}" if self.params else self.path


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """One HTTP response. The repr omits the body, which may be a Secret."""

    status: int
    body: bytes = field(default=b"", repr=False)
    retry_after_s: float = 0.0


def parse_retry_after_s(header: str | None) -> float:
    """Return the seconds of a Retry-After header, 60 at most.

    A date, which no API server sends, counts as no header.
    """
    if not (header and header.isascii() and header.isdigit()):
        return 0.0
    return min(float(header), _MAX_RETRY_AFTER_S)


def read_body(chunks: Iterable[bytes], max_bytes: int, operation: str) -> bytes:
    """Join all chunks; raise TooLargeError above ``max_bytes``."""
    body = bytearray()
    for piece in chunks:
        body += piece
        check_length(len(body), max_bytes, operation)
    return bytes(body)


def iter_lines(chunks: Iterable[bytes], max_bytes: int, operation: str) -> Iterator[bytes]:
    """Yield each line as it arrives, without its end; raise TooLargeError for a longer one."""
    pending = bytearray()
    for piece in chunks:
        pending += piece
        if b"\n" in piece:
            *ended, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            yield from ended
        check_length(len(pending), max_bytes, operation)


def check_length(length: int, max_bytes: int, operation: str) -> None:
    """Raise TooLargeError when the body is longer than allowed."""
    if length > max_bytes:
        raise errors.TooLargeError(f"{operation}: the response is longer than {max_bytes} bytes")


def make_response_error(operation: str, reply: ApiResponse) -> errors.ClusterError:
    """Build the error for an unsuccessful response to ``operation``."""
    try:
        status = json_text.parse_json(reply.body)
    except ValueError:
        status = {}
    # A load balancer before the API server answers with a page of its own.
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {}
    return make_status_error(
        operation, {"code": reply.status, **status}, retry_after_s=reply.retry_after_s
    )


def make_status_error(
    operation: str, status: Mapping[str, object], *, retry_after_s: float = 0.0
) -> errors.ClusterError:
    """Build the error for a ``Status`` object; a watch sends one as its ERROR event."""
    code = status.get("code")
    reason = str(status.get("reason") or "")
    sentence = _format_message(status)[:MESSAGE_CHARS] or f"HTTP {code}"
    message = f"{operation}: {sentence}"
    if code == 429:
        return errors.TooManyRequestsError(
            message, retry_after_s=retry_after_s or _get_retry_after_s(status)
        )
    # The code 409 is also that of a conflict of versions.
    if reason == "AlreadyExists":
        return errors.AlreadyExistsError(message)
    if code == 401:
        return errors.ForbiddenError(
            f"{operation}: the API server rejected the credentials",
            remedy="renew the certificate or token that the kubeconfig names",
        )
    if reason == "Timeout":  # from the API server itself; a 504 of a gateway has no reason
        return errors.ClusterError(message)
    kind = _BY_CODE.get(code, errors.ClusterError) if isinstance(code, int) else errors.ClusterError
    return kind(message)


def _format_message(status: Mapping[str, object]) -> str:
    """Join the message and the causes that it lacks, such as the numbers of a budget."""
    message = str(status.get("message") or status.get("reason") or "").strip()
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else []:
        cause_message = str(cause.get("message") or "") if isinstance(cause, dict) else ""
        if cause_message and cause_message not in message:
            message = f"{message} {cause_message}"
    return message


def _get_retry_after_s(status: Mapping[str, object]) -> float:
    details = status.get("details")
    # An event of a watch has no header; StatusDetails in meta/v1 has the same seconds.
    seconds = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    if not isinstance(seconds, int):
        return 0.0
    return float(min(max(seconds, 0), int(_MAX_RETRY_AFTER_S)))
