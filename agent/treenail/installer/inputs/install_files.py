"""Files of an installation, replaced atomically and durably."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from treenail.errors import FileError, UsageError

_PREFIX = ".treenail-new-"
_READ_LIMIT = 64 * 1024 * 1024
_REMEDIES = {
    errno.ENOSPC: "free some space: df -h {directory}",
    errno.EDQUOT: "free some space: df -h {directory}",
    errno.EROFS: "mount the file system for writing, or choose another directory: --dir DIR",
    errno.EACCES: "run the command as the owner of {directory}",
    errno.EPERM: "run the command as the owner of {directory}",
    errno.EIO: "look for disk errors: journalctl -k",
}


_NO_DIRECTORY = {errno.ENOENT: "it does not exist", errno.ENOTDIR: "it is not a directory"}


def require_directory(path: Path, action: str) -> None:
    """Raise `UsageError` unless an install directory exists and this user may list it.

    ``action`` begins the message, such as ``install from``.
    """
    try:
        os.scandir(path).close()
    except OSError as error:
        cause = _NO_DIRECTORY.get(error.errno or 0, error.strerror)
        remedy = _REMEDIES.get(error.errno or 0, "").format(directory=path)
        raise UsageError(
            f"cannot {action} {path}: {cause}",
            remedy=remedy or "name the install directory: --dir DIR",
        ) from error


class InstallFiles:
    """Reads and replaces files; every `OSError` becomes a `FileError` with a remedy.

    When a method returns, its change is on the disk. After an error, SIGKILL or a power cut each
    file is the old one or the new one.
    """

    def read(self, path: Path, *, limit: int = _READ_LIMIT) -> bytes | None:
        """Return the content; None when the file does not exist."""
        try:
            with path.open("rb") as file:
                content = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _make_error("read", path, error) from error
        if len(content) > limit:
            raise FileError(f"cannot read {path}: it has more than {limit} bytes")
        return content

    def write(self, path: Path, content: bytes, *, mode: int = 0o600) -> bool:
        """Replace a file; return whether its content changed. Missing directories get mode 0700."""
        self.make_directory(path.parent)
        try:
            if path.stat().st_mode & 0o7777 == mode and path.read_bytes() == content:
                self.sync_file(path)
                return False
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _make_error("read", path, error) from error
        # One process writes at a time, so that a file of a killed one has the same name.
        temporary = path.parent / f"{_PREFIX}{path.name}"
        try:
            self._write_new(temporary, content, mode)
            self._replace(temporary, path)
            self._sync_path(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise _make_error("write", path, error) from error
        return True

    def make_directory(self, path: Path, *, mode: int = 0o700) -> None:
        """Make a directory and its parents; one that exists keeps its mode."""
        if path.is_dir():
            # A killed process may have made it without an fsync. Who may not read the directory
            # above did not make it either.
            with suppress(OSError):
                self._sync_path(path.parent)
            return
        self.make_directory(path.parent)
        try:
            path.mkdir(mode=mode)
            self._sync_path(path.parent)
        except FileExistsError as error:
            if not path.is_dir():
                raise _make_error("make directory", path, error) from error
        except OSError as error:
            raise _make_error("make directory", path, error) from error

    def remove(self, path: Path) -> bool:
        """Remove a file; return whether it existed."""
        try:
            path.unlink()
            self._sync_path(path.parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _make_error("remove", path, error) from error
        return True

    def sync_file(self, path: Path) -> None:
        """Flush a file and its name: a killed process may have written it without an fsync.

        Raises `FileError`.
        """
        try:
            self._sync_path(path)
            self._sync_path(path.parent)
        except OSError as error:
            raise _make_error("flush", path, error) from error

    def sync_tree(self, root: Path) -> None:
        """Flush a directory that another program wrote, with everything below it.

        Files that vanish meanwhile are left out.
        """
        try:
            for directory, _, names in os.walk(root, topdown=False, onerror=_raise_error):
                for path in (*(Path(directory, name) for name in names), Path(directory)):
                    with suppress(FileNotFoundError):
                        self._sync_path(path)
            self._sync_path(root.parent)
        except OSError as error:
            raise _make_error("flush", root, error) from error

    def list_names(self, directory: Path) -> tuple[str, ...]:
        """Return the names in a directory without temporary files; none when it does not exist."""
        try:
            found = sorted(each.name for each in directory.iterdir())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise _make_error("list", directory, error) from error
        return tuple(name for name in found if not name.startswith(_PREFIX))

    def _write_new(self, path: Path, content: bytes, mode: int) -> None:
        with suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # Not the mode of open(2), which the umask restricts.
            os.fchmod(descriptor, mode)
            self._sync(descriptor)

    def _replace(self, temporary: Path, path: Path) -> None:
        temporary.replace(path)

    def _sync_path(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._sync(descriptor)
        finally:
            os.close(descriptor)

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)


def _raise_error(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_error(verb: str, path: Path, error: OSError) -> FileError:
    remedy = _REMEDIES.get(error.errno or 0, "").format(directory=path.parent)
    return FileError(f"cannot {verb} {path}: {error.strerror or error}", remedy=remedy)
