"""Notifications to systemd by datagrams to NOTIFY_SOCKET (sd_notify(3))."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_KIND = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_STATUS_LIMIT = 500  # characters; systemctl shows one line


class SystemdNotifier:
    """Notifies the service manager. Does nothing without NOTIFY_SOCKET, and never raises."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the null character of an abstract address, see sd_notify(3).
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_interval_s = _parse_watchdog_interval(environ)

    @property
    def watchdog_interval_s(self) -> float | None:
        """Half of the watchdog time, the interval between heartbeats; None without a watchdog."""
        return self._watchdog_interval_s

    def notify_ready(self) -> None:
        """Notify that the service has started."""
        self._send_state("READY=1")

    def extend_start_timeout(self, seconds: float) -> None:
        """Let the start last at least so many more seconds, whatever TimeoutStartSec= says."""
        self._send_state(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}")

    def notify_status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._send_state(f"STATUS={' '.join(text.split())[:_STATUS_LIMIT]}")

    def notify_watchdog(self) -> None:
        """Send a heartbeat to the watchdog."""
        self._send_state("WATCHDOG=1")

    def notify_stopping(self) -> None:
        """Notify that the service stops."""
        self._send_state("STOPPING=1")

    def _send_state(self, state: str) -> None:
        if not self._address:
            return
        with (
            suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, _KIND) as sender,
        ):
            sender.sendto(state.encode("utf-8", "replace"), self._address)


def _parse_watchdog_interval(environ: Mapping[str, str]) -> float | None:
    timeout_us, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not timeout_us.isdecimal() or int(timeout_us) == 0 or pid not in {"", str(os.getpid())}:
        return None
    return int(timeout_us) / 2_000_000
