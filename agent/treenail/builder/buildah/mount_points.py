"""Mount points of instructions in the unpacked base.

For each ``RUN``, buildah mounts its own /etc/hostname, /etc/hosts and /etc/resolv.conf. It creates
a file that the image lacks as mount point, with mode 0755, and leaves it in the instruction's layer
(chroot/run_linux.go). A node would get an empty /etc/hostname from the image. In the base, which is
never written back, such a file changes no layer.
"""

import logging
import os
from pathlib import Path

from treenail.builder.buildah.stored_tree import find_trees
from treenail.errors import TreenailError

log = logging.getLogger(__name__)

_DIRECTORY = "etc"
_NAMES = ("hostname", "hosts", "resolv.conf")


def create_mount_points(storage: Path, driver: str, image_id: str) -> None:
    """Create the files that a loaded image lacks, in its highest layer with /etc.

    Without them builds succeed, too, so a failure is only logged.
    """
    try:
        trees = list(find_trees(storage, driver, image_id))
        places = [tree / _DIRECTORY for tree in trees]
        directory = next((each for each in places if _is_directory(each)), None)
        if directory is None:
            return
        for name in _NAMES:
            # Anything counts, also a link or a whiteout.
            if not any(os.path.lexists(each / name) for each in places if _is_directory(each)):
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(directory / name, flags, 0o644))
    except (OSError, TreenailError) as error:
        log.warning("the image may get empty files in /%s: %s", _DIRECTORY, error)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
