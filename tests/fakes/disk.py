"""A disk in memory that can lose power, and remembers then only what was flushed."""

import errno
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from treenail.host.disk import Disk

Entry = tuple[str, int, bytes]
"""What is at a path: its kind, its mode, a file's content or a link's text."""
Tree = dict[str, Entry]

_STATES = 1_000


class PowerCut(BaseException):
    """The power goes; nothing that runs may cope with it."""


class Node:
    """A file, link or directory: as the running system sees it, and as the disk has it."""

    def __init__(self, kind: str, mode: int, content: bytes = b"") -> None:
        self.kind = kind
        self.mode = mode
        self.content = content
        self.flushed: tuple[int, bytes] | None = None
        self.entries: dict[str, Node] = {}
        self.flushed_entries: dict[str, Node] = {}
        self.pending: list[dict[str, Node | None]] = []

    def change(self, entries: "dict[str, Node | None]") -> None:
        """Change names in this directory, all in one step."""
        self.pending.append(entries)
        _apply(self.entries, entries)

    def flush(self) -> None:
        self.flushed = (self.mode, self.content)
        self.flushed_entries = dict(self.entries)
        self.pending.clear()

    def everything(self) -> Iterator["Node"]:
        yield self
        for below in self.entries.values():
            yield from below.everything()

    def outcomes(self) -> list[tuple[int, bytes, dict[str, "Node"]]]:
        """What the disk may have of this after a power cut.

        Without a flush any part of a file may have arrived, its length before its bytes, and
        any of the changes to a directory.
        """
        now = (self.mode, self.content)
        found = (
            [now]
            if self.kind == "link" or self.flushed == now
            else [
                self.flushed or (0, b""),
                now,
                (self.mode, self.content[: len(self.content) // 2]),
                (self.mode, bytes(len(self.content))),
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
    """The same calls as a real disk.

    ``calls`` is the number of calls after which the power goes; ``deaf_to`` is told the number
    of each flush and says whether it is forgotten.
    """

    def __init__(self, tree: Tree | None = None, *, flushed: bool = True) -> None:
        """A disk with these entries, the first of which has been flushed in any case."""
        self.root = Node("directory", 0o755)
        for number, (path, (kind, mode, content)) in enumerate(sorted((tree or {}).items())):
            parent = self._node(Path(path).parent)
            parent.change({Path(path).name: Node(kind, mode, content)})
            if flushed or number == 0:
                for node in self.root.everything():
                    node.flush()
        self.flushes = 0
        self.deaf_to: Callable[[int], bool] = lambda _: False
        self.calls_left: int | None = None
        self._open: dict[int, tuple[Node, int]] = {}

    def tree(self) -> Tree:
        """What the running system sees."""
        return _tree(self.root, lambda node: (node.mode, node.content, node.entries))

    def after_power_cut(self) -> Iterator[Tree]:
        """What the next start may find: all there is, or a great many when there is too much."""
        nodes = list({id(node): node for node in self._reachable()}.values())
        outcomes = [node.outcomes() for node in nodes]
        total = 1
        for each in outcomes:
            total *= len(each)
        if total <= _STATES:
            states: Iterator[tuple[tuple[int, bytes, dict[str, Node]], ...]] = itertools.product(
                *outcomes
            )
        else:
            chance = random.Random(total)
            states = (tuple(chance.choice(each) for each in outcomes) for _ in range(_STATES))
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

    # The calls.

    def status(self, path: Path) -> os.stat_result:
        return _status(self._node(path))

    def status_of(self, descriptor: int) -> os.stat_result:
        return _status(self._open[descriptor][0])

    def names(self, directory: Path) -> list[str]:
        return sorted(self._node(directory).entries)

    def create(self, path: Path) -> int:
        parent = self._node(path.parent)
        if path.name in parent.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._count()
        parent.change({path.name: Node("file", 0o600)})
        return self.open(path)

    def open(self, path: Path) -> int:
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
        self._open[descriptor][0].content += content[:3]
        return len(content[:3])

    def own(self, descriptor: int, uid: int, gid: int) -> None:
        raise NotImplementedError

    def change_mode(self, descriptor: int, mode: int) -> None:
        self._count()
        self._open[descriptor][0].mode = mode

    def label(self, target: Path | int) -> bytes:
        return b""

    def change_label(self, descriptor: int, label: bytes) -> None:
        raise NotImplementedError

    def sync(self, descriptor: int) -> None:
        self._count()
        self._flush([self._open[descriptor][0]])

    def sync_filesystem(self, descriptor: int) -> None:
        self._count()
        self._flush(list(self.root.everything()))

    def replace(self, path: Path, target: Path) -> None:
        self._count()
        assert path.parent == target.parent
        parent = self._node(path.parent)
        old = parent.entries.get(target.name)
        if old is not None and old.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        parent.change({path.name: None, target.name: parent.entries[path.name]})

    def link_text(self, path: Path) -> str:
        return self._node(path).content.decode()

    def symlink(self, path: Path, text: str) -> None:
        self._count()
        assert path.name not in self._node(path.parent).entries
        self._node(path.parent).change({path.name: Node("link", 0o777, text.encode())})

    def unlink(self, path: Path) -> None:
        node = self._node(path)
        if node.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._count()
        self._node(path.parent).change({path.name: None})

    def make_directory(self, path: Path) -> None:
        self._count()
        assert path.name not in self._node(path.parent).entries
        self._node(path.parent).change({path.name: Node("directory", 0o700)})

    def remove_directory(self, path: Path) -> None:
        self._count()
        if self._node(path).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        self._node(path.parent).change({path.name: None})

    def _count(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise PowerCut

    def _flush(self, nodes: list[Node]) -> None:
        self.flushes += 1
        if not self.deaf_to(self.flushes - 1):
            for node in nodes:
                node.flush()

    def _node(self, path: Path) -> Node:
        node = self.root
        for name in path.parts[1:]:
            if node.kind != "directory":
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            node = node.entries[name]
        return node


def _status(node: Node) -> os.stat_result:
    kind = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}[node.kind]
    return os.stat_result((kind | node.mode, id(node), 1, 1, 0, 0, len(node.content), 0, 0, 0))


def _tree(root: Node, outcome: Callable[[Node], tuple[int, bytes, dict[str, Node]]]) -> Tree:
    found: Tree = {}
    todo = [("", root)]
    while todo:
        path, node = todo.pop()
        mode, content, entries = outcome(node)
        if path:
            found[path] = (node.kind, mode, content)
        todo.extend((f"{path}/{name}", below) for name, below in entries.items())
    return found
