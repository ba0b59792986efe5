"""logind: rebooting, and the locks that hold a shutdown up."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treenail.errors import BusError
from treenail.host.bus import SystemBus, Target

log = logging.getLogger(__name__)

_NAME = "org.freedesktop.login1"
_MANAGER = Target(_NAME, "/org/freedesktop/login1", f"{_NAME}.Manager")
_CALL_S = 30.0
_IN_PROGRESS = f"{_NAME}.OperationInProgress"
# Before systemd 258, a blocked reboot is refused as if root had no right to it.
_BLOCKED = {f"{_NAME}.BlockedByInhibitorLock", "org.freedesktop.DBus.Error.AccessDenied"}


@dataclass(frozen=True, slots=True)
class Inhibitor:
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

    def reboot(self) -> None:
        """Return once a reboot is queued, by this call or before it.

        From systemd 257 on, a block lock stops root too; the error names who holds it.
        """
        try:
            # Nobody is there to be asked for a password.
            interactive = False
            self._bus.call(_MANAGER, "Reboot", interactive, timeout_s=_CALL_S)
        except BusError as error:
            if error.name == _IN_PROGRESS:
                log.info("the machine is going down already")
                return
            if error.name in _BLOCKED:
                raise self._blocked(error) from error
            raise

    def shutting_down(self) -> bool:
        """Whether the machine is going down: a shutdown was begun, perhaps held up by delays."""
        return self._bus.properties(_MANAGER, timeout_s=_CALL_S).get("PreparingForShutdown") is True

    def inhibitors(self) -> tuple[Inhibitor, ...]:
        """The locks that are held, whoever holds them."""
        found = self._bus.call(_MANAGER, "ListInhibitors", timeout_s=_CALL_S)
        return tuple(Inhibitor(*each) for each in found) if isinstance(found, list) else ()

    @contextmanager
    def inhibit(self, what: str, who: str, why: str, mode: str) -> Iterator[None]:
        """Hold a lock, such as on ``shutdown``, while within; the kernel ends it if we die.

        ``mode`` is ``block``, which also keeps rpm-ostreed from rebooting, or ``delay``.
        """
        lock = self._bus.call_for_fd(_MANAGER, "Inhibit", what, who, why, mode, timeout_s=_CALL_S)
        try:
            yield
        finally:
            os.close(lock)

    def _blocked(self, error: BusError) -> BusError:
        blocking = [
            f"{each.who} (process {each.pid}): {each.why}"
            for each in self.inhibitors()
            if "shutdown" in each.what.split(":") and each.mode == "block"
        ]
        if not blocking:
            return error
        return BusError(
            f"logind refuses to reboot, blocked by {'; '.join(blocking)}",
            name=error.name,
            remedy="wait for it, or end it; see: systemd-inhibit --list",
        )
