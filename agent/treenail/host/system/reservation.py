"""Disk space that is reserved for a rollback, and released when it begins.

A rollback creates directories and writes the ledger. Both fail on a disk that a bad system has
filled, and the node would stay on the bad system.
"""

import logging
import os

from treenail.errors import FileError
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import STATE_DIRECTORY

log = logging.getLogger(__name__)

RESERVATION_PATH = f"{STATE_DIRECTORY}/reserve"
RESERVATION_SIZE = 4 * 1024 * 1024


class SpaceReservation:
    """A file below a root that occupies the reserved space."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def reserve_space(self) -> None:
        """Reserve the space; log a warning when the disk is full."""
        try:
            path = self._root.resolve_path(RESERVATION_PATH)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVATION_SIZE)
            finally:
                os.close(descriptor)
        except (OSError, FileError) as error:
            log.warning("cannot reserve disk space for a rollback: %s", error)

    def release_space(self) -> None:
        """Release the space, if it is reserved."""
        try:
            self._root.resolve_path(RESERVATION_PATH).unlink(missing_ok=True)
        except (OSError, FileError) as error:
            log.warning("cannot release the disk space reserved for a rollback: %s", error)
