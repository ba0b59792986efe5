"""Reads files of an installation that may be half-written, damaged or hostile."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treenail.clock import format_rfc3339
from treenail.config.redacted_parts import format_redacted_ends, format_redacted_text
from treenail.errors import FileError

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
_HEAD_BYTES = 256 * 1024
_TAIL_BYTES = 3 * 1024 * 1024
_OVERLAP_BYTES = 64 * 1024
_MAX_FILES = 5000
_MAX_DEPTH = 12


def list_files(folder: Path) -> list[Path]:
    """List the regular files below a folder, at most 5000, sorted; links are not followed."""
    return sorted(path for path, status in _walk(folder) if stat.S_ISREG(status.st_mode))


def describe_files(folder: Path) -> list[dict[str, object]]:
    """List names, modes, owners, sizes and times of all entries below a folder, no contents."""
    found: list[dict[str, object]] = []
    for path, status in _walk(folder):
        found.append(
            {
                "path": str(path.relative_to(folder)),
                "mode": stat.filemode(status.st_mode),
                "owner": f"{status.st_uid}:{status.st_gid}",
                "bytes": status.st_size,
                "changed": format_rfc3339(status.st_mtime),
            }
        )
    return sorted(found, key=lambda each: str(each["path"]))


def read_document(path: Path) -> bytes:
    """Read a file of at most 16 MiB; raise `FileError` for a longer or special one."""
    with _open_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_DOCUMENT_BYTES:
            limit = MAX_DOCUMENT_BYTES // (1024 * 1024)
            raise FileError(f"{path} has {size} bytes, more than {limit} MiB")
        return _read_span(descriptor, 0, MAX_DOCUMENT_BYTES)


def read_log(path: Path) -> tuple[bytes, int]:
    """Return a text without secrets, and the number of bytes that a long one lacks.

    Beginning and end of a long text are kept. Raises `FileError`.
    """
    with _open_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        omitted = size - _HEAD_BYTES - _TAIL_BYTES
        if omitted <= 0:
            content = _read_span(descriptor, 0, size)
            return format_redacted_text(content.decode("utf-8", "replace")), 0
        overlap = min(omitted, _OVERLAP_BYTES)
        start = size - _TAIL_BYTES - overlap
        head = _read_span(descriptor, 0, _HEAD_BYTES)
        tail = _read_span(descriptor, start, _TAIL_BYTES + overlap)
        shown = format_redacted_ends(head, tail, overlap=overlap, omitted=omitted - overlap)
        return shown, omitted


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the entries below a folder and their status; skip what cannot be read or vanishes."""
    waiting, count = [(folder, _MAX_DEPTH)], 0
    while waiting:
        here, depth_left = waiting.pop()
        try:
            found = sorted(here.iterdir())
        except OSError:
            continue
        for path in found:
            count += 1
            if count > _MAX_FILES:
                return
            with suppress(OSError):
                status = path.lstat()
                yield path, status
                if depth_left and stat.S_ISDIR(status.st_mode):
                    waiting.append((path, depth_left - 1))


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    """Open a regular file, not a link; a FIFO does not block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileError(f"cannot read {path}: it is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _read_span(descriptor: int, start: int, size: int) -> bytes:
    found = bytearray()
    while chunk := os.pread(descriptor, size - len(found), start + len(found)):
        found += chunk
    return bytes(found)
