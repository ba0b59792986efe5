"""What is to be changed, and what stands there: read as a whole before anything is touched."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import (
    AbsentEntry,
    DirectoryEntry,
    Entry,
    EntryWriter,
    refuse_temporary_name,
)
from treenail.host.filesystem.files import make_file_error
from treenail.host.filesystem.root import Root
from treenail.host.rollback.inverse import Inverse, PreviousEntry, strip_prefix


@dataclass(frozen=True, slots=True)
class PathChange:
    """What to have at a path below the root."""

    path: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """A change whose inverse is in the log; ``aside_path`` is the inverse's, reckoned once."""

    path: str
    """As it was asked for; of a directory that was missing above, where it is."""
    inverse: Inverse
    aside_path: str
    entry: Entry


class ChangeRecorder:
    """Finds the inverses of changes, the first of which has the number after ``number``.

    The last component of a path is the entry itself; links before it are followed inside the root.
    Raises `FileError`.
    """

    def __init__(self, root: Root, disk: Disk, number: int) -> None:
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk
        self._entries = EntryWriter(disk)
        self._parents: dict[str, str] = {}
        self._prepared: dict[str, PreparedChange] = {}
        self.number = number
        self.current_path = ""
        """The path that was looked at last."""
        self.directories: set[str] = set()
        """Those that are there, and in which something is made."""

    def record_changes(self, changes: Sequence[PathChange]) -> tuple[PreparedChange, ...]:
        """The changes, and before each the directories that are missing above."""
        for change in changes:
            self.current_path = change.path
            refuse_temporary_name(change.path)
            place = self._resolve_entry(change.path)
            if place in self._prepared:
                self._prepared[place] = _merge_changes(self._prepared[place], change)
                continue
            for parent in self._find_missing_parents(place):
                missing = PathChange(strip_prefix(parent, self._prefix), DirectoryEntry())
                self._prepared[parent] = self._prepare_change(missing, parent)
            self._prepared[place] = self._prepare_change(change, place)
        return tuple(self._prepared.values())

    def _resolve_entry(self, path: str) -> str:
        parent, _, name = path.rpartition("/")
        if not parent or name in {"", ".", ".."}:
            return os.fspath(self._root.resolve_entry(path))
        if parent not in self._parents:
            self._parents[parent] = os.fspath(self._root.resolve_path(parent)).removesuffix("/")
        return f"{self._parents[parent]}/{name}"

    def _find_missing_parents(self, place: str) -> list[str]:
        """The directories above that are neither there nor recorded to be made, topmost first."""
        missing: list[str] = []
        parent = _get_parent(place)
        while parent not in self.directories and not (
            parent in self._prepared and isinstance(self._prepared[parent].entry, DirectoryEntry)
        ):
            mode = self._read_mode(parent)
            if mode is not None:
                if not stat.S_ISDIR(mode):
                    raise FileError(f"{parent} is not a directory, and {place} is to be in it")
                self.directories.add(parent)
                break
            missing.append(parent)
            parent = _get_parent(parent)
        return missing[::-1]

    def _prepare_change(self, change: PathChange, place: str) -> PreparedChange:
        mode = self._read_mode(place)
        directory = isinstance(change.entry, DirectoryEntry)
        self.number += 1
        if mode is None:
            inverse = Inverse(place, self.number, PreviousEntry.NOTHING)
        elif stat.S_ISDIR(mode):
            if not directory and not isinstance(change.entry, AbsentEntry):
                raise FileError(f"{place} is a directory, and is to be none", remedy="move it away")
            described = self._entries.describe_directory(place)
            before = PreviousEntry.DIRECTORY if directory else PreviousEntry.EMPTIED_DIRECTORY
            inverse = Inverse(place, self.number, before, described)
        elif directory:
            raise FileError(f"{place} is no directory, and is to be one", remedy="move it away")
        else:
            inverse = Inverse(place, self.number, PreviousEntry.FILE_OR_LINK)
        return PreparedChange(change.path, inverse, inverse.aside_path, change.entry)

    def _read_mode(self, path: str) -> int | None:
        try:
            return self._disk.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise make_file_error("look at", path, error) from error


def _get_parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _merge_changes(prepared: PreparedChange, change: PathChange) -> PreparedChange:
    """What is asked for a directory that is to be made anyway; anything else is a conflict."""
    match prepared.entry, change.entry:
        case old, new if old == new:
            return prepared
        case DirectoryEntry(mode=None), DirectoryEntry():
            return PreparedChange(change.path, prepared.inverse, prepared.aside_path, change.entry)
        case DirectoryEntry(), DirectoryEntry(mode=None):
            return prepared
        case _:
            place = prepared.inverse.path
            raise FileError(f"{change.path} is to be changed twice: it is {place}")
