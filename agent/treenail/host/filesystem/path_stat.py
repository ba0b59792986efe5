"""The current state of paths: kind, mode, owner, digest, target and SELinux label."""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from treenail import errors, observations
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.filesystem.disk import Disk

_KINDS = {
    stat.S_IFREG: observations.EntryKind.FILE,
    stat.S_IFDIR: observations.EntryKind.DIRECTORY,
    stat.S_IFLNK: observations.EntryKind.LINK,
}
_IRREPLACEABLE = {
    stat.S_IFDIR: observations.EntryKind.DIRECTORY,
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}
_CHUNK = 1024 * 1024


def stat_paths(
    root: root_directory.Root, disk: Disk, paths: Iterable[str]
) -> dict[str, observations.PathEntry]:
    """Return the state of each path below the root; raise `FileError`."""
    states: dict[str, observations.PathEntry] = {}
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


def _stat_entry(disk: Disk, entry: str) -> observations.PathEntry:
    try:
        status = disk.lstat(entry)
    except (FileNotFoundError, NotADirectoryError):
        return observations.ABSENT_ENTRY
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), observations.EntryKind.OTHER)
    label = expected_label = ""
    if disk.labels is not None:
        present = disk.read_label(entry)
        label = _decode_label(present)
        expected_label = _decode_label(disk.decide_label(entry, status, present))
    return observations.PathEntry(
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        sha256=_compute_digest(disk, entry, status.st_size)
        if kind == observations.EntryKind.FILE
        else "",
        target=disk.readlink(entry) if kind == observations.EntryKind.LINK else "",
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


PASSWD_FILES = ("/etc/passwd", "/usr/lib/passwd")
GROUP_FILES = ("/etc/group", "/usr/lib/group")
"""An OSTree-based OS has the users and groups of its image in /usr/lib (nss-altfiles)."""


class Accounts:
    """Names and IDs of users and groups, read once. Raises `FileError`."""

    def __init__(self, files: atomic_files.HostFiles) -> None:
        self._users = _read_numbers(files, PASSWD_FILES)
        self._groups = _read_numbers(files, GROUP_FILES)
        self._user_names = _invert_numbers(self._users)
        self._group_names = _invert_numbers(self._groups)

    def has_user(self, user: str) -> bool:
        return user in self._users

    def find_uid(self, user: int | str) -> int:
        """Return the UID of a user name; return a UID unchanged."""
        return _find_number(user, self._users, "user")

    def find_gid(self, group: int | str) -> int:
        """Return the GID of a group name; return a GID unchanged."""
        return _find_number(group, self._groups, "group")

    def name_owner(self, entry: observations.PathEntry) -> observations.PathEntry:
        """Return the entry with the names of its user and group, where they have names."""
        return replace(
            entry,
            user=self._user_names.get(entry.uid, ""),
            group=self._group_names.get(entry.gid, ""),
        )


def _invert_numbers(numbers: dict[str, int]) -> dict[int, str]:
    """Map each ID to its first name."""
    return {number: name for name, number in reversed(numbers.items())}


def _read_numbers(files: atomic_files.HostFiles, paths: tuple[str, ...]) -> dict[str, int]:
    """Map names to IDs; the first file has precedence."""
    numbers: dict[str, int] = {}
    for path in paths:
        for line in (files.read_file(path) or b"").decode("utf-8", "surrogateescape").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split(":")[1:2]
            if number and number[0].isdigit():
                numbers.setdefault(name, int(number[0]))
    return numbers


def _find_number(name: int | str, numbers: Mapping[str, int], kind: str) -> int:
    if isinstance(name, int):
        return name
    if name == "root":
        return 0
    if name not in numbers:
        raise errors.FileError(
            f"there is no {kind} {name} on this machine",
            remedy=f"use the ID of the {kind}, or create it with a sysusers.d file",
        )
    return numbers[name]
