"""A cache of the objects of one kind, kept current by a watch."""

import random
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from treenail import clocks, errors, retry
from treenail.kube import api_client, watch

T = TypeVar("T")

Transform = Callable[[api_client.Json], T | None]
"""Converts an object to the part that the cache stores; None stores nothing."""

ChangeHandler = Callable[[str, T | None, T | None], None]
"""Receives the key, the value before (None: new) and the value after (None: deleted)."""


class Informer(Generic[T]):
    """All objects of a scope by key, in the form that a controller needs. Thread-safe.

    Handlers are called on the watching thread for each change, after the cache shows it. They
    should only enqueue the key. Each handler sees an unbroken sequence for an object: the value
    after one call is the value before of the next.
    """

    def __init__(
        self,
        client: api_client.Client,
        scope: watch.WatchScope,
        clock: clocks.Clock,
        transform: Transform[T],
        *,
        on_lost: Callable[[errors.ClusterError], None] = lambda _: None,
        jitter: retry.Random = random.random,
    ) -> None:
        self._transform = transform
        self._lock = threading.Lock()
        self._synced = threading.Event()
        self._objects: dict[str, T] = {}
        self._handlers: list[ChangeHandler[T]] = []
        self._watch = watch.ResourceWatch(
            client,
            scope,
            clock,
            on_change=self._apply_change,
            on_connected=self._synced.set,
            on_lost=on_lost,
            jitter=jitter,
        )

    def add_handler(self, handler: ChangeHandler[T]) -> None:
        """Call ``handler`` for every change. Add handlers before ``start``."""
        self._handlers.append(handler)

    def add_list_handler(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` after every complete list. Add handlers before ``start``."""
        self._watch.add_list_handler(handler)

    def start(self) -> None:
        """Start to list and watch on a thread of the informer."""
        self._watch.start()

    def stop(self, *, limit_s: float = 5.0) -> None:
        """Stop the watch, and wait up to ``limit_s``; the cache keeps its contents."""
        self._watch.stop(limit_s=limit_s)

    def retire(self) -> None:
        """Call no handler any longer; the watch ends when its duration is over."""
        self._watch.retire()

    @property
    def has_synced(self) -> bool:
        """True after the first complete list."""
        return self._synced.is_set()

    def wait_until_synced(self, limit_s: float) -> bool:
        """Wait for ``has_synced``; return False when it takes longer than ``limit_s``."""
        return self._synced.wait(limit_s)

    def request_list(self) -> None:
        """List again; ``listed_at`` tells when it is done."""
        self._watch.request_list()

    def check_if_silent(self) -> None:
        """Check that no change was missed if the API server is silent for too long."""
        self._watch.check_if_silent()

    @property
    def listed_at(self) -> float | None:
        """Monotonic time at which the last complete list began; None before the first one."""
        return self._watch.listed_at

    @property
    def silence_s(self) -> float:
        """Seconds since the API server last sent anything for this kind."""
        return self._watch.silence_s

    @property
    def restored_s(self) -> float:
        """Seconds since a list showed that etcd was restored; infinite if none did."""
        return self._watch.restored_s

    @property
    def stale_reason(self) -> str:
        """Why the cache may be outdated; empty when it is current."""
        return self._watch.stale_reason

    def find(self, key: str) -> T | None:
        """Return the value of ``namespace/name``, or of a name without namespace."""
        with self._lock:
            return self._objects.get(key)

    def get_all(self) -> Mapping[str, T]:
        """Return a copy of the cache, by key."""
        with self._lock:
            return dict(self._objects)

    def _apply_change(self, key: str, document: api_client.Json | None) -> None:
        after = None if document is None else self._transform(document)
        with self._lock:
            before = self._objects.pop(key, None)
            if after is not None:
                self._objects[key] = after
        if before is not None or after is not None:
            for handler in self._handlers:
                handler(key, before, after)
