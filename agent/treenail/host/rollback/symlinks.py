"""The symbolic links below a directory, recorded before systemctl changes them.

systemctl enables and disables units by links, and systemd does not log which it changed.
"""

import stat
from collections.abc import Container
from pathlib import Path

from treenail.errors import LedgerError
from treenail.host.filesystem import atomic_files, entries, root_directory
from treenail.host.filesystem.disk import Disk

Json = dict[str, object]
_TEMPORARY = f"{entries.TEMPORARY_PREFIX}+0"


class SymlinkTree:
    """Reads and restores links below a root. Raises `FileError`; the caller flushes."""

    def __init__(self, root: root_directory.Root, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._entries = entries.EntryWriter(disk)

    def describe_links(self, top: str) -> Json:
        """Return the links below a directory, and all directories there, as JSON."""
        links, directories = self._walk_tree(self._root.resolve_path(top))
        return {
            "top": top,
            "links": {self._strip_root(path): text for path, text in links.items()},
            "directories": [self._strip_root(path) for path in directories],
        }

    def list_directories(self, top: str) -> list[Path]:
        """Return the directory and all below it, parents first."""
        return self._walk_tree(self._root.resolve_path(top))[1]

    def restore_links(
        self, description: object, skipped: Container[str], fsync_queue: entries.FsyncQueue
    ) -> None:
        """Restore exactly the described links, and remove directories that were made for others.

        ``skipped`` are paths that have an inverse of their own.
        """
        match description:
            case {"top": str(top), "links": dict(links), "directories": list(directories)}:
                self._restore_links(top, links, skipped, fsync_queue)
                self._remove_made_directories(top, directories, fsync_queue)
            case _:
                raise LedgerError(f"cannot restore links: {description!r:.200} describes none")

    def _restore_links(
        self,
        top: str,
        links: dict[str, str],
        skipped: Container[str],
        fsync_queue: entries.FsyncQueue,
    ) -> None:
        current, directories = self._walk_tree(self._root.resolve_path(top))
        for directory in directories:
            # Left by a restore that was interrupted.
            if _TEMPORARY in (self._list_names(directory) or ()):
                self._entries.remove_temporary(directory / _TEMPORARY)
                fsync_queue.add_directory(str(directory))
        for path in current:
            if self._strip_root(path) not in links and str(path) not in skipped:
                self._entries.remove_entry(path)
                fsync_queue.add_directory(str(path.parent))
        for name, text in links.items():
            path = self._root.prefix / name[1:]
            if current.get(path) != text and str(path) not in skipped:
                self._make_link(path, text, fsync_queue)

    def _remove_made_directories(
        self, top: str, previous: list[str], fsync_queue: entries.FsyncQueue
    ) -> None:
        for directory in reversed(self.list_directories(top)):
            if self._strip_root(directory) not in previous and not self._list_names(directory):
                self._entries.remove_entry(directory)
                fsync_queue.discard_directory(str(directory))
                fsync_queue.add_directory(str(directory.parent))

    def _make_link(self, path: Path, text: str, fsync_queue: entries.FsyncQueue) -> None:
        if self._list_names(path.parent) is None:
            self._entries.make_directory(entries.DirectoryEntry(), path.parent)
            fsync_queue.add_directory(str(path.parent.parent))
        temporary = path.parent / _TEMPORARY
        self._entries.make_symlink(entries.SymlinkEntry(text), temporary, path)
        self._entries.put_entry(temporary, path)
        fsync_queue.add_directory(str(path.parent))

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
            with atomic_files.translate_errors("inspect", directory):
                for path in (directory / name for name in names):
                    mode = self._disk.lstat(path).st_mode
                    if stat.S_ISDIR(mode):
                        todo.append(path)
                    elif stat.S_ISLNK(mode) and not path.name.startswith(entries.TEMPORARY_PREFIX):
                        links[path] = self._disk.readlink(path)
        return links, directories

    def _list_names(self, directory: Path) -> list[str] | None:
        """Return the names in the directory, sorted; None when there is none."""
        with atomic_files.translate_errors("inspect", directory):
            try:
                return sorted(self._disk.listdir(directory))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _strip_root(self, path: Path) -> str:
        return root_directory.strip_prefix(str(path), str(self._root.prefix))
