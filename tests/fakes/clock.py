"""A clock that stands still until it is moved."""

_AGENT_STARTS_S = 20.0
"""Seconds of a boot until the agent starts."""


class FakeClock:
    def __init__(self, start: float = 1_700_000_000.0, *, monotonic: float | None = None) -> None:
        """``monotonic``: where the monotonic clock begins, if not with the wall clock."""
        self._now = start
        self._monotonic = start if monotonic is None else monotonic

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.move(seconds)

    def move(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds

    def begin_boot(self) -> None:
        """Begin the monotonic clock again, as a reboot of the kernel does."""
        self._monotonic = _AGENT_STARTS_S

    def set_wall_clock(self, seconds: float) -> None:
        """Set the wall clock, as NTP does; the monotonic clock goes on."""
        self._now = seconds
