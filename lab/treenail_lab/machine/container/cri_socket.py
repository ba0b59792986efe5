"""The socket of the container runtime: it accepts connections and closes them unanswered."""

import socket
import threading
from pathlib import Path

from treenail.errors import HostError

RUNTIME_UNIT = "crio.service"
_SOCKET = "run/crio/crio.sock"


class CriSocket:
    """The listener that CRI-O has for the kubelet, between `start` and `stop`."""

    def __init__(self, root: Path) -> None:
        self._path = root / _SOCKET
        self._listener: socket.socket | None = None

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            listener.listen()
        except OSError as error:
            listener.close()
            raise HostError(f"cannot listen on {self._path}: {error.strerror}") from error
        self._listener = listener
        threading.Thread(
            target=_accept_connections, args=(listener,), name="cri-socket", daemon=True
        ).start()

    def stop(self) -> None:
        if self._listener is not None:
            # close() alone leaves the thread in accept(); shutdown() makes it return.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)


def _accept_connections(listener: socket.socket) -> None:
    # Connections that are not accepted fill the backlog, and then connect() blocks (unix(7)).
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()
