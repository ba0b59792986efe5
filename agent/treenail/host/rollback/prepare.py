"""Changes to paths and the inverses of their current entries, prepared before the first write."""

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
from treenail.host.filesystem.root import Root, strip_prefix
from treenail.host.rollback.undo_log import Inverse, PreviousEntry


@dataclass(frozen=True, slots=True)
class PathChange:
    """The entry that a path below the root gets."""

    path: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """A change with its inverse."""

    path: str
    """The requested path; of a missing parent directory its path below the root."""
    inverse: Inverse
    aside_path: str
    """As `Inverse.aside_path`, computed once."""
    entry: Entry


class ChangeRecorder:
    """Finds the inverses of changes and numbers them, starting after ``number``.

    The last component of a path is the entry itself; links before it are followed inside the root.
    Raises `FileError`.
    """

    def __init__(self, root: Root, disk: Disk, number: int) -> None:
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk
        disk.begin_change()
        self._entries = EntryWriter(disk)
        self._parents: dict[str, str] = {}
        self._prepared: dict[str, PreparedChange] = {}
        self.number = number
        self.current_path = ""
        """The last path that was inspected."""
        self.directories: set[str] = set()
        """Existing directories in which entries change."""

    def record_changes(self, changes: Sequence[PathChange]) -> tuple[PreparedChange, ...]:
        """Prepare the changes, each after the missing parents of its path."""
        for change in changes:
            self.current_path = change.path
            refuse_temporary_name(change.path)
            path = self._resolve_entry(change.path)
            if path in self._prepared:
                self._prepared[path] = _merge_changes(self._prepared[path], change)
                continue
            for parent in self._find_missing_parents(path):
                missing = PathChange(strip_prefix(parent, self._prefix), DirectoryEntry())
                self._prepared[parent] = self._prepare_change(missing, parent)
            self._prepared[path] = self._prepare_change(change, path)
        return tuple(self._prepared.values())

    def _resolve_entry(self, path: str) -> str:
        parent, _, name = path.rpartition("/")
        if not parent or name in {"", ".", ".."}:
            return os.fspath(self._root.resolve_entry(path))
        if parent not in self._parents:
            self._parents[parent] = os.fspath(self._root.resolve_safely(parent)).removesuffix("/")
        return f"{self._parents[parent]}/{name}"

    def _find_missing_parents(self, path: str) -> list[str]:
        """Return the parents that neither exist nor are prepared, topmost first."""
        missing: list[str] = []
        parent = _get_parent(path)
        while parent not in self.directories and not (
            parent in self._prepared and isinstance(self._prepared[parent].entry, DirectoryEntry)
        ):
            mode = self._read_mode(parent)
            if mode is not None:
                if not stat.S_ISDIR(mode):
                    raise FileError(
                        f"cannot write {path}: {parent} is not a directory",
                        remedy=f"move {parent} away",
                    )
                self.directories.add(parent)
                break
            missing.append(parent)
            parent = _get_parent(parent)
        return missing[::-1]

    def _prepare_change(self, change: PathChange, path: str) -> PreparedChange:
        mode = self._read_mode(path)
        is_directory = isinstance(change.entry, DirectoryEntry)
        self.number += 1
        if mode is None:
            inverse = Inverse(path, self.number, PreviousEntry.NOTHING)
        elif stat.S_ISDIR(mode):
            if not is_directory and not isinstance(change.entry, AbsentEntry):
                raise FileError(
                    f"cannot write {path}: a directory exists at this path",
                    remedy=f"move {path} away",
                )
            directory = self._entries.describe_directory(path)
            kind = PreviousEntry.DIRECTORY if is_directory else PreviousEntry.EMPTIED_DIRECTORY
            inverse = Inverse(path, self.number, kind, directory)
        elif is_directory:
            raise FileError(
                f"cannot make the directory {path}: a file or link exists at this path",
                remedy=f"move {path} away",
            )
        else:
            inverse = Inverse(path, self.number, PreviousEntry.FILE_OR_LINK)
        return PreparedChange(change.path, inverse, inverse.aside_path, change.entry)

    def _read_mode(self, path: str) -> int | None:
        try:
            return self._disk.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise make_file_error("inspect", path, error) from error


def _get_parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _merge_changes(prepared: PreparedChange, change: PathChange) -> PreparedChange:
    """Merge two changes of one path; only a parent directory may be changed twice."""
    match prepared.entry, change.entry:
        case old, new if old == new:
            return prepared
        case DirectoryEntry(mode=None), DirectoryEntry():
            return PreparedChange(change.path, prepared.inverse, prepared.aside_path, change.entry)
        case DirectoryEntry(), DirectoryEntry(mode=None):
            return prepared
        case _:
            raise FileError(
                f"cannot change {change.path} twice: {prepared.inverse.path} is the same entry"
            )
