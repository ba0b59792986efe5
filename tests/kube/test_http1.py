"""Responses as a server may send them, in pieces of every size."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.kube.transport.connection import (
    HttpResponse,
    MalformedResponseError,
    TruncatedResponseError,
)

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nAudit-Id: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;note=1\r\nhello\r\nA\r\n, \r\n world\r\n0\r\nTrailer: x\r\n\r\n"
)
KEPT = b"HTTP/1.1 201 Created\r\nCONTENT-LENGTH: 2 \r\nRetry-After:7\r\n\r\nok"


class Pieces:
    """A connection that delivers its bytes in pieces of one size."""

    def __init__(self, data: bytes, size: int = 65536) -> None:
        self._rest = [data[at : at + size] for at in range(0, len(data), size)]

    def read_some(self) -> bytes:
        return self._rest.pop(0) if self._rest else b""


def read(data: bytes, size: int = 65536) -> tuple[HttpResponse, bytes]:
    response = HttpResponse(Pieces(data, size))
    return response, b"".join(response.iter_body())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 65536])
def test_response_in_pieces_is_read_whole(size: int) -> None:
    response, body = read(CHUNKED, size)
    assert (response.status, body, response.can_reuse) == (200, b"hello, \r\n world", True)
    response, body = read(KEPT, size)
    assert (response.status, body, response.can_reuse) == (201, b"ok", True)
    assert response.headers == {"content-length": "2", "retry-after": "7"}


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\na", b"a"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naSURPLUS", b"a"),
    ],
)
def test_connection_without_marked_end_is_not_reused(data: bytes, body: bytes) -> None:
    response, found = read(data)
    assert (found, response.can_reuse) == (body, False)


def test_response_without_a_body_is_complete() -> None:
    response, body = read(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 \r\n\r\n")
    assert (response.status, body, response.can_reuse) == (204, b"", True)


def test_connection_is_not_reused_before_the_end_of_the_body() -> None:
    response = HttpResponse(Pieces(CHUNKED, 90))
    next(iter(response.iter_body()))
    assert not response.can_reuse


@pytest.mark.parametrize("end", range(len(CHUNKED) - 1))
def test_response_that_ends_early_is_truncated(end: int) -> None:
    with pytest.raises(TruncatedResponseError):
        read(CHUNKED[:end])


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_malformed_response_is_rejected(data: bytes) -> None:
    with pytest.raises(MalformedResponseError):
        read(data, 4096)


@given(st.binary(max_size=80), st.integers(0, len(CHUNKED)), st.integers(0, len(CHUNKED)))
def test_damaged_response_is_read_or_rejected(damage: bytes, start: int, end: int) -> None:
    damaged = CHUNKED[:start] + damage + CHUNKED[end:]
    with contextlib.suppress(MalformedResponseError, TruncatedResponseError):
        response, body = read(damaged, 16)
        assert len(body) <= len(damaged)
        assert 100 <= response.status <= 999
