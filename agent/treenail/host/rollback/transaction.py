"""A change of many paths that is done or undone as a whole, across crashes and power cuts.

::

    record    what stands at the paths goes into the log             the log is flushed
    make      new entries are made beside their places
    describe  which inodes take the place of old ones goes into the log   that is flushed, and then
                                                                     the file systems
    put       each new entry is renamed to its place, or changes names with the old one
    commit    directories are flushed; a last line goes into the log it is flushed
              the old entries go, and then the log

Without the last line, whoever starts next puts everything back; with it, they clean up. What is
put back is the old file itself: its owner, mode and attributes were never away.

Where all that is left to be done by then is such renames, the last line is written first and both
are flushed at once: whoever finds the line does what it found undone.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from treenail.errors import FileError, LedgerError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import (
    AbsentEntry,
    DirectoryEntry,
    EntryWriter,
    FileEntry,
    HardlinkEntry,
    SymlinkEntry,
)
from treenail.host.filesystem.files import make_file_error
from treenail.host.filesystem.fsync import FSYNC_EACH_LIMIT, FsyncQueue
from treenail.host.filesystem.root import Root
from treenail.host.rollback.inverse import Inverse, PreviousEntry, strip_prefix
from treenail.host.rollback.prepare import ChangeRecorder, PathChange, PreparedChange
from treenail.host.rollback.symlinks import SymlinkTree
from treenail.host.rollback.undo_log import LOG_PATH, PENDING_PATH, Json, UndoLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InterruptedChange:
    """What an earlier process left; ``notes`` are its own, in order, ``paths`` below the root."""

    is_committed: bool
    notes: tuple[Json, ...]
    paths: frozenset[str] = frozenset()


class UndoTransaction:
    """One change at a time below a root. Raises `FileError` and `LedgerError`.

    The last component of a path is the entry itself; links before it are followed inside the root,
    once, when the change is recorded.
    """

    def __init__(self, root: Root, disk: Disk | None = None, *, log_path: str = LOG_PATH) -> None:
        """``log_path`` is where the log is."""
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk or Disk()
        self._entries = EntryWriter(self._disk)
        self._log = UndoLog(root, self._disk, log_path)
        self._pending_log = UndoLog(root, self._disk, PENDING_PATH)
        self._symlinks = SymlinkTree(root, self._disk)
        self._fsync_queue = FsyncQueue(self._disk)
        self._number = 0
        self._is_small = True
        self._is_repeatable = True  # all that is not flushed yet can be done again after a crash
        self._applied: list[Inverse] = []
        self.current_path = ""
        """The path of the change that is being made, or whose making failed."""

    def ensure_none_interrupted(self) -> None:
        """Raise `LedgerError` while there is an earlier change to be undone."""
        if not self._log.has_begun and self._log.read_records() is not None:
            raise LedgerError(
                f"an earlier change of {self._root.prefix} was cut short and is not undone yet",
                remedy="start the agent, or run treenail once: both undo it first",
            )

    def apply_changes(self, changes: Sequence[PathChange]) -> tuple[str, ...]:
        """Have all of it at its place; returns the paths, missing directories above among them.

        Nothing is touched before all of it is in the log.
        """
        self._is_small = len(changes) <= FSYNC_EACH_LIMIT
        recorded = self._record_changes(changes)
        self._is_repeatable &= not self._is_small and all(map(_is_repeatable, recorded))
        made: dict[int, int] = {}
        for each in recorded:
            inode = self._make_entry(each)
            if each.inverse.previous is PreviousEntry.FILE_OR_LINK:
                made[each.inverse.number] = inode
        if made:
            self._log.append_record({"made": list(made.items())}, needs_fsync=self._is_small)
        if not self._is_small:
            self._fsync_queue.sync_file_systems()
        for each in recorded:
            self._put_entry(each)
        return tuple(each.path for each in recorded)

    def record_links(self, top: str) -> None:
        """Record every symbolic link below a directory, for somebody else is to change them."""
        self.ensure_none_interrupted()
        self._is_repeatable = False
        self._log.append_record({"links": self._symlinks.describe_links(top)})

    def mark_links_changed(self, top: str) -> None:
        """Somebody else has changed links below the directory."""
        for directory in self._symlinks.list_directories(top):
            self._fsync_queue.add_directory(os.fspath(directory))

    def record_note(self, note: Json) -> None:
        """Return once the note, which `find_interrupted` tells, outlives a power cut."""
        self.ensure_none_interrupted()
        self._log.append_record({"note": note})

    def commit_changes(self) -> None:
        """Return once all of it is for good; without anything recorded there is nothing to do."""
        if not self._log.has_begun:
            return
        if self._applied and self._is_repeatable:
            self._log.append_commit(needs_fsync=False)
            self._fsync_queue.sync_file_systems()
        else:
            self._fsync_queue.fsync_directories()
            self._log.append_commit()
        done, self._applied = self._applied, []
        self._reset_state()
        try:
            self._remove_replaced(done)
        except FileError as error:
            log.warning("what is replaced is cleaned up at the next start: %s", error)

    def mark_pending(self, owner: str) -> None:
        """Return once all of it outlives a power cut; `PendingChange` says what becomes of it."""
        self.record_note({"held": owner})
        self._fsync_queue.fsync_directories()
        self._log.move_log(PENDING_PATH)
        self._reset_state()

    def find_interrupted(self) -> InterruptedChange | None:
        """What is to be put back, or cleaned up after; None when there is nothing.

        Raises `LedgerError` when the log is damaged.
        """
        written = self._log.read_records()
        if written is None:
            return None
        notes = [record["note"] for record in written.records if "note" in record]
        places = (each.path for record in written.records for each in self._parse_inverses(record))
        return InterruptedChange(
            written.is_committed,
            tuple(note for note in notes if isinstance(note, dict)),
            frozenset(strip_prefix(place, self._prefix) for place in places),
        )

    def undo_changes(self) -> tuple[str, ...]:
        """Have everything as before, for good; what could not be, one sentence for each.

        It can be done again and again, and leaves alone whatever of the change has not happened.
        A committed change is cleaned up after.
        """
        self._reset_state()
        written = self._log.read_records()
        if written is None:
            return ()
        if written.is_committed:
            self._complete_commit(written.records)
            return ()
        failed: list[str] = []
        for action in (
            *self._list_undo_actions(written.records),
            self._fsync_queue.fsync_directories,
        ):
            try:
                action()
            except FileError as error:
                failed.append(str(error))
        return tuple(failed)

    def remove_replaced(self) -> None:
        """Have nothing of what was replaced, nor the log: somebody decided that it is for good."""
        self._reset_state()
        written = self._log.read_records()
        if written is not None:
            self._remove_replaced(
                [each for record in written.records for each in self._parse_inverses(record)]
            )

    def discard_log(self) -> None:
        """Return once no later start puts anything back."""
        self._reset_state()
        self._log.remove_log(needs_fsync=True)

    # Placing.

    def _record_changes(self, changes: Sequence[PathChange]) -> Sequence[PreparedChange]:
        """Return once the inverses outlive a power cut; raises before anything is touched."""
        self.ensure_none_interrupted()
        # It is not part of the change, though it may be missing, too.
        self._log.make_directory(needs_fsync=self._is_small)
        if not self._log.has_begun:
            self._number = (
                self._pending_log.find_last_number()
            )  # what is held has names in the same places
        recording = ChangeRecorder(self._root, self._disk, self._number)
        try:
            found = recording.record_changes(changes)
        finally:
            self.current_path, self._number = recording.current_path, recording.number
        if not self._is_small:
            for directory in (self._log.directory, *recording.directories):
                self._fsync_queue.open_file_system(directory)
        entries = [each.inverse.to_json(self._prefix) for each in found]
        self._log.append_record({"entries": entries}, needs_fsync=self._is_small)
        if not self._is_small:
            self._fsync_queue.sync_file_system(self._log.directory)
        return found

    def _make_entry(self, each: PreparedChange) -> int:
        """Make the new entry beside its place; the number of its inode, 0 if there is no new one.

        A new directory is made at its place: nothing else can be.
        """
        self.current_path, inverse = each.path, each.inverse
        place = inverse.path
        self._applied.append(inverse)
        self._fsync_queue.add_directory(inverse.parent)
        match each.entry:
            case FileEntry() as entry:
                replaces = inverse.previous is PreviousEntry.FILE_OR_LINK
                return self._entries.make_file(
                    entry,
                    each.aside_path,
                    place,
                    is_replacement=replaces,
                    needs_fsync=self._is_small,
                )
            case SymlinkEntry() as entry:
                return self._entries.make_symlink(entry, each.aside_path, place)
            case HardlinkEntry(target=target):
                return self._entries.make_hardlink(self._root.resolve_path(target), each.aside_path)
            case DirectoryEntry() as entry:
                if inverse.previous is PreviousEntry.NOTHING:
                    self._entries.make_directory(entry, place)
                self._fsync_queue.add_directory(place)
                return 0
            case AbsentEntry():
                return 0

    def _put_entry(self, each: PreparedChange) -> None:
        """Have the new entry at its place."""
        self.current_path, inverse = each.path, each.inverse
        match inverse.previous, each.entry:
            case PreviousEntry.FILE_OR_LINK, AbsentEntry():
                self._entries.put_entry(inverse.path, each.aside_path)
            case PreviousEntry.FILE_OR_LINK, _:
                self._entries.exchange_entries(each.aside_path, inverse.path)
            case PreviousEntry.DIRECTORY, DirectoryEntry() as entry:
                self._entries.change_directory(entry, inverse.path)
            case PreviousEntry.NOTHING, FileEntry() | SymlinkEntry() | HardlinkEntry():
                self._entries.put_entry(each.aside_path, inverse.path)
            case _:
                pass

    def _read_mode(self, path: str) -> int | None:
        try:
            return self._disk.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise make_file_error("look at", path, error) from error

    # Putting back.

    def _list_undo_actions(self, records: Sequence[Json]) -> Iterator[Callable[[], None]]:
        """What there is to do, from the last to the first.

        A path that was changed more than once is put back to what stood there first, in one go: a
        second attempt would otherwise take what the first has put back for a later state.
        """
        batches = [self._parse_inverses(record) for record in records]
        made = _find_made_inodes(records)
        first: dict[str, Inverse] = {}
        for inverse in (each for batch in batches for each in batch):
            first.setdefault(inverse.path, inverse)
        for record, batch in zip(reversed(records), reversed(batches), strict=True):
            if "links" in record:
                yield partial(
                    self._symlinks.restore_links, record["links"], first.keys(), self._fsync_queue
                )
            for inverse in reversed(batch):
                if first[inverse.path] is inverse:
                    yield partial(self._restore_entry, inverse, made.get(inverse.number))
                else:
                    yield partial(self._entries.remove_temporary, inverse.aside_path)

    def _parse_inverses(self, record: Json) -> list[Inverse]:
        rows = record.get("entries", ())
        if not isinstance(rows, list):
            return []
        return [Inverse.from_json(row, self._prefix) for row in rows]

    def _restore_entry(self, inverse: Inverse, made: int | None) -> None:
        """``made`` is the inode of the new entry; None when it never was at its place."""
        place = inverse.path
        if self._read_mode(inverse.parent) is None:
            return  # nor was it ever made, or it is gone with its directory
        self._fsync_queue.add_directory(inverse.parent)
        match inverse.previous:
            case PreviousEntry.NOTHING:
                self._entries.remove_temporary(inverse.aside_path)
                self._remove_entry(place)
            case PreviousEntry.FILE_OR_LINK:
                if made is None or self._read_inode(inverse.aside_path) in {None, made}:
                    self._entries.remove_temporary(inverse.aside_path)
                else:
                    self._entries.put_entry(inverse.aside_path, place)
            case PreviousEntry.DIRECTORY:
                self._entries.change_directory(inverse.directory, place)
                self._fsync_queue.add_directory(place)
            case PreviousEntry.EMPTIED_DIRECTORY:
                pass

    def _read_inode(self, path: str) -> int | None:
        try:
            return self._disk.lstat(path).st_ino
        except FileNotFoundError:
            return None
        except OSError as error:
            raise make_file_error("look at", path, error) from error

    def _remove_entry(self, place: str) -> None:
        self._entries.remove_entry(place)
        if self._read_mode(place) is None:
            self._fsync_queue.discard_directory(place)

    # Committing.

    def _complete_commit(self, records: Sequence[Json]) -> None:
        """Do what was committed and is not done yet, and clean up.

        Whoever committed it may have been killed before any of it was flushed.
        """
        self._log.fsync_log()
        made = _find_made_inodes(records)
        inverses = [inverse for record in records for inverse in self._parse_inverses(record)]
        for inverse in inverses:
            if self._read_mode(inverse.parent) is None:
                continue  # it was emptied, and is gone
            self._fsync_queue.add_directory(inverse.parent)
            aside = self._read_inode(inverse.aside_path)
            new = (
                made.get(inverse.number)
                if inverse.previous is PreviousEntry.FILE_OR_LINK
                else aside
            )
            if aside is not None and aside == new:
                self._entries.put_entry(inverse.aside_path, inverse.path)
        self._fsync_queue.fsync_directories()
        self._remove_replaced(inverses)

    def _remove_replaced(self, inverses: Sequence[Inverse]) -> None:
        """Have no old entries and no emptied directories, for good, and then no log."""
        for inverse in inverses:
            if inverse.previous is PreviousEntry.FILE_OR_LINK:
                self._entries.remove_temporary(inverse.aside_path)
                self._fsync_queue.add_directory(inverse.parent)
        for inverse in reversed(inverses):
            if inverse.previous is PreviousEntry.EMPTIED_DIRECTORY:
                self._remove_entry(inverse.path)
                self._fsync_queue.add_directory(inverse.parent)
        self._fsync_queue.fsync_directories()
        self._reset_state()
        # Whoever finds it nevertheless cleans up what is clean; a later change flushes the
        # directory before it makes anything.
        self._log.remove_log(needs_fsync=False)

    def _reset_state(self) -> None:
        self._log.close_log()
        self._fsync_queue.close_file_systems()
        self._applied.clear()
        self._number = 0
        self._is_repeatable = True


def _is_repeatable(each: PreparedChange) -> bool:
    """What is left to be done about it once all is made is to rename the new entry."""
    match each.inverse.previous, each.entry:
        case PreviousEntry.NOTHING, _:
            return True
        case PreviousEntry.FILE_OR_LINK, AbsentEntry():
            return False
        case before, _:
            return before is PreviousEntry.FILE_OR_LINK


def _find_made_inodes(records: Sequence[Json]) -> dict[int, int]:
    """The inodes of the entries that take the places of others, by number."""
    found: dict[int, int] = {}
    for record in records:
        rows = record.get("made", ())
        found.update(rows if isinstance(rows, list) else ())
    return found
