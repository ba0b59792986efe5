"""A thread that records which paths were touched, and wakes the main thread."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treenail.errors import FileError
from treenail.host.filesystem.inotify import InotifyEvents, InotifyWatcher
from treenail.host.filesystem.root_directory import Root

log = logging.getLogger(__name__)

SETTLE_S = 0.3
"""Joins the write, rename and chmod of one editor into one wakeup."""
SETTLE_ROUNDS = 3
"""A program that never stops writing delays the wakeup by so many rounds at most."""
_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class TouchedPaths:
    """The paths that may have changed since the last call."""

    paths: frozenset[str] = frozenset()
    is_incomplete: bool = False
    """The kernel lost events: any path may have changed."""


class PathWatcher:
    """Watches paths with inotify. Its thread calls ``on_touched``, which must only wake another."""

    def __init__(self, root: Root, on_touched: Callable[[], None]) -> None:
        self._root = root
        self._on_touched = on_touched
        self._lock = threading.Lock()
        self._paths: frozenset[str] = frozenset()
        self._directories: frozenset[str] = frozenset()
        self._needs_arming = False
        self._touched: set[str] = set()
        self._is_incomplete = False
        self._stop = threading.Event()
        self._inotify: InotifyWatcher | None = None
        self._thread = threading.Thread(target=self._run, name="path-watch", daemon=True)

    def start(self) -> None:
        """Start watching. Without inotify, log that and rely on the periodic full check."""
        try:
            self._inotify = InotifyWatcher(self._root)
        except FileError as error:
            log.warning("%s; changes are found by the periodic full check only", error)
            return
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and join the thread."""
        self._stop.set()
        if self._inotify is not None:
            self._inotify.interrupt_wait()
            self._thread.join(10.0)
            self._inotify.close()
            self._inotify = None

    def watch_paths(self, paths: Iterable[str], *, directories: Iterable[str]) -> None:
        """Watch these paths, and all entries directly in these directories."""
        with self._lock:
            self._paths, self._directories = frozenset(paths), frozenset(directories)
            self._needs_arming = True
        if self._inotify is not None:
            self._inotify.interrupt_wait()

    def take_touched(self) -> TouchedPaths:
        """Return what was touched since the last call."""
        with self._lock:
            touched = TouchedPaths(frozenset(self._touched), self._is_incomplete)
            self._touched, self._is_incomplete = set(), False
        return touched

    def _run(self) -> None:
        inotify = self._inotify
        while inotify is not None and not self._stop.is_set():
            self._arm_watches(inotify)
            moved = inotify.wait_for_events(_IDLE_S)
            if moved is None or not self._note_touched(moved):
                continue
            for _ in range(SETTLE_ROUNDS):
                moved = inotify.wait_for_events(SETTLE_S)
                if moved is None or not self._note_touched(moved):
                    break
            self._on_touched()

    def _arm_watches(self, inotify: InotifyWatcher) -> None:
        with self._lock:
            if not self._needs_arming:
                return
            self._needs_arming = False
            parents = {path.rpartition("/")[0] or "/" for path in self._paths}
            directories = parents | self._directories
        inotify.watch_directories(directories)
        with self._lock:
            # A change before inotify_add_watch has left no event.
            self._is_incomplete = True
        self._on_touched()

    def _note_touched(self, moved: InotifyEvents) -> bool:
        """Record the watched paths among the events; return whether there are any."""
        with self._lock:
            touched = {
                path
                for path in moved.paths
                if path in self._paths or path.rpartition("/")[0] in self._directories
            }
            self._touched |= touched
            self._is_incomplete = self._is_incomplete or moved.is_incomplete
        return bool(touched) or moved.is_incomplete
