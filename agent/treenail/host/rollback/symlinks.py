"""Every symbolic link below a directory, to be put back after somebody else changed them."""

import stat
from collections.abc import Container
from pathlib import Path

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import (
    TEMPORARY_PREFIX,
    DirectoryEntry,
    EntryWriter,
    SymlinkEntry,
)
from treenail.host.filesystem.files import translate_errors
from treenail.host.filesystem.fsync import FsyncQueue
from treenail.host.filesystem.root import Root
from treenail.host.rollback.inverse import strip_prefix

Json = dict[str, object]
_TEMPORARY = f"{TEMPORARY_PREFIX}+0"


class SymlinkTree:
    """Reads and restores links below a root. Raises `FileError`; flushing is left to others."""

    def __init__(self, root: Root, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._entries = EntryWriter(disk)

    def describe_links(self, top: str) -> Json:
        """The links below a directory, and the directories they are in."""
        links, directories = self._walk_tree(self._root.resolve_path(top))
        return {
            "top": top,
            "links": {self._strip_root(path): text for path, text in links.items()},
            "directories": [self._strip_root(path) for path in directories],
        }

    def list_directories(self, top: str) -> list[Path]:
        """The directory and all below, those above before those below."""
        return self._walk_tree(self._root.resolve_path(top))[1]

    def restore_links(
        self, description: object, skipped: Container[str], flushing: FsyncQueue
    ) -> None:
        """Have the links that `description` told, no others, and no directories made for those.

        ``skipped`` are the paths that somebody else puts back.
        """
        match description:
            case {"top": str(top), "links": dict(links), "directories": list(before)}:
                self._restore_links(top, links, skipped, flushing)
                self._remove_made_directories(top, before, flushing)
            case _:
                raise ValueError("no links")

    def _restore_links(
        self, top: str, links: dict[str, str], skipped: Container[str], flushing: FsyncQueue
    ) -> None:
        found, directories = self._walk_tree(self._root.resolve_path(top))
        for directory in directories:
            if _TEMPORARY in (self._list_names(directory) or ()):  # by a start that was cut short
                self._entries.remove_temporary(directory / _TEMPORARY)
                flushing.add_directory(str(directory))
        for path in found:
            if self._strip_root(path) not in links and str(path) not in skipped:
                self._entries.remove_entry(path)
                flushing.add_directory(str(path.parent))
        for name, text in links.items():
            path = self._root.prefix / name[1:]
            if found.get(path) != text and str(path) not in skipped:
                self._make_link(path, text, flushing)

    def _remove_made_directories(self, top: str, before: list[str], flushing: FsyncQueue) -> None:
        for directory in reversed(self.list_directories(top)):
            if self._strip_root(directory) not in before and not self._list_names(directory):
                self._entries.remove_entry(directory)
                flushing.discard_directory(str(directory))
                flushing.add_directory(str(directory.parent))

    def _make_link(self, path: Path, text: str, flushing: FsyncQueue) -> None:
        if self._list_names(path.parent) is None:
            self._entries.make_directory(DirectoryEntry(), path.parent)
            flushing.add_directory(str(path.parent.parent))
        made = path.parent / _TEMPORARY
        self._entries.make_symlink(SymlinkEntry(text), made, path)
        self._entries.put_entry(made, path)
        flushing.add_directory(str(path.parent))

    def _walk_tree(self, top: Path) -> tuple[dict[Path, str], list[Path]]:
        links: dict[Path, str] = {}
        directories: list[Path] = []
        todo = [top]
        while todo:
            directory = todo.pop()
            names = self._list_names(directory)
            if names is None:
                continue
            directories.append(directory)
            with translate_errors("look at", directory):
                for path in (directory / name for name in names):
                    mode = self._disk.lstat(path).st_mode
                    if stat.S_ISDIR(mode):
                        todo.append(path)
                    elif stat.S_ISLNK(mode) and not path.name.startswith(TEMPORARY_PREFIX):
                        links[path] = self._disk.readlink(path)
        return links, directories

    def _list_names(self, directory: Path) -> list[str] | None:
        """What is in the directory, sorted; None when there is none."""
        with translate_errors("look at", directory):
            try:
                return sorted(self._disk.listdir(directory))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _strip_root(self, path: Path) -> str:
        return strip_prefix(str(path), str(self._root.prefix))
