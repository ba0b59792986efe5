"""A cache of served documents: each is built once, however many machines request it."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from treenail.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Identity of a document. Another one of the same ``slot`` replaces it."""

    slot: Hashable
    """Pool and version of Ignition's format."""
    versions: tuple[str, ...]
    """Versions of everything that the document is built from."""


@dataclass(frozen=True, slots=True)
class CachedResult(Generic[T]):
    """A document and whether another request had it built."""

    document: T
    is_cached: bool


class DocumentCache(Generic[T]):
    """Keeps at most ``max_entries`` documents, those that were requested last. Thread-safe.

    It drops a replaced document at once. Responses in progress have references of their own, so the
    memory is free after the last of them.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[tuple[str, ...], Future[T]]] = OrderedDict()

    def get(self, key: CacheKey, build: Callable[[], T]) -> CachedResult[T]:
        """Return the document; the first caller builds it while the others wait.

        Raises the error of ``build``. The cache keeps a `ConfigError`, because the same inputs
        cause it again, and no other error.
        """
        with self._lock:
            known = self._entries.get(key.slot)
            if known is not None and known[0] == key.versions:
                self._entries.move_to_end(key.slot)
                future, is_cached = known[1], True
            else:
                future, is_cached = Future[T](), False
                self._entries[key.slot] = (key.versions, future)
                self._entries.move_to_end(key.slot)
                while len(self._entries) > self._max_entries:
                    self._entries.popitem(last=False)
        if not is_cached:
            self._build(key, future, build)
        if (error := future.exception()) is not None:
            # Each raise would add frames to the traceback of the error in the cache.
            raise error.with_traceback(None)
        return CachedResult(future.result(), is_cached)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _build(self, key: CacheKey, future: "Future[T]", build: Callable[[], T]) -> None:
        try:
            future.set_result(build())
        except BaseException as error:  # noqa: BLE001  # the waiting threads raise it
            future.set_exception(error)
            if not isinstance(error, ConfigError):
                with self._lock:
                    known = self._entries.get(key.slot)
                    if known is not None and known[1] is future:
                        del self._entries[key.slot]
