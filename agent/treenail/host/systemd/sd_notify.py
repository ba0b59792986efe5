"""What systemd is told: ready, status, watchdog, by datagrams to NOTIFY_SOCKET."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_KIND = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_STATUS_LIMIT = 500  # characters; systemctl shows one line


class SystemdNotifier:
    """Tells the service manager; does nothing where there is none, and never raises."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the null character of an abstract address.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_interval_s = _parse_watchdog_interval(environ)

    @property
    def watchdog_interval_s(self) -> float | None:
        """Seconds between beats of the watchdog, half of what is allowed; None without one."""
        return self._watchdog_interval_s

    def notify_ready(self) -> None:
        """Say that the service is up, or has read its settings again."""
        self._send_state("READY=1")

    def notify_status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._send_state(f"STATUS={' '.join(text.split())[:_STATUS_LIMIT]}")

    def notify_watchdog(self) -> None:
        """Say that the process is alive."""
        self._send_state("WATCHDOG=1")

    def notify_stopping(self) -> None:
        """Say that the service is on its way out."""
        self._send_state("STOPPING=1")

    def notify_reloading(self, monotonic_s: float) -> None:
        """Say that settings are being read again since this moment; `notify_ready` ends it."""
        self._send_state(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic_s * 1_000_000)}")

    def _send_state(self, state: str) -> None:
        if not self._address:
            return
        with (
            suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, _KIND) as sender,
        ):
            sender.sendto(state.encode("utf-8", "replace"), self._address)


def _parse_watchdog_interval(environ: Mapping[str, str]) -> float | None:
    allowed, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or int(allowed) == 0 or pid not in {"", str(os.getpid())}:
        return None
    return int(allowed) / 2_000_000
