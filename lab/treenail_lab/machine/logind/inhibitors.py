"""logind's inhibitor locks: each is a file descriptor, and gone when its last copy is closed."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from gi.repository import GLib

INHIBITABLE = ("shutdown", "sleep", "idle", "handle-power-key", "handle-suspend-key")


@dataclass(frozen=True, slots=True)
class LogindInhibitor:
    """One lock, in the order in which ListInhibitors shows it."""

    what: str
    who: str
    why: str
    mode: str
    uid: int
    pid: int

    def is_for(self, what: str, modes: tuple[str, ...]) -> bool:
        return what in self.what.split(":") and self.mode in modes


class LogindInhibitors:
    """The locks that are held; ``changed`` is called after each change."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._on_change = changed
        self._locks: dict[int, LogindInhibitor] = {}

    def take_lock(self, inhibitor: LogindInhibitor) -> int:
        """Hold a lock; returns the descriptor that the caller must be given, and close."""
        ours, theirs = os.pipe()
        self._locks[ours] = inhibitor
        condition = GLib.IOCondition.HUP | GLib.IOCondition.ERR
        GLib.unix_fd_add_full(GLib.PRIORITY_DEFAULT, ours, condition, self._release_lock)
        self._on_change()
        return theirs

    def list_locks(self) -> tuple[LogindInhibitor, ...]:
        return tuple(self._locks.values())

    def find_locks(self, what: str, *modes: str) -> tuple[LogindInhibitor, ...]:
        """The locks on ``what`` in one of the modes."""
        return tuple(each for each in self._locks.values() if each.is_for(what, modes))

    def list_inhibited(self, mode: str) -> str:
        """What is inhibited in that mode, joined by colons."""
        return ":".join(what for what in INHIBITABLE if self.find_locks(what, mode))

    def _release_lock(self, ours: int, _condition: object) -> bool:
        del self._locks[ours]
        os.close(ours)
        self._on_change()
        return False
