"""The container runtime of a machine: a socket that takes connections, and says nothing."""

import socket
from pathlib import Path

from treenail.errors import HostError

RUNTIME_UNIT = "crio.service"
_SOCKET = "run/crio/crio.sock"


class CriSocket:
    """Listens from `start` to `stop`, as CRI-O does for the kubelet."""

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
            raise HostError(f"{self._path} can't be listened on: {error.strerror}") from error
        self._listener = listener

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
