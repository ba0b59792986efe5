"""A change that is complete, but for good only once it is known how the next boot went."""

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root import Root
from treenail.host.rollback.transaction import Left, Undo
from treenail.host.rollback.undo_log import DONE, HELD, UndoLog


class Held:
    """The change below a root that `Undo.hold` left, if any. Raises `FileError`, `LedgerError`."""

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        disk = disk or Disk()
        self._log = UndoLog(root, disk, HELD)
        self._undo = Undo(root, disk, place=HELD)
        self._done = Undo(root, disk, place=DONE)

    def owner(self) -> str:
        """Who held it; empty when there is nothing."""
        left = self._undo.left()
        if left is None:
            return ""
        return next((str(note["held"]) for note in left.notes if "held" in note), "")

    def left(self) -> Left | None:
        """What is to be put back, with its notes."""
        return self._undo.left()

    def put_back(self) -> tuple[str, ...]:
        """Have everything as before it, for good; what could not be, one sentence for each."""
        return self._undo.put_back()

    def forget(self) -> None:
        """Return once nothing of it is put back any more."""
        self._undo.forget()

    def confirm(self) -> None:
        """Return once it is for good."""
        if self._undo.left() is not None:
            self._log.move(DONE)
        self.clean()

    @property
    def unclean(self) -> bool:
        """A `confirm` was cut short; before a later change uses the same names, call `clean`."""
        return self._done.left() is not None

    def clean(self) -> None:
        """Finish a `confirm` that was cut short."""
        self._done.clean()
