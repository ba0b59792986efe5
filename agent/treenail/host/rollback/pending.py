"""A change that is complete, but for good only once it is known how the next boot went."""

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root import Root
from treenail.host.rollback.transaction import InterruptedChange, UndoTransaction
from treenail.host.rollback.undo_log import CONFIRMED_PATH, PENDING_PATH, UndoLog


class PendingChange:
    """The change below a root that `UndoTransaction.mark_pending` left, if any. Raises `FileError`, `LedgerError`."""

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        disk = disk or Disk()
        self._log = UndoLog(root, disk, PENDING_PATH)
        self._undo = UndoTransaction(root, disk, log_path=PENDING_PATH)
        self._confirmed = UndoTransaction(root, disk, log_path=CONFIRMED_PATH)

    def find_owner(self) -> str:
        """Who held it; empty when there is nothing."""
        left = self._undo.find_interrupted()
        if left is None:
            return ""
        return next((str(note["held"]) for note in left.notes if "held" in note), "")

    def find_interrupted(self) -> InterruptedChange | None:
        """What is to be put back, with its notes."""
        return self._undo.find_interrupted()

    def undo_changes(self) -> tuple[str, ...]:
        """Have everything as before it, for good; what could not be, one sentence for each."""
        return self._undo.undo_changes()

    def discard_log(self) -> None:
        """Return once nothing of it is put back any more."""
        self._undo.discard_log()

    def confirm_change(self) -> None:
        """Return once it is for good."""
        if self._undo.find_interrupted() is not None:
            self._log.move_log(CONFIRMED_PATH)
        self.finish_confirm()

    @property
    def needs_cleanup(self) -> bool:
        """A `confirm_change` was cut short; before a later change uses the same names, call `finish_confirm`."""
        return self._confirmed.find_interrupted() is not None

    def finish_confirm(self) -> None:
        """Finish a `confirm_change` that was cut short."""
        self._confirmed.remove_replaced()
