"""Copies of what stood at paths before somebody's files took their place."""

import base64
import json
from collections.abc import Iterable, Iterator

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import (
    AbsentEntry,
    DirectoryEntry,
    Entry,
    EntryWriter,
    FileEntry,
    SymlinkEntry,
)
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.path_stat import DIRECTORY, FILE, LINK, stat_paths
from treenail.host.filesystem.root import Root
from treenail.host.rollback.prepare import PathChange

Json = dict[str, object]

BACKUP_DIRECTORY = "/var/lib/treenail/original"
_SUFFIX = ".original"
# Where the Machine Config Daemon has its own, copied with all their attributes.
_MCD_DIRECTORY = "/etc/machine-config-daemon/orig"
_MCD_SUFFIX = ".mcdorig"
_LIMIT = 256 * 1024 * 1024


class FileBackups:
    """The copies below a root; nothing is written here, the answers are changes to make.

    A copy is one file: a line of JSON with owner, mode and attributes, and then the content. Raises
    `FileError`.
    """

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._files = HostFiles(root, self._disk)

    def list_paths(self) -> frozenset[str]:
        """The paths of which there is a copy, ours or the Machine Config Daemon's."""
        ours, foreign = (
            self._list_copies(BACKUP_DIRECTORY, _SUFFIX),
            self._list_copies(_MCD_DIRECTORY, _MCD_SUFFIX),
        )
        return frozenset((*ours, *foreign))

    def plan_backup(self, path: str) -> tuple[PathChange, ...]:
        """Have a copy of what stands there now."""
        # Read now: when the changes are made, it may have its successor's name only.
        content = self._read_entry(path)
        copy = FileEntry(lambda: content, 0o600)
        return PathChange(BACKUP_DIRECTORY, DirectoryEntry(0o700)), PathChange(
            _get_backup_path(path), copy
        )

    def find_vendor_paths(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of the paths that the booted deployment has in its /usr/etc.

        With nothing there, /etc would be told from it as if somebody had removed the entry, and
        lack it in the next deployment, too.
        """
        return frozenset(
            path
            for path in paths
            if path.startswith("/etc/") and self._files.has_entry(f"/usr{path}")
        )

    def plan_restore(self, path: str) -> tuple[PathChange, ...]:
        """Have at the path what the copy says, and no copy; without one, what the vendor has."""
        content = self._files.read_file(_get_backup_path(path), limit=_LIMIT)
        if content is not None:
            return PathChange(path, _parse_copy(content, path)), PathChange(
                _get_backup_path(path), AbsentEntry()
            )
        if self._files.has_entry(_get_mcd_path(path)):
            entry = _parse_copy(self._read_entry(_get_mcd_path(path)), path)
            return PathChange(path, entry), PathChange(_get_mcd_path(path), AbsentEntry())
        if self.find_vendor_paths([path]):
            return (PathChange(path, _parse_copy(self._read_entry(f"/usr{path}"), path)),)
        return (PathChange(path, AbsentEntry()),)

    def plan_handback(self) -> tuple[PathChange, ...]:
        """Have our copies where the Machine Config Daemon has its own; it keeps no directories.

        Where both have one, theirs is the older and stays.
        """
        changes: list[PathChange] = []
        for path in sorted(self._list_copies(BACKUP_DIRECTORY, _SUFFIX)):
            content = self._files.read_file(_get_backup_path(path), limit=_LIMIT) or b""
            entry = _parse_copy(content, path)
            if not isinstance(entry, DirectoryEntry) and not self._files.has_entry(
                _get_mcd_path(path)
            ):
                changes.append(PathChange(_get_mcd_path(path), entry))
            changes.append(PathChange(_get_backup_path(path), AbsentEntry()))
        return tuple(changes)

    def _list_copies(self, top: str, suffix: str) -> Iterator[str]:
        todo = [top]
        while todo:
            directory = todo.pop()
            for name in self._files.list_directory(directory):
                path = f"{directory}/{name}"
                if name.endswith(suffix):
                    yield path.removeprefix(top).removesuffix(suffix)
                elif self._files.read_link(path) is None:
                    todo.append(path)

    def _read_entry(self, path: str) -> bytes:
        found = stat_paths(self._root, self._disk, [path])[path]
        header: Json = {"kind": found.kind, "mode": found.mode, "uid": found.uid, "gid": found.gid}
        content = b""
        if found.kind == LINK:
            header["target"] = found.target
        elif found.kind in {FILE, DIRECTORY}:
            described = EntryWriter(self._disk).describe_directory(self._root.resolve_entry(path))
            attributes = (described.xattrs or {}).items()
            header["attributes"] = {n: base64.b64encode(v).decode() for n, v in attributes}
            if found.kind == FILE:
                content = self._files.read_file(path, limit=_LIMIT) or b""
        else:
            raise FileError(f"can't keep a copy of {path}: it is {found.kind}")
        return json.dumps(header).encode() + b"\n" + content


def _parse_copy(copy: bytes, path: str) -> Entry:
    header, _, content = copy.partition(b"\n")
    try:
        found = json.loads(header)
        if found["kind"] == LINK:
            return SymlinkEntry(found["target"], found["uid"], found["gid"])
        attributes = {n: base64.b64decode(v) for n, v in found["attributes"].items()}
        if found["kind"] == DIRECTORY:
            return DirectoryEntry(found["mode"], found["uid"], found["gid"], attributes)
        return FileEntry(lambda: content, found["mode"], found["uid"], found["gid"], attributes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"the copy of {path} is damaged: {error!r}") from error


def _get_backup_path(path: str) -> str:
    return f"{BACKUP_DIRECTORY}{path}{_SUFFIX}"


def _get_mcd_path(path: str) -> str:
    return f"{_MCD_DIRECTORY}{path}{_MCD_SUFFIX}"
