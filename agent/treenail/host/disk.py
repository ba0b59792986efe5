"""The system calls that files are written with, one method each."""

import errno
import os
from pathlib import Path

_LABEL = "security.selinux"


class Disk:
    """What `Files` may call; a test's disk has the same methods and can lose power.

    Descriptors are changed with os.chown, os.chmod and os.setxattr, never with os.fchown or
    os.fchmod: a faked file system knows the former and lets the latter through to the real
    process. `sync_filesystem` is the one call that only a real disk has.
    """

    def status(self, path: Path) -> os.stat_result:
        """The entry itself, a link not followed."""
        return path.lstat()

    def status_of(self, descriptor: int) -> os.stat_result:
        return os.stat(descriptor)

    def names(self, directory: Path) -> list[str]:
        return [entry.name for entry in directory.iterdir()]

    def create(self, path: Path) -> int:
        """A new file for writing that only its owner can read yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
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

    def own(self, descriptor: int, uid: int, gid: int) -> None:
        os.chown(descriptor, uid, gid)

    def change_mode(self, descriptor: int, mode: int) -> None:
        os.chmod(descriptor, mode)

    def label(self, target: Path | int) -> bytes:
        """The SELinux label, empty where there is none."""
        try:
            if isinstance(target, int):
                return os.getxattr(target, _LABEL)
            return os.getxattr(target, _LABEL, follow_symlinks=False)
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.ENOTSUP, errno.ENOENT}:
                return b""
            raise

    def change_label(self, descriptor: int, label: bytes) -> None:
        os.setxattr(descriptor, _LABEL, label)

    def attributes(self, descriptor: int) -> dict[str, bytes]:
        """All extended attributes, the label among them; none where there can be none."""
        try:
            return {name: os.getxattr(descriptor, name) for name in os.listxattr(descriptor)}
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.ENOTSUP}:
                return {}
            raise

    def change_attribute(self, descriptor: int, name: str, value: bytes) -> None:
        os.setxattr(descriptor, name, value)

    def remove_attribute(self, descriptor: int, name: str) -> None:
        os.removexattr(descriptor, name)

    def sync(self, descriptor: int) -> None:
        """Return when the file, or the directory's entries, outlive a power cut."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EROFS}:  # nothing of it can be lost
                raise

    def sync_filesystem(self, descriptor: int) -> None:
        """Return when all of the descriptor's file system outlives a power cut.

        From Linux 5.8 on it raises if anything failed to be written since the descriptor was
        opened; os.sync never says so, and waits for every other file system too. Python has no
        call for it, and ctypes (0.4 MiB) is loaded when the first big batch comes.
        """
        import ctypes  # noqa: PLC0415 - rare, and the agent's memory is counted

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def replace(self, path: Path, target: Path) -> None:
        path.replace(target)

    def link_text(self, path: Path) -> str:
        return os.readlink(path)  # noqa: PTH115 - a Path would tidy the text, and differ

    def symlink(self, path: Path, text: str) -> None:
        path.symlink_to(text)

    def own_link(self, path: Path, uid: int, gid: int) -> None:
        os.lchown(path, uid, gid)

    def link(self, path: Path, new: Path) -> None:
        """A second name for the entry; a symbolic link gets one itself."""
        os.link(path, new, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_directory(self, path: Path) -> None:
        """A new directory that only its owner can enter yet."""
        path.mkdir(0o700)

    def remove_directory(self, path: Path) -> None:
        """Only when it is empty."""
        path.rmdir()
