"""What may stand at a path, how it is made beside that path, and how it is put there."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk, StrPath
from treenail.host.filesystem.files import make_file_error, translate_errors

TEMPORARY_PREFIX = ".treenail"
"""What the names of our own temporary entries begin with; nobody else may ask for them."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file; ``content`` is asked for when it is written.

    Without ``xattrs`` the label of a replaced file is kept if the policy has nothing against
    it, and a new one has what the policy says, or else the kernel; with them, these are all that it
    has. Without ``uid`` and ``gid`` it belongs to whoever the agent runs as.
    """

    content: Callable[[], bytes] = field(repr=False)
    mode: int = 0o644
    uid: int | None = None
    gid: int | None = None
    xattrs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class SymlinkEntry:
    """A symbolic link that says ``text``."""

    text: str
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class HardlinkEntry:
    """Another name of the file ``target``, which is a path below the root."""

    target: str


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A directory; what is in it stays. Without ``mode`` one that is there stays as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    xattrs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class AbsentEntry:
    """Nothing; a directory goes only when it is empty."""


Entry = FileEntry | SymlinkEntry | HardlinkEntry | DirectoryEntry | AbsentEntry

_DIRECTORY_MODE = 0o755


class EntryWriter:
    """The calls that make one entry. Every `OSError` leaves as `FileError`; nothing is flushed."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def make_file(
        self,
        entry: FileEntry,
        temporary: str,
        place: str,
        *,
        is_replacement: bool,
        needs_fsync: bool,
    ) -> int:
        """Have a new file, complete, to be put at ``place``, where it ``is_replacement`` one or not.

        Returns the number of its inode.
        """
        content = entry.content()
        disk = self._disk
        try:
            descriptor = self._create_file(temporary)
            try:
                written = disk.write(descriptor, content)
                while written < len(content):
                    written += disk.write(descriptor, content[written:])
                # After the content: writing takes the set-user-ID bit away from all but root.
                status = disk.fstat(descriptor)
                self._set_owner(descriptor, status, entry.uid, entry.gid)
                disk.chmod(descriptor, entry.mode)
                if entry.xattrs is not None:
                    self._set_xattrs(descriptor, entry.xattrs)
                else:
                    present = disk.read_label(place) if is_replacement else b""
                    self._set_label(descriptor, disk.decide_label(place, status, present))
                if needs_fsync:
                    disk.fsync(descriptor)
            finally:
                disk.close(descriptor)
        except OSError as error:
            raise make_file_error("write", place, error) from error
        return status.st_ino

    def make_symlink(self, entry: SymlinkEntry, temporary: StrPath, place: StrPath) -> int:
        """Have a symbolic link, to be put at ``place``; returns the number of its inode."""
        with translate_errors("link", place):
            self.remove_temporary(temporary)
            self._disk.symlink(temporary, entry.text)
            status = self._disk.lstat(temporary)
            if entry.uid not in {None, status.st_uid} or entry.gid not in {None, status.st_gid}:
                self._disk.lchown(temporary, _convert_owner(entry.uid), _convert_owner(entry.gid))
            present = self._disk.read_label(place)
            self._set_label(temporary, self._disk.decide_label(place, status, present))
            return status.st_ino

    def make_hardlink(self, path: StrPath, temporary: StrPath) -> int:
        """Have a second name of the file or link; returns the number of its inode."""
        with translate_errors("link", path):
            self.remove_temporary(temporary)
            self._disk.link(path, temporary)
            return self._disk.lstat(temporary).st_ino

    def put_entry(self, temporary: StrPath, place: StrPath) -> None:
        """Have what was made at its place, in one step."""
        try:
            self._disk.replace(temporary, place)
        except OSError as error:
            raise make_file_error("replace", place, error) from error

    def exchange_entries(self, temporary: str, place: str) -> None:
        """As `put_entry`, and what was there has the name ``temporary``."""
        try:
            self._disk.exchange(temporary, place)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.ENOSYS}:
                raise FileError(
                    f"can't replace {place}: two names can't be exchanged on its file system",
                    remedy="have it on ext4, xfs, btrfs or tmpfs",
                ) from error
            raise make_file_error("replace", place, error) from error

    def remove_entry(self, place: StrPath) -> None:
        """Have nothing there; a directory that is not empty stays."""
        with translate_errors("remove", place):
            try:
                self._disk.unlink(place)
            except (FileNotFoundError, NotADirectoryError):
                return
            except (IsADirectoryError, PermissionError):
                if not stat.S_ISDIR(self._disk.lstat(place).st_mode):
                    raise
                if not self._disk.listdir(place):
                    self._disk.rmdir(place)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # then it was never made
                    raise

    def make_directory(self, entry: DirectoryEntry, place: StrPath) -> None:
        """Have a directory where nothing is."""
        with translate_errors("make the directory", place):
            self._disk.mkdir(place)
            mode = _DIRECTORY_MODE if entry.mode is None else entry.mode
            self._change_directory(place, entry.uid, entry.gid, mode, entry.xattrs)

    def change_directory(self, entry: DirectoryEntry, place: StrPath) -> None:
        """Have this mode and owner on the directory that is there."""
        if entry.mode is not None:
            with translate_errors("change", place):
                self._change_directory(place, entry.uid, entry.gid, entry.mode, entry.xattrs)

    def describe_directory(self, place: StrPath) -> DirectoryEntry:
        """What stands there, as a directory is described: mode, owner, attributes."""
        with translate_errors("look at", place), self._open_descriptor(place) as descriptor:
            status = self._disk.fstat(descriptor)
            return DirectoryEntry(
                stat.S_IMODE(status.st_mode),
                status.st_uid,
                status.st_gid,
                self._disk.read_xattrs(descriptor),
            )

    def remove_temporary(self, temporary: StrPath) -> None:
        """Have no such file or link."""
        try:
            self._disk.unlink(temporary)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # then it was never made
                raise make_file_error("remove", temporary, error) from error

    def _create_file(self, temporary: str) -> int:
        try:
            return self._disk.create(temporary)
        except FileExistsError:
            self._disk.unlink(temporary)
            return self._disk.create(temporary)

    def _change_directory(
        self,
        place: StrPath,
        uid: int | None,
        gid: int | None,
        mode: int,
        xattrs: Mapping[str, bytes] | None,
    ) -> None:
        with self._open_descriptor(place) as descriptor:
            status = self._disk.fstat(descriptor)
            self._set_owner(descriptor, status, uid, gid)
            self._disk.chmod(descriptor, mode)
            if xattrs is not None:
                self._set_xattrs(descriptor, xattrs)
            elif self._disk.labels is not None:
                present = self._disk.read_label(descriptor)
                self._set_label(descriptor, self._disk.decide_label(place, status, present))

    def _set_owner(
        self, descriptor: int, status: os.stat_result, uid: int | None, gid: int | None
    ) -> None:
        """Before the mode: a change of owner takes the set-user-ID bit away."""
        if uid not in {None, status.st_uid} or gid not in {None, status.st_gid}:
            self._disk.chown(descriptor, _convert_owner(uid), _convert_owner(gid))

    def _set_label(self, target: StrPath | int, label: bytes) -> None:
        if label and label != self._disk.read_label(target):
            self._disk.set_label(target, label)

    def _set_xattrs(self, descriptor: int, xattrs: Mapping[str, bytes]) -> None:
        found = self._disk.read_xattrs(descriptor)
        for name in found.keys() - xattrs.keys():
            self._disk.remove_xattr(descriptor, name)
        for name, value in xattrs.items():
            if found.get(name) != value:
                self._disk.set_xattr(descriptor, name, value)

    @contextmanager
    def _open_descriptor(self, path: StrPath) -> Iterator[int]:
        descriptor = self._disk.open(path)
        try:
            yield descriptor
        finally:
            self._disk.close(descriptor)


def refuse_temporary_name(path: str) -> None:
    """Raise `FileError` for a name that only our temporary entries have."""
    if path.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
        raise FileError(f"{path} is a name that only temporary files have, and they vanish")


def _convert_owner(owner: int | None) -> int:
    return -1 if owner is None else owner
