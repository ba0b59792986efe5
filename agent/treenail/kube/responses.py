"""Responses to own requests, which the watch shows only later."""

import threading
from typing import Generic, Protocol, TypeVar


class Versioned(Protocol):
    """An object with the UID and the resource version of the API server."""

    @property
    def uid(self) -> str: ...

    @property
    def resource_version(self) -> str: ...


V = TypeVar("V", bound=Versioned)


class RecentResponses(Generic[V]):
    """The last response for each object, until the watch shows the same or a newer version.

    Resource versions are compared only within one watch: an etcd restore sets them back. A complete
    list therefore replaces every response of a request that began before it, and an object with
    another UID replaces the response of its predecessor. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._list_count = 0
        self._responses: dict[str, V] = {}

    def begin_request(self) -> int:
        """Return the token to pass to `store_response`; call it before the request is sent."""
        with self._lock:
            return self._list_count

    def store_response(self, key: str, response: V, token: int) -> None:
        """Store the response, unless a list was received after the request began."""
        with self._lock:
            if token == self._list_count:
                self._responses[key] = response

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
            return self._responses.get(key)

    def select_latest(self, key: str, watched: V | None) -> V | None:
        """Return the watched object, or the response if that is newer; None for a deleted one."""
        with self._lock:
            response = self._responses.get(key)
            if watched is not None and response is not None and _is_older(watched, response):
                return response
            self._responses.pop(key, None)
            return watched


def _is_older(watched: Versioned, response: Versioned) -> bool:
    if watched.uid != response.uid:
        return False
    new, old = watched.resource_version, response.resource_version
    return new.isdigit() and old.isdigit() and int(new) < int(old)
