"""Files of an image in buildah's storage, without a mount and without a copy of its tree.

Tree and storage are the result of untrusted instructions: no symbolic link in them is followed,
and no pipe is waited for.

For each ``RUN``, buildah mounts its own /etc/hostname, /etc/hosts and /etc/resolv.conf. It creates
a file that the image lacks as mount point, with mode 0755, and leaves it in the instruction's layer
(chroot/run_linux.go). A node would get an empty /etc/hostname from the image. In the base, which is
never written back, such a file changes no layer.
"""

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from treenail import errors, memory
from treenail.api import decode

_LIMIT = 256 * memory.MIB
_LIST_LIMIT = 16 * memory.MIB
_LAYERS_LIMIT = 1000
_LAYER = re.compile(r"[0-9a-z]{1,64}")
_FORMATS = {"overlay": "overlay/{}/diff", "vfs": "vfs/dir/{}"}
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A directory with one of these hides that of lower layers; user.* is that of mounts in a user
# namespace, which may not write trusted.* (Documentation/filesystems/overlayfs.rst).
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


class StoredTree:
    """The tree of an image; for the drivers ``overlay`` and ``vfs`` of containers/storage."""

    def __init__(self, storage: Path, driver: str, image: str) -> None:
        """``image`` is its name in the storage. Raises `FileError` and `ConfigError`."""
        self._storage = storage
        self._roots = list(find_trees(storage, driver, image))

    def read_file(self, path: str) -> bytes | None:
        """Return the content of a regular file; None if the tree has none at this path.

        Raises `FileError` when it is larger than 256 MiB or cannot be read.
        """
        *parents, name = path.strip("/").split("/")
        for root in self._roots:
            content = _look_up(self._storage, root, parents, name)
            if content is not None:
                return content or None
        return None


def _look_up(storage: Path, root: Path, parents: list[str], name: str) -> bytes | None:
    """Return the content in one layer: empty if the layer hides the path, None if it lacks it."""
    descriptor = _open(storage, str(root.relative_to(storage)), os.O_DIRECTORY)
    is_opaque = False
    try:
        for parent in parents:
            entry = _stat(descriptor, parent)
            if entry is None:
                return b"" if is_opaque else None
            if not stat.S_ISDIR(entry.st_mode):
                # A link, or the device that marks a removed entry.
                return b""
            child = os.open(parent, _FLAGS | os.O_DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = child
            is_opaque = is_opaque or _is_opaque(descriptor)
        entry = _stat(descriptor, name)
        if entry is None:
            return b"" if is_opaque else None
        if not stat.S_ISREG(entry.st_mode):
            return b""
        return _read(os.open(name, _FLAGS, dir_fd=descriptor), name, _LIMIT)
    except OSError as error:
        raise errors.FileError(f"cannot read {name} in {root}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _open(base: Path, path: str, flags: int = 0) -> int:
    """Open a path below a directory, without following a link; raise `FileError`."""
    *parents, name = path.split("/")
    try:
        descriptor = os.open(base, _FLAGS | os.O_DIRECTORY)
        for part in parents:
            outer = descriptor
            try:
                descriptor = os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=outer)
            finally:
                os.close(outer)
        try:
            return os.open(name, _FLAGS | flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise errors.FileError(f"cannot read {base / path}: {error.strerror}") from error


def _read(descriptor: int, name: str, limit: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        content = b"" if not stat.S_ISREG(os.fstat(descriptor).st_mode) else file.read(limit + 1)
    if len(content) > limit:
        raise errors.FileError(f"cannot read {name}: it has more than {limit} bytes")
    return content


def _stat(descriptor: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(descriptor: int) -> bool:
    for name in _OPAQUE:
        with suppress(OSError):
            if os.getxattr(descriptor, name) == b"y":
                return True
    return False


def find_trees(storage: Path, driver: str, image: str) -> Iterator[Path]:
    """Yield the unpacked layers of an image, the highest first; ``image`` is its ID or name.

    Raises `FileError` and `ConfigError`.
    """
    # Files of containers/storage: each driver has its own list of images and of layers.
    images = _read_list(storage, f"{driver}-images/images.json")
    layers = {
        record.get_text("id"): record
        for record in _read_list(storage, f"{driver}-layers/layers.json")
    }
    layer = next((record.get_text("layer") for record in images if _is_image(record, image)), "")
    for _ in range(_LAYERS_LIMIT):
        if layer not in layers or not _LAYER.fullmatch(layer):
            return
        yield storage / _FORMATS[driver].format(layer)
        if driver == "vfs":
            # Each layer has the whole tree.
            return
        layer = layers[layer].get_text("parent")


def _is_image(image: decode.Fields, wanted: str) -> bool:
    names = image.get_text_list("names")
    return wanted == image.get_text("id") or wanted in names or f"{wanted}:latest" in names


def _read_list(storage: Path, path: str) -> list[decode.Fields]:
    document = decode.load_json(_read(_open(storage, path), path, _LIST_LIMIT), where=path)
    records = document if isinstance(document, list) else []
    return [decode.Fields.from_json(record, path) for record in records]


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
        directory = next((place for place in places if _is_directory(place)), None)
        if directory is None:
            return
        for name in _NAMES:
            # Anything counts, also a link or a whiteout.
            if not any(os.path.lexists(place / name) for place in places if _is_directory(place)):
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(directory / name, flags, 0o644)
                owner = directory.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
                os.close(descriptor)
    except (OSError, errors.TreenailError) as error:
        log.warning("the image may get empty files in /%s: %s", _DIRECTORY, error)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
