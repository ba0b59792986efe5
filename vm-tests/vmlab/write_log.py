"""The log of a disk's writes and flushes, and the disks that a power cut may leave of it.

QEMU's block driver blklogwrites writes the log in the format of Linux' dm-log-writes
(Documentation/admin-guide/device-mapper/log-writes.rst).
"""

import fcntl
import os
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vmlab.tools import ToolError

BLOCK = 4096
"""A write may be cut off between blocks of this size: file systems rely on whole ones."""
_MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQL")
_ENTRY = struct.Struct("<QQQQ")
_DISK_SECTOR = 512
_FICLONE = 0x40049409
"""Of ioctl_ficlone(2)."""
_FLUSH, _FUA, _DISCARD = 1, 2, 4


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A write, or a flush of all writes before it."""

    offset: int
    """On the disk, in bytes."""
    length: int
    data_offset: int
    """Of the written data in the log."""
    end: int
    """The log's size with this entry."""
    is_flush: bool = False
    is_durable: bool = False
    """The write is on the disk when it ends (FUA)."""


@dataclass(frozen=True, slots=True)
class PowerCut:
    """A power cut after the first ``position`` entries of a log."""

    position: int
    kept: tuple[tuple[int, int], ...] = ()
    """Of the writes after the last flush, those that the disk has: number and length in bytes."""
    kind: str = "flushed only"


def read_log(path: Path) -> list[LogEntry]:
    """Read the entries of a log. Its superblock counts them late, so that it is not used."""
    found: list[LogEntry] = []
    with path.open("rb") as log:
        head = log.read(_SUPER.size)
        magic, version, _, sector = _SUPER.unpack(head) if len(head) == _SUPER.size else (0,) * 4
        if (magic, version) != (_MAGIC, 1):
            raise ToolError(f"{path} is no log of writes: it begins with {head[:16].hex()}")
        size, place = path.stat().st_size, sector
        while place + _ENTRY.size <= size:
            log.seek(place)
            start, count, flags, data = _ENTRY.unpack(log.read(_ENTRY.size))
            if not (count or flags):
                break
            if data or flags & ~(_FLUSH | _FUA | _DISCARD):
                raise ToolError(f"{path} has an unknown entry at {place}: flags {flags:#x}")
            # A discarded block may still have its content: the entry has no data.
            length = 0 if flags & _DISCARD else count * _DISK_SECTOR
            end = place + sector + -(-length // sector) * sector
            if end > size:
                break
            entry = LogEntry(
                start * _DISK_SECTOR,
                length,
                place + sector,
                end,
                is_flush=bool(flags & _FLUSH),
                is_durable=bool(flags & _FUA),
            )
            found.append(entry)
            place = end
    return found


class Replay:
    """Writes the content that a log leaves on a disk; ``disk`` has that from before the log."""

    def __init__(self, log: Path, entries: Sequence[LogEntry], disk: Path) -> None:
        self.entries = entries
        self._log = log
        self._disk = disk
        self._flushed = 0

    def make_disk(self, cut: PowerCut, target: Path) -> None:
        """Write the disk that the power cut leaves. The positions of cuts must not decrease."""
        self._apply_flushed(find_flushed(self.entries, cut.position))
        copy_sparse(self._disk, target)
        kept = dict(cut.kept)
        with self._log.open("rb") as log, target.open("r+b", buffering=0) as disk:
            for number in range(self._flushed, cut.position):
                entry = self.entries[number]
                length = entry.length if entry.is_durable else kept.get(number, 0)
                _copy_range(log, entry.data_offset, disk, entry.offset, length)

    def _apply_flushed(self, position: int) -> None:
        if position < self._flushed:
            raise ValueError(f"entry {position} comes before {self._flushed}: sort the power cuts")
        with self._log.open("rb") as log, self._disk.open("r+b", buffering=0) as disk:
            for entry in self.entries[self._flushed : position]:
                _copy_range(log, entry.data_offset, disk, entry.offset, entry.length)
        self._flushed = position


def find_flushed(entries: Sequence[LogEntry], position: int) -> int:
    """Return how many of the first ``position`` entries a flush has made durable."""
    for number in range(position - 1, -1, -1):
        if entries[number].is_flush:
            # A flush with data comes before its own data.
            return number if entries[number].length else number + 1
    return 0


def choose_cuts(
    entries: Sequence[LogEntry], begin: int, end: int, count: int, chance: random.Random
) -> list[PowerCut]:
    """Choose different power cuts after entries ``begin`` to ``end``, in order.

    Half of them at most come right after a flush. The others leave all writes since the last flush,
    a subset of them, or all but a part of the last one.
    """
    flushes = [number + 1 for number in range(begin, end) if entries[number].is_flush]
    chance.shuffle(flushes)
    found = {PowerCut(position) for position in flushes[: count // 2]}
    epochs = list(_list_epochs(entries, begin, end))
    for _ in range(100 * count if epochs else 0):
        if len(found) >= count:
            break
        # By epochs first: most writes belong to a few of them.
        epoch = chance.choice(epochs)
        found.add(_choose_cut(entries, epoch, chance))
    return sorted(found, key=lambda cut: (cut.position, cut.kept))


def _list_epochs(entries: Sequence[LogEntry], begin: int, end: int) -> Iterator[range]:
    """Yield the numbers of the writes between flushes, without gaps where nothing is written."""
    start = begin
    for number in range(begin, end):
        if entries[number].is_flush:
            if number > start:
                yield range(start, number)
            start = number + 1
    if end > start:
        yield range(start, end)


def _choose_cut(entries: Sequence[LogEntry], epoch: range, chance: random.Random) -> PowerCut:
    last = chance.choice(epoch)
    first = find_flushed(entries, last + 1)
    writes = [(number, entries[number].length) for number in range(first, last + 1)]
    kind = chance.choice(("all writes", "a subset", "a subset", "a torn write"))
    if kind == "a subset":
        share = chance.random()
        writes = [each for each in writes if chance.random() < share]
    elif kind == "a torn write":
        number, length = writes[-1]
        writes[-1] = number, chance.randrange(0, length, BLOCK) if length else 0
    return PowerCut(last + 1, tuple(writes), kind)


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file and its holes; where the file system can, only its metadata (XFS, Btrfs)."""
    target.unlink(missing_ok=True)
    with source.open("rb") as old, target.open("wb", buffering=0) as new:
        with suppress(OSError):
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            return
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        place = 0
        while place < size:
            try:
                begin = os.lseek(old.fileno(), place, os.SEEK_DATA)
            except OSError:
                break
            place = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            _copy_range(old, begin, new, begin, place - begin)


def _copy_range(source: IO[bytes], offset: int, target: IO[bytes], at: int, length: int) -> None:
    os.lseek(target.fileno(), at, os.SEEK_SET)
    while length:
        count = os.sendfile(target.fileno(), source.fileno(), offset, length)
        if not count:
            raise ToolError(f"the log of writes ends at {offset}, within the data of an entry")
        offset, length = offset + count, length - count
