"""logind: reboots and inhibitor locks (org.freedesktop.login1(5))."""

import logging
from dataclasses import dataclass

from treenail.errors import BusError
from treenail.host.systemd import system_bus

log = logging.getLogger(__name__)

_NAME = "org.freedesktop.login1"
_MANAGER = system_bus.BusInterface(_NAME, "/org/freedesktop/login1", f"{_NAME}.Manager")
_CALL_S = 30.0
_IN_PROGRESS = f"{_NAME}.OperationInProgress"
# Flag of RebootWithFlags from systemd 254 on; older versions refuse it with InvalidArgs.
_SOFT_REBOOT_FLAG = 4
_UNSUPPORTED = {
    "org.freedesktop.DBus.Error.InvalidArgs",
    "org.freedesktop.DBus.Error.UnknownMethod",
}
# systemd 257 refuses a blocked reboot with AccessDenied, 258 with the first name.
_BLOCKED = {f"{_NAME}.BlockedByInhibitorLock", "org.freedesktop.DBus.Error.AccessDenied"}


@dataclass(frozen=True, slots=True)
class InhibitorLock:
    """A lock; ``what`` is a list such as ``shutdown:sleep``, ``mode`` is block or delay."""

    what: str
    who: str
    why: str
    mode: str
    uid: int
    pid: int


class Logind:
    """Reboots and inhibitor locks. Raises `BusError` alone. For one thread."""

    def __init__(self, bus: system_bus.SystemBus) -> None:
        self._bus = bus

    def reboot_machine(self, *, is_soft: bool = False) -> None:
        """Queue a reboot, unless one is queued already.

        A block lock prevents it with every version of systemd; the error names the holder.
        ``is_soft`` restarts user space only, where systemd supports that (from 254 on).
        """
        if not self.is_shutting_down():
            # Up to systemd 256, logind ignores block locks when root requests the reboot.
            self._refuse_if_blocked()
        try:
            self._request_reboot(_SOFT_REBOOT_FLAG if is_soft else 0)
        except BusError as error:
            if error.name == _IN_PROGRESS:
                log.info("a shutdown is in progress already")
                return
            if error.name in _BLOCKED:
                self._refuse_if_blocked(error)
            raise

    def _request_reboot(self, flags: int) -> None:
        # No polkit dialog: there is no user session.
        is_interactive = False
        if flags:
            try:
                self._bus.call_method(_MANAGER, "RebootWithFlags", flags, timeout_s=_CALL_S)
            except BusError as error:
                if error.name not in _UNSUPPORTED:
                    raise
                log.info("systemd does not support soft reboots; rebooting the whole machine")
            else:
                return
        # A reply means that the reboot is queued. Delay locks hold it for InhibitDelayMaxSec=, by
        # default 5 s (logind.conf(5)).
        self._bus.call_method(_MANAGER, "Reboot", is_interactive, timeout_s=_CALL_S)

    def is_shutting_down(self) -> bool:
        """Return whether a shutdown has begun; delay locks may hold it."""
        return (
            self._bus.read_properties(_MANAGER, timeout_s=_CALL_S).get("PreparingForShutdown")
            is True
        )

    def list_inhibitors(self) -> tuple[InhibitorLock, ...]:
        """Return all locks of all programs."""
        rows = self._bus.call_method(_MANAGER, "ListInhibitors", timeout_s=_CALL_S)
        try:
            return tuple(InhibitorLock(*row) for row in rows) if isinstance(rows, list) else ()
        except TypeError as error:
            raise BusError(
                f"cannot list inhibitors: {_NAME} describes a lock in another way",
                remedy="update treenail: it does not know this version of systemd",
            ) from error

    def _refuse_if_blocked(self, error: BusError | None = None) -> None:
        blocking = [
            f"{lock.who} (process {lock.pid}): {lock.why}"
            for lock in self.list_inhibitors()
            if "shutdown" in lock.what.split(":") and lock.mode == "block"
        ]
        if blocking:
            raise BusError(
                f"cannot reboot: blocked by {'; '.join(blocking)}",
                name=error.name if error else f"{_NAME}.BlockedByInhibitorLock",
                remedy="wait for it, or end it; to see all locks, run: systemd-inhibit --list",
            ) from error
