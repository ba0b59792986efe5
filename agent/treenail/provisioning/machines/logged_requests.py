"""The log of requests for configs: its rows, how servers merge them, and its text in a ConfigMap.

The log is bounded in age, rows and bytes. Clients without a token can fill it, so that their
refused requests are dropped first, and have fewer rows. The server passes each request to a
`ConfigRequestLog` as a `RequestRow`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from treenail import clocks, errors, sanitize
from treenail.api import decode


class RequestOutcome(StrEnum):
    """How a request ended."""

    SERVED = "served"
    """The client was sent the whole config."""
    CHECKED = "checked"
    """The response to HEAD."""
    REFUSED = "refused"
    """The token does not permit the request, or the server cannot decide whether it does."""
    INVALID = "invalid"
    """The pool is missing, or its config cannot be expressed in the version requested."""
    FAILED = "failed"
    """The config of the pool cannot be built."""
    BUSY = "busy"
    """Too many connections."""
    DISCONNECTED = "disconnected"
    """The client disconnected, or the time limit ended the response."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request for the config of a pool."""

    at: float
    """Time of the end of the request, in seconds since the epoch."""
    address: str
    """IP address of the client."""
    pool: str
    token: str
    """Public name of the token; empty without one."""
    machine: str
    """Machine that the token is for; empty for any."""
    version: str
    """Version of Ignition's format; empty if the request was refused before it was chosen."""
    outcome: RequestOutcome
    image: str
    """Pull spec that the config names, apart from that of the rendered config; may be empty."""
    status: int
    """HTTP status of the response."""
    bytes: int
    """Bytes of the response's body that were sent."""
    seconds: float
    """From the complete request to the last byte of the response."""
    rendered: str = ""
    """Name of the rendered config; empty if none was sent."""
    reason: str = ""
    """Why the request got no config. Contains nothing secret."""
    is_cached: bool = False
    """True when the config was not built for this request."""


class ConfigRequestLog(Protocol):
    """Receives every request for the config of a pool. The server calls it from many threads.

    It must return quickly: the thread holds a place of the server's limits.
    """

    def record(self, row: RequestRow) -> None:
        """Record a request that has ended."""


DATA_KEY = "requests"
"""Key of the ConfigMap: a line of JSON for each row."""
MAX_ROWS = 1000
MAX_ANONYMOUS_ROWS = 200
"""Of requests that any client can send: each write of the log stores all rows again in etcd."""
MAX_BYTES = 900_000
"""Maximum size of the text. The API server accepts 1 MiB of data in a ConfigMap."""
MAX_AGE_S = 24 * 3600.0

_ADDRESS_LIMIT = 64
_NAME_LIMIT = 253
_TOKEN_LIMIT = 64
_VERSION_LIMIT = 16
_IMAGE_LIMIT = 512
_REASON_LIMIT = 300
_LINE_LIMIT = 32 * 1024
_ANONYMOUS_OUTCOMES = (RequestOutcome.REFUSED, RequestOutcome.INVALID, RequestOutcome.BUSY)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A row of the log: equal failed requests of one machine in a row, or one request."""

    id: str
    """Name of the server and a number."""
    row: RequestRow
    """The last request."""
    first_at: float
    """Time of the first request, in seconds since the epoch."""
    count: int = 1
    is_checked: bool = False
    """True when a server has looked for the Node, after the time in which it is expected."""
    node: str = ""
    """The Node that a server found then; empty for none."""

    @property
    def is_anonymous(self) -> bool:
        """The request got no config and had no valid token: any client can send it."""
        return not self.row.token and self.row.outcome in _ANONYMOUS_OUTCOMES

    @property
    def coalescing_key(self) -> tuple[object, ...] | None:
        """Equal for requests that share a row; None for one that has a row of its own."""
        row = self.row
        if row.outcome is RequestOutcome.SERVED:
            return None
        return (
            row.address, row.pool, row.token, row.machine, row.version, row.outcome, row.image,
            row.status, row.rendered, row.reason,
        )  # fmt: skip

    def add_request(self, row: RequestRow) -> "LoggedRequest":
        """Return the row with another request."""
        return replace(self, row=row, count=self.count + 1)


def log_request(name: str, row: RequestRow) -> LoggedRequest:
    """Return the row of a request: bounded, on one line, without credentials."""
    bounded = replace(
        row,
        address=row.address[:_ADDRESS_LIMIT],
        pool=row.pool[:_NAME_LIMIT],
        token=row.token[:_TOKEN_LIMIT],
        machine=row.machine[:_NAME_LIMIT],
        version=row.version[:_VERSION_LIMIT],
        image=row.image[:_IMAGE_LIMIT],
        rendered=row.rendered[:_NAME_LIMIT],
        reason=sanitize.sanitize_text(
            sanitize.escape_line(row.reason[:_REASON_LIMIT]), limit=_REASON_LIMIT
        ),
    )
    return LoggedRequest(name, bounded, row.at)


def merge_requests(
    stored: Iterable[LoggedRequest], own: Iterable[LoggedRequest], now: float
) -> tuple[LoggedRequest, ...]:
    """Return the rows of all servers, oldest first and bounded.

    ``own`` rows replace the stored ones of the same ID, so that a merge can be repeated. They keep
    the result of a stored check.
    """
    merged = {request.id: request for request in stored}
    for request in own:
        known = merged.get(request.id)
        if known is not None and known.is_checked:
            merged[request.id] = replace(request, is_checked=True, node=known.node)
        else:
            merged[request.id] = request
    return select_newest(merged.values(), now)


def select_newest(rows: Iterable[LoggedRequest], now: float) -> tuple[LoggedRequest, ...]:
    """Return the rows of the last 24 hours, oldest first, at most `MAX_ROWS`."""
    recent = [request for request in rows if now - request.row.at < MAX_AGE_S]
    recent.sort(key=lambda request: (not request.is_anonymous, request.row.at, request.id))
    excess = sum(request.is_anonymous for request in recent) - MAX_ANONYMOUS_ROWS
    kept = recent[max(0, excess, len(recent) - MAX_ROWS) :]
    return tuple(sorted(kept, key=lambda request: (request.row.at, request.id)))


def format_requests(rows: Iterable[LoggedRequest]) -> dict[str, str]:
    """Return the ``data`` of the ConfigMap: the newest rows, at most `MAX_BYTES` of text.

    ``rows`` come from `merge_requests`.
    """
    ordered = sorted(
        rows, key=lambda request: (not request.is_anonymous, request.row.at, request.id)
    )
    kept, size = [], 0
    for request in reversed(ordered):
        line = json.dumps(_format_row(request), separators=(",", ":")) + "\n"
        size += len(line)
        if size > MAX_BYTES:
            break
        kept.append((request.row.at, request.id, line))
    return {DATA_KEY: "".join(line for _, _, line in sorted(kept))}


def parse_requests(data: Mapping[str, object]) -> tuple[LoggedRequest, ...]:
    """Parse the ``data`` of the ConfigMap; skip lines that cannot be read."""
    text = data.get(DATA_KEY)
    requests = []
    for line in (text if isinstance(text, str) else "").splitlines():
        if len(line) > _LINE_LIMIT:
            continue
        try:
            requests.append(
                _parse_row(decode.Fields.from_json(decode.load_json(line, where="row"), "row"))
            )
        except (errors.ConfigError, ValueError):
            continue
    return tuple(requests)


def _format_row(logged: LoggedRequest) -> dict[str, object]:
    row = logged.row
    fields = {
        "id": logged.id,
        "time": clocks.format_rfc3339(row.at),
        "first": clocks.format_rfc3339(logged.first_at) if logged.count > 1 else "",
        "count": logged.count if logged.count > 1 else 0,
        "address": row.address,
        "pool": row.pool,
        "token": row.token,
        "machine": row.machine,
        "version": row.version,
        "outcome": row.outcome.value,
        "status": row.status,
        "bytes": row.bytes,
        "milliseconds": round(row.seconds * 1000),
        "config": row.rendered,
        "image": row.image,
        "reason": row.reason,
        "cached": row.is_cached,
        "checked": logged.is_checked,
        "node": logged.node,
    }
    return {name: value for name, value in fields.items() if value}


def _parse_row(fields: decode.Fields) -> LoggedRequest:
    """Parse a row; raise `ConfigError` or `ValueError`."""
    at = clocks.parse_rfc3339(fields.get_required_text("time"))
    if at is None:
        raise fields.make_error("time", "an RFC 3339 time")
    first_at = clocks.parse_rfc3339(fields.get_text("first"))
    row = RequestRow(
        at=at,
        address=fields.get_text("address"),
        pool=fields.get_text("pool"),
        token=fields.get_text("token"),
        machine=fields.get_text("machine"),
        version=fields.get_text("version"),
        outcome=RequestOutcome(fields.get_text("outcome")),
        image=fields.get_text("image"),
        status=fields.get_optional_integer("status") or 0,
        bytes=fields.get_optional_integer("bytes") or 0,
        seconds=(fields.get_optional_integer("milliseconds") or 0) / 1000,
        rendered=fields.get_text("config"),
        reason=fields.get_text("reason"),
        is_cached=fields.get_bool("cached"),
    )
    return LoggedRequest(
        id=fields.get_required_text("id"),
        row=row,
        first_at=at if first_at is None else first_at,
        count=max(1, fields.get_optional_integer("count") or 1),
        is_checked=fields.get_bool("checked"),
        node=fields.get_text("node"),
    )
