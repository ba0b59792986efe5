"""Access tokens of new machines: which a request may use, and the Secret that keeps their digests.

The Secret never contains a token, only its SHA-256, and the size of a Secret limits their number: a
token takes about 75 bytes, and the API server accepts 1 MiB.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from treenail.api.decode import Fields, Json
from treenail.errors import ConfigError

MAX_TOKENS = 10_000
MAX_USES = 1_000
_DATA_KEY = "tokens"
_FORMAT = 1
_MAX_BYTES = 1_048_576
"""MaxSecretSize of kube-apiserver (pkg/apis/core/types.go)."""
_NAME_CHARACTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_NAME_LENGTH = 6
_SECRET_BYTES = 24
_TOKEN = re.compile(r"tn_([a-z0-9]{1,20})_([A-Za-z0-9_-]{20,64})")
_CLAIM_S = 120.0
"""Time after which a use that was begun and never completed is free again: longer than a response
may take."""
_ADDRESS_LENGTH = 64
_ABSENT: tuple[Any, ...] = ("", [])
"""Machine and uses of an entry that ends before them."""


class UseState(StrEnum):
    """How far a use of a token is."""

    CLAIMED = "claimed"
    """A server sends the config; another one must not."""
    SENT = "sent"
    """The last byte was sent."""


@dataclass(frozen=True, slots=True)
class TokenUse:
    """One machine that used a token."""

    address: str
    at: float
    """Seconds since the epoch; of the last change of the state."""
    state: UseState = UseState.SENT


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What is known of a token, without the token."""

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

    def is_expired(self, now: float) -> bool:
        return now >= self.expires

    def count_uses(self, now: float) -> int:
        """Return how many uses are taken, with those in progress."""
        return sum(_counts(use, now) for use in self.used)


class Refusal(StrEnum):
    """Why a token does not permit a request."""

    UNKNOWN = "the token is unknown; create one with: treenail-controller token create"
    EXPIRED = "the token has expired; create one with: treenail-controller token create"
    OTHER_POOL = "the token is for another pool"
    USED_UP = "the token was used by as many machines as it permits"


@dataclass(frozen=True, slots=True)
class TokenBook:
    """All tokens by name, in the order in which they were created."""

    tokens: Mapping[str, TokenRecord] = field(default_factory=dict)

    def find(self, token: str) -> TokenRecord | None:
        """Return the record of a token, or None for an unknown one.

        Compares digests in constant time; the name that selects the record is public.
        """
        found = self.tokens.get(read_name(token))
        digest = compute_digest(token)
        # Also for an unknown name, so that a response takes as long as for a wrong token.
        expected = found.digest if found is not None else bytes(len(digest))
        is_equal = hmac.compare_digest(digest, expected)
        return found if is_equal else None

    def put(self, record: TokenRecord) -> "TokenBook":
        """Return the book with this record added or replaced."""
        return TokenBook({**self.tokens, record.name: record})

    def remove(self, name: str) -> "TokenBook":
        """Return the book without the token of this name."""
        return TokenBook({key: each for key, each in self.tokens.items() if key != name})

    def prune(self, now: float, *, keep_s: float) -> "TokenBook":
        """Return the book without tokens that expired more than ``keep_s`` seconds ago."""
        return TokenBook(
            {key: each for key, each in self.tokens.items() if now < each.expires + keep_s}
        )


def make_token(
    pool: str, *, expires: float, uses: int = 1, machine: str = ""
) -> tuple[str, TokenRecord]:
    """Return a new token, which nothing keeps, and its record."""
    name = "".join(secrets.choice(_NAME_CHARACTERS) for _ in range(_NAME_LENGTH))
    token = f"tn_{name}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return token, TokenRecord(name, compute_digest(token), pool, expires, uses, machine)


def read_name(token: str) -> str:
    """Return the public part of a token; empty for a text that is no token."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found else ""


def compute_digest(token: str) -> bytes:
    """Return the SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()


def find_refusal(
    record: TokenRecord | None, pool: str, address: str, now: float, *, retry_window_s: float
) -> Refusal | None:
    """Return why a request may not have the config of the pool; None when it may.

    A machine requests its config more than once at its first boot: the address that used the token
    within the last ``retry_window_s`` may use it again.
    """
    if record is None:
        return Refusal.UNKNOWN
    if record.is_expired(now):
        return Refusal.EXPIRED
    if record.pool != pool:
        return Refusal.OTHER_POOL
    if _find_own_use(record, address, now, retry_window_s) is not None:
        return None
    return None if record.count_uses(now) < record.uses else Refusal.USED_UP


def claim_use(
    record: TokenRecord, address: str, now: float, *, retry_window_s: float
) -> TokenRecord:
    """Return the record with a use of this address in progress; unchanged for a repeated one."""
    if _find_own_use(record, address, now, retry_window_s) is not None:
        return record
    kept = tuple(use for use in record.used if _counts(use, now))
    return replace(record, used=(*kept, TokenUse(address, now, UseState.CLAIMED)))


def confirm_use(record: TokenRecord, address: str, now: float) -> TokenRecord:
    """Return the record with the use of this address complete.

    The use is added when no claim is left, so that a completed use always counts. The retry window
    begins with the first complete response and is not extended by repeated ones.
    """
    for number, use in reversed([*enumerate(record.used)]):
        if use.address == address:
            if use.state is UseState.SENT:
                return record
            sent = TokenUse(address, now, UseState.SENT)
            return replace(record, used=(*record.used[:number], sent, *record.used[number + 1 :]))
    return replace(record, used=(*record.used, TokenUse(address, now, UseState.SENT)))


def release_use(record: TokenRecord, address: str) -> TokenRecord:
    """Return the record without the unfinished use of this address."""
    kept = tuple(
        use for use in record.used if not (use.address == address and use.state is UseState.CLAIMED)
    )
    return replace(record, used=kept)


def format_book(book: TokenBook) -> dict[str, str]:
    """Return the ``data`` of the Secret; raise `ConfigError` when it would be too large."""
    rows = [_format_record(each) for each in book.tokens.values()]
    content = json.dumps({"format": _FORMAT, "tokens": rows}, separators=(",", ":")).encode()
    if len(rows) > MAX_TOKENS or len(content) > _MAX_BYTES:
        raise ConfigError(
            f"cannot keep {len(rows)} access tokens: a Secret has room for {MAX_TOKENS} tokens "
            f"and {_MAX_BYTES} bytes, found {len(content)} bytes",
            remedy="remove old ones with: treenail-controller token revoke --expired",
        )
    return {_DATA_KEY: base64.b64encode(content).decode("ascii")}


def parse_book(secret: Json, *, where: str) -> TokenBook:
    """Parse a Secret; raise `ConfigError`, which contains nothing of its content.

    A Secret without data has no tokens.
    """
    data = Fields.from_json(secret, where).get_object("data")
    text = data.get_text(_DATA_KEY)
    if not text:
        return TokenBook()
    if len(text) > 2 * _MAX_BYTES:
        raise _make_error(where, f"it is longer than {_MAX_BYTES} bytes")
    try:
        document = json.loads(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise _make_error(where, "it is not JSON in base64") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise _make_error(where, f"its format is not {_FORMAT}")
    rows = document.get("tokens")
    if not isinstance(rows, list) or len(rows) > MAX_TOKENS:
        raise _make_error(where, f"it has no list of at most {MAX_TOKENS} tokens")
    tokens: dict[str, TokenRecord] = {}
    for number, row in enumerate(rows, 1):
        try:
            record = _parse_record(row)
        except (TypeError, ValueError, binascii.Error):
            raise _make_error(where, f"entry {number} is damaged") from None
        tokens[record.name] = record
    return TokenBook(tokens)


def _counts(use: TokenUse, now: float) -> bool:
    return use.state is UseState.SENT or now < use.at + _CLAIM_S


def _find_own_use(
    record: TokenRecord, address: str, now: float, retry_window_s: float
) -> TokenUse | None:
    for use in record.used:
        if use.address == address and _counts(use, now):
            # A clock that went back must not extend the window.
            window_s = retry_window_s if use.state is UseState.SENT else _CLAIM_S
            if abs(now - use.at) < window_s:
                return use
    return None


def _format_record(record: TokenRecord) -> list[object]:
    row: list[object] = [
        record.name,
        base64.b64encode(record.digest).decode("ascii").rstrip("="),
        record.pool,
        int(record.expires),
        record.uses,
    ]
    used = [[use.address[:_ADDRESS_LENGTH], int(use.at), str(use.state)] for use in record.used]
    if record.machine or used:
        row.append(record.machine)
    if used:
        row.append(used)
    return row


def _parse_record(row: object) -> TokenRecord:
    """Parse one entry; raise TypeError or ValueError."""
    if not isinstance(row, list) or not 5 <= len(row) <= 7:
        raise ValueError
    name, digest, pool, expires, uses = row[:5]
    machine, used = [*row[5:], *_ABSENT[len(row) - 5 :]]
    if not all(isinstance(each, str) for each in (name, digest, pool, machine)):
        raise TypeError
    if not all(type(each) is int for each in (expires, uses)) or not 1 <= uses <= MAX_USES:
        raise ValueError
    decoded = base64.b64decode(f"{digest}=", validate=True)
    if len(decoded) != hashlib.sha256().digest_size or not isinstance(used, list):
        raise ValueError
    return TokenRecord(
        name, decoded, pool, float(expires), uses, machine, tuple(_parse_use(each) for each in used)
    )


def _parse_use(row: object) -> TokenUse:
    if not isinstance(row, list) or len(row) != 3:
        raise ValueError
    address, at, state = row
    if not isinstance(address, str) or type(at) is not int:
        raise TypeError
    return TokenUse(address, float(at), UseState(state))


def _make_error(where: str, problem: str) -> ConfigError:
    return ConfigError(
        f"cannot read the access tokens of {where}: {problem}",
        remedy="restore the Secret from a backup, or delete it and create new tokens",
    )
