"""Free space on disks, and this process's memory; the only user of psutil."""

from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.root import Root


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What this process holds, in bytes."""

    rss: int
    """Resident: with all that it shares with other processes."""
    pss: int
    """Resident, what is shared counted by its share."""


def read_free_bytes(root: Root, path: str) -> int:
    """What can still be written to the file system of ``path``; raises `FileError`."""
    # psutil is loaded where it is asked, not with the agent: it is asked once an update.
    import psutil  # noqa: PLC0415

    found = root.resolve_path(path)
    try:
        return psutil.disk_usage(str(found)).free
    except OSError as error:
        raise FileError(f"can't tell the free space at {found}: {error.strerror}") from error


def read_memory() -> ProcessMemory:
    """The memory of this process now."""
    import psutil  # noqa: PLC0415 - see free_bytes

    held = psutil.Process().memory_full_info()
    return ProcessMemory(rss=held.rss, pss=held.pss)
