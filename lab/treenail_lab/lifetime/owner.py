"""Tie the processes and directories of a lab to the process that owns the lab.

Every child gets `Owner.mark_environment`; every directory is made by `Owner.make_directory` or
claimed by `Owner.claim_directory`. When the owner ends, the reaper kills and removes them. When
the reaper ended too, as in a container that is killed, the next start removes what is left.
"""

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from treenail_lab.lifetime import reaper
from treenail_lab.lifetime.reaper import MARK, kill_marked

PREFIX = "tn"
"""Prefix of directory names: short, because a socket's path has at most 107 bytes (unix(7))."""
OWNER_FILE = ".treenail-lab"
"""The file that holds the owner's token, and the owner's lock while the owner lives."""

_REAPER_TIMEOUT_S = 10.0


class Owner:
    """This process as the owner of labs; `owner` is the only instance."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._locks: dict[Path, int] = {}

    @functools.cached_property
    def _token(self) -> str:
        # Made when it is needed: processes that were forked from one have different tokens.
        return uuid.uuid4().hex

    def mark_environment(self) -> Mapping[str, str]:
        """Return the variable that marks a child; the reaper runs when this returns."""
        with self._guard:
            self._ensure_reaper()
        return {MARK: self._token}

    def make_directory(self) -> Path:
        """Make a private directory with a short name that is removed with this process."""
        parent = Path("/tmp")  # noqa: S108  mkdtemp makes it private, and TMPDIR may be too long
        remove_leftovers(parent)
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.claim_directory(directory)
        return directory

    def claim_directory(self, directory: Path) -> None:
        """Tie a directory to this process; it is removed when this process ends."""
        with self._guard:
            self._ensure_reaper()
            self._locks[directory] = _lock_directory(directory, self._token)
            self._notify_reaper("+", directory)

    def remove_directory(self, directory: Path) -> None:
        """Remove a claimed directory."""
        shutil.rmtree(directory, ignore_errors=True)
        with self._guard:
            lock = self._locks.pop(directory, None)
            if lock is not None:
                os.close(lock)
            self._notify_reaper("-", directory)

    @contextlib.contextmanager
    def temporary_directory(self) -> Iterator[Path]:
        """Provide a directory of `make_directory` and remove it afterwards."""
        directory = self.make_directory()
        try:
            yield directory
        finally:
            self.remove_directory(directory)

    def _ensure_reaper(self) -> None:
        if self._reaper is not None:
            return
        self._reaper = subprocess.Popen(
            # -S and -E skip site-packages and PYTHON*: it starts in 10 ms and takes 10 MB.
            [sys.executable, "-S", "-E", reaper.__file__, self._token],
            # Without the mark: the reaper of an owner further up must not kill this one first.
            env={name: value for name, value in os.environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        atexit.register(self._end_reaper)

    def _end_reaper(self) -> None:
        """Let the reaper clean up, so that this process leaves no child and no open pipe."""
        with self._guard:
            if self._reaper is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # It closes the pipe first, by which the reaper knows.
                    self._reaper.communicate(timeout=_REAPER_TIMEOUT_S)

    def _notify_reaper(self, change: str, directory: Path) -> None:
        if self._reaper is None or self._reaper.stdin is None:
            return
        if not self._reaper.stdin.closed:
            # Without a reaper the directory is still removed by the next start.
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(os.fsencode(f"{change}{directory.absolute()}\n"))
                self._reaper.stdin.flush()


owner = Owner()


def remove_leftovers(parent: Path) -> None:
    """Remove the lab directories below ``parent`` whose owner has ended, and kill its processes."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed by another start just now
            remove_if_abandoned(directory)


def remove_if_abandoned(directory: Path) -> bool:
    """Remove the directory if a lab lived there and its owner has ended; return True if so."""
    try:
        lock = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_marked(MARK, os.read(lock, 64).decode("ascii", "replace"))
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _lock_directory(directory: Path, token: str) -> int:
    """Write the owner file and return the descriptor that holds its lock."""
    fresh = directory / f"{OWNER_FILE}.{token}"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    # Locked before it gets its name: another start removes a directory whose lock is free.
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, token.encode("ascii"))
    fresh.rename(directory / OWNER_FILE)
    return lock
