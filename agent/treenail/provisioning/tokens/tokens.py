"""Access tokens of new machines, and the text of the Secret that keeps their digests.

The Secret never contains a token, only its SHA-256, and the size of a Secret limits their number: a
token and its use take about 105 bytes, 60 when compressed, and the API server accepts 1 MiB.

`Access` decides with them, or without tokens, about a request for a config; the decision with
tokens is `token_access.TokenAccess`, which counts their uses.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus
from typing import Protocol

from treenail.api import decode, object_meta
from treenail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AccessVerdict:
    """Whether one request may receive the config of a pool."""

    status: HTTPStatus = HTTPStatus.OK
    """OK, UNAUTHORIZED, FORBIDDEN, or SERVICE_UNAVAILABLE when the server cannot decide.

    NETWORK_AUTHENTICATION_REQUIRED for a machine of a hosted cluster that should try again."""
    reason: str = ""
    """Why the request was refused. The client receives it, so it contains no part of a token."""
    token_name: str = ""
    """Public name of the token; empty without one."""
    machine: str = ""
    """Machine that the token is for; empty for any."""
    kubeconfig: bytes | None = field(default=None, repr=False)
    """Bootstrap kubeconfig for the machine; None leaves the file out. Before `Access.claim` its
    credential may be a placeholder of the same length."""
    pool: str = ""
    address: str = ""
    """IP address of the client."""
    token: str = field(default="", repr=False)
    """The whole token; empty for a refused request."""
    source: str = ""
    """What `PoolSource.read_inputs` reads; empty for the pool of the request."""

    @property
    def is_allowed(self) -> bool:
        return self.status == HTTPStatus.OK


class Access(Protocol):
    """Decides which requests receive a config. The server calls it from many threads."""

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:
        """Decide about a request; ``token`` is empty when the client sent none. Writes nothing."""

    def claim(self, verdict: AccessVerdict) -> AccessVerdict:
        """Reserve a use of the token before the first byte of a config; may refuse after all.

        The server calls it for GET only. An allowed claim ends with `confirm_sent` or `release`.
        """

    def confirm_sent(self, verdict: AccessVerdict) -> None:
        """Record a use of the token: the client was sent the last byte of the config."""

    def release(self, verdict: AccessVerdict) -> None:
        """Give a claimed use back: the client was not sent the whole config."""


class OpenAccess:
    """Allows every request, as the server of the Machine Config Operator does."""

    def __init__(self, load_kubeconfig: Callable[[], bytes | None] = lambda: None) -> None:
        """``load_kubeconfig`` returns the kubeconfig that all machines share."""
        self._load_kubeconfig = load_kubeconfig

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:  # noqa: ARG002  # interface
        """Allow the request."""
        return AccessVerdict(kubeconfig=self._load_kubeconfig())

    def claim(self, verdict: AccessVerdict) -> AccessVerdict:
        """Allow the request: no token has a number of uses."""
        return verdict

    def confirm_sent(self, verdict: AccessVerdict) -> None:
        """Do nothing."""

    def release(self, verdict: AccessVerdict) -> None:
        """Do nothing."""


MAX_TOKENS = 10_000
MAX_USES = 1_000
_DATA_KEY = "tokens"
_CERTIFICATES_KEY = "certificates"
_FORMAT = 1
_EMPTY: decode.Json = {"format": _FORMAT, "tokens": []}
_MAX_BYTES = 1_048_576
"""MaxSecretSize of kube-apiserver (pkg/apis/core/types.go)."""
_PLAIN_BYTES = 512 * 1024
"""Above it the content is compressed. Digests of 10,000 tokens alone take 440 KB in base64."""
_PARSED_BYTES = 4 * _MAX_BYTES
_ZLIB = b"\x78"
"""First byte of compressed content; plain content begins with a brace."""
_NAME_CHARACTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_NAME_LENGTH = 6
_SECRET_BYTES = 24
_NAME = re.compile(r"[a-z0-9]{1,20}")
_TOKEN = re.compile(rf"tn_({_NAME.pattern})_([A-Za-z0-9_-]{{20,64}})")
_NONE = "-"
"""Stands for an empty field of an entry."""
_ADDRESS = re.compile(r"[0-9A-Za-z:.%_-]{1,64}")
_NODE_MARK = "@"
"""Precedes the name of a Node in an entry."""
_MAX_TIME = 253_402_300_799
"""The end of the year 9999, the last that RFC 3339 can express."""


class UseState(StrEnum):
    """How far a use of a token is."""

    CLAIMED = "claimed"
    """A server sends the config. A server that was killed meanwhile leaves this state: then only
    the same address may use the token again, since the server may have sent everything."""
    SENT = "sent"
    """The last byte was sent."""
    JOINED = "joined"
    """The Node of the machine is Ready."""
    ENDED = "ended"
    """No Node was Ready when the kubelet's credential ended."""


@dataclass(frozen=True, slots=True)
class TokenUse:
    """One machine that used a token."""

    address: str
    at: float
    """Seconds since the epoch: of the last claim, then of the last byte."""
    state: UseState = UseState.SENT
    responses: int = 1
    """Responses in progress, for a claimed use. Complete ones for another use of a token that
    several machines may use: machines behind one address share a use."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Everything about a token except the token itself."""

    name: str
    """Public part, for messages and lists."""
    digest: bytes = field(repr=False)
    """SHA-256 of the whole token."""
    pool: str
    expires: float
    """Seconds since the epoch."""
    uses: int = 1
    """How many machines may use it."""
    machine: str = ""
    """Node name of the machine that it is for; empty for any."""
    used: tuple[TokenUse, ...] = ()
    nodes: tuple[str, ...] = ()
    """Node names in the certificates that were approved for its machines. They stay here when the
    certificate requests are deleted, an hour after their approval."""

    def is_expired(self, now: float) -> bool:
        return now >= self.expires

    @property
    def is_used_up(self) -> bool:
        """True when no other machine may use it. Uses in progress count."""
        return len(self.used) >= self.uses


class Refusal(StrEnum):
    """Why a token does not permit a request."""

    UNKNOWN = "the token is unknown; create one with: treenail-controller token create"
    EXPIRED = "the token has expired; create one with: treenail-controller token create"
    OTHER_POOL = "the token is for another pool"
    USED_UP = "the token was used by as many machines as it permits"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """All tokens by name, in the order in which they were created."""

    tokens: Mapping[str, TokenRecord] = field(default_factory=dict)
    certificates: str = field(default="", repr=False)
    """The certificates of kubelets, as `tokens.certificates` formats them."""

    def find(self, token: str) -> TokenRecord | None:
        """Return the record of a token, or None for an unknown one.

        Compares digests in constant time; the name that selects the record is public.
        """
        record = self.tokens.get(read_name(token))
        digest = compute_digest(token)
        # Also for an unknown name, so that a response takes as long as for a wrong token.
        expected = record.digest if record is not None else bytes(len(digest))
        is_equal = hmac.compare_digest(digest, expected)
        return record if is_equal else None

    def put(self, record: TokenRecord) -> "TokenTable":
        """Return the table with this record added or replaced."""
        return replace(self, tokens={**self.tokens, record.name: record})

    def remove(self, name: str) -> "TokenTable":
        """Return the table without the token of this name."""
        return self.keep(lambda record: record.name != name)

    def prune(self, since: float) -> "TokenTable":
        """Return the table without tokens that expired before this time."""
        return self.keep(lambda record: record.expires >= since)

    def keep(self, is_kept: Callable[[TokenRecord], bool]) -> "TokenTable":
        """Return the table with some of its tokens; certificates outlive their tokens."""
        kept = {name: record for name, record in self.tokens.items() if is_kept(record)}
        return replace(self, tokens=kept)


TOKEN_STATES = ("valid", "used", "overused", "expired")
"""Results of `find_state`."""


def find_state(record: TokenRecord, now: float) -> str:
    """Return the state of a token in one word."""
    if len(record.used) > record.uses:
        return "overused"
    if record.is_used_up:
        return "used"
    return "expired" if record.is_expired(now) else "valid"


def make_token(
    pool: str, *, expires: float, uses: int = 1, machine: str = ""
) -> tuple[str, TokenRecord]:
    """Return a new token, which nothing keeps, and its record.

    Raises `ConfigError` for names that no pool or Node can have.
    """
    for kind, object_name in (("pool", pool), ("machine", machine or _NONE)):
        # The Secret could not be read with such a name in it.
        if not object_meta.is_object_name(object_name) and object_name != _NONE:
            raise ConfigError(
                f"cannot create a token: expected the name of a {kind}, found {object_name!r:.80}"
            )
    name = "".join(secrets.choice(_NAME_CHARACTERS) for _ in range(_NAME_LENGTH))
    token = f"tn_{name}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return token, TokenRecord(name, compute_digest(token), pool, expires, uses, machine)


def read_name(token: str) -> str:
    """Return the public part of a token; empty for a text that is no token."""
    match = _TOKEN.fullmatch(token)
    return match[1] if match else ""


def compute_digest(token: str) -> bytes:
    """Return the SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()


def find_refusal(
    record: TokenRecord | None, pool: str, address: str, now: float, *, retry_window_s: float
) -> Refusal | None:
    """Return why a request may not have the config of the pool; None when it may.

    A machine that restarts in its first boot requests its config again: the address that used the
    token within the last ``retry_window_s`` may use it again, until its Node is Ready.
    """
    if record is None:
        return Refusal.UNKNOWN
    if record.is_expired(now):
        return Refusal.EXPIRED
    if record.pool != pool:
        return Refusal.OTHER_POOL
    if find_own_use(record, address, now, retry_window_s) is not None:
        return None
    return Refusal.USED_UP if record.is_used_up else None


def find_own_use(
    record: TokenRecord, address: str, now: float, retry_window_s: float
) -> TokenUse | None:
    """Return the use that another request of this address continues; None for a new use."""
    for use in record.used:
        if use.state is UseState.JOINED:
            # The pods of a Node have its address, and its machine needs no config any longer.
            continue
        # The absolute value: a clock that went back must not extend the window.
        is_recent = abs(now - use.at) < retry_window_s
        if use.address == address and (use.state is UseState.CLAIMED or is_recent):
            return use
    return None


def claim_use(
    record: TokenRecord, address: str, now: float, *, retry_window_s: float
) -> TokenRecord:
    """Return the record with a response to this address in progress.

    It is unchanged for a repeated request after a complete response.
    """
    own = find_own_use(record, address, now, retry_window_s)
    if own is None:
        return replace(record, used=(*record.used, TokenUse(address, now, UseState.CLAIMED)))
    if own.state is not UseState.CLAIMED:
        return record
    return _replace_use(record, own, replace(own, at=now, responses=own.responses + 1))


def confirm_use(record: TokenRecord, address: str, now: float) -> TokenRecord:
    """Return the record with the use of this address complete.

    The use is added when no claim is left, so that a completed use always counts. The retry window
    begins with the first complete response and is not extended by repeated ones.
    """
    for use in reversed(record.used):
        if use.address == address:
            if use.state is UseState.CLAIMED:
                return _replace_use(record, use, TokenUse(address, now))
            if use.state is UseState.SENT and use.responses < record.uses:
                return _replace_use(record, use, replace(use, responses=use.responses + 1))
            return record
    return replace(record, used=(*record.used, TokenUse(address, now)))


def release_use(record: TokenRecord, address: str) -> TokenRecord:
    """Return the record with one response to this address less; without one the use is free."""
    for use in record.used:
        if use.address == address and use.state is UseState.CLAIMED:
            if use.responses > 1:
                return _replace_use(record, use, replace(use, responses=use.responses - 1))
            return replace(record, used=tuple(other for other in record.used if other is not use))
    return record


def add_node(record: TokenRecord, node: str) -> TokenRecord:
    """Return the record with the name of a Node whose certificate will be approved."""
    return record if node in record.nodes else replace(record, nodes=(*record.nodes, node))


def settle_use(record: TokenRecord, use: TokenUse, state: UseState) -> TokenRecord:
    """Return the record with a use that was sent in its final state."""
    return _replace_use(record, use, replace(use, state=state))


def format_token_table(table: TokenTable) -> dict[str, str]:
    """Return the ``data`` of the Secret; raise `ConfigError` when it would be too large."""
    rows = [_format_record(record) for record in table.tokens.values()]
    content = json.dumps({"format": _FORMAT, "tokens": rows}, separators=(",", ":")).encode()
    if len(content) > _PLAIN_BYTES:
        content = zlib.compress(content, 1)
    size = len(content) + len(table.certificates) * 3 // 4
    if len(rows) > MAX_TOKENS or size > _MAX_BYTES:
        raise ConfigError(
            f"cannot keep {len(rows)} access tokens: a Secret has room for {MAX_TOKENS} tokens "
            f"and {_MAX_BYTES} bytes, found {size} bytes",
            remedy="remove old ones with: treenail-controller token revoke --expired",
        )
    data = {_DATA_KEY: base64.b64encode(content).decode("ascii")}
    return data | ({_CERTIFICATES_KEY: table.certificates} if table.certificates else {})


class TokenTableParser:
    """Parses versions of one Secret, and only what differs from the version before."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._records: dict[str, TokenRecord] = {}
        self._latest: tuple[tuple[str, str], TokenTable] | None = None

    def parse(self, secret: decode.Json) -> TokenTable:
        """Parse the Secret; raise `ConfigError`, which contains nothing of its content.

        A Secret without data has no tokens.
        """
        text = _read_text(secret, self._where, _DATA_KEY)
        certificates = _read_text(secret, self._where, _CERTIFICATES_KEY)
        # The watch repeats what the response to a write contained.
        if self._latest is None or self._latest[0] != (text, certificates):
            table = replace(self._parse_text(text), certificates=certificates)
            self._latest = (text, certificates), table
        return self._latest[1]

    def _parse_text(self, text: str) -> TokenTable:
        # Of 10,000 tokens few change at a time.
        records: dict[str, TokenRecord] = {}
        for number, row in enumerate(_load_rows(text, self._where), 1):
            try:
                records[row] = self._records.get(row) or _parse_record(row)
            except (AttributeError, TypeError, binascii.Error):
                raise _make_error(self._where, f"entry {number} is damaged") from None
            except ValueError as error:
                problem = f"entry {number} is damaged{_describe_entry_error(error)}"
                raise _make_error(self._where, problem) from None
        self._records = records
        table = TokenTable({record.name: record for record in records.values()})
        if len(table.tokens) != len(records):
            raise _make_error(self._where, "two entries have the same name")
        return table


def _read_text(secret: decode.Json, where: str, key: str) -> str:
    text = decode.Fields.from_json(secret, where).get_object("data").get_text(key)
    if len(text) > 2 * _MAX_BYTES:
        raise _make_error(where, f"it is longer than {_MAX_BYTES} bytes")
    return text


def _load_rows(text: str, where: str) -> list[str]:
    try:
        document = json.loads(_decode_content(text)) if text else _EMPTY
    except (binascii.Error, ValueError, RecursionError, zlib.error):
        raise _make_error(where, "it is not JSON in base64") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise _make_error(where, f"its format is not {_FORMAT}")
    if unknown := document.keys() - _EMPTY.keys():
        # A write of this program would drop them.
        raise _make_error(where, f"it has {len(unknown)} unknown fields")
    rows = document.get("tokens")
    if not isinstance(rows, list) or len(rows) > MAX_TOKENS:
        raise _make_error(where, f"it has no list of at most {MAX_TOKENS} tokens")
    return rows


def _decode_content(text: str) -> bytes:
    content = base64.b64decode(text, validate=True)
    if not content.startswith(_ZLIB):
        return content
    # More would not be of this program; json refuses what is cut off.
    return zlib.decompressobj().decompress(content, _PARSED_BYTES)


def _format_record(record: TokenRecord) -> str:
    """Format one entry: name, digest, pool, expiry, uses, machine; then each use and Node."""
    digest = base64.b64encode(record.digest).decode("ascii").rstrip("=")
    fields = (
        *(record.name, digest, record.pool, str(int(record.expires)), str(record.uses)),
        record.machine or _NONE,
        *map(_format_use, record.used),
        *(f"{_NODE_MARK}{node}" for node in record.nodes),
    )
    return " ".join(fields)


def _replace_use(record: TokenRecord, old: TokenUse, new: TokenUse) -> TokenRecord:
    return replace(record, used=tuple(new if use is old else use for use in record.used))


def _format_use(use: TokenUse) -> str:
    fields = [use.address, str(int(use.at)), use.state.value]
    if use.responses > 1:
        fields.append(str(use.responses))
    return ",".join(fields)


class _EntryError(ValueError):
    """The message names the field and what was expected, and contains nothing of the entry."""


def _describe_entry_error(error: ValueError) -> str:
    return f": {error}" if isinstance(error, _EntryError) else ""


def _parse_record(row: str) -> TokenRecord:
    """Parse one entry; raise AttributeError, TypeError or ValueError."""
    name, digest, pool, expires, uses, machine, *others = row.split(" ")
    used = (other for other in others if not other.startswith(_NODE_MARK))
    nodes = tuple(other[len(_NODE_MARK) :] for other in others if other.startswith(_NODE_MARK))
    decoded = base64.b64decode(f"{digest}=", validate=True)
    if len(decoded) != hashlib.sha256().digest_size:
        raise _EntryError("expected a SHA-256 in base64 in its second field")
    if not _NAME.fullmatch(name):
        raise _EntryError("expected a name of lower-case letters and digits in its first field")
    if not object_meta.is_object_name(pool) or not (
        machine == _NONE or object_meta.is_object_name(machine)
    ):
        raise _EntryError("expected the names of a pool and of a machine, or -")
    if not all(map(object_meta.is_object_name, nodes)):
        raise _EntryError(f"expected the name of a Node after {_NODE_MARK}")
    return TokenRecord(
        name,
        decoded,
        pool,
        float(_parse_number(expires, "an expiry in seconds", 0, _MAX_TIME)),
        _parse_number(uses, "uses", 1, MAX_USES),
        "" if machine == _NONE else machine,
        tuple(map(_parse_use, used)),
        nodes,
    )


def _parse_use(text: str) -> TokenUse:
    address, at, state, *responses = text.split(",")
    if not _ADDRESS.fullmatch(address) or len(responses) > 1:
        raise _EntryError("expected ADDRESS,TIME,STATE or ADDRESS,TIME,STATE,RESPONSES in a use")
    return TokenUse(
        address,
        float(_parse_number(at, "a time in seconds", 0, _MAX_TIME)),
        UseState(state),
        *(_parse_number(response, "responses", 1, MAX_USES) for response in responses),
    )


def _parse_number(text: str, what: str, least: int, most: int) -> int:
    # Digits first: int() accepts spaces and underscores, and refuses 5,000 digits.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not least <= int(text) <= most:
        raise _EntryError(f"expected {what} from {least} to {most}")
    return int(text)


def _make_error(where: str, problem: str) -> ConfigError:
    return ConfigError(
        f"cannot read the access tokens of {where}: {problem}",
        remedy="restore the Secret from a backup, or delete it and create new tokens",
    )
