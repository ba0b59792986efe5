"""Comparison of resource versions, and responses to own requests until the watch shows them.

Versions are those of the same object, or of the same kind.
"""

import threading
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# A version is etcd's revision, and 64 bits have at most 20 digits.
_MAX_DIGITS = 20


def is_older_version(version: str, other: str) -> bool:
    """Return whether ``version`` is older; False when one is no number.

    Opaque to clients, but integers that can be compared in kube-apiserver (KEP-5504).
    """
    is_number = all(
        text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS for text in (version, other)
    )
    return is_number and int(version) < int(other)


class Versioned(Protocol):
    """An object with the UID and the resource version of the API server."""

    @property
    def uid(self) -> str: ...

    @property
    def resource_version(self) -> str: ...


V = TypeVar("V", bound=Versioned)


@dataclass(frozen=True, slots=True)
class RequestToken:
    """State of the cache when a request began."""

    list_count: int
    seen_version: str | None
    """Resource version of the watched object; None without one."""


class RecentResponses(Generic[V]):
    """The last response for each object, until the watch shows the same or a newer version.

    Resource versions are compared only within one watch: an etcd restore sets them back. A complete
    list therefore replaces every response of a request that began before it, and an object with
    another UID replaces the response of its predecessor. A response replaces what the watch showed
    when the request began, because etcd answers with its newest state. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._list_count = 0
        self._responses: dict[str, tuple[V, str | None]] = {}
        """Each with the resource version that the watch showed when the request began."""

    def begin_request(self, watched: V | None) -> RequestToken:
        """Return the token to pass to `store_response`; call it before the request is sent."""
        with self._lock:
            return RequestToken(self._list_count, watched.resource_version if watched else None)

    def store_response(self, key: str, response: V, token: RequestToken) -> None:
        """Store the response, unless a list was received after the request began."""
        with self._lock:
            if token.list_count == self._list_count:
                self._responses[key] = (response, token.seen_version)

    def forget_response(self, key: str) -> None:
        """Forget the response for an object that does not exist."""
        with self._lock:
            self._responses.pop(key, None)

    def handle_list(self) -> tuple[str, ...]:
        """Forget all responses after a complete list; return the keys of those."""
        with self._lock:
            self._list_count += 1
            forgotten = tuple(self._responses)
            self._responses.clear()
            return forgotten

    def find(self, key: str) -> V | None:
        """Return the last response that no list and no watch event replaced."""
        with self._lock:
            stored = self._responses.get(key)
            return None if stored is None else stored[0]

    def select_latest(self, key: str, watched: V | None) -> V | None:
        """Return the watched object, or the response if that is newer; None for a deleted one."""
        with self._lock:
            response, seen_version = self._responses.get(key, (None, None))
            if (
                watched is not None
                and response is not None
                and (watched.resource_version == seen_version or _is_older(watched, response))
            ):
                return response
            self._responses.pop(key, None)
            return watched


def _is_older(watched: Versioned, response: Versioned) -> bool:
    is_same = watched.uid == response.uid
    return is_same and is_older_version(watched.resource_version, response.resource_version)
