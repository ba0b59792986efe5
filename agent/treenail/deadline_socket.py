"""Socket for ``http.client`` with a time limit for the whole request.

The time-out of a plain socket restarts with each received byte.
"""

import io
import socket

from treenail import clocks

_BUFFER_BYTES = 256 * 1024


class DeadlineSocket:
    """A socket as ``http.client`` uses it, whose operations end at a deadline.

    ``idle_s`` is the limit of one operation.
    """

    def __init__(
        self, inner: socket.socket, clock: clocks.Clock, idle_s: float, deadline: float
    ) -> None:
        self.deadline = deadline
        self._inner = inner
        self._clock = clock
        self._idle_s = idle_s
        self._readers = 0
        self._is_closed = False

    def sendall(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            self._set_timeout()
            view = view[self._inner.send(view) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._readers += 1
        return io.BufferedReader(_SocketReader(self), _BUFFER_BYTES)

    def receive_into(self, buffer: memoryview) -> int:
        self._set_timeout()
        return self._inner.recv_into(buffer)

    def release(self) -> None:
        """Count a reader that is closed; http.client closes the socket before it reads the rest."""
        self._readers -= 1
        if self._is_closed and self._readers <= 0:
            self._inner.close()

    def close(self) -> None:
        self._is_closed = True
        if self._readers <= 0:
            self._inner.close()

    def _set_timeout(self) -> None:
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit of the request ended")
        self._inner.settimeout(min(left, self._idle_s))


class _SocketReader(io.RawIOBase):
    def __init__(self, limited: DeadlineSocket) -> None:
        self._limited = limited

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer
        return self._limited.receive_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._limited.release()
