"""The body of an answer, whole or line by line, and never without end."""

from collections.abc import Iterable, Iterator

from treenail.errors import ClusterError

MIB = 1024 * 1024
MOST_BYTES = 64 * MIB
PIECE = 65536


def whole(pieces: Iterable[bytes], most_bytes: int, what: str) -> bytes:
    """All pieces; ClusterError beyond ``most_bytes``."""
    body = bytearray()
    for piece in pieces:
        body += piece
        refuse_too_long(len(body), most_bytes, what)
    return bytes(body)


def lines(pieces: Iterable[bytes], most_bytes: int, what: str) -> Iterator[bytes]:
    """Each line as soon as it is there, without its end; ClusterError for one too long."""
    pending = bytearray()
    for piece in pieces:
        pending += piece
        if b"\n" in piece:
            *ended, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            yield from ended
        refuse_too_long(len(pending), most_bytes, what)


def refuse_too_long(length: int, most_bytes: int, what: str) -> None:
    """ClusterError when there is more than allowed."""
    if length > most_bytes:
        raise ClusterError(f"{what}: the answer is longer than {most_bytes} bytes")
