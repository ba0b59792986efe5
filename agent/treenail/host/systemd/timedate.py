"""The system clock's state, as timedated knows it."""

from treenail.errors import BusError
from treenail.host.systemd.bus import BusInterface, SystemBus

_NAME = "org.freedesktop.timedate1"
_TIMEDATE = BusInterface(_NAME, "/org/freedesktop/timedate1", _NAME)
_CALL_S = 10.0


class Timedate:
    """Asks the kernel through timedated: the agent itself has no right to."""

    def __init__(self, bus: SystemBus) -> None:
        self._bus = bus

    def is_synchronized(self) -> bool | None:
        """Whether the clock follows a time server; None when nobody can tell."""
        try:
            found = self._bus.read_properties(_TIMEDATE, timeout_s=_CALL_S).get("NTPSynchronized")
        except BusError:
            return None
        return found if isinstance(found, bool) else None
