"""Backups of the entries that were at paths before the files of a config replaced them."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from treenail import errors, observations
from treenail.encoding import codec, json_text
from treenail.host.filesystem import atomic_files, entries, path_stat, root_directory
from treenail.host.filesystem.disk import Disk
from treenail.host.rollback import undo_log

BACKUP_DIRECTORY = "/var/lib/treenail/original"
_SUFFIX = ".original"
# The MCD makes its own backups with cp -a, so with all attributes.
_MCD_DIRECTORY = "/etc/machine-config-daemon/orig"
_MCD_SUFFIX = ".mcdorig"
_LIMIT = 256 * 1024 * 1024
_NAME_BYTES = 255
# In place of a name that is too long with the suffix; the backup's header has the path.
_LONG_NAME = re.compile(r"[0-9a-f]{64}\.long")


@dataclass(frozen=True, slots=True)
class _BackupHeader:
    """The first line of a backup; the content of a file follows."""

    kind: str
    mode: int
    uid: int
    gid: int
    target: str = ""
    xattrs: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    """The path of the entry, where the name of the backup does not show it."""
    is_default: Annotated[bool, codec.Key("default", omit=True)] = False
    """The entry was as in /usr/etc of its deployment; False if an older agent made the backup."""


class FileBackups:
    """The backups below a root: plans changes, and writes nothing. Raises `FileError`."""

    def __init__(self, root: root_directory.Root, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._files = atomic_files.HostFiles(root, self._disk)

    def list_paths(self) -> frozenset[str]:
        """Return the paths that have a backup of treenail or of the Machine Config Daemon."""
        mcd = self._list_copies(_MCD_DIRECTORY, _MCD_SUFFIX)
        return frozenset((*self._list_own_paths(), *mcd))

    def plan_backup(self, path: str) -> tuple[undo_log.PathChange, ...]:
        """Return the changes that back up the current entry."""
        # Read it now: when the changes are applied, the new entry may be at the path.
        header, content = self._read_entry(path)
        # A directory may have further entries, and cannot go with its default.
        if header.kind != observations.EntryKind.DIRECTORY and self.find_vendor_paths([path]):
            default, default_content = self._read_entry(f"/usr{path}")
            # Labels are those of the policy, not of a user.
            default = replace(default, path=header.path, xattrs=header.xattrs)
            header = replace(header, is_default=(default, default_content) == (header, content))
        content = json.dumps(codec.encode(header)).encode() + b"\n" + content
        return (
            undo_log.PathChange(BACKUP_DIRECTORY, entries.DirectoryEntry(0o700)),
            undo_log.PathChange(_get_backup_path(path), entries.FileEntry(lambda: content, 0o600)),
        )

    def find_vendor_paths(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the paths that the booted deployment has in its /usr/etc."""
        # Removing such a path from /etc would be a local change that the merge of /etc carries
        # into the next deployment (ostree-admin-config-diff(1)).
        return frozenset(
            path
            for path in paths
            if path.startswith("/etc/") and self._files.has_entry(f"/usr{path}")
        )

    def plan_restore(self, path: str) -> tuple[undo_log.PathChange, ...]:
        """Return the changes that restore the backup and remove it.

        Without a backup they restore the default of the deployment, or remove the path. Likewise
        for the backup of a default: an update may have changed that since.
        """
        backup_path, mcd_path = _get_backup_path(path), _get_mcd_path(path)
        content = self._files.read_file(backup_path, limit=_LIMIT)
        if content is not None:
            return undo_log.PathChange(path, self._choose_entry(content, path)), (
                undo_log.PathChange(backup_path, entries.AbsentEntry())
            )
        if _has_short_name(mcd_path) and self._files.has_entry(mcd_path):
            entry = _make_entry(*self._read_entry(mcd_path))
            return undo_log.PathChange(path, entry), undo_log.PathChange(
                mcd_path, entries.AbsentEntry()
            )
        return (undo_log.PathChange(path, self._find_default(path)),)

    def plan_handback(self) -> tuple[undo_log.PathChange, ...]:
        """Return the changes that move the backups to the Machine Config Daemon.

        It has no backups of directories, nor of names that are too long with its suffix. A backup
        of its own is older and stays.
        """
        changes: list[undo_log.PathChange] = []
        for path in sorted(self._list_own_paths()):
            backup_path, mcd_path = _get_backup_path(path), _get_mcd_path(path)
            if not _has_short_name(mcd_path):
                continue
            content = self._files.read_file(backup_path, limit=_LIMIT) or b""
            entry = self._choose_entry(content, path)
            is_copied = not isinstance(entry, entries.DirectoryEntry | entries.AbsentEntry)
            if is_copied and not self._files.has_entry(mcd_path):
                changes.append(undo_log.PathChange(mcd_path, entry))
            changes.append(undo_log.PathChange(backup_path, entries.AbsentEntry()))
        return tuple(changes)

    def _choose_entry(self, copy: bytes, path: str) -> entries.Entry:
        """Return the entry of the backup, or the current default if the backup is of one."""
        header = _parse_header(copy, path)
        if header.is_default:
            return self._find_default(path)
        return _make_entry(header, copy.partition(b"\n")[2])

    def _find_default(self, path: str) -> entries.Entry:
        """Return the entry that the booted deployment has in /usr/etc, or none."""
        if not self.find_vendor_paths([path]):
            return entries.AbsentEntry()
        return _make_entry(*self._read_entry(f"/usr{path}"))

    def _list_own_paths(self) -> Iterator[str]:
        for path in self._list_copies(BACKUP_DIRECTORY, _SUFFIX):
            if _LONG_NAME.fullmatch(path.rpartition("/")[2]):
                copy = self._files.read_file(f"{BACKUP_DIRECTORY}{path}{_SUFFIX}", limit=_LIMIT)
                yield _parse_header(copy or b"", path).path or path
            else:
                yield path

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

    def _read_entry(self, path: str) -> tuple[_BackupHeader, bytes]:
        state = path_stat.stat_paths(self._root, self._disk, [path])[path]
        xattrs: dict[str, str] = {}
        content = b""
        if state.kind in {observations.EntryKind.FILE, observations.EntryKind.DIRECTORY}:
            attributes = entries.EntryWriter(self._disk).describe_directory(
                self._root.resolve_entry(path)
            )
            xattrs = undo_log.encode_xattrs(attributes.xattrs or {})
            if state.kind == observations.EntryKind.FILE:
                content = self._files.read_file(path, limit=_LIMIT) or b""
        elif state.kind != observations.EntryKind.LINK:
            raise errors.FileError(f"cannot back up {path}: it is {state.kind}")
        named = "" if _has_short_name(f"{path}{_SUFFIX}") else path
        header = _BackupHeader(
            str(state.kind), state.mode, state.uid, state.gid, state.target, xattrs, named
        )
        return header, content


def _make_entry(header: _BackupHeader, content: bytes) -> entries.Entry:
    xattrs = undo_log.decode_xattrs(header.xattrs)
    if header.kind == observations.EntryKind.LINK:
        return entries.SymlinkEntry(header.target, header.uid, header.gid)
    if header.kind == observations.EntryKind.DIRECTORY:
        return entries.DirectoryEntry(header.mode, header.uid, header.gid, xattrs)
    return entries.FileEntry(lambda: content, header.mode, header.uid, header.gid, xattrs)


def _parse_header(copy: bytes, path: str) -> _BackupHeader:
    try:
        header = codec.decode(_BackupHeader, json_text.parse_json(copy.partition(b"\n")[0]))
        undo_log.decode_xattrs(header.xattrs)
    except ValueError as error:
        raise errors.FileError(
            f"cannot restore {path}: its backup is damaged: {error}",
            remedy=f"move {_get_backup_path(path)} away",
        ) from error
    return header


def _get_backup_path(path: str) -> str:
    parent, _, name = path.rpartition("/")
    if not _has_short_name(f"{path}{_SUFFIX}"):
        name = f"{hashlib.sha256(name.encode()).hexdigest()}.long"
    return f"{BACKUP_DIRECTORY}{parent}/{name}{_SUFFIX}"


def _has_short_name(path: str) -> bool:
    """Return whether a file can have the name at the end of the path."""
    return len(path.rpartition("/")[2].encode()) <= _NAME_BYTES


def _get_mcd_path(path: str) -> str:
    return f"{_MCD_DIRECTORY}{path}{_MCD_SUFFIX}"
