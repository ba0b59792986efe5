"""The process that ends what a lab started, however the lab itself ends.

::

    python reaper.py TOKEN < PIPE

The owner holds the other end of PIPE and writes a line for each directory: ``+PATH`` when it has
made one, ``-PATH`` when it has removed it. The kernel closes the pipe when the owner ends, by
SIGKILL too. Then the reaper kills every process that carries TOKEN and removes the directories.

PR_SET_PDEATHSIG is no substitute: it fires when the *thread* that started the child ends
(prctl(2)), and the lab reboots machines from threads that end with the previous boot.

The owner starts this file by its path, without site-packages: it imports the standard library only.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

MARK = "TREENAIL_LAB_OWNER"
"""The environment variable that carries the token; children inherit it."""
_MAX_ROUNDS = 10
"""A process may fork between the search and the kill, so the search is repeated."""


def kill_marked(mark: str, value: str) -> None:
    """Kill every process whose environment has the variable ``mark`` with this value."""
    for _ in range(_MAX_ROUNDS):
        pids = list(find_marked(mark, value))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if not pids:
            return


def find_marked(mark: str, value: str) -> Iterator[int]:
    """Yield the ids of the other processes that have the variable; zombies have none."""
    entry = os.fsencode(f"{mark}={value}")
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = entry in (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended, or belongs to another user
        if is_marked and directory.name != str(os.getpid()):
            yield int(directory.name)


def main(token: str) -> int:
    """Wait until the owner has ended, then clean up."""
    # A terminal that closes, and Ctrl-C in it, must not end the reaper before the owner.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    directories: set[bytes] = set()
    for line in sys.stdin.buffer:
        change, path = line[:1], line[1:].rstrip(b"\n")
        if change == b"+":
            directories.add(path)
        else:
            directories.discard(path)
    kill_marked(MARK, token)
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
