"""The undo log: inverses of changes, each flushed to the disk before the change it undoes.

A log is a file of lines. Each line is a record in JSON with its checksum in front. `PathChange` is
a change of a path; the inverse of the current entry is prepared before the first write.
"""

import base64
import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from treenail import errors
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files, entries, root_directory
from treenail.host.filesystem.disk import Disk

Json = dict[str, object]
Row: TypeAlias = "list[object]"

UNDO_DIRECTORY = "/var/lib/treenail/undo"
LOG_PATH = f"{UNDO_DIRECTORY}/log"
PENDING_PATH = f"{UNDO_DIRECTORY}/pending"
"""The log of a complete change that the next boot confirms or undoes."""
CONFIRMED_PATH = f"{UNDO_DIRECTORY}/confirmed"
"""The log of a confirmed change whose replaced entries are not all removed."""
_LIMIT = 256 * 1024 * 1024
_COMMITTED: Json = {"committed": True}


class PreviousEntry(StrEnum):
    """The kind of entry at a path before the change."""

    NOTHING = "nothing"
    FILE_OR_LINK = "file or link"
    """Kept beside its path, under the temporary name of the new entry."""
    DIRECTORY = "directory"
    EMPTIED_DIRECTORY = "emptied directory"
    """Removed at the end if it is empty by then."""


_DIRECTORIES = frozenset({PreviousEntry.DIRECTORY, PreviousEntry.EMPTIED_DIRECTORY})


_UNCHANGED = entries.DirectoryEntry()


@dataclass(frozen=True, slots=True)
class Inverse:
    """The entry to restore at ``path``; ``directory`` has the attributes of a directory."""

    path: str
    number: int
    previous: PreviousEntry
    directory: entries.DirectoryEntry = _UNCHANGED

    @property
    def parent(self) -> str:
        return self.path.rpartition("/")[0] or "/"

    @property
    def aside_path(self) -> str:
        """The temporary name beside the path: first of the new entry, then of the old one."""
        return f"{self.path.rpartition('/')[0]}/{entries.TEMPORARY_PREFIX}+{self.number}"

    def to_json(self, prefix: str) -> Row:
        """Encode as a row, because a log may have thousands; the path is below ``prefix``."""
        row: Row = [
            root_directory.strip_prefix(self.path, prefix),
            self.previous.value,
            self.number,
        ]
        if self.previous in _DIRECTORIES:
            row += [self.directory.mode, self.directory.uid, self.directory.gid]
            row.append(encode_xattrs(self.directory.xattrs or {}))
        return row

    @classmethod
    def from_json(cls, row: Row, prefix: str) -> "Inverse":
        """Decode a row; raise `ValueError` when it is invalid.

        Further values, of a newer treenail, are ignored.
        """
        match row:
            case [str(path), str(kind), int(number), *more]:
                previous = PreviousEntry(kind)
            case _:
                raise ValueError(f"{row!r:.200} is no inverse")
        full_path = root_directory.add_prefix(path, prefix)
        if previous not in _DIRECTORIES:
            return cls(full_path, number, previous)
        match more:
            case [int(mode), int(uid), int(gid), dict(xattrs), *_]:
                directory = entries.DirectoryEntry(mode, uid, gid, decode_xattrs(xattrs))
                return cls(full_path, number, previous, directory)
            case _:
                raise ValueError(f"{row!r:.200} is no inverse")


@dataclass(frozen=True, slots=True)
class UndoRecords:
    """The records of a log; a committed change is completed and never undone."""

    records: tuple[Json, ...]
    is_committed: bool


class UndoLog:
    """One log below a root. Raises `LedgerError` and `FileError`."""

    def __init__(self, root: root_directory.Root, disk: Disk, path: str = LOG_PATH) -> None:
        self._root = root
        self._disk = disk
        self._path = path
        self._files = atomic_files.HostFiles(root, disk)
        self._descriptor: int | None = None
        self._is_directory_durable = False

    @property
    def has_begun(self) -> bool:
        """Return whether this process has written to the log."""
        return self._descriptor is not None

    @property
    def directory(self) -> str:
        """The real path of the directory."""
        return os.fspath(self._root.resolve_path(UNDO_DIRECTORY))

    def make_directory(self, *, needs_fsync: bool = True) -> None:
        """Make the directory of the log, with mode 0700."""
        if not self._is_directory_durable:
            self._files.make_directory(UNDO_DIRECTORY, mode=0o700, needs_fsync=needs_fsync)
            self._is_directory_durable = needs_fsync

    def append_record(self, record: Json, *, needs_fsync: bool = True) -> None:
        """Append a record, durably unless the caller flushes it; the first makes the log."""
        text = json.dumps(record, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        path = self._root.resolve_path(self._path)
        if self._descriptor is None:
            self.make_directory(needs_fsync=needs_fsync)
        with atomic_files.translate_errors("write", path):
            is_new = self._descriptor is None
            descriptor = self._descriptor = self._descriptor or self._disk.create(path)
            written = 0
            while written < len(line):
                written += self._disk.write(descriptor, line[written:])
            if needs_fsync:
                self._disk.fsync(descriptor)
                if is_new:
                    self._fsync_directory()

    def append_commit(self, *, needs_fsync: bool = True) -> None:
        """Append the last record, after which nothing is undone."""
        self.append_record(_COMMITTED, needs_fsync=needs_fsync)

    def fsync_log(self) -> None:
        """Flush the log, which another process may have written."""
        path = self._root.resolve_path(self._path)
        with (
            atomic_files.translate_errors("flush", path),
            atomic_files.open_descriptor(self._disk, path) as descriptor,
        ):
            self._disk.fsync(descriptor)

    def read_records(self) -> UndoRecords | None:
        """Read all complete records; None when there is no log."""
        content = self._files.read_file(self._path, limit=_LIMIT)
        if content is None:
            return None
        records: list[Json] = []
        lines = content.split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            checksum, _, text = line.partition(b" ")
            if checksum != b"%08x" % zlib.crc32(text):
                # A power cut damages the last line only: each line is flushed before the next.
                if number < len(lines):
                    raise self._make_damage_error(f"the checksum of line {number} is wrong")
                break
            records.append(self._parse_record(text, number))
        if records and records[-1] == _COMMITTED:
            return UndoRecords(tuple(records[:-1]), is_committed=True)
        return UndoRecords(tuple(records), is_committed=False)

    def parse_inverses(self, record: Json) -> list[Inverse]:
        """Return the inverses of one record; raise `LedgerError` when one is unknown."""
        rows = record.get("entries", ())
        prefix = os.fspath(self._root.prefix)
        try:
            return (
                [Inverse.from_json(row, prefix) for row in rows] if isinstance(rows, list) else []
            )
        except ValueError as error:
            raise self._make_damage_error(str(error)) from error

    def close_log(self) -> None:
        """End writing; the log stays."""
        if self._descriptor is not None:
            self._disk.close(self._descriptor)
            self._descriptor = None

    def move_log(self, path: str) -> None:
        """Rename the log durably; another log at the path is replaced."""
        self.close_log()
        old, new = self._root.resolve_path(self._path), self._root.resolve_path(path)
        with atomic_files.translate_errors("rename", old):
            self._disk.replace(old, new)
            try:
                self._fsync_directory()
            except OSError:
                # The caller undoes the change after this error, and looks for the log here.
                self._disk.replace(new, old)
                raise

    def find_last_number(self) -> int:
        """Return the highest number of an inverse; 0 without a log."""
        log_records = self.read_records()
        records = log_records.records if log_records else ()
        numbers = (inverse.number for record in records for inverse in self.parse_inverses(record))
        return max(numbers, default=0)

    def remove_log(self, *, needs_fsync: bool) -> None:
        """Remove the log if there is one."""
        self.close_log()
        path = self._root.resolve_path(self._path)
        with atomic_files.translate_errors("remove", path):
            try:
                self._disk.unlink(path)
            except FileNotFoundError:
                return
            if needs_fsync:
                self._fsync_directory()

    def _parse_record(self, text: bytes, number: int) -> Json:
        try:
            record = json_text.parse_json(text)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise self._make_damage_error(f"line {number} is not a JSON object")
        return record

    def _fsync_directory(self) -> None:
        directory = self._root.resolve_path(UNDO_DIRECTORY)
        with atomic_files.open_descriptor(self._disk, directory) as descriptor:
            self._disk.fsync(descriptor)

    def _make_damage_error(self, cause: str) -> errors.LedgerError:
        path = self._root.resolve_path(self._path)
        return errors.LedgerError(
            f"cannot read the undo log {path}: {cause}",
            remedy=f"move {path} away and apply the config again: treenail once",
        )


def encode_xattrs(xattrs: Mapping[str, bytes]) -> dict[str, str]:
    """Encode extended attributes for JSON."""
    return {name: base64.b64encode(value).decode() for name, value in xattrs.items()}


def decode_xattrs(encoded: Mapping[str, str]) -> dict[str, bytes]:
    """Decode extended attributes; raise `ValueError` for invalid base64."""
    if not all(isinstance(value, str) for value in encoded.values()):
        raise ValueError("expected extended attributes in base64")
    return {name: base64.b64decode(value) for name, value in encoded.items()}


@dataclass(frozen=True, slots=True)
class PathChange:
    """The entry that a path below the root gets."""

    path: str
    entry: entries.Entry


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """A change with its inverse."""

    path: str
    """The requested path; of a missing parent directory its path below the root."""
    inverse: Inverse
    aside_path: str
    """As `Inverse.aside_path`, computed once."""
    entry: entries.Entry


class ChangeRecorder:
    """Finds the inverses of changes and numbers them, starting after ``number``.

    The last component of a path is the entry itself; links before it are followed inside the root.
    Raises `FileError`.
    """

    def __init__(self, root: root_directory.Root, disk: Disk, number: int) -> None:
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk
        disk.begin_change()
        self._entries = entries.EntryWriter(disk)
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
            entries.refuse_temporary_name(change.path)
            path = self._resolve_entry(change.path)
            if path in self._prepared:
                self._prepared[path] = _merge_changes(self._prepared[path], change)
                continue
            for parent in self._find_missing_parents(path):
                missing = PathChange(
                    root_directory.strip_prefix(parent, self._prefix), entries.DirectoryEntry()
                )
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
            parent in self._prepared
            and isinstance(self._prepared[parent].entry, entries.DirectoryEntry)
        ):
            mode = self._read_mode(parent)
            if mode is not None:
                if not stat.S_ISDIR(mode):
                    raise errors.FileError(
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
        is_directory = isinstance(change.entry, entries.DirectoryEntry)
        self.number += 1
        if mode is None:
            inverse = Inverse(path, self.number, PreviousEntry.NOTHING)
        elif stat.S_ISDIR(mode):
            if not is_directory and not isinstance(change.entry, entries.AbsentEntry):
                raise errors.FileError(
                    f"cannot write {path}: a directory exists at this path",
                    remedy=f"move {path} away",
                )
            directory = self._entries.describe_directory(path)
            kind = PreviousEntry.DIRECTORY if is_directory else PreviousEntry.EMPTIED_DIRECTORY
            inverse = Inverse(path, self.number, kind, directory)
        elif is_directory:
            raise errors.FileError(
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
            raise atomic_files.make_file_error("inspect", path, error) from error


def _get_parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _merge_changes(prepared: PreparedChange, change: PathChange) -> PreparedChange:
    """Merge two changes of one path; only a parent directory may be changed twice."""
    match prepared.entry, change.entry:
        case old, new if old == new:
            return prepared
        case entries.DirectoryEntry(mode=None), entries.DirectoryEntry():
            return PreparedChange(change.path, prepared.inverse, prepared.aside_path, change.entry)
        case entries.DirectoryEntry(), entries.DirectoryEntry(mode=None):
            return prepared
        case _:
            raise errors.FileError(
                f"cannot change {change.path} twice: {prepared.inverse.path} is the same entry"
            )
