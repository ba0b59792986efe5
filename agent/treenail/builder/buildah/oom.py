"""Count of processes that the kernel killed because this cgroup had no memory left."""

from pathlib import Path


def count_oom_kills(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Read the counter of this process's cgroup; None where it cannot be read."""
    for line in _read_lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        # In a cgroup namespace, as in a container, the own cgroup is the root.
        if controllers == "":
            file = cgroups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        for entry in _read_lines(file):
            name, _, count = entry.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
