"""The log of inverses: lines that are only ever added, each flushed before what it undoes."""

import json
import os
import zlib
from dataclasses import dataclass

from treenail.errors import LedgerError
from treenail.host.disk import Disk
from treenail.host.files import Files, failing
from treenail.host.root import Root

Json = dict[str, object]

DIRECTORY = "/var/lib/treenail/undo"
LOG = f"{DIRECTORY}/log"
_LIMIT = 256 * 1024 * 1024
_COMMITTED: Json = {"committed": True}


@dataclass(frozen=True, slots=True)
class Records:
    """What a log holds; once committed there is nothing to undo any more."""

    records: tuple[Json, ...]
    committed: bool


class UndoLog:
    """The log below a root. Raises `LedgerError` and `FileError`."""

    def __init__(self, root: Root, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._files = Files(root, disk)
        self._descriptor: int | None = None

    @property
    def begun(self) -> bool:
        """This process has written to it."""
        return self._descriptor is not None

    @property
    def directory(self) -> str:
        """Where it is, on the disk itself."""
        return os.fspath(self._root.path(DIRECTORY))

    def make_directory(self) -> None:
        """Have the directory of the log, for nobody else."""
        self._files.make_directory(DIRECTORY, mode=0o700)

    def append(self, record: Json, *, flush: bool = True) -> None:
        """Return once the record outlives a power cut, unless somebody else is to ``flush`` it.

        The first one makes the log.
        """
        text = json.dumps(record, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        path = self._root.path(LOG)
        if self._descriptor is None:
            self.make_directory()
        with failing("write", path):
            if self._descriptor is None:
                self._descriptor = self._disk.create(path)
                self._sync_directory()
            written = 0
            while written < len(line):
                written += self._disk.write(self._descriptor, line[written:])
            if flush:
                self._disk.sync(self._descriptor)

    def commit(self) -> None:
        """Return once nothing that was recorded is undone any more."""
        self.append(_COMMITTED)

    def read(self) -> Records | None:
        """The records, without one that was cut short; None when there is no log."""
        content = self._files.read(LOG, limit=_LIMIT)
        if content is None:
            return None
        records: list[Json] = []
        lines = content.split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            check, _, text = line.partition(b" ")
            if check != b"%08x" % zlib.crc32(text):
                if number < len(lines):
                    raise LedgerError(
                        f"{self._root.path(LOG)} is damaged in line {number}",
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

    def remove(self, *, flush: bool) -> None:
        """Have no log; with ``flush`` return once no later start finds it."""
        self.close()
        path = self._root.path(LOG)
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
