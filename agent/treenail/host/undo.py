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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.errors import FileError, LedgerError
from treenail.host.disk import Disk
from treenail.host.entries import (
    NAMES,
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
        self._flushing = Flushing(self._disk)
        self._number = 0
        self._few = True
        self._kept: list[Path] = []

    def record(self, changes: Sequence[Change]) -> tuple[Recorded, ...]:
        """Return once the inverses outlive a power cut; raises before anything is touched.

        Directories that are missing above a path come before it in the answer.
        """
        self._refuse_to_forget()
        found: dict[Path, Recorded] = {}
        there: set[Path] = set()
        for change, place in self._places(changes):
            if place in found:
                raise FileError(f"{change.path} is to be changed twice: it is {place}")
            for parent in reversed(list(self._missing(place, there, found))):
                found[parent] = self._recorded(parent, Directory())
            found[place] = self._recorded(place, change.entry)
        rows = [recorded.inverse.to_json(self._root.prefix) for recorded in found.values()]
        self._log.append({"entries": rows})
        self._few = len(found) <= FEW
        if not self._few:
            for directory in there:
                self._flushing.open(directory)
        return tuple(found.values())

    def prepare(self, change: Recorded) -> None:
        """Make the new entry beside its place, and give the old one its second name."""
        inverse = change.inverse
        if inverse.before is Before.KEPT:
            self._entries.link(inverse.place, inverse.kept)
            self._kept.append(inverse.kept)
        match change.entry:
            case Regular() as entry:
                self._entries.make(entry, inverse.made, inverse.place, flush=self._few)
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
        inverse = change.inverse
        match change.entry:
            case Absent():
                self._entries.remove(inverse.place)
                self._flushing.removed(inverse.place)
            case Directory() as entry:
                if inverse.before is Before.DIRECTORY:
                    self._entries.change_directory(entry, inverse.place)
            case Regular() | Symlink() | Hardlink():
                self._entries.put(inverse.made, inverse.place)

    def keep_links(self, top: str) -> None:
        """Record every symbolic link below a directory, for somebody else is to change them."""
        self._refuse_to_forget()
        links, directories = self._links(self._root.path(top))
        self._log.append(
            {
                "links": {self._below(path): text for path, text in links.items()},
                "directories": [self._below(path) for path in directories],
                "top": top,
            }
        )

    def links_changed(self, top: str) -> None:
        """Somebody else has changed links below the directory."""
        for directory in self._links(self._root.path(top))[1]:
            self._flushing.changed(directory)

    def note(self, note: Json) -> None:
        """Return once the note, which `left` tells, outlives a power cut."""
        self._refuse_to_forget()
        self._log.append({"note": note})

    def commit(self) -> None:
        """Return once all of it is for good; without anything recorded there is nothing to do."""
        if not self._log.begun:
            return
        self._flushing.flush()
        self._log.commit()
        kept, self._kept = self._kept, []
        try:
            self._clean(kept)
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
            self._clean([each.kept for each in inverses if each.before is Before.KEPT])
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
        self._log.remove()

    # Recording.

    def _refuse_to_forget(self) -> None:
        if not self._log.begun and self._log.read() is not None:
            raise LedgerError(
                f"an earlier change of {self._root.prefix} was cut short and is not undone yet",
                remedy="start the agent, or run treenail once: both undo it first",
            )

    def _places(self, changes: Sequence[Change]) -> Iterator[tuple[Change, Path]]:
        parents: dict[str, Path] = {}
        for change in changes:
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

    def _recorded(self, place: Path, entry: Entry) -> Recorded:
        mode = self._mode(place)
        self._number += 1
        if mode is None:
            return Recorded(Inverse(place, self._number, Before.NOTHING), entry)
        if stat.S_ISDIR(mode):
            if not isinstance(entry, Directory | Absent):
                raise FileError(f"{place} is a directory, and is to be none", remedy="move it away")
            described = self._entries.described(place)
            return Recorded(Inverse(place, self._number, Before.DIRECTORY, described), entry)
        if isinstance(entry, Directory):
            raise FileError(f"{place} is no directory, and is to be one", remedy="move it away")
        return Recorded(Inverse(place, self._number, Before.KEPT), entry)

    def _mode(self, path: Path) -> int | None:
        with failing("look at", path):
            try:
                return self._disk.status(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return None

    # Putting back.

    def _putting_back(self, records: Sequence[Json]) -> Iterator[Callable[[], None]]:
        for record in reversed(records):
            if "links" in record:
                yield lambda record=record: self._put_links_back(record)  # type: ignore[misc]
            for inverse in reversed(self._inverses(record)):
                yield lambda inverse=inverse: self._put_entry_back(inverse)  # type: ignore[misc]

    def _inverses(self, record: Json) -> list[Inverse]:
        rows = record.get("entries", ())
        if not isinstance(rows, list):
            return []
        return [Inverse.from_json(row, self._root.prefix) for row in rows]

    def _put_entry_back(self, inverse: Inverse) -> None:
        place = inverse.place
        if self._mode(place.parent) is None:
            return  # nor was it ever made, or it is gone with its directory
        self._flushing.changed(place.parent)
        self._entries.drop(inverse.made)
        match inverse.before:
            case Before.NOTHING:
                self._entries.remove(place)
                self._flushing.removed(place)
            case Before.KEPT:
                if self._mode(inverse.kept) is not None:
                    self._entries.put(inverse.kept, place)
            case Before.DIRECTORY:
                if self._mode(place) is None:
                    self._entries.make_directory(inverse.directory, place)
                else:
                    self._entries.change_directory(inverse.directory, place)
                self._flushing.changed(place)

    def _put_links_back(self, record: Json) -> None:
        links, before = record["links"], record["directories"]
        if not isinstance(links, dict) or not isinstance(before, list):
            return
        found, directories = self._links(self._root.path(str(record["top"])))
        for path in found:
            if self._below(path) not in links:
                self._entries.remove(path)
                self._flushing.changed(path.parent)
        for name, text in links.items():
            path = self._root.prefix / str(name)[1:]
            if found.get(path) == text:
                continue
            if self._mode(path.parent) is None:
                self._entries.make_directory(Directory(), path.parent)
                self._flushing.changed(path.parent.parent)
            made = path.parent / f"{NAMES}+0"
            self._entries.make_symlink(Symlink(str(text)), made, path)
            self._entries.put(made, path)
            self._flushing.changed(path.parent)
        for directory in reversed(directories):
            if self._below(directory) not in before:
                self._entries.remove(directory)
                self._flushing.removed(directory)
                self._flushing.changed(directory.parent)

    def _links(self, top: Path) -> tuple[dict[Path, str], list[Path]]:
        """The links below, and the directories, those above before those below."""
        links: dict[Path, str] = {}
        directories: list[Path] = []
        todo = [top]
        while todo:
            directory = todo.pop()
            with failing("look at", directory):
                try:
                    names = self._disk.names(directory)
                except FileNotFoundError:
                    continue
                directories.append(directory)
                for path in sorted(directory / name for name in names):
                    mode = self._disk.status(path).st_mode
                    if stat.S_ISDIR(mode):
                        todo.append(path)
                    elif stat.S_ISLNK(mode) and not path.name.startswith(NAMES):
                        links[path] = self._disk.link_text(path)
        return links, directories

    def _clean(self, kept: Iterable[Path]) -> None:
        """Have no second names, for good, and then no log."""
        self._start_anew()
        for path in kept:
            with failing("remove", path):
                self._entries.drop(path)
            self._flushing.changed(path.parent)
        self._flushing.flush()
        self.forget()

    def _start_anew(self) -> None:
        self._log.close()
        self._flushing.close()
        self._kept.clear()
        self._number = 0

    def _below(self, path: Path) -> str:
        return below(path, self._root.prefix)
