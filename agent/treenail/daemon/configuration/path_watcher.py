"""A thread that notes which paths were touched, and rings."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from treenail.errors import FileError
from treenail.host.filesystem.inotify import Inotify, Moved
from treenail.host.filesystem.root import Root

log = logging.getLogger(__name__)

SETTLE_S = 0.3
"""An editor's write, rename and chmod are one finding."""
SETTLE_ROUNDS = 3
"""But somebody who never stops writing does not keep it back."""
_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Touched:
    """What may have changed since the last look."""

    paths: frozenset[str] = frozenset()
    all: bool = False
    """Any path may have."""


class Watcher(Protocol):
    """Who knows what may have changed."""

    def watch(self, paths: Iterable[str], *, below: Iterable[str]) -> None:
        """Be told of these paths, and of whatever stands directly in these directories."""

    def take(self) -> Touched:
        """What was touched since the last time."""


class PathWatch:
    """`Watcher` by inotify. ``on_touched`` is called on its thread, and should only ring."""

    def __init__(self, root: Root, on_touched: Callable[[], None]) -> None:
        self._root = root
        self._on_touched = on_touched
        self._lock = threading.Lock()
        self._paths: frozenset[str] = frozenset()
        self._below: frozenset[str] = frozenset()
        self._asked = False
        self._touched: set[str] = set()
        self._all = False
        self._stop = threading.Event()
        self._inotify: Inotify | None = None
        self._thread = threading.Thread(target=self._run, name="path-watch", daemon=True)

    def start(self) -> None:
        """Watch from now on; without inotify there is nothing but a word in the log."""
        try:
            self._inotify = Inotify(self._root)
        except FileError as error:
            log.warning("%s; what others change is found by looking now and then", error)
            return
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()
        if self._inotify is not None:
            self._inotify.interrupt()
            self._thread.join(10.0)
            self._inotify.close()
            self._inotify = None

    def watch(self, paths: Iterable[str], *, below: Iterable[str]) -> None:
        with self._lock:
            self._paths, self._below = frozenset(paths), frozenset(below)
            self._asked = True
        if self._inotify is not None:
            self._inotify.interrupt()

    def take(self) -> Touched:
        with self._lock:
            touched = Touched(frozenset(self._touched), self._all)
            self._touched, self._all = set(), False
        return touched

    def _run(self) -> None:
        inotify = self._inotify
        while inotify is not None and not self._stop.is_set():
            self._arm(inotify)
            moved = inotify.wait(_IDLE_S)
            if moved is None or not self._note(moved):
                continue
            for _ in range(SETTLE_ROUNDS):
                moved = inotify.wait(SETTLE_S)
                if moved is None or not self._note(moved):
                    break
            self._on_touched()

    def _arm(self, inotify: Inotify) -> None:
        with self._lock:
            if not self._asked:
                return
            self._asked = False
            parents = {path.rpartition("/")[0] or "/" for path in self._paths}
            directories = parents | self._below
        inotify.watch(directories)
        with self._lock:
            # Whatever was touched before the kernel watched has left no event.
            self._all = True
        self._on_touched()

    def _note(self, moved: Moved) -> bool:
        """Keep what is of interest; whether anything is."""
        with self._lock:
            found = {
                path
                for path in moved.paths
                if path in self._paths or path.rpartition("/")[0] in self._below
            }
            self._touched |= found
            self._all = self._all or moved.lost
        return bool(found) or moved.lost
