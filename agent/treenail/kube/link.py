"""TLS connection to the API server with a deadline; any thread can abort it."""

import select
import socket
import ssl
import threading

from treenail.clock import Clock

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
# A TLS record has at most 16 KiB of data (RFC 8446, 5.1), and OpenSSL reads one at a time.
_RECORD_BYTES = 16384
_SLACK_S = 0.05
"""Excess over the deadline that is not worth a system call for each read."""


class TlsConnection:
    """A TLS connection; ``connect`` establishes it.

    Every operation raises TimeoutError at ``deadline``, a monotonic time. A limit for each read
    would let a server that sends single bytes block the caller without end.
    """

    def __init__(self, context: ssl.SSLContext, clock: Clock) -> None:
        self.context = context
        self.deadline = 0.0
        self.is_reused = False
        self._timeout_s: float | None = None
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
        self._set_timeout(connected)
        connected.sendall(data)

    def read_some(self) -> bytes:
        """Read at least one byte; return empty bytes at the end."""
        connected = self._get_socket()
        self._set_timeout(connected)
        return connected.recv(_RECORD_BYTES)

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

    def _set_timeout(self, connected: socket.socket) -> None:
        left = self._get_remaining_s()
        if self._timeout_s is None or not left <= self._timeout_s <= left + _SLACK_S:
            connected.settimeout(left)
            self._timeout_s = left

    def _get_remaining_s(self) -> float:
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit is over")
        return left


def _shut_down_socket(connected: socket.socket) -> None:
    try:
        # SSLSocket.shutdown drops the TLS state while another thread reads (ssl.py).
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # The socket is no longer connected.
