"""A queue of keys with the semantics of client-go's: each key once, never twice at a time.

A key that is added while it is worked on is handed out again afterwards, so no change is missed;
one that waits for later does not keep others from being handed out.
"""

import heapq
import random
import threading
from collections import deque

from treenail.clock import Clock
from treenail.kube.backoff import Backoff, Random


class WorkQueue:
    """Keys to look at. Thread-safe.

    Whoever takes a key by ``get`` says ``done`` when it was looked at, and before that ``forget``
    if that went well or ``add_rate_limited`` if it did not: pauses double from ``first_s`` up to ``most_s``
    for each key by itself, cut by a random part so that not all come at once.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        first_retry_s: float = 0.25,
        max_retry_s: float = 60.0,
        jitter: Random = random.random,
    ) -> None:
        self._clock = clock
        self._first_retry_s = first_retry_s
        self._max_retry_s = max_retry_s
        self._jitter = jitter
        self._changed = threading.Condition()
        self._ready: deque[str] = deque()
        self._added_at: dict[str, float] = {}
        self._working: set[str] = set()
        self._delayed: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._closed = False
        self.adds = 0
        """How many times a key was added that was not waiting already."""
        self.retries = 0
        """How many times a key was to be tried again."""

    def __len__(self) -> int:
        """How many keys wait to be handed out, without those that are for later."""
        with self._changed:
            self._promote_due()
            return len(self._ready)

    def add(self, key: str) -> None:
        """Hand the key out as soon as somebody is free."""
        with self._changed:
            self._add_ready(key)

    def add_after(self, key: str, seconds: float) -> None:
        """Hand the key out in so many seconds; the earliest of several such wishes counts."""
        if seconds <= 0:
            self.add(key)
            return
        with self._changed:
            at = self._clock.monotonic() + seconds
            if not self._closed and at < self._due_at.get(key, float("inf")):
                self._due_at[key] = at
                heapq.heappush(self._delayed, (at, key))
                self._changed.notify()

    def add_rate_limited(self, key: str, *, min_s: float = 0.0) -> float:
        """Hand the key out after its next pause, of at least ``min_s``; how long that is."""
        with self._changed:
            backoff = self._backoffs.get(key)
            if backoff is None:
                backoff = Backoff(
                    first_s=self._first_retry_s, max_s=self._max_retry_s, jitter=self._jitter
                )
                self._backoffs[key] = backoff
            pause_s = max(backoff.next_pause_s(), min_s)
            self.retries += 1
        self.add_after(key, pause_s)
        return pause_s

    def forget(self, key: str) -> None:
        """Begin with the shortest pause when the key fails the next time."""
        with self._changed:
            self._backoffs.pop(key, None)

    def get(self, limit_s: float | None = None) -> tuple[str, float] | None:
        """The next key, and for how many seconds it waited for somebody to be free.

        None when the queue is closed, or when there was nothing for ``limit_s``.
        """
        end = None if limit_s is None else self._clock.monotonic() + limit_s
        with self._changed:
            while not self._closed:
                self._promote_due()
                if self._ready:
                    key = self._ready.popleft()
                    self._working.add(key)
                    return key, self._clock.monotonic() - self._added_at.pop(key)
                wait_s = self._compute_wait_s(end)
                if wait_s is not None and wait_s <= 0:
                    return None
                self._changed.wait(wait_s)
            return None

    def done(self, key: str) -> None:
        """The key was looked at; it is handed out again if it was added in the meantime."""
        with self._changed:
            self._working.discard(key)
            if key in self._added_at and not self._closed:
                self._ready.append(key)
                self._changed.notify()

    def close(self) -> None:
        """Hand nothing out any more, and wake all who wait for a key."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._added_at.clear()
            self._changed.notify_all()

    def _add_ready(self, key: str) -> None:
        if self._closed or key in self._added_at:
            return
        self.adds += 1
        self._added_at[key] = self._clock.monotonic()
        if key not in self._working:
            self._ready.append(key)
            self._changed.notify()

    def _promote_due(self) -> None:
        """Move what is due from later to now."""
        now = self._clock.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            at, key = heapq.heappop(self._delayed)
            # An earlier wish for the same key replaced this one, or was met already.
            if self._due_at.get(key) == at:
                del self._due_at[key]
                self._add_ready(key)

    def _compute_wait_s(self, end: float | None) -> float | None:
        """How long nothing can happen by itself: None for ever, 0 when the time is up."""
        moments = [] if end is None else [end]
        if self._delayed:
            moments.append(self._delayed[0][0])
        if not moments:
            return None
        return max(min(moments) - self._clock.monotonic(), 0.0)
