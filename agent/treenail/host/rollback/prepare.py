"""What is to be changed, and what stands there: read as a whole before anything is touched."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import Absent, Directory, Entries, Entry, refuse_our_names
from treenail.host.filesystem.files import failure
from treenail.host.filesystem.root import Root
from treenail.host.rollback.inverse import Before, Inverse, below


@dataclass(frozen=True, slots=True)
class Change:
    """What to have at a path below the root."""

    path: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Recorded:
    """A change whose inverse is in the log; ``aside`` is the inverse's, reckoned once."""

    path: str
    """As it was asked for; of a directory that was missing above, where it is."""
    inverse: Inverse
    aside: str
    entry: Entry


class Recording:
    """Finds the inverses of changes, the first of which has the number after ``number``.

    The last component of a path is the entry itself; links before it are followed inside the root.
    Raises `FileError`.
    """

    def __init__(self, root: Root, disk: Disk, number: int) -> None:
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk
        self._entries = Entries(disk)
        self._parents: dict[str, str] = {}
        self._found: dict[str, Recorded] = {}
        self.number = number
        self.at = ""
        """The path that was looked at last."""
        self.directories: set[str] = set()
        """Those that are there, and in which something is made."""

    def record(self, changes: Sequence[Change]) -> tuple[Recorded, ...]:
        """The changes, and before each the directories that are missing above."""
        for change in changes:
            self.at = change.path
            refuse_our_names(change.path)
            place = self._place(change.path)
            if place in self._found:
                self._found[place] = _merged(self._found[place], change)
                continue
            for parent in self._missing(place):
                missing = Change(below(parent, self._prefix), Directory())
                self._found[parent] = self._recorded(missing, parent)
            self._found[place] = self._recorded(change, place)
        return tuple(self._found.values())

    def _place(self, path: str) -> str:
        parent, _, name = path.rpartition("/")
        if not parent or name in {"", ".", ".."}:
            return os.fspath(self._root.entry(path))
        if parent not in self._parents:
            self._parents[parent] = os.fspath(self._root.path(parent)).removesuffix("/")
        return f"{self._parents[parent]}/{name}"

    def _missing(self, place: str) -> list[str]:
        """The directories above that are neither there nor recorded to be made, topmost first."""
        missing: list[str] = []
        parent = _parent(place)
        while parent not in self.directories and not (
            parent in self._found and isinstance(self._found[parent].entry, Directory)
        ):
            mode = self._mode(parent)
            if mode is not None:
                if not stat.S_ISDIR(mode):
                    raise FileError(f"{parent} is not a directory, and {place} is to be in it")
                self.directories.add(parent)
                break
            missing.append(parent)
            parent = _parent(parent)
        return missing[::-1]

    def _recorded(self, change: Change, place: str) -> Recorded:
        mode = self._mode(place)
        directory = isinstance(change.entry, Directory)
        self.number += 1
        if mode is None:
            inverse = Inverse(place, self.number, Before.NOTHING)
        elif stat.S_ISDIR(mode):
            if not directory and not isinstance(change.entry, Absent):
                raise FileError(f"{place} is a directory, and is to be none", remedy="move it away")
            described = self._entries.described(place)
            before = Before.DIRECTORY if directory else Before.EMPTIED
            inverse = Inverse(place, self.number, before, described)
        elif directory:
            raise FileError(f"{place} is no directory, and is to be one", remedy="move it away")
        else:
            inverse = Inverse(place, self.number, Before.KEPT)
        return Recorded(change.path, inverse, inverse.aside, change.entry)

    def _mode(self, path: str) -> int | None:
        try:
            return self._disk.status(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise failure("look at", path, error) from error


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _merged(recorded: Recorded, change: Change) -> Recorded:
    """What is asked for a directory that is to be made anyway; anything else is a conflict."""
    match recorded.entry, change.entry:
        case old, new if old == new:
            return recorded
        case Directory(mode=None), Directory():
            return Recorded(change.path, recorded.inverse, recorded.aside, change.entry)
        case Directory(), Directory(mode=None):
            return recorded
        case _:
            place = recorded.inverse.place
            raise FileError(f"{change.path} is to be changed twice: it is {place}")
