"""Changes of many paths that are applied or undone together, across crashes and power cuts.

::

    record    log the inverse of every path                          flush the log
    make      write the new entries beside their paths
    describe  log the inodes of entries that replace others          flush log and file systems
    put       rename each new entry to its path, or exchange it with the old one
    commit    flush the directories, log the last record             flush the log
              remove the old entries, then the log

Without the last record, the next start undoes the change; with it, the next start completes it.
Undoing restores the old file itself, so owner, mode and attributes need no copy.

Where only renames are left to do, the last record is logged first and both are flushed at once. A
start that finds the record repeats the renames.

Symbolic links below a directory are recorded before systemctl changes them.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from treenail import errors
from treenail.host.filesystem import atomic_files, entries, root_directory
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import (
    FSYNC_EACH_LIMIT,
    AbsentEntry,
    DirectoryEntry,
    EntryWriter,
    FileEntry,
    FsyncQueue,
    HardlinkEntry,
    SymlinkEntry,
)
from treenail.host.rollback import undo_log

Json = dict[str, object]
_TEMPORARY = f"{entries.TEMPORARY_PREFIX}+0"


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InterruptedChange:
    """A change that an earlier process began; ``notes`` are in order, ``paths`` below the root."""

    is_committed: bool
    notes: tuple[undo_log.Json, ...]
    paths: frozenset[str] = frozenset()


class UndoTransaction:
    """One change at a time below a root. Raises `FileError` and `LedgerError`.

    The last component of a path is the entry itself. Links before it are followed inside the root,
    once, when the change is recorded.
    """

    def __init__(
        self,
        root: root_directory.Root,
        disk: Disk | None = None,
        *,
        log_path: str = undo_log.LOG_PATH,
    ) -> None:
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk or Disk()
        self._entries = EntryWriter(self._disk)
        self._log = undo_log.UndoLog(root, self._disk, log_path)
        self._pending_log = undo_log.UndoLog(root, self._disk, undo_log.PENDING_PATH)
        self._symlinks = SymlinkTree(root, self._disk)
        self._fsync_queue = FsyncQueue(self._disk)
        self._number = 0
        self._is_small = True
        self._is_repeatable = True  # a start can repeat everything that is not flushed yet
        self._applied: list[undo_log.Inverse] = []
        self.current_path = ""
        """The path of the current or failed change."""

    def ensure_none_interrupted(self) -> None:
        """Raise `LedgerError` while an interrupted change is not undone."""
        if not self._log.has_begun and self._log.read_records() is not None:
            raise errors.LedgerError(
                f"cannot change {self._root.prefix}: an earlier change was interrupted and is not "
                "undone yet",
                remedy="undo it: systemctl restart treenail; or: treenail once",
            )

    def apply_changes(self, changes: Sequence[undo_log.PathChange]) -> tuple[str, ...]:
        """Apply the changes; return their paths, missing parent directories included.

        The inverses of all changes are in the log before the first write.
        """
        self._is_small = len(changes) <= FSYNC_EACH_LIMIT
        prepared = self._record_changes(changes)
        self._is_repeatable &= not self._is_small and all(map(_is_repeatable, prepared))
        inodes: dict[int, int] = {}
        for change in prepared:
            inode = self._make_entry(change)
            if change.inverse.previous is undo_log.PreviousEntry.FILE_OR_LINK:
                inodes[change.inverse.number] = inode
        if inodes:
            self._log.append_record({"made": list(inodes.items())}, needs_fsync=self._is_small)
        if not self._is_small:
            self._fsync_queue.sync_file_systems()
        for change in prepared:
            self._put_entry(change)
        return tuple(change.path for change in prepared)

    def record_links(self, top: str) -> None:
        """Record every symbolic link below a directory that another program will change."""
        self.ensure_none_interrupted()
        self._is_repeatable = False
        self._log.append_record({"links": self._symlinks.describe_links(top)})

    def mark_links_changed(self, top: str) -> None:
        """Flush the directories below ``top`` at commit: another program changed their links."""
        for directory in self._symlinks.list_directories(top):
            self._fsync_queue.add_directory(os.fspath(directory))

    def record_note(self, note: undo_log.Json) -> None:
        """Store a note durably, for `find_interrupted`."""
        self.ensure_none_interrupted()
        self._log.append_record({"note": note})

    def commit_changes(self) -> None:
        """Make the changes durable and final; do nothing when none was recorded."""
        if not self._log.has_begun:
            return
        if self._applied and self._is_repeatable:
            self._log.append_commit(needs_fsync=False)
            self._fsync_queue.sync_file_systems()
        else:
            self._fsync_queue.fsync_directories()
            self._log.append_commit()
        applied, self._applied = self._applied, []
        self._reset_state()
        try:
            self._remove_replaced(applied)
        except errors.FileError as error:
            log.warning("cannot remove replaced files, retrying at the next start: %s", error)

    def mark_pending(self, owner: str) -> None:
        """Make the changes durable and leave the decision about them to `PendingChange`."""
        self.record_note({"pending": owner})
        self._fsync_queue.fsync_directories()
        self._log.move_log(undo_log.PENDING_PATH)
        self._reset_state()

    def find_interrupted(self) -> InterruptedChange | None:
        """Return the change that an earlier process did not finish; None without one.

        Raises `LedgerError` when the log is damaged.
        """
        log_records = self._log.read_records()
        if log_records is None:
            return None
        records = log_records.records
        notes = [record["note"] for record in records if "note" in record]
        paths = (inverse.path for record in records for inverse in self._log.parse_inverses(record))
        return InterruptedChange(
            log_records.is_committed,
            tuple(note for note in notes if isinstance(note, dict)),
            frozenset(root_directory.strip_prefix(path, self._prefix) for path in paths),
        )

    def undo_changes(self) -> tuple[str, ...]:
        """Undo the interrupted change durably; return one sentence for each failure.

        Idempotent, also for changes that did not happen yet. A committed change is completed
        instead.
        """
        self._reset_state()
        log_records = self._log.read_records()
        if log_records is None:
            return ()
        if log_records.is_committed:
            self._complete_commit(log_records.records)
            return ()
        failures: list[str] = []
        for action in (
            *self._list_undo_actions(log_records.records),
            self._fsync_queue.fsync_directories,
        ):
            try:
                action()
            except errors.FileError as error:
                failures.append(str(error))
        return tuple(failures)

    def remove_replaced(self) -> None:
        """Remove the replaced entries of a confirmed change, and its log."""
        self._reset_state()
        log_records = self._log.read_records()
        if log_records is not None:
            inverses = map(self._log.parse_inverses, log_records.records)
            self._remove_replaced([inverse for batch in inverses for inverse in batch])

    def discard_log(self) -> None:
        """Remove the log durably, so that no later start undoes anything."""
        self._reset_state()
        self._log.remove_log(needs_fsync=True)

    # Applying.

    def _record_changes(
        self, changes: Sequence[undo_log.PathChange]
    ) -> Sequence[undo_log.PreparedChange]:
        """Log the inverses durably; raise before any write."""
        self.ensure_none_interrupted()
        # Not part of the change, although it may be missing as well.
        self._log.make_directory(needs_fsync=self._is_small)
        if not self._log.has_begun:
            # A pending change has temporary names in the same directories.
            self._number = self._pending_log.find_last_number()
        recorder = undo_log.ChangeRecorder(self._root, self._disk, self._number)
        try:
            prepared = recorder.record_changes(changes)
        finally:
            self.current_path, self._number = recorder.current_path, recorder.number
        if not self._is_small:
            for directory in (self._log.directory, *recorder.directories):
                self._fsync_queue.open_file_system(directory)
        entries = [change.inverse.to_json(self._prefix) for change in prepared]
        self._log.append_record({"entries": entries}, needs_fsync=self._is_small)
        if not self._is_small:
            self._fsync_queue.sync_file_system(self._log.directory)
        return prepared

    def _make_entry(self, change: undo_log.PreparedChange) -> int:
        """Make the new entry beside its path; return its inode number, 0 without a new entry."""
        self.current_path, inverse = change.path, change.inverse
        path = inverse.path
        self._applied.append(inverse)
        self._fsync_queue.add_directory(inverse.parent)
        match change.entry:
            case FileEntry() as entry:
                return self._entries.make_file(
                    entry,
                    change.aside_path,
                    path,
                    is_replacement=inverse.previous is undo_log.PreviousEntry.FILE_OR_LINK,
                    needs_fsync=self._is_small,
                )
            case SymlinkEntry() as entry:
                return self._entries.make_symlink(entry, change.aside_path, path)
            case HardlinkEntry(target=target):
                return self._entries.make_hardlink(
                    self._root.resolve_path(target), change.aside_path
                )
            case DirectoryEntry() as entry:
                if inverse.previous is undo_log.PreviousEntry.NOTHING:
                    # At its path at once: other new entries are made inside.
                    self._entries.make_directory(entry, path)
                self._fsync_queue.add_directory(path)
                return 0
            case AbsentEntry():
                return 0

    def _put_entry(self, change: undo_log.PreparedChange) -> None:
        """Rename the new entry to its path."""
        self.current_path, inverse = change.path, change.inverse
        match inverse.previous, change.entry:
            case undo_log.PreviousEntry.FILE_OR_LINK, AbsentEntry():
                self._entries.put_entry(inverse.path, change.aside_path)
            case undo_log.PreviousEntry.FILE_OR_LINK, _:
                self._entries.exchange_entries(change.aside_path, inverse.path)
            case undo_log.PreviousEntry.DIRECTORY, DirectoryEntry() as entry:
                self._entries.change_directory(entry, inverse.path)
            case undo_log.PreviousEntry.NOTHING, FileEntry() | SymlinkEntry() | HardlinkEntry():
                self._entries.put_entry(change.aside_path, inverse.path)
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
            raise atomic_files.make_file_error("inspect", path, error) from error

    # Undoing.

    def _list_undo_actions(self, records: Sequence[undo_log.Json]) -> Iterator[Callable[[], None]]:
        """Yield the actions that undo the records, from the last to the first."""
        # A path that was changed twice gets its first entry in one action: a repeated undo would
        # take the restored entry for a later one.
        batches = [self._log.parse_inverses(record) for record in records]
        inodes = _find_made_inodes(records)
        first: dict[str, undo_log.Inverse] = {}
        for inverse in chain.from_iterable(batches):
            first.setdefault(inverse.path, inverse)
        for record, batch in zip(reversed(records), reversed(batches), strict=True):
            if "links" in record:
                yield partial(
                    self._symlinks.restore_links, record["links"], first.keys(), self._fsync_queue
                )
            for inverse in reversed(batch):
                if first[inverse.path] is inverse:
                    yield partial(self._restore_entry, inverse, inodes.get(inverse.number))
                else:
                    yield partial(self._entries.remove_temporary, inverse.aside_path)

    def _restore_entry(self, inverse: undo_log.Inverse, inode: int | None) -> None:
        """Restore one path; ``inode`` is the inode of the new entry, None when it was not put."""
        path = inverse.path
        if self._read_mode(inverse.parent) is None:
            return  # its directory was never made, or was removed with it
        self._fsync_queue.add_directory(inverse.parent)
        match inverse.previous:
            case undo_log.PreviousEntry.NOTHING:
                self._entries.remove_temporary(inverse.aside_path)
                self._remove_entry(path)
            case undo_log.PreviousEntry.FILE_OR_LINK:
                # The inode says which of the two has the temporary name: the old or the new entry.
                if inode is None or self._read_inode(inverse.aside_path) in {None, inode}:
                    self._entries.remove_temporary(inverse.aside_path)
                else:
                    self._entries.put_entry(inverse.aside_path, path)
            case undo_log.PreviousEntry.DIRECTORY:
                self._entries.change_directory(inverse.directory, path)
                self._fsync_queue.add_directory(path)
            case undo_log.PreviousEntry.EMPTIED_DIRECTORY:
                pass

    def _read_inode(self, path: str) -> int | None:
        try:
            return self._disk.lstat(path).st_ino
        except FileNotFoundError:
            return None
        except OSError as error:
            raise atomic_files.make_file_error("inspect", path, error) from error

    def _remove_entry(self, path: str) -> None:
        self._entries.remove_entry(path)
        if self._read_mode(path) is None:
            self._fsync_queue.discard_directory(path)

    # Committing.

    def _complete_commit(self, records: Sequence[undo_log.Json]) -> None:
        """Complete a committed change and remove the replaced entries.

        The process that committed it may have been killed before it flushed anything.
        """
        self._log.fsync_log()
        inodes = _find_made_inodes(records)
        inverses = [inverse for record in records for inverse in self._log.parse_inverses(record)]
        for inverse in inverses:
            if self._read_mode(inverse.parent) is None:
                continue  # an emptied directory that is removed already
            self._fsync_queue.add_directory(inverse.parent)
            aside = self._read_inode(inverse.aside_path)
            new = aside
            if inverse.previous is undo_log.PreviousEntry.FILE_OR_LINK:
                new = inodes.get(inverse.number)
            if aside is not None and aside == new:
                self._entries.put_entry(inverse.aside_path, inverse.path)
        self._fsync_queue.fsync_directories()
        self._remove_replaced(inverses)

    def _remove_replaced(self, inverses: Sequence[undo_log.Inverse]) -> None:
        """Remove old entries and emptied directories durably, then the log."""
        for inverse in inverses:
            if inverse.previous is undo_log.PreviousEntry.FILE_OR_LINK:
                self._entries.remove_temporary(inverse.aside_path)
                self._fsync_queue.add_directory(inverse.parent)
        for inverse in reversed(inverses):
            if inverse.previous is undo_log.PreviousEntry.EMPTIED_DIRECTORY:
                self._remove_entry(inverse.path)
                self._fsync_queue.add_directory(inverse.parent)
        self._fsync_queue.fsync_directories()
        self._reset_state()
        # Without fsync: a start that finds the log again repeats this, and a later change flushes
        # the directory before its first write.
        self._log.remove_log(needs_fsync=False)

    def _reset_state(self) -> None:
        self._disk.begin_change()
        self._log.close_log()
        self._fsync_queue.close_file_systems()
        self._applied.clear()
        self._number = 0
        self._is_repeatable = True


def _is_repeatable(change: undo_log.PreparedChange) -> bool:
    """Return whether only the rename of the new entry is left after `_make_entry`."""
    match change.inverse.previous, change.entry:
        case undo_log.PreviousEntry.NOTHING, _:
            return True
        case undo_log.PreviousEntry.FILE_OR_LINK, AbsentEntry():
            return False
        case previous, _:
            return previous is undo_log.PreviousEntry.FILE_OR_LINK


def _find_made_inodes(records: Sequence[undo_log.Json]) -> dict[int, int]:
    """Map the numbers of inverses to the inodes of the entries that replace others."""
    inodes: dict[int, int] = {}
    for record in records:
        rows = record.get("made", ())
        inodes.update(rows if isinstance(rows, list) else ())
    return inodes


class PendingChange:
    """The change that `UndoTransaction.mark_pending` left: the boot trial confirms or undoes it.

    Raises `FileError` and `LedgerError`.
    """

    def __init__(self, root: root_directory.Root, disk: Disk | None = None) -> None:
        disk = disk or Disk()
        self._log = undo_log.UndoLog(root, disk, undo_log.PENDING_PATH)
        self._undo = UndoTransaction(root, disk, log_path=undo_log.PENDING_PATH)
        self._confirmed = UndoTransaction(root, disk, log_path=undo_log.CONFIRMED_PATH)

    def find_owner(self) -> str:
        """Return the owner that `UndoTransaction.mark_pending` got; empty without a change."""
        change = self._undo.find_interrupted()
        notes = change.notes if change else ()
        return next((str(note["pending"]) for note in notes if "pending" in note), "")

    def find_interrupted(self) -> InterruptedChange | None:
        """Return the pending change with its notes; None without one."""
        return self._undo.find_interrupted()

    def undo_changes(self) -> tuple[str, ...]:
        """Undo the change durably; return one sentence for each failure."""
        return self._undo.undo_changes()

    def discard_log(self) -> None:
        """Remove the log durably, so that no later start undoes anything."""
        self._undo.discard_log()

    def confirm_change(self) -> None:
        """Make the change final."""
        if self._undo.find_interrupted() is not None:
            self._log.move_log(undo_log.CONFIRMED_PATH)
        self.finish_confirm()

    @property
    def needs_cleanup(self) -> bool:
        """Return whether `confirm_change` was interrupted.

        Then call `finish_confirm` before a later change uses the same temporary names.
        """
        return self._confirmed.find_interrupted() is not None

    def finish_confirm(self) -> None:
        """Finish a `confirm_change` that was interrupted."""
        self._confirmed.remove_replaced()


class SymlinkTree:
    """Reads and restores links below a root. Raises `FileError`; the caller flushes."""

    def __init__(self, root: root_directory.Root, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._entries = EntryWriter(disk)

    def describe_links(self, top: str) -> Json:
        """Return the links below a directory, and all directories there, as JSON."""
        links, directories = self._walk_tree(self._root.resolve_path(top))
        return {
            "top": top,
            "links": {self._strip_root(path): text for path, text in links.items()},
            "directories": [self._strip_root(path) for path in directories],
        }

    def list_directories(self, top: str) -> list[Path]:
        """Return the directory and all below it, parents first."""
        return self._walk_tree(self._root.resolve_path(top))[1]

    def restore_links(
        self, description: object, skipped: Container[str], fsync_queue: FsyncQueue
    ) -> None:
        """Restore exactly the described links, and remove directories that were made for others.

        ``skipped`` are paths that have an inverse of their own.
        """
        match description:
            case {"top": str(top), "links": dict(links), "directories": list(directories)}:
                self._restore_links(top, links, skipped, fsync_queue)
                self._remove_made_directories(top, directories, fsync_queue)
            case _:
                raise errors.LedgerError(
                    f"cannot restore links: {description!r:.200} describes none"
                )

    def _restore_links(
        self,
        top: str,
        links: dict[str, str],
        skipped: Container[str],
        fsync_queue: FsyncQueue,
    ) -> None:
        current, directories = self._walk_tree(self._root.resolve_path(top))
        for directory in directories:
            # Left by a restore that was interrupted.
            if _TEMPORARY in (self._list_names(directory) or ()):
                self._entries.remove_temporary(directory / _TEMPORARY)
                fsync_queue.add_directory(str(directory))
        for path in current:
            if self._strip_root(path) not in links and str(path) not in skipped:
                self._entries.remove_entry(path)
                fsync_queue.add_directory(str(path.parent))
        for name, text in links.items():
            path = self._root.prefix / name[1:]
            if current.get(path) != text and str(path) not in skipped:
                self._make_link(path, text, fsync_queue)

    def _remove_made_directories(
        self, top: str, previous: list[str], fsync_queue: FsyncQueue
    ) -> None:
        for directory in reversed(self.list_directories(top)):
            if self._strip_root(directory) not in previous and not self._list_names(directory):
                self._entries.remove_entry(directory)
                fsync_queue.discard_directory(str(directory))
                fsync_queue.add_directory(str(directory.parent))

    def _make_link(self, path: Path, text: str, fsync_queue: FsyncQueue) -> None:
        if self._list_names(path.parent) is None:
            self._entries.make_directory(DirectoryEntry(), path.parent)
            fsync_queue.add_directory(str(path.parent.parent))
        temporary = path.parent / _TEMPORARY
        self._entries.make_symlink(SymlinkEntry(text), temporary, path)
        self._entries.put_entry(temporary, path)
        fsync_queue.add_directory(str(path.parent))

    def _walk_tree(self, top: Path) -> tuple[dict[Path, str], list[Path]]:
        links: dict[Path, str] = {}
        directories: list[Path] = []
        todo = [top]
        while todo:
            directory = todo.pop()
            names = self._list_names(directory)
            if names is None:
                continue
            directories.append(directory)
            with atomic_files.translate_errors("inspect", directory):
                for path in (directory / name for name in names):
                    mode = self._disk.lstat(path).st_mode
                    if stat.S_ISDIR(mode):
                        todo.append(path)
                    elif stat.S_ISLNK(mode) and not path.name.startswith(entries.TEMPORARY_PREFIX):
                        links[path] = self._disk.readlink(path)
        return links, directories

    def _list_names(self, directory: Path) -> list[str] | None:
        """Return the names in the directory, sorted; None when there is none."""
        with atomic_files.translate_errors("inspect", directory):
            try:
                return sorted(self._disk.listdir(directory))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _strip_root(self, path: Path) -> str:
        return root_directory.strip_prefix(str(path), str(self._root.prefix))
