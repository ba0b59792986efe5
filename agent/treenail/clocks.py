"""The only clock: wall time for reports, monotonic time for limits, and sleep."""

import time
from typing import Protocol

# RFC 3339 writes years with four digits.
YEAR_1000 = -30_610_224_000
END_OF_9999 = 253_402_300_799


class Clock(Protocol):
    """Interface of a clock; tests pass one that they can move."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since a fixed point in time; never decreases."""

    def sleep(self, seconds: float) -> None:
        """Block the thread for this many seconds."""


class SystemClock:
    """Clock of this machine."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class BootTimeClock(SystemClock):
    """Clock whose monotonic time also counts while the machine sleeps, as a Lease needs."""

    def monotonic(self) -> float:
        # CLOCK_MONOTONIC stands still during a suspend (clock_gettime(2)).
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def format_rfc3339(seconds: float) -> str:
    """Format seconds since the epoch as Kubernetes does, in UTC: ``2026-01-31T12:00:00Z``.

    A time of another year than 1000 to 9999 becomes the nearest of these: damaged files name them.
    """
    bounded = min(max(seconds, YEAR_1000), END_OF_9999)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(bounded))


def format_micro_time(seconds: float) -> str:
    """Format seconds since the epoch as a MicroTime: ``2026-01-31T12:00:00.000000Z``."""
    return f"{format_rfc3339(seconds)[:-1]}.{int(seconds * 1_000_000) % 1_000_000:06d}Z"


def parse_rfc3339(text: object) -> float | None:
    """Convert an RFC 3339 time to seconds since the epoch; None for anything else."""
    from datetime import datetime  # noqa: PLC0415  1 ms, and few commands read a time

    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return moment.timestamp() if moment is not None and moment.tzinfo else None
