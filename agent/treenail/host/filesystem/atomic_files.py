"""Files, links and directories below the root, written atomically and durably."""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk, StrPath
from treenail.host.filesystem.root_directory import Root

_TEMPORARY_PREFIX = ".treenail-"
_FSYNC_EACH_LIMIT = 4  # up to here fsync each file: syncfs also flushes what other programs write
_READ_LIMIT = 16 * 1024 * 1024
_CHUNK = 1024 * 1024
_REMEDIES = {
    errno.ENOSPC: "free some space on that file system",
    errno.EDQUOT: "free some space on that file system",
    # A remount for writing does not reach the mount namespace of a unit that started before it.
    errno.EROFS: "find out why that file system is read-only: findmnt; after a remount for writing "
    "run: systemctl restart treenail",
    errno.EIO: "look for disk errors in the kernel log: journalctl -k",
    errno.EACCES: "run the agent as root",
    errno.EPERM: "run the agent as root; to see whether the file is immutable, run: lsattr",
}

# A writer removes the temporary files in its directory, so two threads must not write at a time:
# the Node watch writes status.json beside the files of the main thread.
_WRITE_LOCK = threading.RLock()
P = ParamSpec("P")
R = TypeVar("R")


def _write_alone(method: Callable[P, R]) -> Callable[P, R]:
    """Hold the lock of the writers during ``method``."""

    @wraps(method)
    def locked(*arguments: P.args, **keywords: P.kwargs) -> R:
        with _WRITE_LOCK:
            return method(*arguments, **keywords)

    return locked


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file to write: its path below the root, content, mode and owner.

    Without ``uid`` and ``gid`` a new file belongs to the user of this process.
    """

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644
    uid: int | None = None
    gid: int | None = None


class HostFiles:
    """Reads and writes below a root. Every `OSError` is raised as `FileError`.

    A change is on disk when its method returns. After an error or a power cut each path is either
    old or new, and the call can be repeated. The last component of a path is the entry itself:
    writing replaces a symbolic link there. Links before it are followed inside the root; changes
    through a user's link to an entry of another user are refused.

    A replaced entry keeps its SELinux label if the policy accepts that. A new entry gets the label
    of the policy; without a policy the kernel labels it. One thread at a time writes. The lock of
    the ledger excludes other agents.
    """

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._durable_directories: set[Path] = set()

    def read_file(self, path: str, *, limit: int = _READ_LIMIT) -> bytes | None:
        """Return the content, links followed; None when there is no such file.

        Raises `FileError` when it has more than ``limit`` bytes or is no regular file.
        """
        resolved = self._root.resolve_path(path)
        with translate_errors("read", resolved):
            try:
                return self._read_content(resolved, limit)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def has_file(self, file: FileSpec) -> bool:
        """Return whether exactly this file exists; a link to one does not count."""
        return self._is_current(self._root.resolve_entry(file.path), file)

    def write_file(
        self,
        path: str,
        content: bytes,
        *,
        mode: int = 0o644,
        uid: int | None = None,
        gid: int | None = None,
    ) -> bool:
        """Write one file; return whether that was a change. Missing directories get mode 0755."""
        return bool(self.write_files([FileSpec(path, content, mode, uid, gid)]))

    @_write_alone
    def write_files(self, files: Sequence[FileSpec]) -> tuple[str, ...]:
        """Write the files; return the paths that changed, in order.

        Each file is atomic, the set is not: after a power cut some may be old and some new. More
        than a few cost one flush for each file system and one for each directory.
        """
        # 1,000 files on ext4: fsync for each makes 1,001 flushes of the disk (as many after
        # posix_fadvise), fsync from 16 threads 540, syncfs 2.
        self._disk.begin_change()
        specs = self._resolve_entries(files)
        directories = dict.fromkeys(entry.parent for entry in specs)
        for directory in directories:
            self._ensure_directory(directory)
            self._remove_leftovers(directory)
        changed = [entry for entry, file in specs.items() if not self._is_current(entry, file)]
        temporaries = {
            entry: entry.parent / f"{_TEMPORARY_PREFIX}{number}"
            for number, entry in enumerate(changed)
        }
        try:
            if len(specs) > _FSYNC_EACH_LIMIT:
                with self._sync_file_systems(directories):
                    for entry, temporary in temporaries.items():
                        self._write_temporary(temporary, specs[entry], entry, needs_fsync=False)
            else:
                # An unchanged file may be one that a killed process wrote and did not fsync.
                for entry in specs.keys() - temporaries.keys():
                    self._fsync_path(entry)
                for entry, temporary in temporaries.items():
                    self._write_temporary(temporary, specs[entry], entry, needs_fsync=True)
            for entry, temporary in temporaries.items():
                with translate_errors("replace", entry):
                    self._disk.replace(temporary, entry)
        except FileError:
            for temporary in temporaries.values():
                with suppress(OSError):
                    self._disk.unlink(temporary)
            raise
        for directory in directories:
            self._fsync_path(directory)
        self._disk.release_memory()
        return tuple(specs[entry].path for entry in changed)

    @_write_alone
    def make_symlink(self, path: str, target: str) -> bool:
        """Make a symbolic link to ``target``; return whether that was a change.

        An existing file or link is replaced atomically.
        """
        self._disk.begin_change()
        entry = self._resolve_entry(path)
        self._ensure_directory(entry.parent)
        with translate_errors("make the link", entry):
            is_change = self._read_link(entry) != target
            if is_change:
                self._remove_leftovers(entry.parent)
                temporary = entry.parent / f"{_TEMPORARY_PREFIX}0"
                self._disk.symlink(temporary, target)
                self._set_label(temporary, entry, self._disk.lstat(temporary))
                self._disk.replace(temporary, entry)
        self._fsync_path(entry.parent)
        return is_change

    def read_link(self, path: str) -> str | None:
        """Return the target of the symbolic link; None when the path is no link or is missing."""
        entry = self._root.resolve_entry(path)
        with translate_errors("read the link", entry):
            return self._read_link(entry)

    def has_entry(self, path: str) -> bool:
        """Return whether the entry exists; a dangling link does."""
        return self._stat_entry(self._root.resolve_entry(path)) is not None

    def list_directory(self, path: str) -> tuple[str, ...]:
        """Return the names in the directory, sorted, links to it followed; empty without one."""
        directory = self._root.resolve_path(path)
        with translate_errors("list", directory):
            try:
                return tuple(sorted(self._disk.listdir(directory)))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def remove_file(self, path: str) -> bool:
        """Remove a file or link; return whether there was one."""
        self._disk.begin_change()
        entry = self._root.resolve_entry(path, for_change=True)
        with translate_errors("remove", entry):
            try:
                self._disk.unlink(entry)
            except (FileNotFoundError, NotADirectoryError):
                was_removed = False
            else:
                was_removed = True
        if self._stat_entry(entry.parent) is not None:
            self._fsync_path(entry.parent)
        return was_removed

    @_write_alone
    def remove_leftovers(self, path: str) -> None:
        """Remove temporary files of an interrupted write, as the next write there would do."""
        directory = self._root.resolve_safely(path)
        if self._remove_leftovers(directory):
            self._fsync_path(directory)

    def sync_file_systems(self, directories: Iterable[str]) -> None:
        """Flush the file systems of these directories: all that any program wrote there.

        A directory that is missing is skipped.
        """
        resolved = (self._root.resolve_path(directory) for directory in directories)
        with self._sync_file_systems(
            [directory for directory in resolved if self._stat_entry(directory)]
        ):
            pass

    @_write_alone
    def make_directory(
        self,
        path: str,
        *,
        mode: int = 0o755,
        uid: int | None = None,
        gid: int | None = None,
        needs_fsync: bool = True,
    ) -> bool:
        """Make a directory, or set its mode and owner; return whether that was a change.

        Missing parents get mode 0755. Without ``needs_fsync`` the caller flushes the directory.
        """
        self._disk.begin_change()
        directory = self._root.resolve_safely(path)
        if self._ensure_directory(directory, mode, uid, gid, needs_fsync=needs_fsync):
            return True
        with (
            translate_errors("change", directory),
            open_descriptor(self._disk, directory) as descriptor,
        ):
            is_change = self._set_owner_and_mode(descriptor, mode, uid, gid)
            if needs_fsync:
                self._disk.fsync(descriptor)
        return is_change

    def _resolve_entries(self, files: Sequence[FileSpec]) -> dict[Path, FileSpec]:
        specs: dict[Path, FileSpec] = {}
        for file in files:
            entry = self._resolve_entry(file.path)
            if entry in specs:
                raise FileError(
                    f"cannot write {file.path} twice: {specs[entry].path} is the same file"
                )
            specs[entry] = file
        return specs

    def _resolve_entry(self, path: str) -> Path:
        entry = self._root.resolve_entry(path, for_change=True)
        if entry.name.startswith(_TEMPORARY_PREFIX):
            raise FileError(f"cannot write {path}: this name is reserved for temporary files")
        return entry

    def _ensure_directory(
        self,
        directory: Path,
        mode: int = 0o755,
        uid: int | None = None,
        gid: int | None = None,
        *,
        needs_fsync: bool = True,
    ) -> bool:
        """Return whether the directory was made; an existing one keeps its mode and owner."""
        status = self._stat_entry(directory)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise FileError(f"cannot make the directory {directory}: it is not a directory")
        if directory == self._root.prefix or (
            status is not None and (directory in self._durable_directories or not needs_fsync)
        ):
            return False
        self._ensure_directory(directory.parent, needs_fsync=needs_fsync)
        if status is None:
            with translate_errors("make the directory", directory):
                self._remove_leftovers(directory.parent)
                temporary = directory.parent / f"{_TEMPORARY_PREFIX}0"
                self._disk.mkdir(temporary)
                with open_descriptor(self._disk, temporary) as descriptor:
                    self._set_owner_and_mode(descriptor, mode, uid, gid)
                    self._set_label(descriptor, directory, self._disk.fstat(descriptor))
                    if needs_fsync:
                        self._disk.fsync(descriptor)
                self._disk.replace(temporary, directory)
        if needs_fsync:
            # Once per process for an existing directory too: a killed agent may have made it
            # without an fsync.
            self._fsync_path(directory.parent)
            self._durable_directories.add(directory)
        return status is None

    def _remove_leftovers(self, directory: Path) -> bool:
        """Remove temporary entries of an interrupted run; return whether there were any."""
        was_removed = False
        with translate_errors("clean up", directory):
            for name in self._disk.listdir(directory):
                if name.startswith(_TEMPORARY_PREFIX):
                    was_removed = True
                    leftover = directory / name
                    if stat.S_ISDIR(self._disk.lstat(leftover).st_mode):
                        self._disk.rmdir(leftover)
                    else:
                        self._disk.unlink(leftover)
        return was_removed

    def _is_current(self, entry: Path, file: FileSpec) -> bool:
        status = self._stat_entry(entry)
        if (
            status is None
            or not stat.S_ISREG(status.st_mode)
            or stat.S_IMODE(status.st_mode) != file.mode
            or file.uid not in {None, status.st_uid}
            or file.gid not in {None, status.st_gid}
            or status.st_size != len(file.content)
        ):
            return False
        with translate_errors("read", entry):
            return self._read_content(entry, status.st_size) == file.content

    def _write_temporary(
        self, temporary: Path, file: FileSpec, entry: Path, *, needs_fsync: bool
    ) -> None:
        with translate_errors("write", entry):
            descriptor = self._disk.create(temporary)
            try:
                written = 0
                while written < len(file.content):
                    written += self._disk.write(descriptor, file.content[written:])
                # After the content: write(2) of a user other than root clears the set-user-ID bit.
                self._set_owner_and_mode(descriptor, file.mode, file.uid, file.gid)
                self._set_label(descriptor, entry, self._disk.fstat(descriptor))
                if needs_fsync:
                    self._disk.fsync(descriptor)
            finally:
                self._disk.close(descriptor)

    def _set_label(self, target: Path | int, entry: Path, status: os.stat_result) -> None:
        """Label the temporary entry as the policy labels ``entry``."""
        label = self._disk.decide_label(entry, status, self._disk.read_label(entry))
        if label and label != self._disk.read_label(target):
            self._disk.set_label(target, label)

    def _set_owner_and_mode(
        self, descriptor: int, mode: int, uid: int | None, gid: int | None
    ) -> bool:
        status = self._disk.fstat(descriptor)
        needs_chown = uid not in {None, status.st_uid} or gid not in {None, status.st_gid}
        if needs_chown:
            # Before the mode: chown(2) clears the set-user-ID bit.
            self._disk.chown(descriptor, -1 if uid is None else uid, -1 if gid is None else gid)
        if not needs_chown and stat.S_IMODE(status.st_mode) == mode:
            return False
        self._disk.chmod(descriptor, mode)
        return True

    def _read_content(self, path: Path, limit: int) -> bytes:
        with open_descriptor(self._disk, path) as descriptor:
            if not stat.S_ISREG(self._disk.fstat(descriptor).st_mode):
                raise FileError(f"cannot read {path}: it is not a regular file")
            parts: list[bytes] = []
            rest = limit + 1
            while rest and (part := self._disk.read(descriptor, min(rest, _CHUNK))):
                parts.append(part)
                rest -= len(part)
        if not rest:
            raise FileError(f"cannot read {path}: it has more than {limit} bytes")
        return b"".join(parts)

    def _stat_entry(self, path: Path) -> os.stat_result | None:
        with translate_errors("inspect", path):
            try:
                return self._disk.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _read_link(self, entry: Path) -> str | None:
        status = self._stat_entry(entry)
        if status is None or not stat.S_ISLNK(status.st_mode):
            return None
        return self._disk.readlink(entry)

    def _fsync_path(self, path: Path) -> None:
        with translate_errors("flush", path), open_descriptor(self._disk, path) as descriptor:
            self._disk.fsync(descriptor)

    @contextmanager
    def _sync_file_systems(self, directories: Iterable[Path]) -> Iterator[None]:
        """Flush the file systems of the directories at the end.

        They are opened first: syncfs(2) reports errors of writes since the descriptor was opened.
        """
        with ExitStack() as stack:
            file_systems: dict[int, tuple[Path, int]] = {}
            for directory in directories:
                with translate_errors("open", directory):
                    device = self._disk.lstat(directory).st_dev
                    if device not in file_systems:
                        descriptor = stack.enter_context(open_descriptor(self._disk, directory))
                        file_systems[device] = directory, descriptor
            yield
            for directory, descriptor in file_systems.values():
                with translate_errors("flush the file system of", directory):
                    self._disk.syncfs(descriptor)


@contextmanager
def open_descriptor(disk: Disk, path: StrPath) -> Iterator[int]:
    """Open a file or directory for reading, and close it afterwards."""
    descriptor = disk.open(path)
    try:
        yield descriptor
    finally:
        disk.close(descriptor)


@contextmanager
def translate_errors(verb: str, path: StrPath) -> Iterator[None]:
    """Raise an `OSError` as the `FileError` "cannot VERB PATH: CAUSE"."""
    try:
        yield
    except OSError as error:
        raise make_file_error(verb, path, error) from error


def make_file_error(verb: str, path: StrPath, error: OSError) -> FileError:
    """Make the error of `translate_errors`, for loops over thousands of paths: it costs less."""
    return FileError(
        f"cannot {verb} {path}: {error.strerror or error}",
        remedy=_REMEDIES.get(error.errno or 0, ""),
    )
