"""The only clock: wall time for people, monotonic time for limits, sleep for the rare pause."""

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, for whoever needs to know; tests pass one they can move."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def format_rfc3339(seconds: float) -> str:
    """The moment as Kubernetes writes it, in UTC: ``2026-01-31T12:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def format_micro_time(seconds: float) -> str:
    """The moment as Kubernetes' MicroTime: ``2026-01-31T12:00:00.000000Z``."""
    return f"{format_rfc3339(seconds)[:-1]}.{int(seconds * 1_000_000) % 1_000_000:06d}Z"
