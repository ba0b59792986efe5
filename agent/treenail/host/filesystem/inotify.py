"""Watching paths for changes with inotify(7)."""

import ctypes
import errno
import logging
import os
import select
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.root_directory import Root

log = logging.getLogger(__name__)

MAX_WATCHES = 4096
"""The limit of watched directories; the periodic full inspection covers the others."""

# From sys/inotify.h.
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
# Watch descriptor, mask, cookie and length; the name follows, padded with NUL (inotify(7)).
_EVENT = struct.Struct("iIII")
_BUFFER_SIZE = 64 * 1024


@dataclass(frozen=True, slots=True)
class InotifyEvents:
    """The changes since the last `InotifyWatcher.wait_for_events`."""

    paths: frozenset[str] = frozenset()
    """Changed paths below the root, in the watched directories."""
    is_incomplete: bool = False
    """Any path may have changed: the kernel dropped events, or directories moved."""


class InotifyWatcher:
    """Watches directories below a root. For one thread, except `interrupt_wait`.

    A directory that is missing or is removed is awaited in its parents. Raises `FileError` when the
    user has no inotify instance left.
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
                f"cannot watch files: {os.strerror(number)}",
                remedy="raise the sysctl fs.inotify.max_user_instances",
            )
        self._requested: tuple[str, ...] = ()
        self._directories: dict[int, set[str]] = {}
        """The paths of each watched directory; links may give it several."""
        self._awaited_names: dict[int, set[bytes]] = {}
        """Names in a directory that lead to a requested one, whether they exist or not."""
        self._has_warned = False

    def watch_directories(self, directories: Iterable[str]) -> None:
        """Watch exactly these directories, absolute paths below the root."""
        self._requested = tuple(sorted(set(directories)))
        self._update_watches()

    def wait_for_events(self, seconds: float) -> InotifyEvents | None:
        """Wait up to ``seconds`` for changes; None after the timeout or an interrupt."""
        ready, _, _ = select.select([self._fd, self._wakeup_fd], [], [], max(seconds, 0.0))
        if self._wakeup_fd in ready:
            os.eventfd_read(self._wakeup_fd)
            return None
        return self._read_events() if ready else None

    def interrupt_wait(self) -> None:
        """Make `wait_for_events` return at once; any thread may call it."""
        os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Release the inotify instance."""
        os.close(self._fd)
        os.close(self._wakeup_fd)

    def _update_watches(self) -> None:
        watched: dict[int, set[str]] = {}
        awaited: dict[int, set[bytes]] = {}
        unwatched = 0
        for directory in self._requested:
            number = self._add_watch(directory, is_full=len(watched) >= MAX_WATCHES)
            if number is not None and number >= 0:
                watched.setdefault(number, set()).add(directory)
            unwatched += number is not None and number < 0
            parent = directory
            # A directory that is renamed with its parent gets no event of its own: watch the
            # parents too.
            while parent != "/":
                parent, _, name = parent.rpartition("/")
                parent = parent or "/"
                number = self._add_watch(parent, is_full=len(watched) >= MAX_WATCHES)
                if number is not None and number >= 0:
                    watched.setdefault(number, set())
                    awaited.setdefault(number, set()).add(os.fsencode(name))
        for number in self._directories.keys() - watched.keys():
            # The kernel confirms with IN_IGNORED, which `_read_events` skips: it no longer knows
            # the number.
            self._libc.inotify_rm_watch(self._fd, number)
        self._directories, self._awaited_names = watched, awaited
        if unwatched and not self._has_warned:
            log.warning(
                "cannot watch %d of %d directories; they are inspected periodically only; "
                "raise the sysctl fs.inotify.max_user_watches if it is below %d",
                unwatched,
                len(self._requested),
                MAX_WATCHES,
            )
        self._has_warned = unwatched > 0

    def _add_watch(self, directory: str, *, is_full: bool) -> int | None:
        """Return the watch descriptor; None without such a directory, -1 when the limit is met."""
        if is_full:
            return -1
        try:
            resolved = self._root.resolve_path(directory)
        except FileError:
            return -1
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(resolved), _MASK)
        if number >= 0:
            return number
        is_missing = ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR)
        return None if is_missing and directory != "/" else -1

    def _read_events(self) -> InotifyEvents:
        paths: set[str] = set()
        was_dropped = is_stale = False
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
                was_dropped = was_dropped or bool(mask & _IN_Q_OVERFLOW)
                if number not in self._directories:
                    continue
                was_awaited = mask & _ENTRY_CHANGED and name in self._awaited_names.get(number, ())
                is_stale = is_stale or bool(mask & _WATCH_LOST or was_awaited)
                for directory in self._directories[number] if name else ():
                    paths.add(f"{directory.rstrip('/')}/{os.fsdecode(name)}")
        if is_stale:
            self._update_watches()
        # Entries made between the event and the new watch cause no event.
        return InotifyEvents(frozenset(paths), is_incomplete=was_dropped or is_stale)
