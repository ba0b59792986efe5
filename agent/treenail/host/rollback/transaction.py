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
    Absent,
    Directory,
    Entries,
    Hardlink,
    Regular,
    Symlink,
)
from treenail.host.filesystem.files import failure
from treenail.host.filesystem.fsync import FEW, Flushing
from treenail.host.filesystem.root import Root
from treenail.host.rollback.inverse import Before, Inverse, below
from treenail.host.rollback.prepare import Change, Recorded, Recording
from treenail.host.rollback.symlinks import LinkTree
from treenail.host.rollback.undo_log import HELD, LOG, Json, UndoLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier process left; ``notes`` are its own, in order, ``places`` below the root."""

    committed: bool
    notes: tuple[Json, ...]
    places: frozenset[str] = frozenset()


class Undo:
    """One change at a time below a root. Raises `FileError` and `LedgerError`.

    The last component of a path is the entry itself; links before it are followed inside the root,
    once, when the change is recorded.
    """

    def __init__(self, root: Root, disk: Disk | None = None, *, place: str = LOG) -> None:
        """``place`` is where the log is."""
        self._root = root
        self._prefix = os.fspath(root.prefix)
        self._disk = disk or Disk()
        self._entries = Entries(self._disk)
        self._log = UndoLog(root, self._disk, place)
        self._held = UndoLog(root, self._disk, HELD)
        self._links = LinkTree(root, self._disk)
        self._flushing = Flushing(self._disk)
        self._number = 0
        self._few = True
        self._repeatable = True  # all that is not flushed yet can be done again after a crash
        self._done: list[Inverse] = []
        self.at = ""
        """The path of the change that is being made, or whose making failed."""

    def check(self) -> None:
        """Raise `LedgerError` while there is an earlier change to be undone."""
        if not self._log.begun and self._log.read() is not None:
            raise LedgerError(
                f"an earlier change of {self._root.prefix} was cut short and is not undone yet",
                remedy="start the agent, or run treenail once: both undo it first",
            )

    def place(self, changes: Sequence[Change]) -> tuple[str, ...]:
        """Have all of it at its place; returns the paths, missing directories above among them.

        Nothing is touched before all of it is in the log.
        """
        self._few = len(changes) <= FEW
        recorded = self._record(changes)
        self._repeatable &= not self._few and all(map(_repeatable, recorded))
        made: dict[int, int] = {}
        for each in recorded:
            inode = self._make(each)
            if each.inverse.before is Before.KEPT:
                made[each.inverse.number] = inode
        if made:
            self._log.append({"made": list(made.items())}, flush=self._few)
        if not self._few:
            self._flushing.flush_file_systems()
        for each in recorded:
            self._put(each)
        return tuple(each.path for each in recorded)

    def keep_links(self, top: str) -> None:
        """Record every symbolic link below a directory, for somebody else is to change them."""
        self.check()
        self._repeatable = False
        self._log.append({"links": self._links.described(top)})

    def links_changed(self, top: str) -> None:
        """Somebody else has changed links below the directory."""
        for directory in self._links.directories(top):
            self._flushing.changed(os.fspath(directory))

    def note(self, note: Json) -> None:
        """Return once the note, which `left` tells, outlives a power cut."""
        self.check()
        self._log.append({"note": note})

    def commit(self) -> None:
        """Return once all of it is for good; without anything recorded there is nothing to do."""
        if not self._log.begun:
            return
        if self._done and self._repeatable:
            self._log.commit(flush=False)
            self._flushing.flush_file_systems()
        else:
            self._flushing.flush()
            self._log.commit()
        done, self._done = self._done, []
        self._start_anew()
        try:
            self._clean(done)
        except FileError as error:
            log.warning("what is replaced is cleaned up at the next start: %s", error)

    def hold(self, owner: str) -> None:
        """Return once all of it outlives a power cut; `Held` says what becomes of it."""
        self.note({"held": owner})
        self._flushing.flush()
        self._log.move(HELD)
        self._start_anew()

    def left(self) -> Left | None:
        """What is to be put back, or cleaned up after; None when there is nothing.

        Raises `LedgerError` when the log is damaged.
        """
        written = self._log.read()
        if written is None:
            return None
        notes = [record["note"] for record in written.records if "note" in record]
        places = (each.place for record in written.records for each in self._inverses(record))
        return Left(
            written.committed,
            tuple(note for note in notes if isinstance(note, dict)),
            frozenset(below(place, self._prefix) for place in places),
        )

    def put_back(self) -> tuple[str, ...]:
        """Have everything as before, for good; what could not be, one sentence for each.

        It can be done again and again, and leaves alone whatever of the change has not happened.
        A committed change is cleaned up after.
        """
        self._start_anew()
        written = self._log.read()
        if written is None:
            return ()
        if written.committed:
            self._complete(written.records)
            return ()
        failed: list[str] = []
        for action in (*self._putting_back(written.records), self._flushing.flush):
            try:
                action()
            except FileError as error:
                failed.append(str(error))
        return tuple(failed)

    def clean(self) -> None:
        """Have nothing of what was replaced, nor the log: somebody decided that it is for good."""
        self._start_anew()
        written = self._log.read()
        if written is not None:
            self._clean([each for record in written.records for each in self._inverses(record)])

    def forget(self) -> None:
        """Return once no later start puts anything back."""
        self._start_anew()
        self._log.remove(flush=True)

    # Placing.

    def _record(self, changes: Sequence[Change]) -> Sequence[Recorded]:
        """Return once the inverses outlive a power cut; raises before anything is touched."""
        self.check()
        # It is not part of the change, though it may be missing, too.
        self._log.make_directory(flush=self._few)
        if not self._log.begun:
            self._number = self._held.last_number()  # what is held has names in the same places
        recording = Recording(self._root, self._disk, self._number)
        try:
            found = recording.record(changes)
        finally:
            self.at, self._number = recording.at, recording.number
        if not self._few:
            for directory in (self._log.directory, *recording.directories):
                self._flushing.open(directory)
        entries = [each.inverse.to_json(self._prefix) for each in found]
        self._log.append({"entries": entries}, flush=self._few)
        if not self._few:
            self._flushing.flush_file_system(self._log.directory)
        return found

    def _make(self, each: Recorded) -> int:
        """Make the new entry beside its place; the number of its inode, 0 if there is no new one.

        A new directory is made at its place: nothing else can be.
        """
        self.at, inverse = each.path, each.inverse
        place = inverse.place
        self._done.append(inverse)
        self._flushing.changed(inverse.parent)
        match each.entry:
            case Regular() as entry:
                replaces = inverse.before is Before.KEPT
                return self._entries.make(
                    entry, each.aside, place, replaces=replaces, flush=self._few
                )
            case Symlink() as entry:
                return self._entries.make_symlink(entry, each.aside, place)
            case Hardlink(target=target):
                return self._entries.make_name(self._root.path(target), each.aside)
            case Directory() as entry:
                if inverse.before is Before.NOTHING:
                    self._entries.make_directory(entry, place)
                self._flushing.changed(place)
                return 0
            case Absent():
                return 0

    def _put(self, each: Recorded) -> None:
        """Have the new entry at its place."""
        self.at, inverse = each.path, each.inverse
        match inverse.before, each.entry:
            case Before.KEPT, Absent():
                self._entries.put(inverse.place, each.aside)
            case Before.KEPT, _:
                self._entries.exchange(each.aside, inverse.place)
            case Before.DIRECTORY, Directory() as entry:
                self._entries.change_directory(entry, inverse.place)
            case Before.NOTHING, Regular() | Symlink() | Hardlink():
                self._entries.put(each.aside, inverse.place)
            case _:
                pass

    def _mode(self, path: str) -> int | None:
        try:
            return self._disk.status(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise failure("look at", path, error) from error

    # Putting back.

    def _putting_back(self, records: Sequence[Json]) -> Iterator[Callable[[], None]]:
        """What there is to do, from the last to the first.

        A path that was changed more than once is put back to what stood there first, in one go: a
        second attempt would otherwise take what the first has put back for a later state.
        """
        batches = [self._inverses(record) for record in records]
        made = _made(records)
        first: dict[str, Inverse] = {}
        for inverse in (each for batch in batches for each in batch):
            first.setdefault(inverse.place, inverse)
        for record, batch in zip(reversed(records), reversed(batches), strict=True):
            if "links" in record:
                yield partial(self._links.put_back, record["links"], first.keys(), self._flushing)
            for inverse in reversed(batch):
                if first[inverse.place] is inverse:
                    yield partial(self._put_entry_back, inverse, made.get(inverse.number))
                else:
                    yield partial(self._entries.drop, inverse.aside)

    def _inverses(self, record: Json) -> list[Inverse]:
        rows = record.get("entries", ())
        if not isinstance(rows, list):
            return []
        return [Inverse.from_json(row, self._prefix) for row in rows]

    def _put_entry_back(self, inverse: Inverse, made: int | None) -> None:
        """``made`` is the inode of the new entry; None when it never was at its place."""
        place = inverse.place
        if self._mode(inverse.parent) is None:
            return  # nor was it ever made, or it is gone with its directory
        self._flushing.changed(inverse.parent)
        match inverse.before:
            case Before.NOTHING:
                self._entries.drop(inverse.aside)
                self._remove(place)
            case Before.KEPT:
                if made is None or self._inode(inverse.aside) in {None, made}:
                    self._entries.drop(inverse.aside)
                else:
                    self._entries.put(inverse.aside, place)
            case Before.DIRECTORY:
                self._entries.change_directory(inverse.directory, place)
                self._flushing.changed(place)
            case Before.EMPTIED:
                pass

    def _inode(self, path: str) -> int | None:
        try:
            return self._disk.status(path).st_ino
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure("look at", path, error) from error

    def _remove(self, place: str) -> None:
        self._entries.remove(place)
        if self._mode(place) is None:
            self._flushing.removed(place)

    # Committing.

    def _complete(self, records: Sequence[Json]) -> None:
        """Do what was committed and is not done yet, and clean up.

        Whoever committed it may have been killed before any of it was flushed.
        """
        self._log.flush()
        made = _made(records)
        inverses = [inverse for record in records for inverse in self._inverses(record)]
        for inverse in inverses:
            if self._mode(inverse.parent) is None:
                continue  # it was emptied, and is gone
            self._flushing.changed(inverse.parent)
            aside = self._inode(inverse.aside)
            new = made.get(inverse.number) if inverse.before is Before.KEPT else aside
            if aside is not None and aside == new:
                self._entries.put(inverse.aside, inverse.place)
        self._flushing.flush()
        self._clean(inverses)

    def _clean(self, inverses: Sequence[Inverse]) -> None:
        """Have no old entries and no emptied directories, for good, and then no log."""
        for inverse in inverses:
            if inverse.before is Before.KEPT:
                self._entries.drop(inverse.aside)
                self._flushing.changed(inverse.parent)
        for inverse in reversed(inverses):
            if inverse.before is Before.EMPTIED:
                self._remove(inverse.place)
                self._flushing.changed(inverse.parent)
        self._flushing.flush()
        self._start_anew()
        # Whoever finds it nevertheless cleans up what is clean; a later change flushes the
        # directory before it makes anything.
        self._log.remove(flush=False)

    def _start_anew(self) -> None:
        self._log.close()
        self._flushing.close()
        self._done.clear()
        self._number = 0
        self._repeatable = True


def _repeatable(each: Recorded) -> bool:
    """What is left to be done about it once all is made is to rename the new entry."""
    match each.inverse.before, each.entry:
        case Before.NOTHING, _:
            return True
        case Before.KEPT, Absent():
            return False
        case before, _:
            return before is Before.KEPT


def _made(records: Sequence[Json]) -> dict[int, int]:
    """The inodes of the entries that take the places of others, by number."""
    found: dict[int, int] = {}
    for record in records:
        rows = record.get("made", ())
        found.update(rows if isinstance(rows, list) else ())
    return found
