"""The disk of a power cut, mounted as the next boot would mount it."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmlab.guest.names import STATEROOT
from vmlab.tools import ToolError, run

_CLONE_NEWNS = 0x20000
"""Of unshare(2)."""
_SECTOR = 512
_TABLE, _PARTITION = 446, struct.Struct("<8xII")


@dataclass(frozen=True, slots=True)
class CutMachine:
    """The root that boots next: its /etc and /var are those of the deployment."""

    root: Path
    arguments: tuple[str, ...]
    """Of the kernel, without the deployment's."""
    deployments: tuple[tuple[str, str], ...]
    """The ID and the image's digest of each, in the order of the boot loader."""

    @property
    def digest(self) -> str:
        """The digest of the image that boots."""
        return self.deployments[0][1]


def enter_mount_namespace() -> None:
    """Hide later mounts from programs that make a mount namespace, which would keep them mounted.

    Otherwise they write to the disk after its unmount here, while e2fsck reads it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNS):
        raise ToolError(f"cannot make a mount namespace: {os.strerror(ctypes.get_errno())}")
    run("mount", "--make-rslave", "/")


@contextmanager
def mount_cut(disk: Path, at: Path) -> Iterator[CutMachine]:
    """Mount the disk; raise `ToolError` if its file systems or its next boot are damaged."""
    with ExitStack() as mounts:
        parts = list_partitions(disk)
        _mount(mounts, disk, parts[1], at)
        _mount(mounts, disk, parts[0], at / "boot")
        machine = _find_next_boot(at)
        var = at / "ostree/deploy" / STATEROOT / "var"
        run("mount", "--bind", var, machine.root / "var")
        mounts.callback(run, "umount", machine.root / "var")
        yield machine


def check_file_systems(disk: Path) -> list[str]:
    """Return what e2fsck finds in the file systems, which were mounted and unmounted."""
    wrong = []
    for start, size in list_partitions(disk):
        device = run("losetup", "--find", "--show", "--read-only",
                     f"--offset={start}", f"--sizelimit={size}", disk)  # fmt: skip
        try:
            # What e2fsck finds is in its output, which `run` leaves out of its error.
            found = run("sh", "-c", 'e2fsck -f -n "$1" 2>&1 || echo FAILED', "sh", device)
            if found.endswith("FAILED"):
                wrong.append(f"e2fsck: {found}")
        finally:
            run("losetup", "--detach", device)
    return wrong


def list_partitions(disk: Path) -> list[tuple[int, int]]:
    """Return start and size of the first two partitions, in bytes."""
    with disk.open("rb") as file:
        file.seek(_TABLE)
        table = file.read(32)
    return [
        (start * _SECTOR, size * _SECTOR) for start, size in _PARTITION.iter_unpack(table) if size
    ]


def _mount(mounts: ExitStack, disk: Path, part: tuple[int, int], at: Path) -> None:
    start, size = part
    run("mount", "-o", f"loop,offset={start},sizelimit={size}", disk, at)
    mounts.callback(_unmount, at)


def _unmount(at: Path) -> None:
    device = Path(run("findmnt", "-no", "SOURCE", at)).name
    count = Path("/sys/fs/ext4", device, "errors_count").read_text().strip()
    run("umount", at)
    if count != "0":
        raise ToolError(f"the kernel found {count} errors in the file system at {at}")


def _find_next_boot(sysroot: Path) -> CutMachine:
    """Find the deployment of the loader entry with the highest version."""
    entries = [
        _read_entry(path) for path in (sysroot / "boot/loader/entries").iterdir()
        if path.suffix == ".conf"
    ]  # fmt: skip
    if not entries:
        raise ToolError("the boot loader has no entry")
    roots = []
    for entry in sorted(entries, key=lambda each: int(each["version"]), reverse=True):
        for name in ("linux", "initrd"):
            image = sysroot / "boot" / entry[name].removeprefix("/boot").lstrip("/")
            if not image.stat().st_size:
                raise ToolError(f"{name} of the loader entry {entry['title']} is empty")
        words = entry["options"].split()
        place = next(word for word in words if word.startswith("ostree=")).partition("=")[2]
        root = (sysroot / place.lstrip("/")).resolve(strict=True)
        roots.append((root, tuple(word for word in words if not word.startswith("ostree="))))
    root, arguments = roots[0]
    return CutMachine(root, arguments, tuple(_read_deployment(each) for each, _ in roots))


def _read_deployment(root: Path) -> tuple[str, str]:
    origin = root.with_name(f"{root.name}.origin").read_text()
    digest = next(line for line in origin.splitlines() if "@sha256:" in line).partition("@")[2]
    return f"{STATEROOT}-{root.name}", digest


def _read_entry(path: Path) -> dict[str, str]:
    rows = (line.partition(" ") for line in path.read_text().splitlines())
    return {name: value.strip() for name, _, value in rows}
