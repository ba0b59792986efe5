"""How threads and signal handlers get the main thread's attention."""

import queue


class Wakeup:
    """A bell: a ring means "look", and carries no order.

    Rings that come while nobody waits are kept; missing or merged ones do no harm, because
    whoever wakes looks at everything. Safe in signal handlers, as `queue.SimpleQueue` is.
    """

    def __init__(self) -> None:
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def notify(self, reason: str) -> None:
        """Wake the waiting thread; ``reason`` is for the log."""
        self._reasons.put(reason)

    def wait(self, seconds: float) -> frozenset[str]:
        """Return the reasons rung since the last wait, or nothing after so many seconds."""
        reasons: set[str] = set()
        try:
            reasons.add(self._reasons.get(timeout=max(seconds, 0.0)))
            while True:
                reasons.add(self._reasons.get_nowait())
        except queue.Empty:
            return frozenset(reasons)
