"""TLS connection to the API server with a deadline, and the HTTP/1.1 responses (RFC 9112) on it.

Any thread can abort the connection. ``http.client`` costs five times the processor time, because it
parses the head as an email.
"""

import re
import select
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping

from treenail.clocks import Clock

# The kernel detects a lost peer after 30 s of silence and three lost probes (tcp(7)), or when sent
# data stays unacknowledged for 45 s.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
    # Nagle's algorithm would hold the end of a request until the server acknowledges the rest.
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
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(addresses, start=1):
            plain = self._replace_socket(socket.socket(family, kind, protocol))
            try:
                for option in SOCKET_OPTIONS:
                    plain.setsockopt(*option)
                plain.settimeout(min(limit_s, self._get_remaining_s()))
                plain.connect(address)
                break
            except OSError:
                if self._aborted or number == len(addresses):
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
        remaining_s = self._get_remaining_s()
        if self._timeout_s is None or not remaining_s <= self._timeout_s <= remaining_s + _SLACK_S:
            connected.settimeout(remaining_s)
            self._timeout_s = remaining_s

    def _get_remaining_s(self) -> float:
        remaining_s = self.deadline - self._clock.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the time limit is over")
        return remaining_s


def _shut_down_socket(connected: socket.socket) -> None:
    try:
        # SSLSocket.shutdown drops the TLS state while another thread reads (ssl.py).
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # The socket is no longer connected.


MAX_HEAD_BYTES = 65536
_MAX_DIGITS = 18
_HEX_DIGITS = b"0123456789abcdefABCDEF"
# RFC 9112, 6.3.
_NO_BODY = frozenset({204, 304})
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: [^\r\n]*)?(?=\r\n|\Z)")
# Only the headers that clients of the API server need; a response has a dozen others.
_HEADER = re.compile(
    rb"\r\n(connection|content-encoding|content-length|retry-after|transfer-encoding):[ \t]*"
    rb"([^\r\n]*)",
    re.IGNORECASE,
)


class MalformedResponseError(Exception):
    """The server sent something that is not an HTTP/1.1 response."""


class TruncatedResponseError(Exception):
    """The connection ended before the response was complete."""


class HttpResponse:
    """One response: its head is read at once, its body by ``iter_body``.

    ``headers`` has those that a client of the API server needs, with names in lower case.
    """

    def __init__(self, source: TlsConnection) -> None:
        self._source = source
        self._buffer = bytearray()
        head = self._read_head()
        while 100 <= head[0] < 200:  # interim responses
            head = self._read_head()
        self.status, self.headers, self._is_http_1_0 = head
        self._is_complete = self.status in _NO_BODY
        self._is_chunked = self._get_is_chunked()
        # Transfer-Encoding overrides Content-Length (RFC 9112, 6.3).
        self._length = None if self._is_chunked else self._parse_length()

    @property
    def can_reuse(self) -> bool:
        """True when the body is complete, its end was marked, and the connection stays open."""
        wants_close = "close" in self.headers.get("connection", "").lower()
        return self._is_complete and not (wants_close or self._is_http_1_0 or self._buffer)

    def iter_body(self) -> Iterator[bytes]:
        """Yield the body in pieces as they arrive.

        Raises TruncatedResponseError when the connection ends before the body does.
        """
        if self._is_complete:
            return
        if self._is_chunked:
            yield from self._iter_chunks()
        elif self._length is None:
            # The end of the connection is the end of the body.
            yield from self._take_buffer()
            while piece := self._source.read_some():
                yield piece
            return
        else:
            yield from self._iter_bytes(self._length)
        self._is_complete = True

    def _iter_chunks(self) -> Iterator[bytes]:
        while True:
            # Extensions of a chunk follow a semicolon and are ignored (RFC 9112, 7.1.1).
            size = self._read_line().partition(b";")[0].strip()
            if not size or size.strip(_HEX_DIGITS) or len(size) > _MAX_DIGITS:
                raise MalformedResponseError("the size of a chunk is not a number")
            if not (length := int(size, 16)):
                break
            yield from self._iter_bytes(length)
            if self._read_line():
                raise MalformedResponseError("a chunk is longer than its size")
        while self._read_line():
            pass  # trailers

    def _iter_bytes(self, length: int) -> Iterator[bytes]:
        while length > 0:
            if not self._buffer:
                self._fill()
            piece = bytes(self._buffer[:length])
            del self._buffer[:length]
            length -= len(piece)
            yield piece

    def _take_buffer(self) -> Iterator[bytes]:
        if self._buffer:
            piece = bytes(self._buffer)
            self._buffer.clear()
            yield piece

    def _read_head(self) -> tuple[int, Mapping[str, str], bool]:
        head = self._read_until(b"\r\n\r\n")
        status = _STATUS_LINE.match(head)
        if status is None:
            raise MalformedResponseError("the response does not begin with HTTP/1.1 and a status")
        headers = {
            name.lower().decode("ascii"): value.strip().decode("latin-1")
            for name, value in _HEADER.findall(head)
        }
        return int(status[2]), headers, status[1] == b"0"

    def _read_line(self) -> bytes:
        return self._read_until(b"\r\n")

    def _read_until(self, end: bytes) -> bytes:
        """Return what precedes ``end``, and drop both from the buffer."""
        start = 0
        while (position := self._buffer.find(end, start)) < 0:
            start = max(len(self._buffer) - len(end) + 1, 0)
            if start > MAX_HEAD_BYTES:
                raise MalformedResponseError(f"a line is longer than {MAX_HEAD_BYTES} bytes")
            self._fill()
        line = bytes(self._buffer[:position])
        del self._buffer[: position + len(end)]
        return line

    def _fill(self) -> None:
        piece = self._source.read_some()
        if not piece:
            raise TruncatedResponseError
        self._buffer += piece

    def _get_is_chunked(self) -> bool:
        encoding = self.headers.get("transfer-encoding", "")
        if encoding and encoding.lower() != "chunked":
            raise MalformedResponseError(f"the transfer encoding {encoding!r:.40} is unknown")
        return bool(encoding)

    def _parse_length(self) -> int | None:
        text = self.headers.get("content-length")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise MalformedResponseError("the content length is not a number")
        return int(text)
