"""Space on the bootstrap host: of the state, and of the registry."""

import os
from dataclasses import dataclass
from pathlib import Path

from treenail.builder.buildah.disk_space import read_disk_space
from treenail.errors import FileError, HostError

MIB = 1024 * 1024
GIB = 1024 * MIB
DEFAULT_LIMIT = 10 * GIB
STATE_SPACE = 64 * MIB
"""Free bytes for the state, the rendered configs and the logs."""
_RESERVE = 256 * MIB
"""Free bytes that the file system keeps for logs and for the state of the installation."""


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Bytes of the storage directory, and of its file system."""

    path: Path
    used: int
    free: int
    limit: int

    @property
    def needed(self) -> int:
        """Free bytes that the registry may still need."""
        return max(self.limit - self.used, 0) + _RESERVE

    def describe_problem(self) -> str:
        """Return why nothing more may be pushed; empty if there is space."""
        if self.used > self.limit:
            used, limit = format_bytes(self.used), format_bytes(self.limit)
            return f"{self.path} has {used}, above its limit of {limit}"
        if self.free < _RESERVE:
            return f"the file system of {self.path} has {format_bytes(self.free)} free"
        return ""


def check_space(directory: Path, needed: int) -> None:
    """Raise `HostError` unless the file system of the directory has so many free bytes."""
    found = read_disk_space(directory)
    if found is None:
        raise FileError(
            f"cannot read the free space of {directory}", remedy=f"check it: df -h '{directory}'"
        )
    free = found.free_bytes
    if free < needed:
        raise HostError(
            f"cannot install from {directory}: its file system has {free // MIB} MiB free, and the "
            f"installation needs {needed // MIB} MiB",
            remedy=f"free some space: du -xsh {directory}/.treenail; or move the directory to "
            "another file system",
        )


def measure_storage(path: Path, limit: int) -> StorageUse:
    """Measure the storage directory; raise `FileError`. Files that vanish meanwhile count 0."""
    found = read_disk_space(path)
    if found is None:
        raise FileError(f"cannot read the free space of {path}", remedy=f"check it: df -h '{path}'")
    return StorageUse(path, _count_bytes(path), found.free_bytes, limit)


def check_storage(path: Path, limit: int) -> StorageUse:
    """Raise `HostError` unless the file system can hold what the limit allows."""
    use = measure_storage(path, limit)
    if use.free < use.needed:
        raise HostError(
            f"cannot start the bootstrap registry: the file system of {path} has "
            f"{format_bytes(use.free)} free, and the storage limit of {format_bytes(limit)} needs "
            f"{format_bytes(use.needed)}",
            remedy=f"free space below {path}, or set a lower limit with --registry-storage-limit",
        )
    return use


def check_room(limit: int, image_bytes: int) -> None:
    """Raise `HostError` unless the limit permits an image of this size."""
    if image_bytes > limit:
        raise HostError(
            f"the base image has {format_bytes(image_bytes)}, and the bootstrap registry may have "
            f"{format_bytes(limit)}",
            remedy="set a higher limit with --registry-storage-limit",
        )


def _count_bytes(path: Path) -> int:
    count = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                count += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118 - for speed
            except OSError:
                continue
    return count


def format_bytes(count: int) -> str:
    """Format a size for users."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count // MIB} MiB"
