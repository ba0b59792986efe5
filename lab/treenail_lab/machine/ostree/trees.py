"""The trees of deployments on disk, and the /etc that belongs to each.

As in libostree, the tree of a staged deployment has the image's /usr/etc and no /etc. The /etc of
a new deployment is merged at its first boot: what differs from the /usr/etc before it, stays. Only
the files of the image are switched below /usr: the lab's programs are the same in each. An image of
a real registry is unpacked once, layers with whiteouts into one tree, and its files are copied into
the trees of its deployments.
"""

import os
import shutil
import tarfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

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
        paths = []
        for place, directories, files in os.walk(root):
            below = PurePosixPath("/", Path(place).relative_to(root))
            links = [directory for directory in directories if Path(place, directory).is_symlink()]
            paths += [str(below / entry) for entry in (*files, *links)]
        return sorted(path for path in paths if not path.startswith(_LEFT_OUT))

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
        for child in place.parent.iterdir():
            _remove(child)
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


_UNITS = "usr/lib/systemd"
# The machine's own programs are there: a boot does not replace them by those of a real image.
_PROGRAMS = ("/usr/bin/", "/usr/sbin/", "/usr/libexec/")


class TreeContent(Protocol):
    """A deployment, as far as its tree depends on it."""

    @property
    def id(self) -> str: ...
    @property
    def osname(self) -> str: ...
    @property
    def files(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def links(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def content(self) -> str: ...


class DeploymentTrees:
    """The trees below one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._deploy = root / "sysroot/ostree/deploy"
        self._base = root / "sysroot/ostree/base"
        self.unpacked = UnpackedImages(root / "sysroot/ostree/images")
        self._live = root / "sysroot/ostree/live-etc"
        """The file that names the deployment whose /etc is at /etc."""

    def record_base(self) -> None:
        """Record /etc and the vendor's units as they are: every image has them."""
        _copy_tree(self._root / "etc", self._base / "usr/etc")
        _copy_tree(self._root / _UNITS, self._base / _UNITS)

    def find_tree(self, deployment: TreeContent) -> Path:
        """Return the path of the deployment's tree."""
        name = deployment.id.removeprefix(f"{deployment.osname}-")
        return self._deploy / deployment.osname / "deploy" / name

    def write_tree(self, deployment: TreeContent, place: Path | None = None) -> Path:
        """Write the tree of a new deployment, or elsewhere for its image; return its path."""
        tree = place or self.find_tree(deployment)
        shutil.rmtree(tree, ignore_errors=True)
        _copy_tree(self._base, tree)
        for path in self.unpacked.list_paths(deployment.content):
            source = self.unpacked.find_directory(deployment.content) / path[1:]
            _copy_entry(source, tree / _find_image_path(path))
        for path, text in deployment.files:
            place = tree / _find_image_path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            place.chmod(0o644)
        for path, target in deployment.links:
            place = tree / _find_image_path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(target)
        return tree

    def prune_trees(self, kept: Collection[TreeContent]) -> None:
        """Remove the trees of all other deployments."""
        names = {self.find_tree(deployment) for deployment in kept}
        for tree in self._deploy.glob("*/deploy/*"):
            if tree not in names:
                shutil.rmtree(tree, ignore_errors=True)

    def read_live(self) -> str:
        """Return the ID of the deployment whose /etc is at /etc; empty before the first boot."""
        return self._live.read_text("utf-8") if self._live.exists() else ""

    def switch_to(self, deployment: TreeContent, before: TreeContent | None) -> None:
        """Make /etc, /usr/etc and the image's files those of the deployment, as a boot does."""
        live = self.read_live()
        if live == deployment.id:
            return
        tree = self.find_tree(deployment)
        if not tree.exists():
            self.write_tree(deployment)
        etc = self._root / "etc"
        if before is not None and before.id == live:
            former = self.find_tree(before)
            if not (tree / "etc").exists():
                _merge_etc(former / "usr/etc", etc, tree)
            former.mkdir(parents=True, exist_ok=True)
            etc.rename(former / "etc")
            (tree / "etc").rename(etc)
            self._remove_image_files(before)
        elif not live:
            for path in self._list_paths(deployment):
                if path.startswith("/etc/"):
                    _copy_entry(tree / _find_image_path(path), self._root / path[1:])
        shutil.rmtree(self._root / "usr/etc", ignore_errors=True)
        _copy_tree(tree / "usr/etc", self._root / "usr/etc")
        for path in self._list_paths(deployment):
            place = self._root / path[1:]
            is_program = path.startswith(_PROGRAMS) and place.exists()
            if path.startswith("/usr/") and not is_program:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / path[1:], place, follow_symlinks=False)
        self._live.write_text(deployment.id, "utf-8")

    def _remove_image_files(self, deployment: TreeContent) -> None:
        for path in self._list_paths(deployment):
            is_kept = path.startswith(_PROGRAMS) or (self._base / path[1:]).exists()
            if path.startswith("/usr/") and not (is_kept and deployment.content):
                (self._root / path[1:]).unlink(missing_ok=True)

    def _list_paths(self, deployment: TreeContent) -> list[str]:
        unpacked = self.unpacked.list_paths(deployment.content)
        return [*unpacked, *(path for path, _ in (*deployment.files, *deployment.links))]


def _find_image_path(path: str) -> str:
    return f"usr{path}" if path.startswith("/etc/") else path[1:]


def _merge_etc(old: Path, live: Path, tree: Path) -> None:
    """Write the /etc of the tree: its /usr/etc with all that differs in ``live`` from ``old``."""
    etc = tree / "etc"
    _copy_tree(tree / "usr/etc", etc)
    changed = {path.relative_to(live) for path in live.rglob("*")}
    for path in (file.relative_to(old) for file in old.rglob("*")):
        if path not in changed:
            _remove_entry(etc / path)
    for path in sorted(changed):
        if not _is_same(live / path, old / path):
            _copy_entry(live / path, etc / path)


def _is_same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    if one.is_dir() or not other.is_file():
        return one.is_dir() and other.is_dir()
    same_mode = one.stat().st_mode == other.stat().st_mode
    return same_mode and one.read_bytes() == other.read_bytes()


def _copy_entry(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copystat(source, target)
    else:
        _remove_entry(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    status = source.lstat()
    with suppress(PermissionError):
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy_tree(source: Path, target: Path) -> None:
    if source.exists():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
