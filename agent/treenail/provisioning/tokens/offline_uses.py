"""Uses of access tokens that the API server has not recorded, because it was unreachable."""

import threading
from collections.abc import Mapping
from dataclasses import replace

from treenail.provisioning.tokens.tokens import (
    TokenBook,
    TokenRecord,
    TokenUse,
    UseState,
    confirm_use,
)

UseKey = tuple[str, str]
"""Name of the token, and address of the machine."""


class OfflineUses:
    """Uses that only this server knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[UseKey, TokenUse] = {}

    def add(self, name: str, use: TokenUse) -> None:
        """Add a use, or replace that of the same address."""
        with self._lock:
            self._uses[name, use.address] = use

    def remove(self, name: str, address: str) -> bool:
        """Forget a use that was not completed; return False if there is none."""
        with self._lock:
            found = self._uses.get((name, address))
            if found is None:
                return False
            if found.state is UseState.CLAIMED:
                del self._uses[name, address]
            return True

    def has(self, name: str, address: str) -> bool:
        """Return whether the use of this address waits for the API server."""
        return (name, address) in self._uses

    def complete_record(self, record: TokenRecord) -> TokenRecord:
        """Return the record with the uses that wait."""
        if not self._uses:
            return record
        with self._lock:
            waiting = [use for (name, _), use in self._uses.items() if name == record.name]
        for use in waiting:
            record = merge_use(record, use)
        return record

    def get_all(self) -> Mapping[UseKey, TokenUse]:
        """Return a copy."""
        with self._lock:
            return dict(self._uses)

    def discard(self, recorded: Mapping[UseKey, TokenUse]) -> None:
        """Forget uses that the API server has recorded, unless they changed meanwhile."""
        with self._lock:
            for key, use in recorded.items():
                if self._uses.get(key) is use:
                    del self._uses[key]


def merge_use(record: TokenRecord, use: TokenUse) -> TokenRecord:
    """Return the record with a use of another source, even if the token was used up."""
    if use.state is not UseState.CLAIMED:
        return confirm_use(record, use.address, use.at)
    if any(each.address == use.address for each in record.used):
        return record
    return replace(record, used=(*record.used, use))


def merge_uses(
    book: TokenBook, waiting: Mapping[UseKey, TokenUse]
) -> tuple[TokenBook, tuple[TokenRecord, ...]]:
    """Return the book with the uses, and the tokens that too many machines used.

    The uses of a token that was revoked meanwhile are dropped.
    """
    changed: dict[str, TokenRecord] = {}
    for (name, _), use in waiting.items():
        record = changed.get(name) or book.tokens.get(name)
        if record is not None:
            changed[name] = merge_use(record, use)
    excess = tuple(each for each in changed.values() if len(each.used) > each.uses)
    return TokenBook({**book.tokens, **changed}), excess
