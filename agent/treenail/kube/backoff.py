"""How long to wait before trying again: longer each time, never the same for everybody."""

import random
from collections.abc import Callable

Random = Callable[[], float]
"""A number from 0 up to 1."""


class Backoff:
    """Pauses that double from ``first_s`` up to ``most_s``; each is cut by up to a half.

    The cut keeps a thousand nodes that lost the same server from coming back in one instant.
    """

    def __init__(
        self, *, first_s: float = 0.5, max_s: float = 30.0, jitter: Random = random.random
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._next_s = first_s

    def next_pause_s(self) -> float:
        """Seconds to wait this time."""
        whole_s = self._next_s
        self._next_s = min(whole_s * 2, self._max_s)
        return whole_s * (1 - self._jitter() / 2)

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._next_s = self._first_s
