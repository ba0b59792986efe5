"""Mount points of instructions in the unpacked base.

For each ``RUN``, buildah mounts its own /etc/hostname, /etc/hosts and /etc/resolv.conf. It creates
a file that the image lacks as mount point, with mode 0755, and leaves it in the instruction's layer
(chroot/run_linux.go). A node would get an empty /etc/hostname from the image. In the base, which is
never written back, such a file changes no layer.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from treenail.api.decode import Fields, load_json
from treenail.errors import TreenailError

log = logging.getLogger(__name__)

_DIRECTORY = "etc"
_NAMES = ("hostname", "hosts", "resolv.conf")
_LIMIT = 1000  # layers
_FORMATS = {"overlay": "overlay/{}/diff", "vfs": "vfs/dir/{}"}


def create_mount_points(storage: Path, driver: str, image_id: str) -> None:
    """Create the files that a loaded image lacks, in its highest layer with /etc.

    Without them builds succeed, too, so a failure is only logged.
    """
    try:
        trees = list(_find_trees(storage, driver, image_id))
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


def _find_trees(storage: Path, driver: str, image_id: str) -> Iterator[Path]:
    """Yield the unpacked layers of an image, the highest first."""
    images = _read_list(storage / f"{driver}-images/images.json")
    layers = {
        each.get_text("id"): each for each in _read_list(storage / f"{driver}-layers/layers.json")
    }
    layer = next((each.get_text("layer") for each in images if each.get_text("id") == image_id), "")
    for _ in range(_LIMIT):
        if layer not in layers:
            return
        yield storage / _FORMATS[driver].format(layer)
        if driver == "vfs":
            # Each layer has the whole tree.
            return
        layer = layers[layer].get_text("parent")


def _read_list(path: Path) -> list[Fields]:
    document = load_json(path.read_bytes(), where=str(path))
    found = document if isinstance(document, list) else []
    return [Fields.from_json(each, str(path)) for each in found]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
