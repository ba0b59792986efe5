"""Stands in for CRI-O: takes connections where it would, and can be reloaded."""

import signal
import socket
import sys
from pathlib import Path

SOCKET = Path("/run/crio/crio.sock")


def main() -> int:
    """Accept connections until stopped, and answer nothing."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    SOCKET.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(SOCKET))
        listener.listen()
        while True:
            listener.accept()[0].close()


if __name__ == "__main__":
    sys.exit(main())
