"""Records the system calls that change files below a directory, made by this process.

While a `Recorder` is active, the functions of `os` that change files, ``open`` for writing, and
renameat2 and syncfs of `Disk` go through it. After each call it compares the entries that the call
names with its `DiskModel`, so the model cannot drift from the real disk unseen:
`Recorder.find_unseen_changes` reads the whole directory and compares.
"""

import builtins
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import treenail
from tests.crash.disk_model import DIRECTORY, FILE, LINK, DiskModel, Entry, Inode, Tree, Version
from treenail.host.filesystem.disk import Disk

StrPath = str | os.PathLike[str]

WRITES_TO_DESCRIPTOR = (
    "write",
    "pwrite",
    "writev",
    "ftruncate",
    "fchmod",
    "fchown",
    "posix_fallocate",
)
WRITES_TO_PATH = ("chmod", "chown", "lchown", "setxattr", "removexattr", "truncate", "utime")
ONE_ENTRY = ("symlink", "unlink", "remove", "mkdir", "rmdir", "mkfifo")
TWO_ENTRIES = ("rename", "replace", "link")
FLUSHES = ("fsync", "fdatasync")
RENAMES = ("rename", "replace", "exchange")
_PRODUCT = f"{Path(treenail.__file__).parent}{os.sep}"
_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: LINK}


class Site(NamedTuple):
    """The place of a call in the code: the functions of the product that lead to it."""

    call: str
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.call} in {' > '.join(self.functions)}"


class Recorder:
    """Follows the files below a directory.

    ``on_call`` is called before each call that changes something, with its description. Calls of
    the sites in ``omitted`` do nothing and return success.
    """

    def __init__(self, root: Path, *, omitted: frozenset[Site] = frozenset()) -> None:
        self.root = Path(os.path.realpath(root))
        self.omitted = omitted
        self.on_call: Callable[[str], None] = lambda _: None
        self.sites: dict[Site, int] = {}
        """The number of calls of each site."""
        self.calls = 0
        self.omitted_calls = 0
        self.numbers: dict[int, int] = {}
        """The number of each real inode: in the order of creation, so that runs can be compared."""
        self._is_paused = False
        self._thread = threading.get_ident()
        self._real: dict[str, Any] = {}
        self.forget_history()

    def forget_history(self) -> None:
        """Read the directory again, and take everything in it as flushed."""
        self._inodes: dict[int, Inode] = {}
        self.model = DiskModel(self._read_inode(self.root, is_flushed=True))
        self._device = os.lstat(self.root).st_dev

    def take_as_unflushed(self) -> None:
        """Take what was written since without this recorder as not flushed."""
        todo = [self.root]
        while todo:
            parent = todo.pop()
            directory = self._inodes[os.lstat(parent).st_ino]
            for name in sorted(os.listdir(parent)):
                if name not in directory.entries:
                    directory.change_entries({name: self._read_inode(parent / name)})
                if directory.entries[name].kind == DIRECTORY:
                    todo.append(parent / name)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not record while within; afterwards everything counts as flushed."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
            self.forget_history()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Do not record while within, and keep what is known: other directories are changed."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the calls of this thread while within."""
        replaced: list[tuple[Any, str, Any]] = []

        def put(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
            real = getattr(owner, name)
            replaced.append((owner, name, real))
            recorded = make(real)

            def call(*arguments: Any, **keywords: Any) -> Any:
                chosen = recorded if self._is_recording() else real
                return chosen(*arguments, **keywords)

            setattr(owner, name, call)

        for names, wrap in (
            (WRITES_TO_DESCRIPTOR, self._wrap_descriptor),
            (WRITES_TO_PATH, self._wrap_path),
            (ONE_ENTRY, partial(self._wrap_entries, count=1)),
            (TWO_ENTRIES, partial(self._wrap_entries, count=2)),
            (FLUSHES, self._wrap_fsync),
        ):
            for name in names:
                put(os, name, partial(wrap, name))
        put(os, "open", self._wrap_open)
        put(builtins, "open", self._wrap_file)
        put(io, "open", self._wrap_file)
        put(Disk, "exchange", self._wrap_exchange)
        put(Disk, "syncfs", self._wrap_syncfs)
        try:
            yield
        finally:
            for owner, name, real in reversed(replaced):
                setattr(owner, name, real)

    def find_unseen_changes(self) -> list[str]:
        """Return the paths whose entry differs from the model; empty if all calls were seen."""
        known = self.model.read_tree()
        now = {
            path: entry._replace(number=self.numbers.get(entry.number, 0))
            for path, entry in read_tree(self.root).items()
        }
        return sorted(
            path for path in now.keys() | known.keys() if now.get(path) != known.get(path)
        )

    # Calls.

    def _is_recording(self) -> bool:
        return not self._is_paused and threading.get_ident() == self._thread

    def _is_omitted(self, call: str, target: str) -> bool:
        """Count the call; return whether it is one of those that are omitted."""
        site = Site(call, find_functions())
        self.on_call(f"{call} {target}")
        self.calls += 1
        self.sites[site] = self.sites.get(site, 0) + 1
        is_omitted = site in self.omitted
        self.omitted_calls += is_omitted
        return is_omitted

    def _wrap_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any, **keywords: Any) -> Any:
            inode = self._find_open_inode(descriptor)
            if inode is None:
                return real(descriptor, *arguments, **keywords)
            if self._is_omitted(name, self._name(inode)):
                return len(arguments[0]) if name in {"write", "pwrite"} else None
            result = real(descriptor, *arguments, **keywords)
            inode.write_version(_read_version(f"/proc/self/fd/{descriptor}", follow=True))
            return result

        return call

    def _wrap_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: StrPath | int, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(target, int):
                wrapped = self._wrap_descriptor(name, real)
                return wrapped(target, *arguments, **keywords)
            follows = name != "lchown" and keywords.get("follow_symlinks", True)
            place = _join_directory(target, keywords.get("dir_fd"))
            path = Path(os.path.realpath(place)) if follows else self._locate(place)
            if path is None or not self._covers(path):
                return real(target, *arguments, **keywords)
            if self._is_omitted(name, self._shorten(path)):
                return None
            result = real(target, *arguments, **keywords)
            self._inodes[os.lstat(path).st_ino].write_version(_read_version(path))
            return result

        return call

    def _wrap_entries(self, name: str, real: Callable[..., Any], count: int) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            named = arguments[1:2] if name == "symlink" else arguments[:count]
            keys = ("src_dir_fd", "dst_dir_fd") if count == 2 else ("dir_fd",)
            places = map(_join_directory, named, map(keywords.get, keys))
            paths = [path for each in places if (path := self._locate(each)) is not None]
            if not paths or not all(map(self._covers, paths)):
                return real(*arguments, **keywords)
            if self._is_omitted(name, " ".join(map(self._shorten, paths))):
                return None
            result = real(*arguments, **keywords)
            self._compare_directories(paths)
            return result

        return call

    def _wrap_fsync(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int) -> None:
            inode = self._find_open_inode(descriptor)
            if inode is None:
                real(descriptor)
            elif not self._is_omitted(name, self._name(inode)):
                inode.flush()

        return call

    def _wrap_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
            if isinstance(path, int) or not flags & (os.O_CREAT | os.O_TRUNC):
                return int(real(path, flags, *arguments, **keywords))
            place = Path(os.path.realpath(_join_directory(path, keywords.get("dir_fd"))))
            if not self._covers(place):
                return int(real(path, flags, *arguments, **keywords))
            exists = os.path.lexists(place)
            if exists and not flags & os.O_TRUNC:
                return int(real(path, flags, *arguments, **keywords))
            # Never omitted: the caller needs a descriptor.
            self._is_omitted("create", self._shorten(place))
            descriptor = int(real(path, flags, *arguments, **keywords))
            self._compare_directories([place])
            self._inodes[os.fstat(descriptor).st_ino].write_version(_read_version(place))
            return descriptor

        return call

    def _wrap_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            is_read = not set(mode) & set("wax+")
            if is_read or isinstance(file, int) or not self._is_recording():
                return real(file, mode, *arguments, **keywords)
            if not self._covers(Path(os.path.realpath(file))):
                return real(file, mode, *arguments, **keywords)
            raise NotImplementedError(f"the recorder does not see writes to {file} by open()")

        return call

    def _wrap_exchange(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(disk: Disk, path: StrPath, other: StrPath) -> None:
            places = [place for each in (path, other) if (place := self._locate(each)) is not None]
            if not all(map(self._covers, places)):
                real(disk, path, other)
            elif not self._is_omitted("exchange", " ".join(map(self._shorten, places))):
                real(disk, path, other)
                self._compare_directories(places)

        return call

    def _wrap_syncfs(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(disk: Disk, descriptor: int) -> None:
            if not self._is_recording():
                real(disk, descriptor)
            elif not self._is_omitted("syncfs", self._name(self._find_open_inode(descriptor))):
                self.model.flush_all()

        return call

    # The model.

    def _covers(self, path: Path) -> bool:
        return self._is_recording() and path.is_relative_to(self.root) and path != self.root

    def _locate(self, path: StrPath) -> Path | None:
        """Return the real path of an entry, whose last component is not followed."""
        parent, name = os.path.split(os.path.abspath(path))
        return Path(os.path.realpath(parent)) / name if name else None

    def _shorten(self, path: Path) -> str:
        return path.as_posix().removeprefix(self.root.as_posix())

    def _name(self, inode: Inode | None) -> str:
        for path, entry in self.model.read_tree().items():
            if inode is not None and entry.number == inode.number:
                return path or "/"
        return "a removed file"

    def _find_open_inode(self, descriptor: int) -> Inode | None:
        if not self._is_recording():
            return None
        status = os.fstat(descriptor)
        return self._inodes.get(status.st_ino) if status.st_dev == self._device else None

    def _compare_directories(self, paths: list[Path]) -> None:
        """Record the difference of the parent directories, as one change of each."""
        for parent in dict.fromkeys(path.parent for path in paths):
            directory = self._inodes[os.lstat(parent).st_ino]
            with os.scandir(parent) as found:
                numbers = {each.name: each.inode() for each in found}
            change: dict[str, Inode | None] = {
                name: None for name in directory.entries if name not in numbers
            }
            for name, number in sorted(numbers.items()):
                known = directory.entries.get(name)
                if known is None or known is not self._inodes.get(number):
                    change[name] = self._inodes.get(number) or self._read_inode(parent / name)
            gone = [directory.entries[name] for name in change if name in directory.entries]
            if change:
                directory.change_entries(change)
            for inode in gone:
                self._forget_unnamed(inode)

    def _forget_unnamed(self, inode: Inode) -> None:
        # The file system may give the number to a new file.
        if all(inode is not each for each in self.model.list_inodes()):
            self._inodes = {key: each for key, each in self._inodes.items() if each is not inode}

    def _read_inode(self, path: Path, *, is_flushed: bool = False) -> Inode:
        entry = _read_entry(path)
        inode = self._inodes.get(entry.number)
        if inode is None:
            number = self.numbers.setdefault(entry.number, len(self.numbers) + 1)
            inode = Inode(number, entry.kind, entry.version, is_flushed=is_flushed)
            self._inodes[entry.number] = inode
            if entry.kind == DIRECTORY:
                inode.entries = {
                    name: self._read_inode(path / name, is_flushed=is_flushed)
                    for name in sorted(os.listdir(path))
                }
                inode.flushed_entries = dict(inode.entries) if is_flushed else {}
        return inode


def read_tree(root: Path) -> Tree:
    """Read everything below a directory."""
    tree: Tree = {}
    todo = [("", os.fspath(root))]
    while todo:
        name, path = todo.pop()
        tree[name] = entry = _read_entry(path)
        if entry.kind == DIRECTORY:
            todo.extend((f"{name}/{each}", f"{path}/{each}") for each in os.listdir(path))
    return tree


def _read_entry(path: StrPath) -> Entry:
    status = os.lstat(path)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        raise NotImplementedError(f"{path} is no file, directory or link")
    return Entry(kind, _read_version(path, status), status.st_ino)


def _read_version(
    path: StrPath, status: os.stat_result | None = None, *, follow: bool = False
) -> Version:
    if status is None:
        status = os.stat(path, follow_symlinks=follow)
    content = b""
    if stat.S_ISLNK(status.st_mode):
        content = os.fsencode(os.readlink(path))
    elif stat.S_ISREG(status.st_mode) and status.st_size:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while part := os.read(descriptor, 1 << 20):
                content += part
        finally:
            os.close(descriptor)
    names = os.listxattr(path, follow_symlinks=follow)
    xattrs = tuple(
        (name, os.getxattr(path, name, follow_symlinks=follow)) for name in sorted(names)
    )
    return Version(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, xattrs, content)


def _join_directory(path: StrPath, descriptor: int | None) -> StrPath:
    """Return the path of an entry of the open directory."""
    if descriptor is None:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), path)


def find_functions() -> tuple[str, ...]:
    """Return the functions of the product on the stack, the outermost first, each once."""
    functions: list[str] = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_filename.startswith(_PRODUCT) and not code.co_qualname.startswith("Disk."):
            functions.append(code.co_qualname)
    return tuple(dict.fromkeys(reversed(functions)))
