"""What may stand at a path, how it is made beside that path, and how it is put there."""

import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from treenail.errors import FileError
from treenail.host.disk import Disk
from treenail.host.files import failing

NAMES = ".treenail"
"""What the names of our own temporary entries begin with; nobody else may ask for them."""


@dataclass(frozen=True, slots=True)
class Regular:
    """A file; ``content`` is asked for when it is written.

    Without ``attributes`` the label of a replaced file is kept, and a new one has what the kernel
    gives it; with them, these are all that it has. Without ``uid`` and ``gid`` it belongs to
    whoever the agent runs as.
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
        self, entry: Regular, temporary: Path, place: Path, *, replaces: bool, flush: bool
    ) -> None:
        """Have a new file, complete, to be put at ``place``, where it ``replaces`` one or not."""
        content = entry.content()
        with failing("write", place):
            descriptor = self._create(temporary)
            try:
                written = self._disk.write(descriptor, content)
                while written < len(content):
                    written += self._disk.write(descriptor, content[written:])
                # After the content: writing takes the set-user-ID bit away from all but root.
                self._own(descriptor, entry.uid, entry.gid)
                self._disk.change_mode(descriptor, entry.mode)
                if entry.attributes is not None:
                    self._change_attributes(descriptor, entry.attributes)
                elif replaces:
                    label = self._disk.label(place)
                    if label and label != self._disk.label(descriptor):
                        self._disk.change_label(descriptor, label)
                if flush:
                    self._disk.sync(descriptor)
            finally:
                self._disk.close(descriptor)

    def make_symlink(self, entry: Symlink, temporary: Path, place: Path) -> None:
        """Have a symbolic link, to be put at ``place``."""
        with failing("link", place):
            self.drop(temporary)
            self._disk.symlink(temporary, entry.text)
            status = self._disk.status(temporary)
            if entry.uid not in {None, status.st_uid} or entry.gid not in {None, status.st_gid}:
                self._disk.own_link(temporary, _number(entry.uid), _number(entry.gid))

    def link(self, path: Path, new: Path) -> None:
        """Have a second name of the file or link."""
        with failing("link", path):
            try:
                self._disk.link(path, new)
            except FileExistsError:
                self._disk.unlink(new)
                self._disk.link(path, new)

    def put(self, temporary: Path, place: Path) -> None:
        """Have what was made at its place, in one step."""
        with failing("replace", place):
            self._disk.replace(temporary, place)

    def put_name(self, name: Path, place: Path) -> None:
        """As `put` for what may be another name of the file that is there: ``name`` is gone."""
        with failing("replace", place):
            self._disk.replace(name, place)
            # Nothing happens when both are names of one file.
            self.drop(name)

    def remove(self, place: Path) -> None:
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

    def make_directory(self, entry: Directory, place: Path) -> None:
        """Have a directory where nothing is."""
        with failing("make the directory", place):
            self._disk.make_directory(place)
            mode = _DIRECTORY_MODE if entry.mode is None else entry.mode
            self._change(place, entry.uid, entry.gid, mode, entry.attributes)

    def change_directory(self, entry: Directory, place: Path) -> None:
        """Have this mode and owner on the directory that is there."""
        if entry.mode is not None:
            with failing("change", place):
                self._change(place, entry.uid, entry.gid, entry.mode, entry.attributes)

    def described(self, place: Path) -> Directory:
        """What stands there, as a directory is described: mode, owner, attributes."""
        with failing("look at", place), self._opened(place) as descriptor:
            status = self._disk.status_of(descriptor)
            return Directory(
                stat.S_IMODE(status.st_mode),
                status.st_uid,
                status.st_gid,
                self._disk.attributes(descriptor),
            )

    def drop(self, temporary: Path) -> None:
        """Have no such file or link."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self._disk.unlink(temporary)

    def sync(self, path: Path) -> None:
        """Return when the file, or the directory's entries, outlive a power cut."""
        with failing("flush", path), self._opened(path) as descriptor:
            self._disk.sync(descriptor)

    def _create(self, temporary: Path) -> int:
        try:
            return self._disk.create(temporary)
        except FileExistsError:
            self._disk.unlink(temporary)
            return self._disk.create(temporary)

    def _change(
        self,
        place: Path,
        uid: int | None,
        gid: int | None,
        mode: int,
        attributes: Mapping[str, bytes] | None,
    ) -> None:
        with self._opened(place) as descriptor:
            self._own(descriptor, uid, gid)
            self._disk.change_mode(descriptor, mode)
            if attributes is not None:
                self._change_attributes(descriptor, attributes)

    def _own(self, descriptor: int, uid: int | None, gid: int | None) -> None:
        """Before the mode: a change of owner takes the set-user-ID bit away."""
        if uid is None and gid is None:
            return
        status = self._disk.status_of(descriptor)
        if uid not in {None, status.st_uid} or gid not in {None, status.st_gid}:
            self._disk.own(descriptor, _number(uid), _number(gid))

    def _change_attributes(self, descriptor: int, attributes: Mapping[str, bytes]) -> None:
        found = self._disk.attributes(descriptor)
        for name in found.keys() - attributes.keys():
            self._disk.remove_attribute(descriptor, name)
        for name, value in attributes.items():
            if found.get(name) != value:
                self._disk.change_attribute(descriptor, name, value)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
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
