"""Flushing changed directories: one by one, or with their whole file systems."""

from contextlib import suppress

from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import translate_errors

FSYNC_EACH_LIMIT = 4
"""Up to here fsync each path: syncfs also flushes what other programs write."""


class FsyncQueue:
    """Directories and file systems that need a flush. Raises `FileError`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._directories: dict[str, None] = {}
        self._file_systems: dict[int, tuple[str, int]] = {}

    def open_file_system(self, directory: str) -> None:
        """Open the file system of the directory, before the first write there.

        syncfs(2) reports errors of writes since its descriptor was opened.
        """
        with translate_errors("open", directory):
            device = self._disk.lstat(directory).st_dev
            if device not in self._file_systems:
                self._file_systems[device] = directory, self._disk.open(directory)

    def add_directory(self, directory: str) -> None:
        """Add a directory whose entries, mode or owner were changed."""
        self._directories[directory] = None

    def discard_directory(self, directory: str) -> None:
        """Forget a directory that was removed."""
        self._directories.pop(directory, None)

    def sync_file_systems(self) -> None:
        """Flush all opened file systems."""
        for device in self._file_systems:
            self._sync_device(device)

    def sync_file_system(self, directory: str) -> None:
        """Flush the opened file system that the directory is on."""
        with translate_errors("inspect", directory):
            device = self._disk.lstat(directory).st_dev
        self._sync_device(device)

    def fsync_directories(self) -> None:
        """Flush the added directories; many of them with one flush for each file system."""
        if len(self._directories) > FSYNC_EACH_LIMIT:
            for directory in self._directories:
                self.open_file_system(directory)
            self.sync_file_systems()
            return
        for directory in self._directories:
            self.fsync_path(directory)

    def fsync_path(self, path: str) -> None:
        """Flush one file or directory."""
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
        """Forget all directories and close the file systems."""
        self._directories.clear()
        for _, descriptor in self._file_systems.values():
            with suppress(OSError):  # nothing was written through it
                self._disk.close(descriptor)
        self._file_systems.clear()
