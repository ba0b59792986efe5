"""A moment on both clocks of a machine, for waits that outlive the agent's process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """The wall clock may jump: a machine without a clock battery boots in 1970 or at its last time.

    The monotonic clock never jumps, but it begins again with each kernel.
    """

    wall: float
    """Seconds since the epoch."""
    boot_id: str
    monotonic: float
    """Seconds of this boot's monotonic clock."""
