"""The log of inverses: lines that are only ever added, each flushed before what it undoes."""

import json
import os
import zlib
from dataclasses import dataclass

from treenail.errors import LedgerError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import HostFiles, translate_errors
from treenail.host.filesystem.root import Root

Json = dict[str, object]

UNDO_DIRECTORY = "/var/lib/treenail/undo"
LOG_PATH = f"{UNDO_DIRECTORY}/log"
PENDING_PATH = f"{UNDO_DIRECTORY}/held"
"""Of a change that is complete, and neither undone at a start nor yet for good."""
CONFIRMED_PATH = f"{UNDO_DIRECTORY}/done"
"""Of one that was held, and is for good."""
_LIMIT = 256 * 1024 * 1024
_COMMITTED: Json = {"committed": True}


@dataclass(frozen=True, slots=True)
class UndoRecords:
    """What a log holds; once committed there is nothing to undo any more."""

    records: tuple[Json, ...]
    is_committed: bool


class UndoLog:
    """The log below a root. Raises `LedgerError` and `FileError`."""

    def __init__(self, root: Root, disk: Disk, path: str = LOG_PATH) -> None:
        self._root = root
        self._disk = disk
        self._path = path
        self._files = HostFiles(root, disk)
        self._descriptor: int | None = None
        self._is_directory_durable = False

    @property
    def has_begun(self) -> bool:
        """This process has written to it."""
        return self._descriptor is not None

    @property
    def directory(self) -> str:
        """Where it is, on the disk itself."""
        return os.fspath(self._root.resolve_path(UNDO_DIRECTORY))

    def make_directory(self, *, needs_fsync: bool = True) -> None:
        """Have the directory of the log, for nobody else; somebody else may ``needs_fsync`` it."""
        if not self._is_directory_durable:
            self._files.make_directory(UNDO_DIRECTORY, mode=0o700, needs_fsync=needs_fsync)
            self._is_directory_durable = needs_fsync

    def append_record(self, record: Json, *, needs_fsync: bool = True) -> None:
        """Return once the record outlives a power cut, unless somebody else is to ``needs_fsync`` it.

        The first one makes the log.
        """
        text = json.dumps(record, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        path = self._root.resolve_path(self._path)
        if self._descriptor is None:
            self.make_directory(needs_fsync=needs_fsync)
        with translate_errors("write", path):
            new = self._descriptor is None
            descriptor = self._descriptor = self._descriptor or self._disk.create(path)
            written = 0
            while written < len(line):
                written += self._disk.write(descriptor, line[written:])
            if needs_fsync:
                self._disk.fsync(descriptor)
                if new:
                    self._fsync_directory()

    def append_commit(self, *, needs_fsync: bool = True) -> None:
        """Return once nothing that was recorded is undone any more; ``needs_fsync`` as in `append_record`."""
        self.append_record(_COMMITTED, needs_fsync=needs_fsync)

    def fsync_log(self) -> None:
        """Return once all that is in it outlives a power cut, whoever wrote that."""
        path = self._root.resolve_path(self._path)
        with translate_errors("flush", path):
            descriptor = self._disk.open(path)
            try:
                self._disk.fsync(descriptor)
            finally:
                self._disk.close(descriptor)

    def read_records(self) -> UndoRecords | None:
        """The records, without one that was cut short; None when there is no log."""
        content = self._files.read_file(self._path, limit=_LIMIT)
        if content is None:
            return None
        records: list[Json] = []
        lines = content.split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            check, _, text = line.partition(b" ")
            if check != b"%08x" % zlib.crc32(text):
                if number < len(lines):
                    raise LedgerError(
                        f"{self._root.resolve_path(self._path)} is damaged in line {number}",
                        remedy="move it away, and bring the node to its config: treenail once",
                    )
                break
            records.append(json.loads(text))
        if records and records[-1] == _COMMITTED:
            return UndoRecords(tuple(records[:-1]), is_committed=True)
        return UndoRecords(tuple(records), is_committed=False)

    def close_log(self) -> None:
        """Write no more to it; it stays."""
        if self._descriptor is not None:
            self._disk.close(self._descriptor)
            self._descriptor = None

    def move_log(self, place: str) -> None:
        """Return once it is there for good, in place of any other."""
        self.close_log()
        path, moved = self._root.resolve_path(self._path), self._root.resolve_path(place)
        with translate_errors("rename", path):
            self._disk.replace(path, moved)
            try:
                self._fsync_directory()
            except OSError:
                # Whoever hears of the failure looks for it here, and undoes what it tells.
                self._disk.replace(moved, path)
                raise

    def find_last_number(self) -> int:
        """The highest number of an inverse in it; 0 without a log."""
        found = self.read_records()
        batches = (record.get("entries", ()) for record in found.records) if found else ()
        return max((row[2] for batch in batches for row in batch), default=0)  # type: ignore[attr-defined]

    def remove_log(self, *, needs_fsync: bool) -> None:
        """Have no log; with ``needs_fsync`` return once no later start finds it."""
        self.close_log()
        path = self._root.resolve_path(self._path)
        with translate_errors("remove", path):
            try:
                self._disk.unlink(path)
            except FileNotFoundError:
                return
            if needs_fsync:
                self._fsync_directory()

    def _fsync_directory(self) -> None:
        descriptor = self._disk.open(self._root.resolve_path(UNDO_DIRECTORY))
        try:
            self._disk.fsync(descriptor)
        finally:
            self._disk.close(descriptor)
