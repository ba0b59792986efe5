"""Checks of the host: each requirement of virtual machines is tried, not guessed."""

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vmlab.registry import PORT
from vmlab.tools import ToolError, cache, given_image, run

MEMORY_MIB = 2048
DISK_GIB, KEPT_DISK_GIB = 6, 3
"""What is written: the first time, and once images are kept."""
_APART = "mount -t tmpfs none /mnt && chroot / true && mknod /mnt/null c 1 3 && echo >/mnt/null"


def lacking() -> Iterator[str]:
    """Yield a sentence for each fault of this host that no package can fix."""
    checks: tuple[Callable[[], str], ...] = (_system, _user, _memory, _disk, _privileges, _port)
    for check in checks:
        try:
            if sentence := check():
                yield sentence
        except (OSError, ValueError, ToolError) as error:
            yield str(error).splitlines()[-1]


def _system() -> str:
    if given_image() is not None:
        return ""
    if platform.machine() != "x86_64":
        return f"the images are made for x86_64, and this is {platform.machine()}"
    there = all(map(shutil.which, ("apt-get", "dpkg-query")))
    return "" if there else "it takes Debian's apt-get, to install and to make images"


def _user() -> str:
    return "" if os.geteuid() == 0 else "it takes root"


def _memory() -> str:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    found = next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text("ascii").strip()) != "max":
        used = int(limit.with_name("memory.current").read_text("ascii"))
        found = min(found, (int(text) - used) >> 20)
    return f"{found} of {MEMORY_MIB} MiB of memory are free" if found < MEMORY_MIB else ""


def _disk() -> str:
    place = cache()
    needed = KEPT_DISK_GIB if any(place.glob("base-*")) else DISK_GIB
    found = shutil.disk_usage(place).free >> 30
    return f"{found} of {needed} GiB are free in {place}" if found < needed else ""


def _privileges() -> str:
    try:
        run("unshare", "--mount", "sh", "-c", _APART, limit_s=30.0)
        with tempfile.NamedTemporaryFile(dir=cache()) as file:
            run("chattr", "+i", file.name)
            run("chattr", "-i", file.name)
    except ToolError as error:
        return f"root may not do here what making images takes: {str(error).splitlines()[-1]}"
    return ""


def _port() -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return f"port {PORT} is taken on this host, and the images name it"
    return ""
