"""inotify: which of a set of paths may have changed."""

import ctypes
import errno
import logging
import os
import select
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.root import Root

log = logging.getLogger(__name__)

MAX_WATCHES = 4096
"""Directories that are watched at once; whatever else there is, is found by a full look."""

_IN_MODIFY, _IN_ATTRIB = 0x2, 0x4
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_IN_Q_OVERFLOW, _IN_IGNORED = 0x4000, 0x8000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x1000000, 0x2000000
_MASK = (
    _IN_MODIFY | _IN_ATTRIB | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
    | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR | _IN_DONT_FOLLOW
)  # fmt: skip
_ENTRY_CHANGED = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_WATCH_LOST = _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_IGNORED
_EVENT = struct.Struct("iIII")
_BUFFER_SIZE = 64 * 1024


@dataclass(frozen=True, slots=True)
class InotifyEvents:
    """What happened since the last `InotifyWatcher.wait_for_events`."""

    paths: frozenset[str] = frozenset()
    """Those below the root at which something happened, in the watched directories."""
    is_incomplete: bool = False
    """Something may have happened at any path: the kernel dropped events, or directories moved."""


class InotifyWatcher:
    """Watches the directories that a set of paths stands in, below a root.

    A directory that is not there yet, or goes, is waited for in those above it. Linux only; to be
    used by one thread, but for `interrupt_wait`. Raises `FileError` when the kernel has no inotify
    instance to spare.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            number = ctypes.get_errno()
            os.close(self._wakeup_fd)
            raise FileError(
                f"can't watch files: {os.strerror(number)}",
                remedy="raise the sysctl fs.inotify.max_user_instances",
            )
        self._requested: tuple[str, ...] = ()
        self._directories: dict[int, set[str]] = {}
        """What each watched directory is called; links may give it several names."""
        self._awaited_names: dict[int, set[bytes]] = {}
        """The names in a directory that lead on to a wanted one, there already or not."""
        self._has_warned = False

    def watch_directories(self, directories: Iterable[str]) -> None:
        """Watch these from now on, and no others; absolute paths below the root."""
        self._requested = tuple(sorted(set(directories)))
        self._update_watches()

    def wait_for_events(self, seconds: float) -> InotifyEvents | None:
        """What happens within so many seconds; None when nothing does, or when interrupted."""
        ready, _, _ = select.select([self._fd, self._wakeup_fd], [], [], max(seconds, 0.0))
        if self._wakeup_fd in ready:
            os.eventfd_read(self._wakeup_fd)
            return None
        return self._read_events() if ready else None

    def interrupt_wait(self) -> None:
        """Have `wait_for_events` return at once; for any thread."""
        os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Watch no more."""
        os.close(self._fd)
        os.close(self._wakeup_fd)

    def _update_watches(self) -> None:
        found: dict[int, set[str]] = {}
        awaited: dict[int, set[bytes]] = {}
        left = 0
        for directory in self._requested:
            number = self._add_watch(directory, is_full=len(found) >= MAX_WATCHES)
            if number is not None and number >= 0:
                found.setdefault(number, set()).add(directory)
            left += number is not None and number < 0
            place = directory
            # Nobody is told when a directory goes with one above it.
            while place != "/":
                place, _, name = place.rpartition("/")
                place = place or "/"
                number = self._add_watch(place, is_full=len(found) >= MAX_WATCHES)
                if number is not None and number >= 0:
                    found.setdefault(number, set())
                    awaited.setdefault(number, set()).add(os.fsencode(name))
        for number in self._directories.keys() - found.keys():
            self._libc.inotify_rm_watch(self._fd, number)
        self._directories, self._awaited_names = found, awaited
        if left and not self._has_warned:
            log.warning(
                "%d of %d directories can't be watched, and are looked at now and then only; "
                "raise the sysctl fs.inotify.max_user_watches if that is below %d",
                left,
                len(self._requested),
                MAX_WATCHES,
            )
        self._has_warned = left > 0

    def _add_watch(self, directory: str, *, is_full: bool) -> int | None:
        """The watch's number; None without such a directory, -1 when there can be no more."""
        if is_full:
            return -1
        try:
            place = self._root.resolve_path(directory)
        except FileError:
            return -1
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(place), _MASK)
        if number >= 0:
            return number
        missing = ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR)
        return None if missing and directory != "/" else -1

    def _read_events(self) -> InotifyEvents:
        paths: set[str] = set()
        lost = stale = False
        while True:
            try:
                content = os.read(self._fd, _BUFFER_SIZE)
            except BlockingIOError:
                break
            offset = 0
            while offset < len(content):
                number, mask, _, length = _EVENT.unpack_from(content, offset)
                offset += _EVENT.size
                name = content[offset : offset + length].rstrip(b"\0")
                offset += length
                lost = lost or bool(mask & _IN_Q_OVERFLOW)
                if number not in self._directories:
                    continue
                leads_on = mask & _ENTRY_CHANGED and name in self._awaited_names.get(number, ())
                stale = stale or bool(mask & _WATCH_LOST or leads_on)
                for directory in self._directories[number] if name else ():
                    paths.add(f"{directory.rstrip('/')}/{os.fsdecode(name)}")
        if stale:
            self._update_watches()
        # What came into being between the event and the new watch left no event.
        return InotifyEvents(frozenset(paths), is_incomplete=lost or stale)
