"""Exponential back-off with jitter."""

import random
from collections.abc import Callable

Random = Callable[[], float]
"""Returns a number from 0 up to 1."""


class Backoff:
    """Pauses that double from ``first_s`` up to ``max_s``, each reduced by up to a half.

    The jitter spreads the reconnects of a thousand nodes that lost the same server.
    """

    def __init__(
        self, *, first_s: float = 0.5, max_s: float = 30.0, jitter: Random = random.random
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._next_s = first_s

    def next_pause_s(self) -> float:
        """Return the next pause and double the one after it."""
        pause_s = self._next_s
        self._next_s = min(pause_s * 2, self._max_s)
        return pause_s * (1 - self._jitter() / 2)

    def reset(self) -> None:
        """Restart with the shortest pause."""
        self._next_s = self._first_s
