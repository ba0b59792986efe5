"""What stands at paths now."""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import make_file_error
from treenail.host.filesystem.root import Root

FILE = "file"
DIRECTORY = "directory"
LINK = "link"
NOTHING = "nothing"
OTHER = "something else"
_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: LINK}
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PathStat:
    """What stands at a path; a link at its end is itself. ``inode`` names it on its device.

    ``label`` is its SELinux label, and ``expected_label`` the one that it ought to have; both are empty
    where no policy says anything.
    """

    kind: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    sha256: str = ""
    target: str = ""
    inode: tuple[int, int] = (0, 0)
    label: str = ""
    expected_label: str = ""


_NOTHING = PathStat(NOTHING)


def stat_paths(root: Root, disk: Disk, paths: Iterable[str]) -> dict[str, PathStat]:
    """What stands at each of the paths below the root; raises `FileError`."""
    found: dict[str, PathStat] = {}
    for path, place in resolve_entries(root, paths).items():
        try:
            found[path] = _stat_entry(disk, place)
        except OSError as error:
            raise make_file_error("look at", place, error) from error
    disk.release_memory()
    return found


def find_directories(root: Root, disk: Disk, paths: Iterable[str]) -> Iterator[str]:
    """Those of the paths at which a directory stands; raises `FileError`."""
    for path, place in resolve_entries(root, paths).items():
        try:
            if stat.S_ISDIR(disk.lstat(place).st_mode):
                yield path
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise make_file_error("look at", place, error) from error


def resolve_entries(root: Root, paths: Iterable[str]) -> dict[str, str]:
    """Where the entry of each of the paths is, the links before it followed; raises `FileError`.

    Two paths with one place are names of one entry.
    """
    parents: dict[str, str] = {}
    found: dict[str, str] = {}
    for path in paths:
        parent, _, name = path.rpartition("/")
        if not parent or name in {"", ".", ".."}:
            found[path] = os.fspath(root.resolve_entry(path))
            continue
        if parent not in parents:
            parents[parent] = os.fspath(root.resolve_path(parent)).removesuffix("/")
        found[path] = f"{parents[parent]}/{name}"
    return found


def _stat_entry(disk: Disk, place: str) -> PathStat:
    try:
        status = disk.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return _NOTHING
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), OTHER)
    label = fitting = ""
    if disk.labels is not None:
        present = disk.read_label(place)
        label, fitting = (
            _decode_label(present),
            _decode_label(disk.decide_label(place, status, present)),
        )
    return PathStat(
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        sha256=_compute_digest(disk, place, status.st_size) if kind == FILE else "",
        target=disk.readlink(place) if kind == LINK else "",
        inode=(status.st_dev, status.st_ino),
        label=label,
        expected_label=fitting,
    )


def _compute_digest(disk: Disk, place: str, size: int) -> str:
    """``size`` is what it had a moment ago: one byte more tells the end in one call."""
    chunk = min(size + 1, _CHUNK)
    descriptor = disk.open(place)
    try:
        part = disk.read(descriptor, chunk)
        digest = hashlib.sha256(part)
        while len(part) == chunk:
            part = disk.read(descriptor, chunk)
            digest.update(part)
    finally:
        disk.close(descriptor)
    return digest.hexdigest()


def _decode_label(label: bytes) -> str:
    return label.rstrip(b"\0").decode(errors="replace")
