"""Directories that were changed, and flushing them: one by one, or their file systems."""

from contextlib import suppress

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import translate_errors

FSYNC_EACH_LIMIT = 4
"""So many are flushed one by one, which leaves other programs' writes alone."""


class FsyncQueue:
    """What is to be flushed. Raises `FileError`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._directories: dict[str, None] = {}
        self._file_systems: dict[int, tuple[str, int]] = {}

    def open_file_system(self, directory: str) -> None:
        """Open its file system, before anything is written there.

        An error of writing is heard by those who had it open.
        """
        with translate_errors("open", directory):
            device = self._disk.lstat(directory).st_dev
            if device not in self._file_systems:
                self._file_systems[device] = directory, self._disk.open(directory)

    def add_directory(self, directory: str) -> None:
        """Entries of the directory, or its own mode or owner, were changed."""
        self._directories[directory] = None

    def discard_directory(self, directory: str) -> None:
        """There is no such directory any more."""
        self._directories.pop(directory, None)

    def sync_file_systems(self) -> None:
        """Return once all that is on the opened file systems outlives a power cut."""
        for device in self._file_systems:
            self._sync_device(device)

    def sync_file_system(self, directory: str) -> None:
        """As `sync_file_systems`, but only the one that the directory is on."""
        with translate_errors("look at", directory):
            device = self._disk.lstat(directory).st_dev
        self._sync_device(device)

    def fsync_directories(self) -> None:
        """Return once the directories outlive a power cut; many cost one flush together."""
        if len(self._directories) > FSYNC_EACH_LIMIT:
            for directory in self._directories:
                self.open_file_system(directory)
            self.sync_file_systems()
            return
        for directory in self._directories:
            self.fsync_path(directory)

    def fsync_path(self, path: str) -> None:
        """Return once the file, or the directory, outlives a power cut."""
        with translate_errors("flush", path):
            descriptor = self._disk.open(path)
            try:
                self._disk.fsync(descriptor)
            finally:
                self._disk.close(descriptor)

    def _sync_device(self, device: int) -> None:
        directory, descriptor = self._file_systems[device]
        with translate_errors("flush the file system of", directory):
            self._disk.syncfs(descriptor)

    def close_file_systems(self) -> None:
        """Forget all of it."""
        self._directories.clear()
        for _, descriptor in self._file_systems.values():
            with suppress(OSError):  # nothing was written through it
                self._disk.close(descriptor)
        self._file_systems.clear()
