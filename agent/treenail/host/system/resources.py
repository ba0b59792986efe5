"""Disk space and processes of this machine; the only user of psutil.

psutil is imported at the first call: the agent needs it once per update, and its memory is counted.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The size of a file system, and the bytes that root can still write."""

    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A running process: its start in seconds since the epoch, and its resident memory."""

    started_at: float
    memory_bytes: int


def read_disk_usage(path: Path) -> DiskUsage:
    """Return the usage of the file system of a path; raise `OSError`."""
    import psutil  # noqa: PLC0415 - see above

    usage = psutil.disk_usage(str(path))
    # Not usage.free: that is without the blocks reserved for root, which runs the update.
    return DiskUsage(size_bytes=usage.total, free_bytes=usage.total - usage.used)


def find_process(pid: int) -> ProcessStatus | None:
    """Return the process of this number; None when there is none or it is hidden."""
    import psutil  # noqa: PLC0415 - see above

    try:
        process = psutil.Process(pid)
        return ProcessStatus(process.create_time(), process.memory_info().rss)
    except (psutil.Error, ValueError):
        return None


def handles_signal(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal; False when that is unknown.

    Other processes end at most signals.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next((line for line in lines.splitlines() if line.startswith("SigCgt:")), "")
    # A bit for each signal, from 1 on (proc_pid_status(5)).
    mask = caught.partition(":")[2].strip() or "0"
    return bool(int(mask, 16) >> (number - 1) & 1)
