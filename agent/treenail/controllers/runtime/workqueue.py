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
    if that went well or ``retry`` if it did not: pauses double from ``first_s`` up to ``most_s``
    for each key by itself, cut by a random part so that not all come at once.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        first_s: float = 0.25,
        most_s: float = 60.0,
        jitter: Random = random.random,
    ) -> None:
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._changed = threading.Condition()
        self._ready: deque[str] = deque()
        self._wanted: dict[str, float] = {}
        self._working: set[str] = set()
        self._later: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._closed = False
        self.adds = 0
        """How many times a key was added that was not waiting already."""
        self.retries = 0
        """How many times a key was to be tried again."""

    def __len__(self) -> int:
        """How many keys wait to be handed out, without those that are for later."""
        with self._changed:
            self._promote()
            return len(self._ready)

    def add(self, key: str) -> None:
        """Hand the key out as soon as somebody is free."""
        with self._changed:
            self._add(key)

    def add_after(self, key: str, seconds: float) -> None:
        """Hand the key out in so many seconds; the earliest of several such wishes counts."""
        if seconds <= 0:
            self.add(key)
            return
        with self._changed:
            at = self._clock.monotonic() + seconds
            if not self._closed and at < self._due.get(key, float("inf")):
                self._due[key] = at
                heapq.heappush(self._later, (at, key))
                self._changed.notify()

    def retry(self, key: str, *, least_s: float = 0.0) -> float:
        """Hand the key out after its next pause, of at least ``least_s``; how long that is."""
        with self._changed:
            backoff = self._backoffs.get(key)
            if backoff is None:
                backoff = Backoff(first_s=self._first_s, most_s=self._most_s, jitter=self._jitter)
                self._backoffs[key] = backoff
            pause_s = max(backoff.pause_s(), least_s)
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
                self._promote()
                if self._ready:
                    key = self._ready.popleft()
                    self._working.add(key)
                    return key, self._clock.monotonic() - self._wanted.pop(key)
                wait_s = self._wait_s(end)
                if wait_s is not None and wait_s <= 0:
                    return None
                self._changed.wait(wait_s)
            return None

    def done(self, key: str) -> None:
        """The key was looked at; it is handed out again if it was added in the meantime."""
        with self._changed:
            self._working.discard(key)
            if key in self._wanted and not self._closed:
                self._ready.append(key)
                self._changed.notify()

    def close(self) -> None:
        """Hand nothing out any more, and wake all who wait for a key."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._wanted.clear()
            self._changed.notify_all()

    def _add(self, key: str) -> None:
        if self._closed or key in self._wanted:
            return
        self.adds += 1
        self._wanted[key] = self._clock.monotonic()
        if key not in self._working:
            self._ready.append(key)
            self._changed.notify()

    def _promote(self) -> None:
        """Move what is due from later to now."""
        now = self._clock.monotonic()
        while self._later and self._later[0][0] <= now:
            at, key = heapq.heappop(self._later)
            # An earlier wish for the same key replaced this one, or was met already.
            if self._due.get(key) == at:
                del self._due[key]
                self._add(key)

    def _wait_s(self, end: float | None) -> float | None:
        """How long nothing can happen by itself: None for ever, 0 when the time is up."""
        moments = [] if end is None else [end]
        if self._later:
            moments.append(self._later[0][0])
        if not moments:
            return None
        return max(min(moments) - self._clock.monotonic(), 0.0)
