"""timedated: the state of the system clock (org.freedesktop.timedate1(5))."""

from treenail.errors import BusError
from treenail.host.systemd.bus import BusInterface, SystemBus

_NAME = "org.freedesktop.timedate1"
_TIMEDATE = BusInterface(_NAME, "/org/freedesktop/timedate1", _NAME)
_CALL_S = 10.0


class Timedate:
    """The system clock. timedated asks the kernel: ProtectClock= denies the agent adjtimex(2)."""

    def __init__(self, bus: SystemBus) -> None:
        self._bus = bus

    def is_synchronized(self) -> bool | None:
        """Return whether the clock is synchronized by NTP; None when timedated does not answer."""
        try:
            value = self._bus.read_properties(_TIMEDATE, timeout_s=_CALL_S).get("NTPSynchronized")
        except BusError:
            return None
        return value if isinstance(value, bool) else None
