"""Files, links and directories below the root: written whole or not at all, and for good."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk, StrPath
from treenail.host.filesystem.root import Root

_TEMPORARY_PREFIX = ".treenail-"
_FSYNC_EACH_LIMIT = 4  # so many are flushed one by one, which leaves other programs' writes alone
_READ_LIMIT = 16 * 1024 * 1024
_CHUNK = 1024 * 1024
_REMEDIES = {
    errno.ENOSPC: "free some space on that file system",
    errno.EDQUOT: "free some space on that file system",
    errno.EROFS: "find out why that file system is mounted read-only",
    errno.EIO: "look for the disk's errors in the kernel log: journalctl -k",
    errno.EACCES: "run the agent as root",
    errno.EPERM: "run the agent as root; lsattr shows whether the file is immutable",
}


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file to have: a path below the root, and everything about it.

    Without ``uid`` and ``gid`` a new file belongs to whoever the agent runs as.
    """

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644
    uid: int | None = None
    gid: int | None = None


class HostFiles:
    """Reads and writes below a root.

    When a method that changes something returns, the change outlives a power cut; when it
    raises or the power goes, each path is as it was or as it was to be, never in between.
    Doing it again is always right. The last component of a path is the entry itself: a symbolic
    link there is replaced, not followed; links before it are followed inside the root.

    A replaced entry's SELinux label is kept if the policy has nothing against it, a new one has
    what the policy says, or else what the kernel gives in its directory. One thread at a time may
    write in a directory; the ledger's lock keeps other agents away.
    Every `OSError` leaves as `FileError`.
    """

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._durable_directories: set[Path] = set()

    def read_file(self, path: str, *, limit: int = _READ_LIMIT) -> bytes | None:
        """What the file holds, links followed; None when there is none.

        Raises `FileError` for more than ``limit`` bytes, and for what is not a regular file.
        """
        found = self._root.resolve_path(path)
        with translate_errors("read", found):
            try:
                return self._read_content(found, limit)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def has_file(self, file: FileSpec) -> bool:
        """Whether the file is there as wanted: itself, not a link to one."""
        return self._is_current(self._resolve_entry(file.path), file)

    def write_file(
        self,
        path: str,
        content: bytes,
        *,
        mode: int = 0o644,
        uid: int | None = None,
        gid: int | None = None,
    ) -> bool:
        """Have this file; whether that was a change. Missing directories are made, 0755."""
        return bool(self.write_files([FileSpec(path, content, mode, uid, gid)]))

    def write_files(self, files: Sequence[FileSpec]) -> tuple[str, ...]:
        """Have all these files; the paths that changed, in order.

        The promise holds for each file, not for the set: after a power cut some may be old and
        some new. More than a few cost one flush for each file system and one for each directory.
        Measured on ext4 with 1,000 files: fsync for each makes 1,001 flushes of the disk (no
        fewer after posix_fadvise), from 16 threads 540, syncfs 2.
        """
        wanted = self._resolve_entries(files)
        directories = dict.fromkeys(entry.parent for entry in wanted)
        for directory in directories:
            self._ensure_directory(directory)
            self._remove_leftovers(directory)
        changed = [entry for entry, file in wanted.items() if not self._is_current(entry, file)]
        temporaries = {
            entry: entry.parent / f"{_TEMPORARY_PREFIX}{number}"
            for number, entry in enumerate(changed)
        }
        try:
            if len(wanted) > _FSYNC_EACH_LIMIT:
                with self._sync_file_systems(directories):
                    for entry, temporary in temporaries.items():
                        self._write_temporary(temporary, wanted[entry], entry, needs_fsync=False)
            else:
                for entry in wanted.keys() - temporaries.keys():
                    self._fsync_path(entry)
                for entry, temporary in temporaries.items():
                    self._write_temporary(temporary, wanted[entry], entry, needs_fsync=True)
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
        return tuple(wanted[entry].path for entry in changed)

    def make_symlink(self, path: str, target: str) -> bool:
        """Have a symbolic link that says ``target``; whether that was a change.

        A file or link in its place is replaced in one step: there is always one or the other.
        """
        entry = self._resolve_entry(path)
        self._ensure_directory(entry.parent)
        with translate_errors("link", entry):
            changed = self._read_link(entry) != target
            if changed:
                self._remove_leftovers(entry.parent)
                temporary = entry.parent / f"{_TEMPORARY_PREFIX}0"
                self._disk.symlink(temporary, target)
                self._set_label(temporary, entry, self._disk.lstat(temporary))
                self._disk.replace(temporary, entry)
        self._fsync_path(entry.parent)
        return changed

    def read_link(self, path: str) -> str | None:
        """What the symbolic link says; None when the path is none, or nothing at all."""
        entry = self._root.resolve_entry(path)
        with translate_errors("read the link", entry):
            return self._read_link(entry)

    def has_entry(self, path: str) -> bool:
        """Whether anything is there, be it a link to nothing."""
        return self._stat_entry(self._root.resolve_entry(path)) is not None

    def list_directory(self, path: str) -> tuple[str, ...]:
        """What is in the directory, sorted, links to it followed; nothing when there is none."""
        directory = self._root.resolve_path(path)
        with translate_errors("list", directory):
            try:
                return tuple(sorted(self._disk.listdir(directory)))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def remove_file(self, path: str) -> bool:
        """Have no file and no link there; whether that was a change."""
        entry = self._root.resolve_entry(path)
        with translate_errors("remove", entry):
            try:
                self._disk.unlink(entry)
            except (FileNotFoundError, NotADirectoryError):
                removed = False
            else:
                removed = True
        if self._stat_entry(entry.parent) is not None:
            self._fsync_path(entry.parent)
        return removed

    def remove_leftovers(self, path: str) -> None:
        """Have nothing in the directory of what a write left there that was cut short.

        The next write there does that, too.
        """
        directory = self._root.resolve_path(path)
        if self._remove_leftovers(directory):
            self._fsync_path(directory)

    def make_directory(
        self,
        path: str,
        *,
        mode: int = 0o755,
        uid: int | None = None,
        gid: int | None = None,
        needs_fsync: bool = True,
    ) -> bool:
        """Have a directory of this mode and owner; whether that was a change.

        What is in it stays. Missing parents are made, 0755. Without ``needs_fsync`` it outlives a power
        cut only if somebody else sees to that.
        """
        directory = self._root.resolve_path(path)
        if self._ensure_directory(directory, mode, uid, gid, needs_fsync=needs_fsync):
            return True
        with translate_errors("change", directory), self._open_descriptor(directory) as descriptor:
            changed = self._set_owner_and_mode(descriptor, mode, uid, gid)
            if needs_fsync:
                self._disk.fsync(descriptor)
        return changed

    def _resolve_entries(self, files: Sequence[FileSpec]) -> dict[Path, FileSpec]:
        wanted: dict[Path, FileSpec] = {}
        for file in files:
            entry = self._resolve_entry(file.path)
            if entry in wanted:
                raise FileError(f"{file.path} is to be written twice: it is {wanted[entry].path}")
            wanted[entry] = file
        return wanted

    def _resolve_entry(self, path: str) -> Path:
        entry = self._root.resolve_entry(path)
        if entry.name.startswith(_TEMPORARY_PREFIX):
            raise FileError(f"{path} is a name that only temporary files have, and they vanish")
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
        """Whether it was made; mode and owner of one that was there stay.

        The first time in this process its parents are flushed even when it was there: an agent
        that was killed may have made it and not come to that.
        """
        status = self._stat_entry(directory)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise FileError(f"{directory} is not a directory")
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
                with self._open_descriptor(temporary) as descriptor:
                    self._set_owner_and_mode(descriptor, mode, uid, gid)
                    self._set_label(descriptor, directory, self._disk.fstat(descriptor))
                    if needs_fsync:
                        self._disk.fsync(descriptor)
                self._disk.replace(temporary, directory)
        if needs_fsync:
            self._fsync_path(directory.parent)
            self._durable_directories.add(directory)
        return status is None

    def _remove_leftovers(self, directory: Path) -> bool:
        """Remove what a run that was cut short left behind; whether there was anything."""
        swept = False
        with translate_errors("clean up", directory):
            for name in self._disk.listdir(directory):
                if name.startswith(_TEMPORARY_PREFIX):
                    swept = True
                    left = directory / name
                    if stat.S_ISDIR(self._disk.lstat(left).st_mode):
                        self._disk.rmdir(left)
                    else:
                        self._disk.unlink(left)
        return swept

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
                # After the content: writing takes the set-user-ID bit away from all but root.
                self._set_owner_and_mode(descriptor, file.mode, file.uid, file.gid)
                self._set_label(descriptor, entry, self._disk.fstat(descriptor))
                if needs_fsync:
                    self._disk.fsync(descriptor)
            finally:
                self._disk.close(descriptor)

    def _set_label(self, target: Path | int, entry: Path, status: os.stat_result) -> None:
        """Have on what is to be put at the entry the label that it ought to have there."""
        label = self._disk.decide_label(entry, status, self._disk.read_label(entry))
        if label and label != self._disk.read_label(target):
            self._disk.set_label(target, label)

    def _set_owner_and_mode(
        self, descriptor: int, mode: int, uid: int | None, gid: int | None
    ) -> bool:
        """The owner first: a change of owner takes the set-user-ID bit away."""
        status = self._disk.fstat(descriptor)
        owner = uid not in {None, status.st_uid} or gid not in {None, status.st_gid}
        if owner:
            self._disk.chown(descriptor, -1 if uid is None else uid, -1 if gid is None else gid)
        if not owner and stat.S_IMODE(status.st_mode) == mode:
            return False
        self._disk.chmod(descriptor, mode)
        return True

    def _read_content(self, path: Path, limit: int) -> bytes:
        with self._open_descriptor(path) as descriptor:
            if not stat.S_ISREG(self._disk.fstat(descriptor).st_mode):
                raise FileError(f"{path} is not a regular file")
            parts: list[bytes] = []
            room = limit + 1
            while room and (part := self._disk.read(descriptor, min(room, _CHUNK))):
                parts.append(part)
                room -= len(part)
        if not room:
            raise FileError(f"{path} holds more than {limit} bytes")
        return b"".join(parts)

    def _stat_entry(self, path: Path) -> os.stat_result | None:
        with translate_errors("look at", path):
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
        with translate_errors("flush", path), self._open_descriptor(path) as descriptor:
            self._disk.fsync(descriptor)

    @contextmanager
    def _open_descriptor(self, path: Path) -> Iterator[int]:
        descriptor = self._disk.open(path)
        try:
            yield descriptor
        finally:
            self._disk.close(descriptor)

    @contextmanager
    def _sync_file_systems(self, directories: Iterable[Path]) -> Iterator[None]:
        """Flush the directories' file systems at the end; opened before, to hear of errors."""
        with ExitStack() as stack:
            file_systems: dict[int, tuple[Path, int]] = {}
            for directory in directories:
                with translate_errors("open", directory):
                    device = self._disk.lstat(directory).st_dev
                    if device not in file_systems:
                        descriptor = stack.enter_context(self._open_descriptor(directory))
                        file_systems[device] = directory, descriptor
            yield
            for directory, descriptor in file_systems.values():
                with translate_errors("flush the file system of", directory):
                    self._disk.syncfs(descriptor)


@contextmanager
def translate_errors(verb: str, path: StrPath) -> Iterator[None]:
    """Let an `OSError` out as a `FileError` that says what could not be done to which path."""
    try:
        yield
    except OSError as error:
        raise make_file_error(verb, path, error) from error


def make_file_error(verb: str, path: StrPath, error: OSError) -> FileError:
    """The error to raise; for loops over thousands of paths, where `translate_errors` would show."""
    return FileError(
        f"can't {verb} {path}: {error.strerror or error}",
        remedy=_REMEDIES.get(error.errno or 0, ""),
    )
