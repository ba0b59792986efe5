"""Free disk space, and memory of this process; the only module that uses psutil."""

from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.root import Root


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of this process in bytes."""

    rss: int
    """Resident set size, with all shared pages."""
    pss: int
    """Proportional set size: shared pages divided among the processes that map them."""


def read_free_bytes(root: Root, path: str) -> int:
    """Return the free bytes of the file system of ``path``; raises `FileError`."""
    # Import late: the agent uses psutil once per update, and its memory is limited.
    import psutil  # noqa: PLC0415

    found = root.resolve_path(path)
    try:
        return psutil.disk_usage(str(found)).free
    except OSError as error:
        raise FileError(f"cannot read the free space of {found}: {error.strerror}") from error


def read_memory() -> ProcessMemory:
    """The memory of this process now."""
    import psutil  # noqa: PLC0415 - see read_free_bytes

    memory = psutil.Process().memory_full_info()
    return ProcessMemory(rss=memory.rss, pss=memory.pss)
