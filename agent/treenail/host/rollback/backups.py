"""Copies of what stood at paths before somebody's files took their place."""

import base64
import json
from collections.abc import Iterable, Iterator

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import Absent, Directory, Entries, Entry, Regular, Symlink
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.path_stat import DIRECTORY, FILE, LINK, standing
from treenail.host.filesystem.root import Root
from treenail.host.rollback.prepare import Change

Json = dict[str, object]

TOP = "/var/lib/treenail/original"
_SUFFIX = ".original"
# Where the Machine Config Daemon has its own, copied with all their attributes.
_FOREIGN = "/etc/machine-config-daemon/orig"
_FOREIGN_SUFFIX = ".mcdorig"
_LIMIT = 256 * 1024 * 1024


class Originals:
    """The copies below a root; nothing is written here, the answers are changes to make.

    A copy is one file: a line of JSON with owner, mode and attributes, and then the content. Raises
    `FileError`.
    """

    def __init__(self, root: Root, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()
        self._files = Files(root, self._disk)

    def paths(self) -> frozenset[str]:
        """The paths of which there is a copy, ours or the Machine Config Daemon's."""
        ours, foreign = self._below(TOP, _SUFFIX), self._below(_FOREIGN, _FOREIGN_SUFFIX)
        return frozenset((*ours, *foreign))

    def keeping(self, path: str) -> tuple[Change, ...]:
        """Have a copy of what stands there now."""
        # Read now: when the changes are made, it may have its successor's name only.
        content = self._content(path)
        copy = Regular(lambda: content, 0o600)
        return Change(TOP, Directory(0o700)), Change(_copy(path), copy)

    def vendored(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of the paths that the booted deployment has in its /usr/etc.

        With nothing there, /etc would be told from it as if somebody had removed the entry, and
        lack it in the next deployment, too.
        """
        return frozenset(
            path
            for path in paths
            if path.startswith("/etc/") and self._files.is_there(f"/usr{path}")
        )

    def restoring(self, path: str) -> tuple[Change, ...]:
        """Have at the path what the copy says, and no copy; without one, what the vendor has."""
        content = self._files.read(_copy(path), limit=_LIMIT)
        if content is not None:
            return Change(path, _entry(content, path)), Change(_copy(path), Absent())
        if self._files.is_there(_foreign(path)):
            entry = _entry(self._content(_foreign(path)), path)
            return Change(path, entry), Change(_foreign(path), Absent())
        if self.vendored([path]):
            return (Change(path, _entry(self._content(f"/usr{path}"), path)),)
        return (Change(path, Absent()),)

    def handing_over(self) -> tuple[Change, ...]:
        """Have our copies where the Machine Config Daemon has its own; it keeps no directories.

        Where both have one, theirs is the older and stays.
        """
        changes: list[Change] = []
        for path in sorted(self._below(TOP, _SUFFIX)):
            content = self._files.read(_copy(path), limit=_LIMIT) or b""
            entry = _entry(content, path)
            if not isinstance(entry, Directory) and not self._files.is_there(_foreign(path)):
                changes.append(Change(_foreign(path), entry))
            changes.append(Change(_copy(path), Absent()))
        return tuple(changes)

    def _below(self, top: str, suffix: str) -> Iterator[str]:
        todo = [top]
        while todo:
            directory = todo.pop()
            for name in self._files.names(directory):
                path = f"{directory}/{name}"
                if name.endswith(suffix):
                    yield path.removeprefix(top).removesuffix(suffix)
                elif self._files.link_text(path) is None:
                    todo.append(path)

    def _content(self, path: str) -> bytes:
        found = standing(self._root, self._disk, [path])[path]
        header: Json = {"kind": found.kind, "mode": found.mode, "uid": found.uid, "gid": found.gid}
        content = b""
        if found.kind == LINK:
            header["target"] = found.target
        elif found.kind in {FILE, DIRECTORY}:
            described = Entries(self._disk).described(self._root.entry(path))
            attributes = (described.attributes or {}).items()
            header["attributes"] = {n: base64.b64encode(v).decode() for n, v in attributes}
            if found.kind == FILE:
                content = self._files.read(path, limit=_LIMIT) or b""
        else:
            raise FileError(f"can't keep a copy of {path}: it is {found.kind}")
        return json.dumps(header).encode() + b"\n" + content


def _entry(copy: bytes, path: str) -> Entry:
    header, _, content = copy.partition(b"\n")
    try:
        found = json.loads(header)
        if found["kind"] == LINK:
            return Symlink(found["target"], found["uid"], found["gid"])
        attributes = {n: base64.b64decode(v) for n, v in found["attributes"].items()}
        if found["kind"] == DIRECTORY:
            return Directory(found["mode"], found["uid"], found["gid"], attributes)
        return Regular(lambda: content, found["mode"], found["uid"], found["gid"], attributes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"the copy of {path} is damaged: {error!r}") from error


def _copy(path: str) -> str:
    return f"{TOP}{path}{_SUFFIX}"


def _foreign(path: str) -> str:
    return f"{_FOREIGN}{path}{_FOREIGN_SUFFIX}"
