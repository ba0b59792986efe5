"""The body of an answer, whole or line by line, and never without end."""

from collections.abc import Iterable, Iterator

from treenail.errors import ClusterError

MIB = 1024 * 1024
MAX_BYTES = 64 * MIB
CHUNK_BYTES = 65536


def read_body(chunks: Iterable[bytes], max_bytes: int, what: str) -> bytes:
    """All pieces; ClusterError beyond ``max_bytes``."""
    body = bytearray()
    for piece in chunks:
        body += piece
        check_length(len(body), max_bytes, what)
    return bytes(body)


def iter_lines(chunks: Iterable[bytes], max_bytes: int, what: str) -> Iterator[bytes]:
    """Each line as soon as it is there, without its end; ClusterError for one too long."""
    pending = bytearray()
    for piece in chunks:
        pending += piece
        if b"\n" in piece:
            *ended, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            yield from ended
        check_length(len(pending), max_bytes, what)


def check_length(length: int, max_bytes: int, what: str) -> None:
    """ClusterError when there is more than allowed."""
    if length > max_bytes:
        raise ClusterError(f"{what}: the answer is longer than {max_bytes} bytes")
