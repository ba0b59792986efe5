"""Memory limits of containers by cgroups, where this process may create them."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_PREFIX = "treenail-lab-"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup with a memory limit."""

    path: Path
    is_unified: bool

    def is_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process of the group for its limit."""
        name = "memory.events" if self.is_unified else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_text("ascii").splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill" and count != "0":
                    return True
        return False

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def create_memory_group(name: str, limit: int) -> MemoryGroup | None:
    """Create a group with a limit in bytes; None where this process may not."""
    for parent, is_unified in _list_parents():
        path = parent / f"{_PREFIX}{name}"
        file = path / ("memory.max" if is_unified else "memory.limit_in_bytes")
        try:
            path.mkdir()
            file.write_text(str(limit), "ascii")
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        return MemoryGroup(path, is_unified)
    return None


def remove_leftovers() -> None:
    """Remove the groups of labs that were killed; the kernel keeps those with processes."""
    for parent, _ in _list_parents():
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                path.rmdir()


def _list_parents() -> list[tuple[Path, bool]]:
    """Return the groups that may get a child: this process's, in version 2 the root."""
    parents = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                parents.append((_MOUNT / "memory" / path.lstrip("/"), False))
            elif not controllers and (_MOUNT / "cgroup.controllers").exists():
                # A group with processes cannot give its children a controller (cgroups(7)).
                parents.append((_MOUNT, True))
    return parents
