"""A change of many paths that is done or undone as a whole, across crashes and power cuts.

::

    record    what stands at the paths goes into the log           the log is flushed
    prepare   new entries are made beside their places, and old ones get a second name there
    flush                                                          the file systems are flushed
    put       each new entry is renamed to its place
    commit    a last line goes into the log                        directories and log are flushed
              the second names go, and then the log

Without the last line, whoever starts next puts everything back; with it, they clean up. What is
put back is the old file itself: its owner, mode and attributes were never away.
"""

import logging
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treenail.errors import FileError, LedgerError
from treenail.host.disk import Disk
from treenail.host.entries import (
    Absent,
    Directory,
    Entries,
    Entry,
    Hardlink,
    Regular,
    Symlink,
    refuse_our_names,
)
from treenail.host.files import failing
from treenail.host.flushing import FEW, Flushing
from treenail.host.inverse import Before, Inverse, below
from treenail.host.linktree import LinkTree
from treenail.host.root import Root
from treenail.host.undolog import Json, UndoLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """What to have at a path below the root."""

    path: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Recorded:
    """A change whose inverse is in the log."""

    path: str
    """As it was asked for; of a directory that was missing above, where it is."""
    inverse: Inverse
    entry: Entry


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier process left; ``notes`` are its own, in order."""

    committed: bool
    notes: tuple[Json, ...]


class Undo:
    """One change at a time below a root. Raises `FileError` and `LedgerError`.

    The last component of a path is the entry itself; links before it are followed inside the root,
    once, when the change is recorded.
    """

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._entries = Entries(self._disk)
        self._log = UndoLog(root, self._disk)
        self._links = LinkTree(root, self._disk)
        self._flushing = Flushing(self._disk)
        self._number = 0
        self._few = True
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

    def record(self, changes: Sequence[Change]) -> tuple[Recorded, ...]:
        """Return once the inverses outlive a power cut; raises before anything is touched.

        Directories that are missing above a path come before it in the answer.
        """
        self.check()
        self._log.make_directory()  # it is not part of the change, though it may be missing, too
        found: dict[Path, Recorded] = {}
        there: set[Path] = set()
        for change, place in self._places(changes):
            if place in found:
                found[place] = _merged(found[place], change)
                continue
            for parent in reversed(list(self._missing(place, there, found))):
                found[parent] = self._recorded(Change(self._below(parent), Directory()), parent)
            found[place] = self._recorded(change, place)
        rows = [recorded.inverse.to_json(self._root.prefix) for recorded in found.values()]
        self._log.append({"entries": rows})
        self._few = len(found) <= FEW
        if not self._few:
            for directory in there:
                self._flushing.open(directory)
        return tuple(found.values())

    def prepare(self, change: Recorded) -> None:
        """Make the new entry beside its place, and give the old one its second name."""
        self.at, inverse = change.path, change.inverse
        if inverse.before is Before.KEPT:
            self._entries.link(inverse.place, inverse.kept)
        self._done.append(inverse)
        match change.entry:
            case Regular() as entry:
                self._entries.make(
                    entry,
                    inverse.made,
                    inverse.place,
                    replaces=inverse.before is Before.KEPT,
                    flush=self._few,
                )
            case Symlink() as entry:
                self._entries.make_symlink(entry, inverse.made, inverse.place)
            case Hardlink(target=target):
                self._entries.link(self._root.path(target), inverse.made)
            case Directory() as entry:
                if inverse.before is Before.NOTHING:
                    self._entries.make_directory(entry, inverse.place)
                self._flushing.changed(inverse.place)
            case Absent():
                pass
        self._flushing.changed(inverse.place.parent)

    def flush(self, changes: Sequence[Recorded]) -> None:
        """Return once what was prepared outlives a power cut; few files have been flushed."""
        if not self._few:
            self._flushing.flush_file_systems()
            return
        kept = [change.inverse for change in changes if change.inverse.before is Before.KEPT]
        for directory in dict.fromkeys(inverse.place.parent for inverse in kept):
            self._flushing.sync(directory)

    def put(self, change: Recorded) -> None:
        """Have the new entry at its place."""
        self.at, inverse = change.path, change.inverse
        match change.entry:
            case Absent():
                if inverse.before is Before.KEPT:
                    self._entries.remove(inverse.place)
            case Directory() as entry:
                if inverse.before is Before.DIRECTORY:
                    self._entries.change_directory(entry, inverse.place)
            case Hardlink():
                self._entries.put_name(inverse.made, inverse.place)
            case Regular() | Symlink():
                self._entries.put(inverse.made, inverse.place)

    def keep_links(self, top: str) -> None:
        """Record every symbolic link below a directory, for somebody else is to change them."""
        self.check()
        self._log.append({"links": self._links.described(top)})

    def links_changed(self, top: str) -> None:
        """Somebody else has changed links below the directory."""
        for directory in self._links.directories(top):
            self._flushing.changed(directory)

    def note(self, note: Json) -> None:
        """Return once the note, which `left` tells, outlives a power cut."""
        self.check()
        self._log.append({"note": note})

    def commit(self) -> None:
        """Return once all of it is for good; without anything recorded there is nothing to do."""
        if not self._log.begun:
            return
        self._flushing.flush()
        self._log.commit()
        done, self._done = self._done, []
        try:
            self._clean(done)
        except FileError as error:
            log.warning("what is replaced is cleaned up at the next start: %s", error)

    def left(self) -> Left | None:
        """What is to be put back, or cleaned up after; None when there is nothing.

        Raises `LedgerError` when the log is damaged.
        """
        written = self._log.read()
        if written is None:
            return None
        notes = [record["note"] for record in written.records if "note" in record]
        return Left(written.committed, tuple(note for note in notes if isinstance(note, dict)))

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
            inverses = [inverse for record in written.records for inverse in self._inverses(record)]
            self._clean(inverses)
            return ()
        failed: list[str] = []
        for action in (*self._putting_back(written.records), self._flushing.flush):
            try:
                action()
            except FileError as error:
                failed.append(str(error))
        return tuple(failed)

    def forget(self) -> None:
        """Return once no later start puts anything back."""
        self._start_anew()
        self._log.remove(flush=True)

    # Recording.

    def _places(self, changes: Sequence[Change]) -> Iterator[tuple[Change, Path]]:
        parents: dict[str, Path] = {}
        for change in changes:
            self.at = change.path
            refuse_our_names(change.path)
            parent, _, name = change.path.rpartition("/")
            if not parent or name in {"", ".", ".."}:
                yield change, self._root.entry(change.path)
                continue
            if parent not in parents:
                parents[parent] = self._root.path(parent)
            yield change, parents[parent] / name

    def _missing(
        self, place: Path, there: set[Path], found: Mapping[Path, Recorded]
    ) -> Iterator[Path]:
        """The directories above that are neither there nor recorded to be made."""
        for parent in place.parents:
            if parent in there or (parent in found and isinstance(found[parent].entry, Directory)):
                return
            mode = self._mode(parent)
            if mode is not None:
                if not stat.S_ISDIR(mode):
                    raise FileError(f"{parent} is not a directory, and {place} is to be in it")
                there.add(parent)
                return
            yield parent

    def _recorded(self, change: Change, place: Path) -> Recorded:
        mode = self._mode(place)
        directory = isinstance(change.entry, Directory)
        self._number += 1
        if mode is None:
            inverse = Inverse(place, self._number, Before.NOTHING)
        elif stat.S_ISDIR(mode):
            if not directory and not isinstance(change.entry, Absent):
                raise FileError(f"{place} is a directory, and is to be none", remedy="move it away")
            described = self._entries.described(place)
            before = Before.DIRECTORY if directory else Before.EMPTIED
            inverse = Inverse(place, self._number, before, described)
        elif directory:
            raise FileError(f"{place} is no directory, and is to be one", remedy="move it away")
        else:
            inverse = Inverse(place, self._number, Before.KEPT)
        return Recorded(change.path, inverse, change.entry)

    def _mode(self, path: Path) -> int | None:
        with failing("look at", path):
            try:
                return self._disk.status(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return None

    # Putting back.

    def _putting_back(self, records: Sequence[Json]) -> Iterator[Callable[[], None]]:
        """What there is to do, from the last to the first.

        A path that was changed more than once is put back to what stood there first, in one go: a
        second attempt would otherwise take what the first has put back for a later state.
        """
        batches = [self._inverses(record) for record in records]
        first: dict[Path, Inverse] = {}
        for inverse in (each for batch in batches for each in batch):
            first.setdefault(inverse.place, inverse)
        for record, batch in zip(reversed(records), reversed(batches), strict=True):
            if "links" in record:
                yield partial(self._links.put_back, record["links"], first.keys(), self._flushing)
            for inverse in reversed(batch):
                if first[inverse.place] is inverse:
                    yield partial(self._put_entry_back, inverse)
                else:
                    yield partial(self._drop_made, inverse)

    def _inverses(self, record: Json) -> list[Inverse]:
        rows = record.get("entries", ())
        if not isinstance(rows, list):
            return []
        return [Inverse.from_json(row, self._root.prefix) for row in rows]

    def _drop_made(self, inverse: Inverse) -> None:
        with failing("clean up", inverse.place.parent):
            self._entries.drop(inverse.made)
            self._entries.drop(inverse.kept)

    def _put_entry_back(self, inverse: Inverse) -> None:
        place = inverse.place
        if self._mode(place.parent) is None:
            return  # nor was it ever made, or it is gone with its directory
        self._flushing.changed(place.parent)
        with failing("clean up", place.parent):
            self._entries.drop(inverse.made)
        match inverse.before:
            case Before.NOTHING:
                self._remove(place)
            case Before.KEPT:
                if self._mode(inverse.kept) is not None:
                    self._entries.put_name(inverse.kept, place)
            case Before.DIRECTORY:
                self._entries.change_directory(inverse.directory, place)
                self._flushing.changed(place)
            case Before.EMPTIED:
                pass

    def _remove(self, place: Path) -> None:
        self._entries.remove(place)
        if self._mode(place) is None:
            self._flushing.removed(place)

    def _clean(self, inverses: Sequence[Inverse]) -> None:
        """Have no second names and no emptied directories, for good, and then no log."""
        self._start_anew()
        for inverse in inverses:
            if inverse.before is Before.KEPT:
                with failing("remove", inverse.kept):
                    self._entries.drop(inverse.kept)
                self._flushing.changed(inverse.kept.parent)
        for inverse in reversed(inverses):
            if inverse.before is Before.EMPTIED:
                self._remove(inverse.place)
                self._flushing.changed(inverse.place.parent)
        self._flushing.flush()
        self._start_anew()
        # Whoever finds it nevertheless cleans up what is clean.
        self._log.remove(flush=False)

    def _start_anew(self) -> None:
        self._log.close()
        self._flushing.close()
        self._done.clear()
        self._number = 0

    def _below(self, path: Path) -> str:
        return below(path, self._root.prefix)


def _merged(recorded: Recorded, change: Change) -> Recorded:
    """What is asked for a directory that is to be made anyway; anything else is a conflict."""
    match recorded.entry, change.entry:
        case old, new if old == new:
            return recorded
        case Directory(mode=None), Directory():
            return Recorded(change.path, recorded.inverse, change.entry)
        case Directory(), Directory(mode=None):
            return recorded
        case _:
            place = recorded.inverse.place
            raise FileError(f"{change.path} is to be changed twice: it is {place}")
