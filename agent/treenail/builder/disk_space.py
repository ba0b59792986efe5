"""Free space of the builder's disk while a build runs.

A failed build removes its container, so the disk has space again when buildah has ended. And a
program can print "No space left on device" for another reason. So the least space counts.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space of a file system that a program without privileges can use."""

    free_bytes: int
    free_files: int | None = None
    """None where the file system has no limit of files, such as btrfs."""


def read_disk_space(path: Path) -> DiskSpace | None:
    """Return the free space of the file system at this path; None where it cannot be read."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    # f_bavail leaves out the blocks that are reserved for root, 5 % by default in ext4. btrfs
    # reports 0 files in total, because it creates inodes as it needs them.
    return DiskSpace(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)


class DiskSpaceSampler:
    """Records the least free space of a file system within a ``with`` block."""

    def __init__(
        self, path: Path, *, read: Callable[[Path], DiskSpace | None] = read_disk_space
    ) -> None:
        self._path = path
        self._read = read
        self._lock = Lock()
        self._lowest: DiskSpace | None = None
        self._has_ended = Event()
        self._thread = Thread(target=self._sample_until_end, name="disk-space", daemon=True)

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    @property
    def lowest(self) -> DiskSpace | None:
        """The least bytes and the least files that were free; None if they cannot be read."""
        with self._lock:
            return self._lowest

    def sample(self) -> None:
        """Read the free space now. Thread-safe."""
        space = self._read(self._path)
        if space is None:
            return
        with self._lock:
            # Bytes and files are least at different times, and either lack ends a build.
            self._lowest = space if self._lowest is None else _combine(self._lowest, space)

    def _sample_until_end(self) -> None:
        while not self._has_ended.wait(_INTERVAL_S):
            self.sample()


def _combine(one: DiskSpace, other: DiskSpace) -> DiskSpace:
    counts = [space.free_files for space in (one, other) if space.free_files is not None]
    return DiskSpace(min(one.free_bytes, other.free_bytes), min(counts, default=None))
