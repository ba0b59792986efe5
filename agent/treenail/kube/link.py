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
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class TlsConnection:
    """A TLS connection, to be made by ``connect``.

    Everything on it ends at ``deadline``, a moment of the clock's monotonic time, with
    TimeoutError; a limit per read alone would let a server that trickles hold us for ever.
    """

    def __init__(self, context: ssl.SSLContext, clock: Clock) -> None:
        self.context = context
        self.deadline = 0.0
        self.is_reused = False
        self._clock = clock
        self._lock = threading.Lock()
        self._aborted = False
        self._socket: socket.socket | None = None

    def connect(self, host: str, port: int, *, server_name: str, limit_s: float) -> None:
        """Connect to the first address that answers, within ``limit_s`` each; OSError if none."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(found, start=1):
            plain = self._replace_socket(socket.socket(family, kind, protocol))
            try:
                for option in SOCKET_OPTIONS:
                    plain.setsockopt(*option)
                plain.settimeout(min(limit_s, self._get_remaining_s()))
                plain.connect(address)
                break
            except OSError:
                if self._aborted or number == len(found):
                    raise
        secured = self._wrap_socket(server_name)
        secured.settimeout(min(limit_s, self._get_remaining_s()))
        secured.do_handshake()

    def write_bytes(self, data: bytes) -> None:
        """Send all of it."""
        connected = self._get_socket()
        connected.settimeout(self._get_remaining_s())
        connected.sendall(data)

    def begin_response(self, method: str) -> http.client.HTTPResponse:
        """The answer to what was written, its headers read; its body is read from it."""
        # All that HTTPResponse asks of a socket is makefile().
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        response.begin()
        return response

    def makefile(self, _mode: str) -> io.BufferedReader:
        """A reader that keeps the deadline; closing it leaves the connection open."""
        return io.BufferedReader(_ConnectionReader(self))

    def read_into(self, buffer: "WriteableBuffer") -> int:
        """At least one byte into ``buffer``; 0 at the end."""
        connected = self._get_socket()
        connected.settimeout(self._get_remaining_s())
        return connected.recv_into(buffer)

    def is_idle(self) -> bool:
        """Whether it is open and silent; a peer that closed it, or talks out of turn, is not."""
        poll = select.poll()
        try:
            poll.register(self._get_socket(), select.POLLIN)
        except (OSError, ValueError):
            return False
        return not poll.poll(0)

    def abort(self) -> None:
        """End it from any thread: whoever connects, reads or writes here wakes up at once."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                _shut_down_socket(self._socket)

    def close(self) -> None:
        """Give the socket back; for the thread that uses it, or when none does."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _replace_socket(self, plain: socket.socket) -> socket.socket:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = plain
            if self._aborted:
                raise OSError("closed")
            return plain

    def _wrap_socket(self, server_name: str) -> ssl.SSLSocket:
        with self._lock:
            if self._aborted or self._socket is None:
                raise OSError("closed")
            secured = self.context.wrap_socket(
                self._socket, server_hostname=server_name, do_handshake_on_connect=False
            )
            self._socket = secured
            return secured

    def _get_socket(self) -> socket.socket:
        if self._socket is None:
            raise OSError("closed")
        return self._socket

    def _get_remaining_s(self) -> float:
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        return left


class _ConnectionReader(io.RawIOBase):
    """The link as io.BufferedReader wants to see it."""

    def __init__(self, link: TlsConnection) -> None:
        self._connection = link

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        return self._connection.read_into(buffer)


def _shut_down_socket(connected: socket.socket) -> None:
    try:
        # Not SSLSocket.shutdown: that drops the TLS state under the thread that reads.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more, which is what was wanted
