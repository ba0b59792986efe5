"""Queue of keys with the semantics of client-go's workqueue.

A key is in the queue at most once, and one worker processes it at a time. A key that is added
during processing returns to the queue afterwards, so that no change is lost. Delayed keys do not
block others.
"""

import heapq
import random
import threading
from collections import deque

from treenail import clocks, retry


class WorkQueue:
    """Keys to process. Thread-safe.

    A worker calls ``get``, then ``forget`` after success or ``add_rate_limited`` after an error,
    then ``done``. The retry delay of each key doubles from ``first_retry_s`` up to
    ``max_retry_s``, with jitter.
    """

    def __init__(
        self,
        clock: clocks.Clock,
        *,
        first_retry_s: float = 0.25,
        max_retry_s: float = 60.0,
        jitter: retry.Random = random.random,
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
        self._backoffs: dict[str, retry.Backoff] = {}
        self._closed = False
        self.adds = 0
        """Number of keys added, without keys that were queued already."""
        self.retries = 0
        """Number of retries."""

    def __len__(self) -> int:
        """Number of queued keys without delayed ones."""
        with self._changed:
            self._promote_due()
            return len(self._ready)

    def add(self, key: str) -> None:
        """Add the key for the next free worker."""
        with self._changed:
            self._add_ready(key)

    def add_after(self, key: str, seconds: float) -> None:
        """Add the key after a delay; the earliest of several delays wins."""
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
        """Add the key after its retry delay, at least ``min_s``; return the delay."""
        with self._changed:
            backoff = self._backoffs.get(key)
            if backoff is None:
                backoff = retry.Backoff(
                    first_s=self._first_retry_s, max_s=self._max_retry_s, jitter=self._jitter
                )
                self._backoffs[key] = backoff
            pause_s = max(backoff.next_pause_s(), min_s)
            self.retries += 1
        self.add_after(key, pause_s)
        return pause_s

    def forget(self, key: str) -> None:
        """Reset the retry delay of the key."""
        with self._changed:
            self._backoffs.pop(key, None)

    def get(self, limit_s: float | None = None) -> tuple[str, float] | None:
        """Return the next key and the seconds that it waited for a worker.

        None when the queue is closed, or after ``limit_s`` without a key.
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
        """Finish the key; queue it again if it was added during processing."""
        with self._changed:
            self._working.discard(key)
            if key in self._added_at and not self._closed:
                self._ready.append(key)
                self._changed.notify()

    def close(self) -> None:
        """Stop returning keys, and wake all waiting workers."""
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
        """Queue the delayed keys that are due."""
        now = self._clock.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            at, key = heapq.heappop(self._delayed)
            # Else an earlier delay replaced this one or has already passed.
            if self._due_at.get(key) == at:
                del self._due_at[key]
                self._add_ready(key)

    def _compute_wait_s(self, end: float | None) -> float | None:
        """Return the seconds until the next delayed key or ``end``; None without either."""
        moments = [] if end is None else [end]
        if self._delayed:
            moments.append(self._delayed[0][0])
        if not moments:
            return None
        return max(min(moments) - self._clock.monotonic(), 0.0)
