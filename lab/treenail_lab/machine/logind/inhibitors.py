"""logind's inhibitor locks: each is a file descriptor, and gone when its last copy is closed."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from gi.repository import GLib

WHAT = ("shutdown", "sleep", "idle", "handle-power-key", "handle-suspend-key")


@dataclass(frozen=True, slots=True)
class Inhibitor:
    """One lock, in the order in which ListInhibitors shows it."""

    what: str
    who: str
    why: str
    mode: str
    uid: int
    pid: int

    def holds(self, what: str, modes: tuple[str, ...]) -> bool:
        return what in self.what.split(":") and self.mode in modes


class Inhibitors:
    """The locks that are held; ``changed`` is called after each change."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._held: dict[int, Inhibitor] = {}

    def take(self, inhibitor: Inhibitor) -> int:
        """Hold a lock; returns the descriptor that the caller must be given, and close."""
        ours, theirs = os.pipe()
        self._held[ours] = inhibitor
        condition = GLib.IOCondition.HUP | GLib.IOCondition.ERR
        GLib.unix_fd_add_full(GLib.PRIORITY_DEFAULT, ours, condition, self._released)
        self._changed()
        return theirs

    def all(self) -> tuple[Inhibitor, ...]:
        return tuple(self._held.values())

    def held(self, what: str, *modes: str) -> tuple[Inhibitor, ...]:
        """The locks on ``what`` in one of the modes."""
        return tuple(each for each in self._held.values() if each.holds(what, modes))

    def inhibited(self, mode: str) -> str:
        """What is inhibited in that mode, joined by colons."""
        return ":".join(what for what in WHAT if self.held(what, mode))

    def _released(self, ours: int, _condition: object) -> bool:
        del self._held[ours]
        os.close(ours)
        self._changed()
        return False
