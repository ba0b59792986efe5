"""Room on the disk that is kept for the way back, and let go when that is taken.

Returning to the previous deployment makes directories, and the ledger tells of it: on a disk that a
bad system has filled neither is possible, and the node would stay where it is no good.
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
    """A file below a root that takes up the room."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def reserve_space(self) -> None:
        """Have the room taken, unless the disk has none to spare, which is logged."""
        try:
            path = self._root.resolve_path(RESERVATION_PATH)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVATION_SIZE)
            finally:
                os.close(descriptor)
        except (OSError, FileError) as error:
            log.warning("no room is kept for the way back: %s", error)

    def release_space(self) -> None:
        """Have the room free, if it was taken."""
        try:
            self._root.resolve_path(RESERVATION_PATH).unlink(missing_ok=True)
        except (OSError, FileError) as error:
            log.warning("what is kept for the way back stays taken: %s", error)
