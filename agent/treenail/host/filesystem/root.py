"""Paths below the installed root, and never outside it."""

import errno
import os
from pathlib import Path

from treenail.errors import FileError

_MAX_LINKS = 40  # what the kernel follows before it says ELOOP


class Root:
    """The directory that holds the machine: ``/``, or where it is mounted or pretended.

    A path below it means what it means to a process that has it as its root directory: an
    absolute symbolic link starts again at the root, and ``..`` in a link stops there. Paths are
    resolved when asked for; who changes links at the same time has to be trusted, as on ``/``.
    """

    def __init__(self, prefix: str | Path = "/") -> None:
        self.prefix = Path(prefix).resolve()
        self._prefix_text = os.fspath(self.prefix).removesuffix("/")

    def resolve_path(self, path: str) -> Path:
        """Where the file ``path`` is, every symbolic link followed; it need not exist.

        Raises `FileError` when ``path`` is not absolute, has ``..`` in it, or runs in circles.
        """
        return self._resolve(path, follow=True)

    def resolve_entry(self, path: str) -> Path:
        """Where the directory entry ``path`` is: as `resolve_path`, but a link at the end is itself.

        Its parent is inside the root too, so the root itself is refused.
        """
        entry = self._resolve(path, follow=False)
        if entry == self.prefix:
            raise FileError(f"{path!r} is the root directory itself")
        return entry

    def _resolve(self, below: str, *, follow: bool) -> Path:
        todo = _parse_parts(below)
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
                continue
            target = (
                _read_link("/".join((self._prefix_text, *done, part))) if follow or todo else None
            )
            if target is None:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise FileError(f"{below} leads through more than {_MAX_LINKS} symbolic links")
            if target.startswith("/"):
                done.clear()
            todo.extend(_split_reversed(target))
        return self.prefix.joinpath(*done)


def _parse_parts(path: str) -> list[str]:
    if not path.startswith("/"):
        raise FileError(f"{path!r} is not an absolute path")
    if "\0" in path:
        raise FileError(f"{path!r} has a null character in it")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise FileError(f"{path!r} can't be the name of a file") from error
    parts = _split_reversed(path)
    if ".." in parts:
        raise FileError(f"{path!r} has .. in it")
    return parts


def _split_reversed(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in {"", "."}]


def _read_link(path: str) -> str | None:
    """What the link says; None when there is no link, or nothing at all."""
    try:
        return os.readlink(path)  # noqa: PTH115 - a Path costs as much again
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT, errno.ENOTDIR}:
            return None
        raise FileError(f"can't follow {path}: {error.strerror}") from error
