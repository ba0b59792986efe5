"""Every symbolic link below a directory, to be put back after somebody else changed them."""

import stat
from collections.abc import Container
from pathlib import Path

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import NAMES, Directory, Entries, Symlink
from treenail.host.filesystem.files import failing
from treenail.host.filesystem.fsync import Flushing
from treenail.host.filesystem.root import Root
from treenail.host.rollback.inverse import below

Json = dict[str, object]
_MADE = f"{NAMES}+0"


class LinkTree:
    """Reads and restores links below a root. Raises `FileError`; flushing is left to others."""

    def __init__(self, root: Root, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._entries = Entries(disk)

    def described(self, top: str) -> Json:
        """The links below a directory, and the directories they are in."""
        links, directories = self._walk(self._root.path(top))
        return {
            "top": top,
            "links": {self._below(path): text for path, text in links.items()},
            "directories": [self._below(path) for path in directories],
        }

    def directories(self, top: str) -> list[Path]:
        """The directory and all below, those above before those below."""
        return self._walk(self._root.path(top))[1]

    def put_back(self, described: object, others: Container[str], flushing: Flushing) -> None:
        """Have the links that `described` told, no others, and no directories made for those.

        ``others`` are the paths that somebody else puts back.
        """
        match described:
            case {"top": str(top), "links": dict(links), "directories": list(before)}:
                self._put_links_back(top, links, others, flushing)
                self._put_directories_back(top, before, flushing)
            case _:
                raise ValueError("no links")

    def _put_links_back(
        self, top: str, links: dict[str, str], others: Container[str], flushing: Flushing
    ) -> None:
        found, directories = self._walk(self._root.path(top))
        for directory in directories:
            if _MADE in (self._names(directory) or ()):  # by a start that was cut short
                self._entries.drop(directory / _MADE)
                flushing.changed(str(directory))
        for path in found:
            if self._below(path) not in links and str(path) not in others:
                self._entries.remove(path)
                flushing.changed(str(path.parent))
        for name, text in links.items():
            path = self._root.prefix / name[1:]
            if found.get(path) != text and str(path) not in others:
                self._link(path, text, flushing)

    def _put_directories_back(self, top: str, before: list[str], flushing: Flushing) -> None:
        for directory in reversed(self.directories(top)):
            if self._below(directory) not in before and not self._names(directory):
                self._entries.remove(directory)
                flushing.removed(str(directory))
                flushing.changed(str(directory.parent))

    def _link(self, path: Path, text: str, flushing: Flushing) -> None:
        if self._names(path.parent) is None:
            self._entries.make_directory(Directory(), path.parent)
            flushing.changed(str(path.parent.parent))
        made = path.parent / _MADE
        self._entries.make_symlink(Symlink(text), made, path)
        self._entries.put(made, path)
        flushing.changed(str(path.parent))

    def _walk(self, top: Path) -> tuple[dict[Path, str], list[Path]]:
        links: dict[Path, str] = {}
        directories: list[Path] = []
        todo = [top]
        while todo:
            directory = todo.pop()
            names = self._names(directory)
            if names is None:
                continue
            directories.append(directory)
            with failing("look at", directory):
                for path in (directory / name for name in names):
                    mode = self._disk.status(path).st_mode
                    if stat.S_ISDIR(mode):
                        todo.append(path)
                    elif stat.S_ISLNK(mode) and not path.name.startswith(NAMES):
                        links[path] = self._disk.link_text(path)
        return links, directories

    def _names(self, directory: Path) -> list[str] | None:
        """What is in the directory, sorted; None when there is none."""
        with failing("look at", directory):
            try:
                return sorted(self._disk.names(directory))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _below(self, path: Path) -> str:
        return below(str(path), str(self._root.prefix))
