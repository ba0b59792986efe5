"""Room on the file systems that an update writes to, and what the boot partition holds."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from treenail.errors import FileError
from treenail.host.filesystem.root import Root

MOUNTS = Path("/proc/self/mountinfo")
_BOOT = "/boot/ostree"
_MODULES = "/usr/lib/modules"
_LAYERS = "/ostree/repo/refs/heads/ostree/container/blob"
_COLON = "_3A_"  # how ostree writes what can't stand in the name of a ref


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system below a path; ``files`` is 0 where their number has no limit."""

    device: int
    free_bytes: int
    size_bytes: int
    free_files: int
    files: int
    read_only: bool


def file_system(root: Root, path: str, *, mounts: Path = MOUNTS) -> FileSystem | None:
    """What there is at ``path``; None when there is no such path. Raises `FileError`."""
    found = root.path(path)
    try:
        device = found.stat().st_dev
        state = os.statvfs(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{error.strerror}") from error
    return FileSystem(
        device=device,
        # What root may use: updates are root's.
        free_bytes=state.f_bfree * state.f_frsize,
        size_bytes=state.f_blocks * state.f_frsize,
        free_files=state.f_ffree,
        files=state.f_files,
        read_only=_number(device) in _read_only(mounts),
    )


def kernel_bytes(root: Root) -> int:
    """The size of the booted system's kernel and initramfs; 0 when unknown."""
    directory = root.path(_MODULES)
    sizes = [
        sum(_size(each / name) for name in ("vmlinuz", "initramfs.img"))
        for each in _entries(directory)
    ]
    return max(sizes, default=0)


def freeable_boot_bytes(root: Root, *, kept: Collection[str] = ()) -> int:
    """What the kernels of other deployments than the booted one take on /boot.

    ``kept`` are commits whose kernels stay, too; several deployments may share one.
    """
    booted = _boot_checksum(root)
    if not booted:
        return 0
    needed = {booted, *_boot_checksums(root, kept)}
    others = (
        each for each in _entries(root.path(_BOOT)) if each.name.rpartition("-")[2] not in needed
    )
    return sum(_size(file) for each in others for file in _entries(each))


def held_layers(root: Root) -> frozenset[str]:
    """The digests of the image layers that are in the OSTree repository."""
    return frozenset(
        each.name.replace(_COLON, ":")
        for each in _entries(root.path(_LAYERS))
        if _COLON in each.name
    )


def _boot_checksum(root: Root) -> str:
    """What ostree= on the kernel's command line names: /ostree/boot.N/OS/CHECKSUM/SERIAL."""
    try:
        command_line = root.path("/proc/cmdline").read_text("utf-8", "replace")
    except OSError:
        return ""
    for argument in command_line.split():
        if argument.startswith("ostree="):
            parts = argument.split("/")
            return parts[-2] if len(parts) > 2 else ""
    return ""


def _boot_checksums(root: Root, commits: Collection[str]) -> Iterator[str]:
    """Their kernels' names in ostree=, which are links to …/deploy/COMMIT.SERIAL."""
    for version in ("/ostree/boot.0", "/ostree/boot.1"):
        for link in _below(root.path(version), 3):
            # Without exceptions: somebody may be changing them.
            commit, _, _ = Path(os.path.realpath(link)).name.partition(".")
            if commit in commits:
                yield link.parent.name


def _below(directory: Path, levels: int) -> Iterator[Path]:
    for each in _entries(directory):
        if levels > 1:
            yield from _below(each, levels - 1)
        else:
            yield each


def _entries(directory: Path) -> Iterator[Path]:
    try:
        yield from directory.iterdir()
    except OSError:
        return


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _read_only(mounts: Path) -> frozenset[str]:
    """The devices whose file system, not just a mount of it, is read-only; see proc(5)."""
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return frozenset()
    found: set[str] = set()
    for line in lines:
        before, _, after = line.partition(" - ")
        number, options = before.split(" ")[2:3], after.rpartition(" ")[2].split(",")
        if "ro" in options or "emergency_ro" in options:
            found.update(number)
    return frozenset(found)
