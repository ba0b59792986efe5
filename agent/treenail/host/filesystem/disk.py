"""System calls for files, one method each.

Another user may own a directory in which root works. Between the check of a path and its use that
user can rename the directory and put a symbolic link in its place. Entries of such a directory are
therefore reached by its descriptor.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import ctypes

    from treenail.host.filesystem.selinux import SelinuxPolicy


StrPath: TypeAlias = str | os.PathLike[str]
Place: TypeAlias = tuple[StrPath, int | None]

_SELINUX_XATTR = "security.selinux"
_AT_FDCWD = -100  # paths start at the working directory, as in all other calls here
# From linux/fs.h.
_RENAME_EXCHANGE = 2
_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """The system calls of this process. The disk of a test has the same methods and loses power.

    ``exchange`` and ``syncfs`` need ctypes (0.4 MiB), which is imported at their first call.

    Callers pass paths without links before the last component. Methods that open or change an
    entry raise `OSError` (ELOOP) where another user replaced a directory by a link meanwhile.
    """

    labels: "SelinuxPolicy | None" = None
    """None: the kernel labels new entries, and every label counts as correct."""

    def __init__(self, labels: "SelinuxPolicy | None" = None) -> None:
        self.labels = labels
        self._checked: set[str] = set()
        """Directories that no other user can replace."""

    def begin_change(self) -> None:
        """Check again which directories other users can replace; call it before a change."""
        self._checked.clear()

    def _locate(self, path: StrPath) -> AbstractContextManager[Place]:
        """Return the path for a system call, and the descriptor that it begins at, if any."""
        directory, _, name = os.fspath(path).rpartition("/")
        if directory not in self._checked:
            if name and _is_replaceable(directory):
                return _hold_place(directory, name)
            self._checked.add(directory)
        return nullcontext((path, None))

    def _is_safe(self, path: StrPath) -> bool:
        """Return whether `_locate` has found that the path itself is the place.

        A config has thousands of files, and each needs several calls.
        """
        return os.fspath(path).rpartition("/")[0] in self._checked

    def lstat(self, path: StrPath) -> os.stat_result:
        return os.lstat(path)

    # pyfakefs replaces os.stat, os.chown and os.chmod, but not os.fchown and os.fchmod. Those would
    # change a descriptor of the real process.

    def fstat(self, descriptor: int) -> os.stat_result:
        return os.stat(descriptor)

    def listdir(self, directory: StrPath) -> list[str]:
        return os.listdir(directory)

    def create(self, path: StrPath) -> int:
        """Create a file for writing, with mode 0600."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if self._is_safe(path):
            return os.open(path, flags, 0o600)
        with self._locate(path) as (name, directory):
            return os.open(name, flags, 0o600, dir_fd=directory)

    def open(self, path: StrPath) -> int:
        """Open a file or directory for reading; O_NONBLOCK, because opening a FIFO blocks."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if self._is_safe(path):
            return os.open(path, flags)
        with self._locate(path) as (name, directory):
            return os.open(name, flags, dir_fd=directory)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, size: int) -> bytes:
        """Return at most ``size`` bytes; empty at the end."""
        return os.read(descriptor, size)

    def write(self, descriptor: int, content: bytes) -> int:
        """Return the number of bytes written."""
        return os.write(descriptor, content)

    def chown(self, descriptor: int, uid: int, gid: int) -> None:
        os.chown(descriptor, uid, gid)

    def chmod(self, descriptor: int, mode: int) -> None:
        os.chmod(descriptor, mode)

    def read_label(self, target: StrPath | int) -> bytes:
        """Return the SELinux label of a path or descriptor; empty without one."""
        try:
            if isinstance(target, int):
                return os.getxattr(target, _SELINUX_XATTR)
            return os.getxattr(target, _SELINUX_XATTR, follow_symlinks=False)
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.ENOTSUP, errno.ENOENT}:
                return b""
            raise

    def decide_label(self, path: StrPath, status: os.stat_result, present: bytes) -> bytes:
        """Return the label that the policy has for the entry; ``present`` where it accepts that."""
        if self.labels is None:
            return present
        return self.labels.decide_label(os.fspath(path), status, present)

    def release_memory(self) -> None:
        """Free the memory of label lookups; call it after the last of a series."""
        if self.labels is not None:
            self.labels.release_memory()

    def set_label(self, target: StrPath | int, label: bytes) -> None:
        if isinstance(target, int):
            os.setxattr(target, _SELINUX_XATTR, label)
        else:
            os.setxattr(target, _SELINUX_XATTR, label, follow_symlinks=False)

    def read_xattrs(self, descriptor: int) -> dict[str, bytes]:
        """Return all extended attributes, the label included; empty where none are supported."""
        try:
            return {name: os.getxattr(descriptor, name) for name in os.listxattr(descriptor)}
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.ENOTSUP}:
                return {}
            raise

    def set_xattr(self, descriptor: int, name: str, value: bytes) -> None:
        os.setxattr(descriptor, name, value)

    def remove_xattr(self, descriptor: int, name: str) -> None:
        os.removexattr(descriptor, name)

    def fsync(self, descriptor: int) -> None:
        """Flush a file, or the entries of a directory, to the disk."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Such files have nothing to flush: EINVAL in fsync(2) is for special files.
            if error.errno not in {errno.EINVAL, errno.EROFS}:
                raise

    def syncfs(self, descriptor: int) -> None:
        """Flush the file system of the descriptor.

        From Linux 5.8 on it raises when a write failed since the descriptor was opened, see
        syncfs(2). os.sync reports no error and waits for every other file system too.
        """
        _raise_errno(_load_libc().syncfs(descriptor))

    def replace(self, path: StrPath, target: StrPath) -> None:
        if self._is_safe(path) and self._is_safe(target):
            os.replace(path, target)
            return
        with self._locate(path) as (old, source), self._locate(target) as (new, directory):
            os.replace(old, new, src_dir_fd=source, dst_dir_fd=directory)

    def exchange(self, path: StrPath, other: StrPath) -> None:
        """Exchange two entries atomically.

        Supported on ext4, xfs, btrfs, tmpfs and overlayfs; NFS returns EINVAL.
        """
        if self._is_safe(path) and self._is_safe(other):
            _exchange_names(_AT_FDCWD, path, _AT_FDCWD, other)
            return
        with self._locate(path) as (old, source), self._locate(other) as (new, directory):
            _exchange_names(
                _AT_FDCWD if source is None else source,
                old,
                _AT_FDCWD if directory is None else directory,
                new,
            )

    def readlink(self, path: StrPath) -> str:
        return os.readlink(path)

    def symlink(self, path: StrPath, text: str) -> None:
        with self._locate(path) as (name, directory):
            os.symlink(text, name, dir_fd=directory)

    def lchown(self, path: StrPath, uid: int, gid: int) -> None:
        with self._locate(path) as (name, directory):
            if directory is None:
                os.lchown(name, uid, gid)
            else:
                os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)

    def link(self, path: StrPath, new: StrPath) -> None:
        """Make a hard link to the entry; a symbolic link is not followed."""
        with self._locate(path) as (old, source), self._locate(new) as (name, directory):
            os.link(old, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

    def unlink(self, path: StrPath) -> None:
        if self._is_safe(path):
            os.unlink(path)
            return
        with self._locate(path) as (name, directory):
            os.unlink(name, dir_fd=directory)

    def mkdir(self, path: StrPath) -> None:
        """Create a directory with mode 0700."""
        with self._locate(path) as (name, directory):
            os.mkdir(name, 0o700, dir_fd=directory)

    def rmdir(self, path: StrPath) -> None:
        with self._locate(path) as (name, directory):
            os.rmdir(name, dir_fd=directory)


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
    descriptor = os.open("/", _PATH_FLAGS)
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
        return os.open(name, _PATH_FLAGS, dir_fd=descriptor)
    except NotADirectoryError:
        status = os.lstat(name, dir_fd=descriptor)
        if not stat.S_ISLNK(status.st_mode):
            raise
        cause = f"the directory {name} became a symbolic link"
        raise OSError(errno.ELOOP, cause) from None


@contextmanager
def _hold_place(directory: str, name: str) -> Iterator[Place]:
    with hold_directory(directory) as descriptor:
        yield name, descriptor


def _is_replaceable(directory: str) -> bool:
    try:
        return is_replaceable(directory)
    except OSError:
        return False  # the system call itself fails with the cause


def _exchange_names(source: int, old: StrPath, directory: int, new: StrPath) -> None:
    _raise_errno(
        _load_libc().renameat2(
            source, os.fsencode(old), directory, os.fsencode(new), _RENAME_EXCHANGE
        )
    )


@cache
def _load_libc() -> "ctypes.CDLL":
    import ctypes  # noqa: PLC0415 - 0.4 MiB, and rarely needed

    return ctypes.CDLL(None, use_errno=True)


def _raise_errno(result: int) -> None:
    if result != 0:
        import ctypes  # noqa: PLC0415 - as above

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
