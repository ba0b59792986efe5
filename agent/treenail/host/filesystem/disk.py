"""The system calls that files are written with, one method each."""

import errno
import os
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import ctypes

StrPath: TypeAlias = str | os.PathLike[str]

_SELINUX_XATTR = "security.selinux"
_AT_FDCWD = -100  # AT_FDCWD: from the working directory, as all other calls take their paths
_RENAME_EXCHANGE = 2


class LabelPolicy(Protocol):
    """The SELinux policy that labels entries: `treenail.host.filesystem.selinux.SelinuxPolicy`."""

    def decide_label(self, place: str, status: os.stat_result, present: bytes) -> bytes: ...
    def release_memory(self) -> None: ...


class Disk:
    """What `Files` may call; a test's disk has the same methods and can lose power.

    Descriptors are changed with os.chown, os.chmod and os.setxattr, never with os.fchown or
    os.fchmod: a faked file system knows the former and lets the latter through to the real
    process. `exchange` and `syncfs` are the calls that only a real disk has: Python has
    none for them, and ctypes (0.4 MiB) is loaded when the first of them comes.
    """

    labels: LabelPolicy | None = None
    """Without it new entries have the labels that the kernel gives, and none is ever wrong."""

    def __init__(self, labels: LabelPolicy | None = None) -> None:
        self.labels = labels

    def lstat(self, path: StrPath) -> os.stat_result:
        """The entry itself, a link not followed."""
        return os.lstat(path)

    def fstat(self, descriptor: int) -> os.stat_result:
        return os.stat(descriptor)

    def listdir(self, directory: StrPath) -> list[str]:
        return os.listdir(directory)

    def create(self, path: StrPath) -> int:
        """A new file for writing that only its owner can read yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: StrPath) -> int:
        """A file or directory for reading; returns at once where a FIFO would make it wait."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        return os.read(descriptor, size)

    def write(self, descriptor: int, content: bytes) -> int:
        """How many of the bytes were taken."""
        return os.write(descriptor, content)

    def chown(self, descriptor: int, uid: int, gid: int) -> None:
        os.chown(descriptor, uid, gid)

    def chmod(self, descriptor: int, mode: int) -> None:
        os.chmod(descriptor, mode)

    def read_label(self, target: StrPath | int) -> bytes:
        """The SELinux label, empty where there is none."""
        try:
            if isinstance(target, int):
                return os.getxattr(target, _SELINUX_XATTR)
            return os.getxattr(target, _SELINUX_XATTR, follow_symlinks=False)
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.ENOTSUP, errno.ENOENT}:
                return b""
            raise

    def decide_label(self, place: StrPath, status: os.stat_result, present: bytes) -> bytes:
        """The label for such an entry at a place where ``present`` is the label now."""
        if self.labels is None:
            return present
        return self.labels.decide_label(os.fspath(place), status, present)

    def release_memory(self) -> None:
        """Nothing is asked about labels for a while."""
        if self.labels is not None:
            self.labels.release_memory()

    def set_label(self, target: StrPath | int, label: bytes) -> None:
        if isinstance(target, int):
            os.setxattr(target, _SELINUX_XATTR, label)
        else:
            os.setxattr(target, _SELINUX_XATTR, label, follow_symlinks=False)

    def read_xattrs(self, descriptor: int) -> dict[str, bytes]:
        """All extended attributes, the label among them; none where there can be none."""
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
        """Return when the file, or the directory's entries, outlive a power cut."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EROFS}:  # nothing of it can be lost
                raise

    def syncfs(self, descriptor: int) -> None:
        """Return when all of the descriptor's file system outlives a power cut.

        From Linux 5.8 on it raises if anything failed to be written since the descriptor was
        opened; os.sync never says so, and waits for every other file system too.
        """
        _raise_errno(_load_libc().syncfs(descriptor))

    def replace(self, path: StrPath, target: StrPath) -> None:
        os.replace(path, target)

    def exchange(self, path: StrPath, other: StrPath) -> None:
        """Have each entry at the other's place, in one step.

        ext4, xfs, btrfs, tmpfs and overlayfs can do it; NFS says EINVAL.
        """
        old, new = os.fsencode(path), os.fsencode(other)
        _raise_errno(_load_libc().renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE))

    def readlink(self, path: StrPath) -> str:
        return os.readlink(path)

    def symlink(self, path: StrPath, text: str) -> None:
        os.symlink(text, path)

    def lchown(self, path: StrPath, uid: int, gid: int) -> None:
        os.lchown(path, uid, gid)

    def link(self, path: StrPath, new: StrPath) -> None:
        """A second name for the entry; a symbolic link gets one itself."""
        os.link(path, new, follow_symlinks=False)

    def unlink(self, path: StrPath) -> None:
        os.unlink(path)

    def mkdir(self, path: StrPath) -> None:
        """A new directory that only its owner can enter yet."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: StrPath) -> None:
        """Only when it is empty."""
        os.rmdir(path)


@cache
def _load_libc() -> "ctypes.CDLL":
    import ctypes  # noqa: PLC0415 - rare, and the agent's memory is counted

    return ctypes.CDLL(None, use_errno=True)


def _raise_errno(result: int) -> None:
    if result != 0:
        import ctypes  # noqa: PLC0415 - as above

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
