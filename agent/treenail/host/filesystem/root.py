"""Paths below the root directory of the machine, which they never leave."""

import errno
import os
from pathlib import Path

from treenail.errors import FileError

_MAX_LINKS = 40  # as in the kernel, which then returns ELOOP


class Root:
    """The root directory of the machine: ``/``, or the directory where it is mounted or simulated.

    Paths resolve as in a chroot: an absolute symbolic link starts again at the root, and ``..`` in
    a link stops there. Each call resolves its path again. A process that changes links meanwhile
    must be trusted, as on ``/``.
    """

    def __init__(self, prefix: str | Path = "/") -> None:
        self.prefix = Path(prefix).resolve()
        self._prefix_text = os.fspath(self.prefix).removesuffix("/")

    def resolve_path(self, path: str) -> Path:
        """Follow every symbolic link; the file need not exist.

        Raises `FileError` when ``path`` is not absolute or has ``..`` in it, and for link loops.
        """
        return self._resolve(path, follow_last=True)

    def resolve_entry(self, path: str) -> Path:
        """Follow every symbolic link except the last component, which is the entry itself.

        Raises `FileError` as `resolve_path`, and for the root: its parent is outside.
        """
        entry = self._resolve(path, follow_last=False)
        if entry == self.prefix:
            raise FileError(f"{path!r} is the root directory itself")
        return entry

    def _resolve(self, path: str, *, follow_last: bool) -> Path:
        todo = _parse_parts(path)
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
                continue
            target = None
            if todo or follow_last:
                target = _read_link("/".join((self._prefix_text, *done, part)))
            if target is None:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise FileError(f"{path} leads through more than {_MAX_LINKS} symbolic links")
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
        raise FileError(f"{path!r} cannot be the name of a file") from error
    parts = _split_reversed(path)
    if ".." in parts:
        raise FileError(f"{path!r} has .. in it")
    return parts


def _split_reversed(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in {"", "."}]


def _read_link(path: str) -> str | None:
    """Return the target; None where there is no link, or nothing at all."""
    try:
        return os.readlink(path)  # noqa: PTH115 - a Path costs as much again
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT, errno.ENOTDIR}:
            return None
        raise FileError(f"cannot follow {path}: {error.strerror}") from error


def strip_prefix(path: str, prefix: str) -> str:
    """Turn a real path into one below the root ``prefix``."""
    return path if prefix == "/" else path.removeprefix(prefix)


def add_prefix(path: str, prefix: str) -> str:
    """Turn a path below the root ``prefix`` into a real one."""
    return path if prefix == "/" else prefix + path
