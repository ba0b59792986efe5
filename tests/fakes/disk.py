"""A disk in memory that can lose power and then keeps only flushed changes."""

import errno
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from typing import NamedTuple, Self

from treenail.host.filesystem.disk import Disk, StrPath
from treenail.host.filesystem.selinux import SelinuxPolicy


class Entry(NamedTuple):
    """The entry at a path: kind, mode, and the content of a file or the target of a link."""

    kind: str
    mode: int
    content: bytes
    uid: int = 0
    gid: int = 0
    attributes: tuple[tuple[str, bytes], ...] = ()


class Inode(NamedTuple):
    """The metadata of an entry."""

    mode: int
    uid: int = 0
    gid: int = 0
    attributes: tuple[tuple[str, bytes], ...] = ()


Tree = dict[str, Entry]


class Found(dict[str, Entry]):
    """A tree with the inode number of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.inodes: dict[str, int] = {}


Outcome = tuple[Inode, bytes, dict[str, "Node"]]

_STATES = 1_000
_LABEL = "security.selinux"


class PowerCut(BaseException):
    """The power goes; no code under test may catch it."""


class Node:
    """A file, link or directory: its state in the running system and its state on the disk."""

    def __init__(self, number: int, kind: str, inode: Inode, content: bytes = b"") -> None:
        self.number = number
        self.device = 0
        self.kind = kind
        self.inode = inode
        self.content = content
        self.flushed: tuple[Inode, bytes] | None = None
        self.entries: dict[str, Node] = {}
        self.flushed_entries: dict[str, Node] = {}
        self.pending: list[dict[str, Node | None]] = []

    def change(self, entries: "dict[str, Node | None]") -> None:
        """Change names in this directory atomically."""
        for node in entries.values():
            if node is not None:
                node.device = node.device or self.device
        self.pending.append(entries)
        _apply(self.entries, entries)

    def flush(self) -> None:
        self.flushed = (self.inode, self.content)
        self.flushed_entries = dict(self.entries)
        self.pending.clear()

    def everything(self) -> list["Node"]:
        found = [self]
        for node in found:
            found += node.entries.values()
        return found

    def outcomes(self) -> list[Outcome]:
        """Return the states that the disk may have after a power cut.

        Without a flush any part of a file may be on disk, its length before its bytes, and any
        subset of the changes to a directory. Flushed content stays.
        """
        now = (self.inode, self.content)
        if self.flushed == now and not self.pending:
            return [(*now, self.flushed_entries)]
        kept = self.flushed[1] if self.flushed else b""
        if not self.content.startswith(kept):
            kept = b""
        added = self.content[len(kept) :]
        found = (
            [now]
            if self.kind == "link" or self.flushed == now
            else [
                self.flushed or (Inode(0), b""),
                now,
                (self.inode, kept + added[: len(added) // 2]),
                (self.inode, kept + bytes(len(added))),
            ]
        )
        subsets = itertools.product((False, True), repeat=len(self.pending))
        directories = []
        for subset in subsets:
            entries = dict(self.flushed_entries)
            for change in itertools.compress(self.pending, subset):
                _apply(entries, change)
            if entries not in directories:
                directories.append(entries)
        return [(*each, entries) for each in dict.fromkeys(found) for entries in directories]


def _apply(entries: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class MemoryDisk(Disk):
    """A disk with the methods of the real one.

    ``calls_left`` is the number of calls until the power cut. ``ignores_flush`` gets the number of
    each flush and returns whether the disk drops it. A call writes ``chunk`` bytes. Each of
    ``mounts`` is another file system.
    """

    mounts: tuple[str, ...] = ()
    labels: SelinuxPolicy | None = None

    def __init__(self, tree: Tree | None = None, *, flushed: bool = True) -> None:
        """Make a disk with these entries; the first is always flushed."""
        self.root = Node(1, "directory", Inode(0o755))
        self.root.device = 1
        inodes = tree.inodes if isinstance(tree, Found) else {}
        nodes: dict[int, Node] = {}
        for number, (path, (kind, mode, content, *rest)) in enumerate(sorted((tree or {}).items())):
            inode = inodes.get(path, number + 2)
            if inode not in nodes:
                nodes[inode] = Node(inode, kind, Inode(mode, *rest), content)
            if path in self.mounts:
                nodes[inode].device = inode
            parent, name = self._split(path)
            parent.change({name: nodes[inode]})
            if number == 0:
                self._flush_all()
        if flushed:
            self._flush_all()
        self.chunk = 3
        self.flushes = 0
        self.ignores_flush: Callable[[int], bool] = lambda _: False
        self.calls_left: int | None = None
        self._open: dict[int, tuple[Node, int]] = {}

    def replace_by(self, tree: Tree) -> None:
        """Replace all entries; they are flushed, and no descriptor is open."""
        self.root = type(self)(tree).root
        self._open.clear()

    def abandoned(self) -> Self:
        """Return a copy as after a kill of the process: no descriptor open, no further flush."""
        found = copy(self)
        found.root, found._open = deepcopy(self.root), {}
        return found

    def tree(self) -> Tree:
        """Return the state in the running system."""
        return _tree(self.root, lambda node: (node.inode, node.content, node.entries))

    def content(self, path: str) -> bytes | None:
        """The content that the running system reads at this path; None without an entry."""
        try:
            return self._node(path).content
        except (FileNotFoundError, NotADirectoryError):
            return None

    def after_power_cut(self, states_limit: int = _STATES) -> Iterator[Tree]:
        """Yield the possible states at the next boot: all of them, or a random selection."""
        nodes = list({id(node): node for node in self._reachable()}.values())
        outcomes = [node.outcomes() for node in nodes]
        total = 1
        for each in outcomes:
            total *= len(each)
        if total <= states_limit:
            states: Iterator[tuple[Outcome, ...]] = itertools.product(*outcomes)
        else:
            chance = random.Random(total)
            states = (tuple(chance.choice(each) for each in outcomes) for _ in range(states_limit))
        for state in states:
            chosen = dict(zip(map(id, nodes), state, strict=True))
            yield _tree(self.root, lambda node, chosen=chosen: chosen[id(node)])

    def _reachable(self) -> Iterator[Node]:
        todo = [self.root]
        seen: set[int] = set()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            for _, _, entries in node.outcomes():
                todo.extend(entries.values())

    # System calls.

    def begin_change(self) -> None:
        """No other user changes this disk."""

    def lstat(self, path: StrPath) -> os.stat_result:
        return _status(self._node(path))

    def fstat(self, descriptor: int) -> os.stat_result:
        return _status(self._open[descriptor][0])

    def listdir(self, directory: StrPath) -> list[str]:
        return sorted(self._node(directory).entries)

    def create(self, path: StrPath) -> int:
        parent, name = self._split(path)
        if name in parent.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._count()
        parent.change({name: Node(self._unused(), "file", Inode(0o600))})
        return self.open(path)

    def open(self, path: StrPath) -> int:
        descriptor = next(number for number in itertools.count(3) if number not in self._open)
        self._open[descriptor] = self._node(path), 0
        return descriptor

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def read(self, descriptor: int, size: int) -> bytes:
        node, position = self._open[descriptor]
        self._open[descriptor] = node, position + size
        return node.content[position : position + size]

    def write(self, descriptor: int, content: bytes) -> int:
        self._count()
        self._open[descriptor][0].content += content[: self.chunk]
        return len(content[: self.chunk])

    def chown(self, descriptor: int, uid: int, gid: int) -> None:
        self._count()
        _own(self._open[descriptor][0], uid, gid)

    def lchown(self, path: StrPath, uid: int, gid: int) -> None:
        self._count()
        _own(self._node(path), uid, gid)

    def chmod(self, descriptor: int, mode: int) -> None:
        self._count()
        node = self._open[descriptor][0]
        node.inode = node.inode._replace(mode=mode)

    def read_label(self, target: StrPath | int) -> bytes:
        try:
            node = self._open[target][0] if isinstance(target, int) else self._node(target)
        except FileNotFoundError:
            return b""
        return dict(node.inode.attributes).get(_LABEL, b"")

    decide_label = Disk.decide_label
    release_memory = Disk.release_memory

    def set_label(self, target: StrPath | int, label: bytes) -> None:
        self._count()
        node = self._open[target][0] if isinstance(target, int) else self._node(target)
        _label(node, {_LABEL: label})

    def read_xattrs(self, descriptor: int) -> dict[str, bytes]:
        return dict(self._open[descriptor][0].inode.attributes)

    def set_xattr(self, descriptor: int, name: str, value: bytes) -> None:
        self._count()
        _label(self._open[descriptor][0], {name: value})

    def remove_xattr(self, descriptor: int, name: str) -> None:
        self._count()
        _label(self._open[descriptor][0], {name: None})

    def fsync(self, descriptor: int) -> None:
        self._count()
        self._flush([self._open[descriptor][0]])

    def syncfs(self, descriptor: int) -> None:
        self._count()
        device = self._open[descriptor][0].device
        self._flush([node for node in self.root.everything() if node.device == device])

    def replace(self, path: StrPath, target: StrPath) -> None:
        self._count()
        (parent, name), (other, new) = self._split(path), self._split(target)
        assert parent is other
        old = parent.entries.get(new)
        if old is not None and old.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if old is not None and old is parent.entries[name]:
            return  # rename(2): two names of one file stay
        parent.change({name: None, new: parent.entries[name]})

    def exchange(self, path: StrPath, other: StrPath) -> None:
        self._count()
        (parent, name), (above, new) = self._split(path), self._split(other)
        assert parent is above
        if not {name, new} <= parent.entries.keys():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        parent.change({name: parent.entries[new], new: parent.entries[name]})

    def readlink(self, path: StrPath) -> str:
        return self._node(path).content.decode()

    def symlink(self, path: StrPath, text: str) -> None:
        self._count()
        parent, name = self._split(path)
        assert name not in parent.entries
        parent.change({name: Node(self._unused(), "link", Inode(0o777), text.encode())})

    def link(self, path: StrPath, new: StrPath) -> None:
        self._count()
        node = self._node(path)
        assert node.kind != "directory"
        parent, name = self._split(new)
        if name in parent.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        parent.change({name: node})

    def unlink(self, path: StrPath) -> None:
        node = self._node(path)
        if node.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._count()
        parent, name = self._split(path)
        parent.change({name: None})

    def mkdir(self, path: StrPath) -> None:
        self._count()
        parent, name = self._split(path)
        assert name not in parent.entries
        parent.change({name: Node(self._unused(), "directory", Inode(0o700))})

    def rmdir(self, path: StrPath) -> None:
        self._count()
        if self._node(path).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        parent, name = self._split(path)
        parent.change({name: None})

    def _count(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise PowerCut

    def _flush(self, nodes: list[Node]) -> None:
        self.flushes += 1
        if not self.ignores_flush(self.flushes - 1):
            for node in nodes:
                node.flush()

    def _flush_all(self) -> None:
        for node in self.root.everything():
            node.flush()

    def _unused(self) -> int:
        """Return the lowest free inode number, counting inodes that only the disk still has."""
        used: set[int] = set()
        todo = [self.root]
        while todo:
            node = todo.pop()
            if node.number not in used:
                used.add(node.number)
                todo += node.entries.values()
                todo += node.flushed_entries.values()
                todo += (each for change in node.pending for each in change.values() if each)
        return next(number for number in itertools.count(1) if number not in used)

    def _split(self, path: StrPath) -> tuple[Node, str]:
        """Return the directory of the entry and its name there."""
        parent, _, name = os.fspath(path).rpartition("/")
        return self._node(parent), name

    def _node(self, path: StrPath) -> Node:
        node = self.root
        for name in os.fspath(path).split("/")[1:]:
            if node.kind != "directory":
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            node = node.entries[name]
        return node


def _status(node: Node) -> os.stat_result:
    kind = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}[node.kind]
    mode, uid, gid, _ = node.inode
    return os.stat_result(
        (kind | mode, node.number, node.device, 1, uid, gid, len(node.content), 0, 0, 0)
    )


def _own(node: Node, uid: int, gid: int) -> None:
    """Act as chown(2): -1 changes nothing, and the set-user-ID bit is cleared."""
    inode = node.inode
    node.inode = inode._replace(
        mode=inode.mode & 0o1777 if node.kind == "file" else inode.mode,
        uid=inode.uid if uid == -1 else uid,
        gid=inode.gid if gid == -1 else gid,
    )


def _label(node: Node, changes: dict[str, bytes | None]) -> None:
    attributes = dict(node.inode.attributes) | changes
    kept = sorted((name, value) for name, value in attributes.items() if value is not None)
    node.inode = node.inode._replace(attributes=tuple(kept))


def _tree(root: Node, outcome: Callable[[Node], Outcome]) -> Tree:
    found = Found()
    todo = [("", root)]
    while todo:
        path, node = todo.pop()
        inode, content, entries = outcome(node)
        if path:
            found[path] = Entry(node.kind, inode.mode, content, *inode[1:])
            found.inodes[path] = node.number
        todo.extend((f"{path}/{name}", below) for name, below in entries.items())
    return found
