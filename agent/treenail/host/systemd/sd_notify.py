"""What systemd is told: ready, status, watchdog, by datagrams to NOTIFY_SOCKET."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_KIND = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_STATUS_LIMIT = 500  # characters; systemctl shows one line


class Notifier:
    """Tells the service manager; does nothing where there is none, and never raises."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the null character of an abstract address.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._interval_s = _interval_s(environ)

    @property
    def interval_s(self) -> float | None:
        """Seconds between beats of the watchdog, half of what is allowed; None without one."""
        return self._interval_s

    def ready(self) -> None:
        """Say that the service is up, or has read its settings again."""
        self._tell("READY=1")

    def status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._tell(f"STATUS={' '.join(text.split())[:_STATUS_LIMIT]}")

    def watchdog(self) -> None:
        """Say that the process is alive."""
        self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the service is on its way out."""
        self._tell("STOPPING=1")

    def reloading(self, monotonic_s: float) -> None:
        """Say that settings are being read again since this moment; `ready` ends it."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic_s * 1_000_000)}")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        with (
            suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, _KIND) as sender,
        ):
            sender.sendto(state.encode("utf-8", "replace"), self._address)


def _interval_s(environ: Mapping[str, str]) -> float | None:
    allowed, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or int(allowed) == 0 or pid not in {"", str(os.getpid())}:
        return None
    return int(allowed) / 2_000_000
