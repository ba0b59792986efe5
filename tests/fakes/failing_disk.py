"""A disk in memory whose effects fail: full, without inodes, read-only or broken."""

import errno
import os
import sys
from dataclasses import dataclass

from tests.fakes.disk import MemoryDisk, Tree

GROWING = frozenset(
    ("create", "write", "mkdir", "symlink", "link", "replace", "exchange", "set_xattr", "set_label")
)
"""The effects that may need another block of the disk."""
EFFECTS = GROWING | {
    "chown", "lchown", "chmod", "remove_xattr", "fsync", "syncfs", "unlink", "rmdir",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiskFault:
    """The effects that fail, and their error of errno(3)."""

    number: int
    effects: frozenset[str]

    @property
    def cause(self) -> str:
        return os.strerror(self.number)


FAULTS = {
    # Delayed allocation reports a full disk at the flush.
    "full": DiskFault(errno.ENOSPC, GROWING | {"fsync", "syncfs"}),
    "quota": DiskFault(errno.EDQUOT, GROWING),
    "no inodes": DiskFault(errno.ENOSPC, frozenset(("create", "mkdir", "symlink"))),
    # fsync of an unchanged file succeeds on a read-only file system.
    "read-only": DiskFault(errno.EROFS, EFFECTS - {"fsync", "syncfs"}),
    "broken": DiskFault(errno.EIO, EFFECTS),
}


class FailingDisk(MemoryDisk):
    """Counts the effects; ``fault`` makes those from ``first`` up to ``last`` fail."""

    fault: DiskFault | None = None
    first = 0
    last = 0

    def __init__(self, tree: Tree | None = None, *, flushed: bool = True) -> None:
        super().__init__(tree, flushed=flushed)
        self.chunk = 1 << 20
        self.effects: list[str] = []
        self.failures = 0

    def _count(self) -> None:
        effect, number = sys._getframe(1).f_code.co_name, len(self.effects)
        self.effects.append(effect)
        fault = self.fault
        if fault and self.first <= number <= self.last and effect in fault.effects:
            self.failures += 1
            raise OSError(fault.number, fault.cause)
        super()._count()
