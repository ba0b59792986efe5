"""Directories that were changed, and flushing them: one by one, or their file systems."""

from contextlib import suppress

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import failing

FEW = 4
"""So many are flushed one by one, which leaves other programs' writes alone."""


class Flushing:
    """What is to be flushed. Raises `FileError`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._directories: dict[str, None] = {}
        self._file_systems: dict[int, tuple[str, int]] = {}

    def open(self, directory: str) -> None:
        """Open its file system, before anything is written there.

        An error of writing is heard by those who had it open.
        """
        with failing("open", directory):
            device = self._disk.status(directory).st_dev
            if device not in self._file_systems:
                self._file_systems[device] = directory, self._disk.open(directory)

    def changed(self, directory: str) -> None:
        """Entries of the directory, or its own mode or owner, were changed."""
        self._directories[directory] = None

    def removed(self, directory: str) -> None:
        """There is no such directory any more."""
        self._directories.pop(directory, None)

    def flush_file_systems(self) -> None:
        """Return once all that is on the opened file systems outlives a power cut."""
        for device in self._file_systems:
            self._flush_file_system(device)

    def flush_file_system(self, directory: str) -> None:
        """As `flush_file_systems`, but only the one that the directory is on."""
        with failing("look at", directory):
            device = self._disk.status(directory).st_dev
        self._flush_file_system(device)

    def flush(self) -> None:
        """Return once the directories outlive a power cut; many cost one flush together."""
        if len(self._directories) > FEW:
            for directory in self._directories:
                self.open(directory)
            self.flush_file_systems()
            return
        for directory in self._directories:
            self.sync(directory)

    def sync(self, path: str) -> None:
        """Return once the file, or the directory, outlives a power cut."""
        with failing("flush", path):
            descriptor = self._disk.open(path)
            try:
                self._disk.sync(descriptor)
            finally:
                self._disk.close(descriptor)

    def _flush_file_system(self, device: int) -> None:
        directory, descriptor = self._file_systems[device]
        with failing("flush the file system of", directory):
            self._disk.sync_filesystem(descriptor)

    def close(self) -> None:
        """Forget all of it."""
        self._directories.clear()
        for _, descriptor in self._file_systems.values():
            with suppress(OSError):  # nothing was written through it
                self._disk.close(descriptor)
        self._file_systems.clear()
