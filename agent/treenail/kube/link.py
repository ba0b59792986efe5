"""One TLS connection to the API server: it has a deadline, and any thread can end it."""

import http.client
import io
import select
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from treenail.clock import Clock

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A peer that vanished without a word is noticed after 30 s of silence and three lost probes,
# or when what was sent stays unacknowledged for as long.
OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Link:
    """A TLS connection, to be made by ``connect``.

    Everything on it ends at ``deadline``, a moment of the clock's monotonic time, with
    TimeoutError; a limit per read alone would let a server that trickles hold us for ever.
    """

    def __init__(self, context: ssl.SSLContext, clock: Clock) -> None:
        self.context = context
        self.deadline = 0.0
        self.used = False
        self._clock = clock
        self._lock = threading.Lock()
        self._aborted = False
        self._socket: socket.socket | None = None

    def connect(self, host: str, port: int, *, server_name: str, limit_s: float) -> None:
        """Connect to the first address that answers, within ``limit_s`` each; OSError if none."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(found, start=1):
            plain = self._hold(socket.socket(family, kind, protocol))
            try:
                for option in OPTIONS:
                    plain.setsockopt(*option)
                plain.settimeout(min(limit_s, self._left()))
                plain.connect(address)
                break
            except OSError:
                if self._aborted or number == len(found):
                    raise
        secured = self._secure(server_name)
        secured.settimeout(min(limit_s, self._left()))
        secured.do_handshake()

    def write(self, data: bytes) -> None:
        """Send all of it."""
        connected = self._connected()
        connected.settimeout(self._left())
        connected.sendall(data)

    def answer(self, method: str) -> http.client.HTTPResponse:
        """The answer to what was written, its headers read; its body is read from it."""
        # All that HTTPResponse asks of a socket is makefile().
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        response.begin()
        return response

    def makefile(self, _mode: str) -> io.BufferedReader:
        """A reader that keeps the deadline; closing it leaves the connection open."""
        return io.BufferedReader(_Raw(self))

    def read_into(self, buffer: "WriteableBuffer") -> int:
        """At least one byte into ``buffer``; 0 at the end."""
        connected = self._connected()
        connected.settimeout(self._left())
        return connected.recv_into(buffer)

    def idle(self) -> bool:
        """Whether it is open and silent; a peer that closed it, or talks out of turn, is not."""
        poll = select.poll()
        try:
            poll.register(self._connected(), select.POLLIN)
        except (OSError, ValueError):
            return False
        return not poll.poll(0)

    def abort(self) -> None:
        """End it from any thread: whoever connects, reads or writes here wakes up at once."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                _shut_down(self._socket)

    def close(self) -> None:
        """Give the socket back; for the thread that uses it, or when none does."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _hold(self, plain: socket.socket) -> socket.socket:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = plain
            if self._aborted:
                raise OSError("closed")
            return plain

    def _secure(self, server_name: str) -> ssl.SSLSocket:
        with self._lock:
            if self._aborted or self._socket is None:
                raise OSError("closed")
            secured = self.context.wrap_socket(
                self._socket, server_hostname=server_name, do_handshake_on_connect=False
            )
            self._socket = secured
            return secured

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise OSError("closed")
        return self._socket

    def _left(self) -> float:
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        return left


class _Raw(io.RawIOBase):
    """The link as io.BufferedReader wants to see it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        return self._link.read_into(buffer)


def _shut_down(connected: socket.socket) -> None:
    try:
        # Not SSLSocket.shutdown: that drops the TLS state under the thread that reads.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more, which is what was wanted
