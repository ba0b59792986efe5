"""An agent that does nothing but live: it tells systemd so, and obeys its first argument.

``run`` runs until SIGTERM; ``deaf`` ignores SIGTERM; ``mute`` sends no sign of life after the
first; ``leave`` exits at once with 0; ``fail`` with 1.
"""

import os
import signal
import socket
import sys
import threading
from types import FrameType


def notify(text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])


def main(mode: str) -> int:
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else end)
    if mode == "fail":
        return 1
    watchdog = os.environ.get("WATCHDOG_USEC", "none")
    notify(f"READY=1\nSTATUS={mode} {watchdog}")
    if mode == "leave":
        return 0
    while not stop.wait(0.05):
        if mode != "mute":
            notify("WATCHDOG=1")
    notify("STOPPING=1\nSTATUS=stopping")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
