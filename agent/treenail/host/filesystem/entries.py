"""What may stand at a path, how it is made beside that path, and how it is put there."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk, Place
from treenail.host.filesystem.files import failing, failure

NAMES = ".treenail"
"""What the names of our own temporary entries begin with; nobody else may ask for them."""


@dataclass(frozen=True, slots=True)
class Regular:
    """A file; ``content`` is asked for when it is written.

    Without ``attributes`` the label of a replaced file is kept if the policy has nothing against
    it, and a new one has what the policy says, or else the kernel; with them, these are all that it
    has. Without ``uid`` and ``gid`` it belongs to whoever the agent runs as.
    """

    content: Callable[[], bytes] = field(repr=False)
    mode: int = 0o644
    uid: int | None = None
    gid: int | None = None
    attributes: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link that says ``text``."""

    text: str
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class Hardlink:
    """Another name of the file ``target``, which is a path below the root."""

    target: str


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory; what is in it stays. Without ``mode`` one that is there stays as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    attributes: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """Nothing; a directory goes only when it is empty."""


Entry = Regular | Symlink | Hardlink | Directory | Absent

_DIRECTORY_MODE = 0o755


class Entries:
    """The calls that make one entry. Every `OSError` leaves as `FileError`; nothing is flushed."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def make(
        self, entry: Regular, temporary: str, place: str, *, replaces: bool, flush: bool
    ) -> int:
        """Have a new file, complete, to be put at ``place``, where it ``replaces`` one or not.

        Returns the number of its inode.
        """
        content = entry.content()
        disk = self._disk
        try:
            descriptor = self._create(temporary)
            try:
                written = disk.write(descriptor, content)
                while written < len(content):
                    written += disk.write(descriptor, content[written:])
                # After the content: writing takes the set-user-ID bit away from all but root.
                status = disk.status_of(descriptor)
                self._own(descriptor, status, entry.uid, entry.gid)
                disk.change_mode(descriptor, entry.mode)
                if entry.attributes is not None:
                    self._change_attributes(descriptor, entry.attributes)
                else:
                    present = disk.label(place) if replaces else b""
                    self._label(descriptor, disk.fitting_label(place, status, present))
                if flush:
                    disk.sync(descriptor)
            finally:
                disk.close(descriptor)
        except OSError as error:
            raise failure("write", place, error) from error
        return status.st_ino

    def make_symlink(self, entry: Symlink, temporary: Place, place: Place) -> int:
        """Have a symbolic link, to be put at ``place``; returns the number of its inode."""
        with failing("link", place):
            self.drop(temporary)
            self._disk.symlink(temporary, entry.text)
            status = self._disk.status(temporary)
            if entry.uid not in {None, status.st_uid} or entry.gid not in {None, status.st_gid}:
                self._disk.own_link(temporary, _number(entry.uid), _number(entry.gid))
            present = self._disk.label(place)
            self._label(temporary, self._disk.fitting_label(place, status, present))
            return status.st_ino

    def make_name(self, path: Place, temporary: Place) -> int:
        """Have a second name of the file or link; returns the number of its inode."""
        with failing("link", path):
            self.drop(temporary)
            self._disk.link(path, temporary)
            return self._disk.status(temporary).st_ino

    def put(self, temporary: Place, place: Place) -> None:
        """Have what was made at its place, in one step."""
        try:
            self._disk.replace(temporary, place)
        except OSError as error:
            raise failure("replace", place, error) from error

    def exchange(self, temporary: str, place: str) -> None:
        """As `put`, and what was there has the name ``temporary``."""
        try:
            self._disk.exchange(temporary, place)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.ENOSYS}:
                raise FileError(
                    f"can't replace {place}: two names can't be exchanged on its file system",
                    remedy="have it on ext4, xfs, btrfs or tmpfs",
                ) from error
            raise failure("replace", place, error) from error

    def remove(self, place: Place) -> None:
        """Have nothing there; a directory that is not empty stays."""
        with failing("remove", place):
            try:
                self._disk.unlink(place)
            except (FileNotFoundError, NotADirectoryError):
                return
            except (IsADirectoryError, PermissionError):
                if not stat.S_ISDIR(self._disk.status(place).st_mode):
                    raise
                if not self._disk.names(place):
                    self._disk.remove_directory(place)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # then it was never made
                    raise

    def make_directory(self, entry: Directory, place: Place) -> None:
        """Have a directory where nothing is."""
        with failing("make the directory", place):
            self._disk.make_directory(place)
            mode = _DIRECTORY_MODE if entry.mode is None else entry.mode
            self._change(place, entry.uid, entry.gid, mode, entry.attributes)

    def change_directory(self, entry: Directory, place: Place) -> None:
        """Have this mode and owner on the directory that is there."""
        if entry.mode is not None:
            with failing("change", place):
                self._change(place, entry.uid, entry.gid, entry.mode, entry.attributes)

    def described(self, place: Place) -> Directory:
        """What stands there, as a directory is described: mode, owner, attributes."""
        with failing("look at", place), self._opened(place) as descriptor:
            status = self._disk.status_of(descriptor)
            return Directory(
                stat.S_IMODE(status.st_mode),
                status.st_uid,
                status.st_gid,
                self._disk.attributes(descriptor),
            )

    def drop(self, temporary: Place) -> None:
        """Have no such file or link."""
        try:
            self._disk.unlink(temporary)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # then it was never made
                raise failure("remove", temporary, error) from error

    def _create(self, temporary: str) -> int:
        try:
            return self._disk.create(temporary)
        except FileExistsError:
            self._disk.unlink(temporary)
            return self._disk.create(temporary)

    def _change(
        self,
        place: Place,
        uid: int | None,
        gid: int | None,
        mode: int,
        attributes: Mapping[str, bytes] | None,
    ) -> None:
        with self._opened(place) as descriptor:
            status = self._disk.status_of(descriptor)
            self._own(descriptor, status, uid, gid)
            self._disk.change_mode(descriptor, mode)
            if attributes is not None:
                self._change_attributes(descriptor, attributes)
            elif self._disk.labels is not None:
                present = self._disk.label(descriptor)
                self._label(descriptor, self._disk.fitting_label(place, status, present))

    def _own(
        self, descriptor: int, status: os.stat_result, uid: int | None, gid: int | None
    ) -> None:
        """Before the mode: a change of owner takes the set-user-ID bit away."""
        if uid not in {None, status.st_uid} or gid not in {None, status.st_gid}:
            self._disk.own(descriptor, _number(uid), _number(gid))

    def _label(self, target: Place | int, label: bytes) -> None:
        if label and label != self._disk.label(target):
            self._disk.change_label(target, label)

    def _change_attributes(self, descriptor: int, attributes: Mapping[str, bytes]) -> None:
        found = self._disk.attributes(descriptor)
        for name in found.keys() - attributes.keys():
            self._disk.remove_attribute(descriptor, name)
        for name, value in attributes.items():
            if found.get(name) != value:
                self._disk.change_attribute(descriptor, name, value)

    @contextmanager
    def _opened(self, path: Place) -> Iterator[int]:
        descriptor = self._disk.open(path)
        try:
            yield descriptor
        finally:
            self._disk.close(descriptor)


def refuse_our_names(path: str) -> None:
    """Raise `FileError` for a name that only our temporary entries have."""
    if path.rpartition("/")[2].startswith(NAMES):
        raise FileError(f"{path} is a name that only temporary files have, and they vanish")


def _number(owner: int | None) -> int:
    return -1 if owner is None else owner
