"""The current state of paths: kind, mode, owner, digest, target and SELinux label."""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator

from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.filesystem.disk import Disk
from treenail.observations import EntryKind, PathEntry

_KINDS = {
    stat.S_IFREG: EntryKind.FILE,
    stat.S_IFDIR: EntryKind.DIRECTORY,
    stat.S_IFLNK: EntryKind.LINK,
}
_IRREPLACEABLE = {stat.S_IFDIR: EntryKind.DIRECTORY, stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
_CHUNK = 1024 * 1024


_NOTHING = PathEntry(EntryKind.NOTHING)


def stat_paths(root: root_directory.Root, disk: Disk, paths: Iterable[str]) -> dict[str, PathEntry]:
    """Return the state of each path below the root; raise `FileError`."""
    states: dict[str, PathEntry] = {}
    for path, entry in resolve_entries(root, paths).items():
        try:
            states[path] = _stat_entry(disk, entry)
        except OSError as error:
            raise atomic_files.make_file_error("inspect", entry, error) from error
    disk.release_memory()
    return states


def find_irreplaceable(
    root: root_directory.Root, disk: Disk, paths: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield the paths at which neither a file nor a link exists, each with what is there.

    Raises `FileError`.
    """
    for path, entry in resolve_entries(root, paths).items():
        try:
            kind = stat.S_IFMT(disk.lstat(entry).st_mode)
            if kind not in {stat.S_IFREG, stat.S_IFLNK}:
                yield path, _IRREPLACEABLE.get(kind, "device")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise atomic_files.make_file_error("inspect", entry, error) from error


def resolve_entries(root: root_directory.Root, paths: Iterable[str]) -> dict[str, str]:
    """Map each path to its entry below the root, links before it followed; raise `FileError`.

    Two paths may have the same entry. Each parent is resolved once.
    """
    parents: dict[str, str] = {}
    entries: dict[str, str] = {}
    for path in paths:
        parent, _, name = path.rpartition("/")
        if not parent or name in {"", ".", ".."}:
            entries[path] = os.fspath(root.resolve_entry(path))
            continue
        if parent not in parents:
            parents[parent] = os.fspath(root.resolve_path(parent)).removesuffix("/")
        entries[path] = f"{parents[parent]}/{name}"
    return entries


def _stat_entry(disk: Disk, entry: str) -> PathEntry:
    try:
        status = disk.lstat(entry)
    except (FileNotFoundError, NotADirectoryError):
        return _NOTHING
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), EntryKind.OTHER)
    label = expected_label = ""
    if disk.labels is not None:
        present = disk.read_label(entry)
        label = _decode_label(present)
        expected_label = _decode_label(disk.decide_label(entry, status, present))
    return PathEntry(
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        sha256=_compute_digest(disk, entry, status.st_size) if kind == EntryKind.FILE else "",
        target=disk.readlink(entry) if kind == EntryKind.LINK else "",
        inode=(status.st_dev, status.st_ino),
        label=label,
        expected_label=expected_label,
    )


def _compute_digest(disk: Disk, entry: str, size: int) -> str:
    # One byte more than the size, so that the first read reaches the end of the file.
    chunk = min(size + 1, _CHUNK)
    descriptor = disk.open(entry)
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
