"""Reads HTTP/1.1 responses (RFC 9112) from a connection.

``http.client`` costs five times the processor time, because it parses the head as an email.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

MAX_HEAD_BYTES = 65536
_MAX_DIGITS = 18
_HEX_DIGITS = b"0123456789abcdefABCDEF"
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


class ByteSource(Protocol):
    """A connection. ``read_some`` returns empty bytes at its end."""

    def read_some(self) -> bytes: ...


class HttpResponse:
    """One response: its head is read at once, its body by ``iter_body``.

    ``headers`` has those that a client of the API server needs, with names in lower case.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._buffer = bytearray()
        head = self._read_head()
        while 100 <= head[0] < 200:  # interim responses
            head = self._read_head()
        self.status, self.headers, self._is_http_1_0 = head
        self._is_complete = self.status in _NO_BODY
        self._is_chunked = self._get_is_chunked()
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
        while (found := self._buffer.find(end, start)) < 0:
            start = max(len(self._buffer) - len(end) + 1, 0)
            if start > MAX_HEAD_BYTES:
                raise MalformedResponseError(f"a line is longer than {MAX_HEAD_BYTES} bytes")
            self._fill()
        line = bytes(self._buffer[:found])
        del self._buffer[: found + len(end)]
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
