"""The unpacked files of images from a real registry: layers with whiteouts, one tree per image."""

import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
# An image may have them, and no deployment takes their content.
_LEFT_OUT = ("/var/", "/proc/", "/sys/", "/dev/", "/run/", "/tmp/", "/sysroot/")  # noqa: S108


class UnpackedImages:
    """The trees below one directory, by a name that follows from the digest."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_directory(self, name: str) -> Path:
        return self._directory / name

    def list_paths(self, name: str) -> list[str]:
        """Return the files and links of an image that a deployment has; none without a name."""
        if not name:
            return []
        root = self.find_directory(name)
        found = []
        for place, directories, files in os.walk(root):
            below = PurePosixPath("/", Path(place).relative_to(root))
            links = [each for each in directories if Path(place, each).is_symlink()]
            found += [str(below / each) for each in (*files, *links)]
        return sorted(path for path in found if not path.startswith(_LEFT_OUT))

    def unpack_layers(self, name: str, layers: Iterable[Path]) -> None:
        """Unpack the layers of an image, the lowest first, unless that is done already."""
        target = self.find_directory(name)
        if target.exists():
            return
        scratch = target.with_name(f".{name}.{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for layer in layers:
            with tarfile.open(layer, "r:*") as archive:
                for member in archive:
                    _unpack_member(archive, member, scratch)
        scratch.rename(target)


def _unpack_member(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    place = _find_place(root, member.name)
    if place == root:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.name == _OPAQUE:
        for each in place.parent.iterdir():
            _remove(each)
        return
    if place.name.startswith(_WHITEOUT):
        _remove(place.with_name(place.name.removeprefix(_WHITEOUT)))
        return
    if not (member.isdir() and place.is_dir() and not place.is_symlink()):
        _remove(place)
    if member.isdir():
        place.mkdir(exist_ok=True)
        place.chmod(member.mode & 0o7777)
    elif member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        place.hardlink_to(_find_place(root, member.linkname))
    elif member.isfile():
        content = archive.extractfile(member)
        if content is not None:
            with place.open("wb") as file:
                shutil.copyfileobj(content, file)
        place.chmod(member.mode & 0o7777)


def _find_place(root: Path, name: str) -> Path:
    """Return the place of a member; links of the image in its way are followed below the root."""
    parts = [part for part in PurePosixPath(name).parts if part not in {"/", "."}]
    if ".." in parts:
        raise ValueError(f"cannot unpack {name!r}: the path leaves the image")
    place = root
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink():
            target = place.readlink()
            joined = PurePosixPath(place.parent.relative_to(root)) / target
            place = root / os.path.normpath(f"/{joined}").lstrip("/")
    return place / parts[-1] if parts else root


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
