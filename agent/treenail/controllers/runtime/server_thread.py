"""A socket server in a thread of its own."""

import socketserver
import threading
from typing import Self

_END_S = 10.0


class ServerThread:
    """Serves while entered. At the end it waits for the thread, and for no request in progress."""

    def __init__(self, server: socketserver.BaseServer, name: str) -> None:
        self._listener = server
        self._thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join(_END_S)
