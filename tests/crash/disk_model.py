"""A model of a disk: what was written, what was flushed, and what a power cut may leave of it.

Rules, as in ALICE and CrashMonkey for a file system without further promises:

- Content and metadata of a file that was not fsynced are old, new or anything that they were in
  between; appended content may also be cut off or consist of zeros.
- Entries of a directory that was not fsynced (created, renamed, removed) are there in any subset
  that keeps the order of the changes to one name. A rename is one change.
- Nothing that was fsynced gets lost. fsync of a file does not flush its entry.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

FILE, DIRECTORY, LINK = "file", "directory", "link"
_PRODUCT_LIMIT = 64


class Version(NamedTuple):
    """Metadata and content of one inode; the content of a link is its target."""

    mode: int
    uid: int
    gid: int
    xattrs: tuple[tuple[str, bytes], ...] = ()
    content: bytes = b""


class Entry(NamedTuple):
    """An entry of a tree; ``number`` is the inode's."""

    kind: str
    version: Version
    number: int


Tree = dict[str, Entry]
"""The entries below a root by their paths, which begin with a slash; the root itself is ``""``."""

Change = Mapping[str, "Inode | None"]


class Inode:
    """One inode: its versions since the last flush, and its entries if it is a directory."""

    def __init__(self, number: int, kind: str, version: Version, *, is_flushed: bool) -> None:
        self.number = number
        self.kind = kind
        self.versions = [version]
        """The first is on the disk, unless `is_new`; the last is the current one."""
        self.is_new = not is_flushed
        self.entries: dict[str, Inode] = {}
        self.flushed_entries: dict[str, Inode] = {}
        self.changes: list[Change] = []

    @property
    def is_dirty(self) -> bool:
        return self.is_new or len(self.versions) > 1 or bool(self.changes)

    @property
    def current(self) -> "Outcome":
        return Outcome(self.versions[-1], self.entries)

    def write_version(self, version: Version) -> None:
        """Change content or metadata."""
        if version != self.versions[-1]:
            self.versions.append(version)

    def change_entries(self, change: Change) -> None:
        """Change names in this directory in one step."""
        self.changes.append(change)
        _apply_change(self.entries, change)

    def flush(self) -> None:
        """Make the current state durable."""
        del self.versions[:-1]
        self.is_new = False
        self.flushed_entries = dict(self.entries)
        self.changes.clear()

    def list_outcomes(self, chance: random.Random) -> "list[Outcome]":
        """Return the states that a power cut may leave; the first is that without any new write."""
        versions = list(dict.fromkeys(self._list_versions()))
        directories = self._list_directories(chance)
        return [Outcome(version, entries) for version in versions for entries in directories]

    def _list_versions(self) -> Iterator[Version]:
        first, last = self.versions[0], self.versions[-1]
        if self.is_new and self.kind == FILE:
            yield first._replace(content=b"")
        yield from self.versions
        if len(self.versions) > 1:
            # Metadata and content reach the disk apart.
            yield first._replace(content=last.content)
            yield last._replace(content=first.content)
        if self.kind == FILE and (self.is_new or first.content != last.content):
            kept = b"" if self.is_new else first.content
            if not last.content.startswith(kept):
                kept = b""
            added = len(last.content) - len(kept)
            yield last._replace(content=last.content[: len(kept) + added // 2])
            yield last._replace(content=kept + bytes(added))

    def _list_directories(self, chance: random.Random) -> "list[dict[str, Inode]]":
        found: list[dict[str, Inode]] = []
        for chosen in _list_subsets(self.changes, chance):
            entries = dict(self.flushed_entries)
            for change in chosen:
                _apply_change(entries, change)
            if entries not in found:
                found.append(entries)
        return found


class Outcome(NamedTuple):
    """A state of one inode."""

    version: Version
    entries: dict[str, Inode]


def _apply_change(entries: dict[str, Inode], change: Change) -> None:
    for name, inode in change.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


def _list_subsets(changes: Sequence[Change], chance: random.Random) -> Iterator[list[Change]]:
    """Yield subsets in which each change comes with all earlier ones of its names.

    All of them up to six changes; else none, all, each prefix, all but one, and some of the rest.
    """
    count = len(changes)
    if count <= 6:
        choices = list(itertools.product((False, True), repeat=count))
    else:
        choices = [tuple(index < end for index in range(count)) for end in range(count + 1)]
        choices += [tuple(index != lost for index in range(count)) for lost in range(count)]
        choices += [tuple(index == kept for index in range(count)) for kept in range(count)]
        choices += [tuple(chance.random() < 0.5 for _ in changes) for _ in range(8)]
    for choice in choices:
        lost: set[str] = set()
        chosen: list[Change] = []
        for change, is_kept in zip(changes, choice, strict=True):
            if is_kept and lost.isdisjoint(change):
                chosen.append(change)
            else:
                lost.update(change)
        yield chosen


class DiskModel:
    """All inodes below one root directory."""

    def __init__(self, top: Inode) -> None:
        self.top = top

    def list_inodes(self) -> list[Inode]:
        """Return the inodes that have a name now."""
        return [inode for _, inode in self._walk_current()]

    def flush_all(self) -> None:
        """Flush as syncfs does."""
        for inode in self.list_inodes():
            inode.flush()

    def flush_below(self, path: str) -> None:
        """Flush all below a directory: in memory nothing is flushed, and nothing is kept."""
        for place, inode in list(self._walk_current()):
            if f"{place}/".startswith(f"{path}/"):
                inode.flush()

    def read_tree(self) -> Tree:
        """Return the tree that the running system sees."""
        return _build_tree(self.top, {})

    def list_trees(self, limit: int, seed: int) -> Iterator[Tree]:
        """Yield trees that a power cut may leave, at most about ``limit``.

        All of them if they are few. Otherwise: no write that is not flushed; each single inode
        with each of its states, while all others have all writes or none; then a random sample.
        """
        chance = random.Random(seed)
        dirty = self._list_dirty()
        outcomes = {id(inode): inode.list_outcomes(chance) for inode in dirty}
        total = 1
        for each in outcomes.values():
            total = min(total * len(each), 1 << 40)
        if total <= min(limit, _PRODUCT_LIMIT):
            for states in itertools.product(*outcomes.values()):
                yield _build_tree(self.top, dict(zip(outcomes, states, strict=True)))
            return
        lost = {number: states[0] for number, states in outcomes.items()}
        kept = {id(inode): inode.current for inode in dirty}
        trees = [lost, kept]
        trees += [
            base | {number: state}
            for number, states in outcomes.items()
            for state in states
            for base in (kept, lost)
        ]
        if len(trees) > limit:
            trees = trees[:2] + chance.sample(trees[2:], max(limit - 2, 0))
        while len(trees) < limit:
            trees.append({number: chance.choice(states) for number, states in outcomes.items()})
        for chosen in trees:
            yield _build_tree(self.top, chosen)

    def _list_dirty(self) -> list[Inode]:
        """Return the inodes with anything to lose, those that only the disk has included."""
        found: dict[int, Inode] = {}
        todo = [self.top]
        while todo:
            inode = todo.pop()
            if id(inode) in found:
                continue
            found[id(inode)] = inode
            todo += inode.entries.values()
            todo += inode.flushed_entries.values()
            todo += (each for change in inode.changes for each in change.values() if each)
        return [inode for inode in found.values() if inode.is_dirty]

    def _walk_current(self) -> Iterator[tuple[str, Inode]]:
        todo = [("", self.top)]
        while todo:
            path, inode = todo.pop()
            yield path, inode
            todo.extend((f"{path}/{name}", below) for name, below in inode.entries.items())


def _build_tree(top: Inode, chosen: Mapping[int, Outcome]) -> Tree:
    tree: Tree = {}
    todo = [("", top)]
    while todo:
        path, inode = todo.pop()
        version, entries = chosen.get(id(inode)) or inode.current
        tree[path] = Entry(inode.kind, version, inode.number)
        todo.extend((f"{path}/{name}", below) for name, below in entries.items())
    return tree
