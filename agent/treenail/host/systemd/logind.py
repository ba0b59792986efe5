"""logind: rebooting, and the locks that hold a shutdown up."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treenail.errors import BusError
from treenail.host.systemd.bus import BusInterface, SystemBus

log = logging.getLogger(__name__)

_NAME = "org.freedesktop.login1"
_MANAGER = BusInterface(_NAME, "/org/freedesktop/login1", f"{_NAME}.Manager")
_CALL_S = 30.0
_IN_PROGRESS = f"{_NAME}.OperationInProgress"
# A flag of RebootWithFlags, which refuses those that it does not know.
_SOFT_REBOOT_FLAG = 4
_UNSUPPORTED = {
    "org.freedesktop.DBus.Error.InvalidArgs",
    "org.freedesktop.DBus.Error.UnknownMethod",
}
# Before systemd 258, a blocked reboot is refused as if root had no right to it.
_BLOCKED = {f"{_NAME}.BlockedByInhibitorLock", "org.freedesktop.DBus.Error.AccessDenied"}


@dataclass(frozen=True, slots=True)
class InhibitorLock:
    """A lock; ``what`` is a list such as ``shutdown:sleep``, ``mode`` block or delay."""

    what: str
    who: str
    why: str
    mode: str
    uid: int
    pid: int


class Logind:
    """Rebooting. Raises `BusError` alone; to be used by one thread."""

    def __init__(self, bus: SystemBus) -> None:
        self._bus = bus

    def reboot_machine(self, *, is_soft: bool = False) -> None:
        """Return once a reboot is queued, by this call or before it.

        A block lock stops it, root's too, whatever systemd's version; the error names who holds
        it. ``is_soft`` asks for a new user space on the kernel that runs, where systemd can do that
        (from 254 on); elsewhere it is a reboot like any other.
        """
        if not self.is_shutting_down():
            # Before systemd 257, logind lets root pass by every lock of root's.
            self._refuse_if_blocked()
        try:
            self._request_reboot(_SOFT_REBOOT_FLAG if is_soft else 0)
        except BusError as error:
            if error.name == _IN_PROGRESS:
                log.info("the machine is going down already")
                return
            if error.name in _BLOCKED:
                self._refuse_if_blocked(error)
            raise

    def _request_reboot(self, flags: int) -> None:
        # Nobody is there to be asked for a password.
        interactive = False
        if flags:
            try:
                self._bus.call_method(_MANAGER, "RebootWithFlags", flags, timeout_s=_CALL_S)
            except BusError as error:
                if error.name not in _UNSUPPORTED:
                    raise
                log.info("systemd knows no soft reboot: the whole machine reboots")
            else:
                return
        self._bus.call_method(_MANAGER, "Reboot", interactive, timeout_s=_CALL_S)

    def is_shutting_down(self) -> bool:
        """Whether the machine is going down: a shutdown was begun, perhaps held up by delays."""
        return (
            self._bus.read_properties(_MANAGER, timeout_s=_CALL_S).get("PreparingForShutdown")
            is True
        )

    def list_inhibitors(self) -> tuple[InhibitorLock, ...]:
        """The locks that are held, whoever holds them."""
        found = self._bus.call_method(_MANAGER, "ListInhibitors", timeout_s=_CALL_S)
        return tuple(InhibitorLock(*each) for each in found) if isinstance(found, list) else ()

    @contextmanager
    def hold_inhibitor(self, what: str, who: str, why: str, mode: str) -> Iterator[None]:
        """Hold a lock, such as on ``shutdown``, while within; the kernel ends it if we die.

        ``mode`` is ``block``, which also keeps rpm-ostreed from rebooting, or ``delay``.
        """
        lock = self._bus.call_for_fd(_MANAGER, "Inhibit", what, who, why, mode, timeout_s=_CALL_S)
        try:
            yield
        finally:
            os.close(lock)

    def _refuse_if_blocked(self, error: BusError | None = None) -> None:
        blocking = [
            f"{each.who} (process {each.pid}): {each.why}"
            for each in self.list_inhibitors()
            if "shutdown" in each.what.split(":") and each.mode == "block"
        ]
        if blocking:
            raise BusError(
                f"can't reboot, blocked by {'; '.join(blocking)}",
                name=error.name if error else f"{_NAME}.BlockedByInhibitorLock",
                remedy="wait for it, or end it; see: systemd-inhibit --list",
            ) from error
