"""Directories that another user can replace while root works in them.

Between the check of a path and its use the owner of a directory can rename it and put a symbolic
link in its place. Entries of such a directory are therefore reached by its descriptor.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_replaceable(directory: str) -> bool:
    """Return whether another user than root can replace the directory, or one above it.

    Raises `OSError`. False for every directory unless this process is root: others have no rights
    that a link could abuse.
    """
    if os.geteuid() != 0:
        return False
    path = ""
    for name in filter(None, directory.split("/")):
        path += f"/{name}"
        status = os.lstat(path)
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # Only the owner of an entry can rename it in a sticky directory. Links have no own mode.
        is_protected = status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode)
        if status.st_uid != 0 or (is_open and not is_protected):
            return True
    return False


@contextmanager
def hold_directory(directory: str) -> Iterator[int]:
    """Yield a descriptor of the directory; raise `OSError` (ELOOP) if a part of it is a link."""
    descriptor = os.open("/", _FLAGS)
    try:
        for name in filter(None, directory.split("/")):
            below = _open_below(descriptor, name)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _open_below(descriptor: int, name: str) -> int:
    try:
        return os.open(name, _FLAGS, dir_fd=descriptor)
    except NotADirectoryError:
        status = os.lstat(name, dir_fd=descriptor)
        if not stat.S_ISLNK(status.st_mode):
            raise
        cause = f"the directory {name} became a symbolic link"
        raise OSError(errno.ELOOP, cause) from None
