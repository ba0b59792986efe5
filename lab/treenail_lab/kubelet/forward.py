"""The host's end of the way from pods to the registry: a Unix socket before a port of loopback."""

import contextlib
import os
import socket
import threading
from pathlib import Path

_CHUNK = 1 << 16
_CONNECT_TIMEOUT_S = 10.0


class PortForward:
    """Accepts connections on a Unix socket between `start` and `stop`."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self.port = port
        self._listener: socket.socket | None = None

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o077)
        try:
            listener.bind(str(self.path))
        finally:
            os.umask(before)
        listener.listen(64)
        self._listener = listener
        threading.Thread(
            target=self._accept, args=(listener,), name="lab-forward", daemon=True
        ).start()

    def stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            # close() alone leaves the thread in accept(); shutdown() makes it return.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            self.path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(("127.0.0.1", self.port), _CONNECT_TIMEOUT_S)
            except OSError:
                return
            with server:
                server.settimeout(None)
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
