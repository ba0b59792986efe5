"""TLS connection to the API server with a deadline; any thread can abort it."""

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

# The kernel detects a lost peer after 30 s of silence and three lost probes (tcp(7)), or when sent
# data stays unacknowledged for 45 s.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class TlsConnection:
    """A TLS connection; ``connect`` establishes it.

    Every operation raises TimeoutError at ``deadline``, a monotonic time. A limit for each read
    would let a server that sends single bytes block the caller without end.
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
        """Connect to the first address that answers; raise OSError if none does.

        Each address gets ``limit_s``, and so does the TLS handshake.
        """
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
        """Send all bytes."""
        connected = self._get_socket()
        connected.settimeout(self._get_remaining_s())
        connected.sendall(data)

    def begin_response(self, method: str) -> http.client.HTTPResponse:
        """Read the headers of the response; the caller reads its body."""
        # HTTPResponse calls only makefile() of a socket (http/client.py).
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        response.begin()
        return response

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return a reader that observes the deadline; closing it leaves the connection open."""
        return io.BufferedReader(_ConnectionReader(self))

    def read_into(self, buffer: "WriteableBuffer") -> int:
        """Read at least one byte into ``buffer``; return 0 at the end."""
        connected = self._get_socket()
        connected.settimeout(self._get_remaining_s())
        return connected.recv_into(buffer)

    def is_idle(self) -> bool:
        """Return True when the connection is open and has no unread data.

        A closed connection is readable too, and so is one whose server sends without a request.
        """
        poll = select.poll()
        try:
            poll.register(self._get_socket(), select.POLLIN)
        except (OSError, ValueError):
            return False
        return not poll.poll(0)

    def abort(self) -> None:
        """End it from any thread; the thread that connects, reads or writes gets an OSError."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                _shut_down_socket(self._socket)

    def close(self) -> None:
        """Close the socket. Only the thread that uses it may call this, or any when none does."""
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
            raise TimeoutError("the time limit is over")
        return left


class _ConnectionReader(io.RawIOBase):
    """Adapter of a connection for io.BufferedReader."""

    def __init__(self, link: TlsConnection) -> None:
        self._connection = link

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        return self._connection.read_into(buffer)


def _shut_down_socket(connected: socket.socket) -> None:
    try:
        # SSLSocket.shutdown drops the TLS state while another thread reads (ssl.py).
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # The socket is no longer connected.
