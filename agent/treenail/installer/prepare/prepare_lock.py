"""The lock of the stage ``prepare``: one process completes an install directory at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treenail.errors import FileError, HostError


@contextmanager
def hold_prepare_lock(root: Path) -> Iterator[None]:
    """Hold the exclusive lock of the directory; raise `HostError` if another process has it.

    The lock is on the directory itself: a run that finds problems leaves no file behind. The kernel
    releases it when the process ends. Raises `FileError` for a directory that cannot be opened.
    """
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(
            f"cannot open {root}: {error.strerror}", remedy=f"check it: ls -ld '{root}'"
        ) from error
    try:
        # NFS locks no directory that is open for reading (flock(2)): no lock is better than no run.
        with suppress(OSError):
            _take_lock(descriptor, root)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HostError(
            f"cannot prepare {root}: another process prepares it",
            remedy="wait until it has ended, and run the command again",
        ) from error
