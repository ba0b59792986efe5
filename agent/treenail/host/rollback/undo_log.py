"""The log of inverses: lines that are only ever added, each flushed before what it undoes."""

import json
import os
import zlib
from dataclasses import dataclass

from treenail.errors import LedgerError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import Files, failing
from treenail.host.filesystem.root import Root

Json = dict[str, object]

DIRECTORY = "/var/lib/treenail/undo"
LOG = f"{DIRECTORY}/log"
HELD = f"{DIRECTORY}/held"
"""Of a change that is complete, and neither undone at a start nor yet for good."""
DONE = f"{DIRECTORY}/done"
"""Of one that was held, and is for good."""
_LIMIT = 256 * 1024 * 1024
_COMMITTED: Json = {"committed": True}


@dataclass(frozen=True, slots=True)
class Records:
    """What a log holds; once committed there is nothing to undo any more."""

    records: tuple[Json, ...]
    committed: bool


class UndoLog:
    """The log below a root. Raises `LedgerError` and `FileError`."""

    def __init__(self, root: Root, disk: Disk, place: str = LOG) -> None:
        self._root = root
        self._disk = disk
        self._place = place
        self._files = Files(root, disk)
        self._descriptor: int | None = None
        self._lasting = False

    @property
    def begun(self) -> bool:
        """This process has written to it."""
        return self._descriptor is not None

    @property
    def directory(self) -> str:
        """Where it is, on the disk itself."""
        return os.fspath(self._root.path(DIRECTORY))

    def make_directory(self, *, flush: bool = True) -> None:
        """Have the directory of the log, for nobody else; somebody else may ``flush`` it."""
        if not self._lasting:
            self._files.make_directory(DIRECTORY, mode=0o700, flush=flush)
            self._lasting = flush

    def append(self, record: Json, *, flush: bool = True) -> None:
        """Return once the record outlives a power cut, unless somebody else is to ``flush`` it.

        The first one makes the log.
        """
        text = json.dumps(record, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        path = self._root.path(self._place)
        if self._descriptor is None:
            self.make_directory(flush=flush)
        with failing("write", path):
            new = self._descriptor is None
            descriptor = self._descriptor = self._descriptor or self._disk.create(path)
            written = 0
            while written < len(line):
                written += self._disk.write(descriptor, line[written:])
            if flush:
                self._disk.sync(descriptor)
                if new:
                    self._sync_directory()

    def commit(self, *, flush: bool = True) -> None:
        """Return once nothing that was recorded is undone any more; ``flush`` as in `append`."""
        self.append(_COMMITTED, flush=flush)

    def flush(self) -> None:
        """Return once all that is in it outlives a power cut, whoever wrote that."""
        path = self._root.path(self._place)
        with failing("flush", path):
            descriptor = self._disk.open(path)
            try:
                self._disk.sync(descriptor)
            finally:
                self._disk.close(descriptor)

    def read(self) -> Records | None:
        """The records, without one that was cut short; None when there is no log."""
        content = self._files.read(self._place, limit=_LIMIT)
        if content is None:
            return None
        records: list[Json] = []
        lines = content.split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            check, _, text = line.partition(b" ")
            if check != b"%08x" % zlib.crc32(text):
                if number < len(lines):
                    raise LedgerError(
                        f"{self._root.path(self._place)} is damaged in line {number}",
                        remedy="move it away, and bring the node to its config: treenail once",
                    )
                break
            records.append(json.loads(text))
        if records and records[-1] == _COMMITTED:
            return Records(tuple(records[:-1]), committed=True)
        return Records(tuple(records), committed=False)

    def close(self) -> None:
        """Write no more to it; it stays."""
        if self._descriptor is not None:
            self._disk.close(self._descriptor)
            self._descriptor = None

    def move(self, place: str) -> None:
        """Return once it is there for good, in place of any other."""
        self.close()
        path, moved = self._root.path(self._place), self._root.path(place)
        with failing("rename", path):
            self._disk.replace(path, moved)
            try:
                self._sync_directory()
            except OSError:
                # Whoever hears of the failure looks for it here, and undoes what it tells.
                self._disk.replace(moved, path)
                raise

    def last_number(self) -> int:
        """The highest number of an inverse in it; 0 without a log."""
        found = self.read()
        batches = (record.get("entries", ()) for record in found.records) if found else ()
        return max((row[2] for batch in batches for row in batch), default=0)  # type: ignore[attr-defined]

    def remove(self, *, flush: bool) -> None:
        """Have no log; with ``flush`` return once no later start finds it."""
        self.close()
        path = self._root.path(self._place)
        with failing("remove", path):
            try:
                self._disk.unlink(path)
            except FileNotFoundError:
                return
            if flush:
                self._sync_directory()

    def _sync_directory(self) -> None:
        descriptor = self._disk.open(self._root.path(DIRECTORY))
        try:
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
