"""Paths below the root directory of the machine, which they never leave."""

import errno
import os
from pathlib import Path

from treenail.errors import FileError

_MAX_LINKS = 40  # as in the kernel, which then returns ELOOP


class Root:
    """The root directory of the machine: ``/``, or the directory where it is mounted or simulated.

    Paths resolve as in a chroot: an absolute symbolic link starts again at the root, and ``..`` in
    a link stops there. Each call resolves its path again. `treenail.host.filesystem.disk.Disk`
    notices links that a user puts into a resolved path meanwhile.
    """

    def __init__(self, prefix: str | Path = "/", *, has_usr_etc: bool = False) -> None:
        """``has_usr_etc``: /etc is /usr/etc, as in a deployment that was never booted."""
        self.prefix = Path(prefix).resolve()
        self._has_usr_etc = has_usr_etc
        self._prefix_text = os.fspath(self.prefix).removesuffix("/")

    def resolve_path(self, path: str) -> Path:
        """Follow every symbolic link; the file need not exist.

        Raises `FileError` when ``path`` is not absolute or has ``..`` in it, and for link loops.
        """
        return self._resolve(path, follow_last=True)

    def resolve_safely(self, path: str) -> Path:
        """Resolve as `resolve_path`, for changes; raise `FileError` for an unsafe link.

        A link of a user other than root is unsafe if it leads to an entry of another user, as for
        systemd-tmpfiles: that user could choose which files of others are changed.
        """
        return self._resolve(path, follow_last=True, for_change=True)

    def resolve_entry(self, path: str, *, for_change: bool = False) -> Path:
        """Follow every symbolic link except the last component, which is the entry itself.

        Raises `FileError` as `resolve_path`, and for the root: its parent is outside. With
        ``for_change`` also for an unsafe link, as `resolve_safely`.
        """
        entry = self._resolve(path, follow_last=False, for_change=for_change)
        if entry == self.prefix:
            raise FileError(f"{path!r} is the root directory itself")
        return entry

    def _resolve(self, path: str, *, follow_last: bool, for_change: bool = False) -> Path:
        owners: dict[str, int] = {}
        todo = _parse_parts(path)
        done: list[str] = []
        count = 0
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
                if done == ["etc"] and self._has_usr_etc:
                    done[:] = ["usr", "etc"]
                continue
            if for_change:
                link = "/".join((self._prefix_text, *done, part))
                target, owners[link] = _read_owned_link(link)
            count += 1
            if count > _MAX_LINKS:
                raise FileError(f"{path} leads through more than {_MAX_LINKS} symbolic links")
            if target.startswith("/"):
                done.clear()
            todo.extend(_split_reversed(target))
        resolved = self.prefix.joinpath(*done)
        _check_owners(path, owners, resolved if follow_last else resolved.parent)
        return resolved


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


def _check_owners(path: str, owners: dict[str, int], resolved: Path) -> None:
    for link, uid in owners.items():
        found_uid = _read_owner(os.fspath(resolved))
        if uid not in {0, found_uid}:
            raise FileError(
                f"cannot change {path}: {link} is a link of the user {uid} to an entry of the user "
                f"{found_uid}",
                remedy=f"remove the link, or give it to root: chown -h root {link}",
            )


def _read_owner(path: str) -> int:
    """Return the user of the entry, or of its nearest parent that exists."""
    while True:
        try:
            return os.lstat(path).st_uid
        except (FileNotFoundError, NotADirectoryError):
            path = path.rpartition("/")[0] or "/"
        except OSError as error:
            raise FileError(f"cannot inspect {path}: {error.strerror}") from error


def _read_link(path: str) -> str | None:
    """Return the target; None where there is no link, or nothing at all."""
    try:
        return os.readlink(path)  # noqa: PTH115 - a Path costs as much again
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT, errno.ENOTDIR}:
            return None
        raise FileError(f"cannot follow {path}: {error.strerror}") from error


def _read_owned_link(path: str) -> tuple[str, int]:
    """Return target and user of one link: a user may exchange it with a link of root meanwhile."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.readlink("", dir_fd=descriptor), os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileError(f"cannot follow {path}: {error.strerror}") from error


def strip_prefix(path: str, prefix: str) -> str:
    """Turn a real path into one below the root ``prefix``."""
    return path if prefix == "/" else path.removeprefix(prefix)


def add_prefix(path: str, prefix: str) -> str:
    """Turn a path below the root ``prefix`` into a real one."""
    return path if prefix == "/" else prefix + path


def open_booted_tree(root: Root) -> Root:
    """Return the booted deployment as its image was: with /usr/etc in place of /etc."""
    return Root(root.prefix, has_usr_etc=root.resolve_path("/usr/etc").is_dir())
