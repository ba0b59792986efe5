"""Directory entries: made under a temporary name beside their path, then renamed to it.

`FsyncQueue` flushes the changed directories: one by one, or with their whole file systems.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from treenail.errors import FileError
from treenail.host.filesystem import atomic_files
from treenail.host.filesystem.disk import Disk, StrPath

TEMPORARY_PREFIX = ".treenail"
"""The prefix of the names of temporary entries, which no config may use."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file; ``content`` is called when the file is written, and may return parts.

    ``xattrs`` are all attributes that the file gets. Without them, a replaced file keeps its label
    if the policy accepts that, and a new file gets the label of the policy, or else of the kernel.
    Without ``uid`` and ``gid`` it belongs to the user of this process.
    """

    content: Callable[[], bytes | Iterable[bytes]] = field(repr=False)
    mode: int = 0o644
    uid: int | None = None
    gid: int | None = None
    xattrs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class SymlinkEntry:
    """A symbolic link with the target ``text``."""

    text: str
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class HardlinkEntry:
    """A second name of the file ``target``, a path below the root."""

    target: str


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A directory, whose entries stay. Without ``mode`` an existing directory is not changed."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    xattrs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class AbsentEntry:
    """No entry; a directory is removed only when it is empty."""


Entry = FileEntry | SymlinkEntry | HardlinkEntry | DirectoryEntry | AbsentEntry

_DIRECTORY_MODE = 0o755


class EntryWriter:
    """Makes single entries. Every `OSError` is raised as `FileError`; the caller flushes."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def make_file(
        self,
        entry: FileEntry,
        temporary: str,
        path: str,
        *,
        is_replacement: bool,
        needs_fsync: bool,
    ) -> int:
        """Write the complete file that will be renamed to ``path``; return its inode number."""
        content = entry.content()
        disk = self._disk
        try:
            descriptor = self._create_file(temporary)
            try:
                for part in (content,) if isinstance(content, bytes) else content:
                    written = disk.write(descriptor, part)
                    while written < len(part):
                        written += disk.write(descriptor, part[written:])
                # After the content: write(2) of a user other than root clears the set-user-ID bit.
                status = disk.fstat(descriptor)
                self._set_owner(descriptor, status, entry.uid, entry.gid)
                disk.chmod(descriptor, entry.mode)
                if entry.xattrs is not None:
                    self._set_xattrs(descriptor, entry.xattrs)
                else:
                    present = disk.read_label(path) if is_replacement else b""
                    self._set_label(descriptor, disk.decide_label(path, status, present))
                if needs_fsync:
                    disk.fsync(descriptor)
            finally:
                disk.close(descriptor)
        except OSError as error:
            raise atomic_files.make_file_error("write", path, error) from error
        return status.st_ino

    def make_symlink(self, entry: SymlinkEntry, temporary: StrPath, path: StrPath) -> int:
        """Make the link that will be renamed to ``path``; return its inode number."""
        with atomic_files.translate_errors("make the link", path):
            self.remove_temporary(temporary)
            self._disk.symlink(temporary, entry.text)
            status = self._disk.lstat(temporary)
            if entry.uid not in {None, status.st_uid} or entry.gid not in {None, status.st_gid}:
                self._disk.lchown(temporary, _convert_owner(entry.uid), _convert_owner(entry.gid))
            present = self._disk.read_label(path)
            self._set_label(temporary, self._disk.decide_label(path, status, present))
            return status.st_ino

    def make_hardlink(self, path: StrPath, temporary: StrPath) -> int:
        """Make a second name of the file or link; return its inode number."""
        with atomic_files.translate_errors("link", path):
            self.remove_temporary(temporary)
            self._disk.link(path, temporary)
            return self._disk.lstat(temporary).st_ino

    def put_entry(self, temporary: StrPath, path: StrPath) -> None:
        """Rename the temporary entry to its path, atomically."""
        try:
            self._disk.replace(temporary, path)
        except OSError as error:
            raise atomic_files.make_file_error("replace", path, error) from error

    def exchange_entries(self, temporary: str, path: str) -> None:
        """Exchange the two entries: the old one then has the name ``temporary``."""
        try:
            self._disk.exchange(temporary, path)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.ENOSYS}:
                raise FileError(
                    f"cannot replace {path}: its file system cannot exchange two names",
                    remedy="move it to ext4, xfs, btrfs or tmpfs",
                ) from error
            raise atomic_files.make_file_error("replace", path, error) from error

    def remove_entry(self, path: StrPath) -> None:
        """Remove the entry if it exists; a directory that is not empty stays."""
        with atomic_files.translate_errors("remove", path):
            try:
                self._disk.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            except (IsADirectoryError, PermissionError):
                if not stat.S_ISDIR(self._disk.lstat(path).st_mode):
                    raise
                if not self._disk.listdir(path):
                    self._disk.rmdir(path)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # such a name cannot exist
                    raise

    def make_directory(self, entry: DirectoryEntry, path: StrPath) -> None:
        """Make a directory at a free path."""
        with atomic_files.translate_errors("make the directory", path):
            self._disk.mkdir(path)
            mode = _DIRECTORY_MODE if entry.mode is None else entry.mode
            self._change_directory(path, entry.uid, entry.gid, mode, entry.xattrs)

    def change_directory(self, entry: DirectoryEntry, path: StrPath) -> None:
        """Set mode, owner and attributes of an existing directory."""
        if entry.mode is not None:
            with atomic_files.translate_errors("change", path):
                self._change_directory(path, entry.uid, entry.gid, entry.mode, entry.xattrs)

    def describe_directory(self, path: StrPath) -> DirectoryEntry:
        """Return mode, owner and attributes of an existing file or directory."""
        with (
            atomic_files.translate_errors("inspect", path),
            atomic_files.open_descriptor(self._disk, path) as descriptor,
        ):
            status = self._disk.fstat(descriptor)
            return DirectoryEntry(
                stat.S_IMODE(status.st_mode),
                status.st_uid,
                status.st_gid,
                self._disk.read_xattrs(descriptor),
            )

    def remove_temporary(self, temporary: StrPath) -> None:
        """Remove a temporary file or link if it exists."""
        try:
            self._disk.unlink(temporary)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # such a name cannot exist
                raise atomic_files.make_file_error("remove", temporary, error) from error

    def _create_file(self, temporary: str) -> int:
        try:
            return self._disk.create(temporary)
        except FileExistsError:
            self._disk.unlink(temporary)
            return self._disk.create(temporary)

    def _change_directory(
        self,
        path: StrPath,
        uid: int | None,
        gid: int | None,
        mode: int,
        xattrs: Mapping[str, bytes] | None,
    ) -> None:
        with atomic_files.open_descriptor(self._disk, path) as descriptor:
            status = self._disk.fstat(descriptor)
            # Write only what differs: a file system may refuse even an equal value.
            self._set_owner(descriptor, status, uid, gid)
            if stat.S_IMODE(status.st_mode) != mode:
                self._disk.chmod(descriptor, mode)
            if xattrs is not None:
                self._set_xattrs(descriptor, xattrs)
            elif self._disk.labels is not None:
                present = self._disk.read_label(descriptor)
                self._set_label(descriptor, self._disk.decide_label(path, status, present))

    def _set_owner(
        self, descriptor: int, status: os.stat_result, uid: int | None, gid: int | None
    ) -> None:
        # Call it before chmod: chown(2) clears the set-user-ID bit.
        if uid not in (None, status.st_uid) or gid not in (None, status.st_gid):
            self._disk.chown(descriptor, _convert_owner(uid), _convert_owner(gid))

    def _set_label(self, target: StrPath | int, label: bytes) -> None:
        if label and label != self._disk.read_label(target):
            self._disk.set_label(target, label)

    def _set_xattrs(self, descriptor: int, xattrs: Mapping[str, bytes]) -> None:
        present = self._disk.read_xattrs(descriptor)
        for name in present.keys() - xattrs.keys():
            self._disk.remove_xattr(descriptor, name)
        for name, value in xattrs.items():
            if present.get(name) != value:
                self._disk.set_xattr(descriptor, name, value)


def refuse_temporary_name(path: str) -> None:
    """Raise `FileError` for a name that is reserved for temporary entries."""
    if path.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
        raise FileError(f"cannot write {path}: this name is reserved for temporary files")


def _convert_owner(owner: int | None) -> int:
    return -1 if owner is None else owner


FSYNC_EACH_LIMIT = 4
"""Up to here fsync each path: syncfs also flushes what other programs write."""


class FsyncQueue:
    """Directories and file systems that need a flush. Raises `FileError`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._directories: dict[str, None] = {}
        self._file_systems: dict[int, tuple[str, int]] = {}

    def open_file_system(self, directory: str) -> None:
        """Open the file system of the directory, before the first write there.

        syncfs(2) reports errors of writes since its descriptor was opened.
        """
        with atomic_files.translate_errors("open", directory):
            device = self._disk.lstat(directory).st_dev
            if device not in self._file_systems:
                self._file_systems[device] = directory, self._disk.open(directory)

    def add_directory(self, directory: str) -> None:
        """Add a directory whose entries, mode or owner were changed."""
        self._directories[directory] = None

    def discard_directory(self, directory: str) -> None:
        """Forget a directory that was removed."""
        self._directories.pop(directory, None)

    def sync_file_systems(self) -> None:
        """Flush all opened file systems."""
        for device in self._file_systems:
            self._sync_device(device)

    def sync_file_system(self, directory: str) -> None:
        """Flush the opened file system that the directory is on."""
        with atomic_files.translate_errors("inspect", directory):
            device = self._disk.lstat(directory).st_dev
        self._sync_device(device)

    def fsync_directories(self) -> None:
        """Flush the added directories; many of them with one flush for each file system."""
        if len(self._directories) > FSYNC_EACH_LIMIT:
            for directory in self._directories:
                self.open_file_system(directory)
            self.sync_file_systems()
            return
        for directory in self._directories:
            self.fsync_path(directory)

    def fsync_path(self, path: str) -> None:
        """Flush one file or directory."""
        with (
            atomic_files.translate_errors("flush", path),
            atomic_files.open_descriptor(self._disk, path) as descriptor,
        ):
            self._disk.fsync(descriptor)

    def _sync_device(self, device: int) -> None:
        directory, descriptor = self._file_systems[device]
        with atomic_files.translate_errors("flush the file system of", directory):
            self._disk.syncfs(descriptor)

    def close_file_systems(self) -> None:
        """Forget all directories and close the file systems."""
        self._directories.clear()
        for _, descriptor in self._file_systems.values():
            with suppress(OSError):  # nothing was written through it
                self._disk.close(descriptor)
        self._file_systems.clear()
