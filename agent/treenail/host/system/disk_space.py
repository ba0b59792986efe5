"""Free space of the file systems that an update writes to, and kernels on /boot.

Some space is reserved for a rollback, and released when it begins. A rollback creates directories
and writes the ledger. Both fail on a disk that a bad system has filled, and the node would stay on
the bad system.
"""

import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from treenail import errors, observations
from treenail.host.filesystem.root_directory import Root
from treenail.host.system import resources, state_file

log = logging.getLogger(__name__)

MOUNTINFO = Path("/proc/self/mountinfo")
_BOOT = "/boot/ostree"
_MODULES = "/usr/lib/modules"
_LAYER_REFS = "/ostree/repo/refs/heads/ostree/container/blob"
_ESCAPED_COLON = "_3A_"  # ref names cannot contain a colon: ostree-ext escapes it
RESERVATION_PATH = f"{state_file.STATE_DIRECTORY}/reserve"
RESERVATION_SIZE = 4 * 1024 * 1024


def read_filesystem_space(
    root: Root, path: str, *, mountinfo: Path = MOUNTINFO
) -> observations.FilesystemSpace | None:
    """Read the space of the filesystem at ``path``; None if the path does not exist.

    Raises `FileError`.
    """
    resolved = root.resolve_path(path)
    try:
        device = resolved.stat().st_dev
        usage = resources.read_disk_usage(resolved)
        # psutil has no inodes.
        inodes = os.statvfs(resolved)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.FileError(f"{error.strerror}") from error
    return observations.FilesystemSpace(
        path=path,
        device=device,
        free_bytes=usage.free_bytes,
        size_bytes=usage.size_bytes,
        free_files=inodes.f_ffree,
        files=inodes.f_files,
        is_read_only=_format_device(device) in _find_read_only_devices(mountinfo),
    )


def compute_kernel_bytes(root: Root) -> int:
    """Return the size of the booted system's kernel and initramfs; 0 when unknown."""
    # An OSTree commit has both in /usr/lib/modules/VERSION; ostree copies them to /boot.
    directory = root.resolve_path(_MODULES)
    sizes = [
        sum(_read_size(kernel / name) for name in ("vmlinuz", "initramfs.img"))
        for kernel in _list_entries(directory)
    ]
    return max(sizes, default=0)


def compute_freeable_boot_bytes(root: Root, *, retained: Collection[str] = ()) -> int:
    """Return the bytes on /boot of kernels that an update may remove.

    The kernels of the booted deployment and of the ``retained`` commits stay. Several deployments
    may share one kernel.
    """
    booted = _read_boot_checksum(root)
    if not booted:
        return 0
    needed = {booted, *_find_boot_checksums(root, retained)}
    others = (
        directory
        for directory in _list_entries(root.resolve_path(_BOOT))
        # The names are OSNAME-CHECKSUM, with the checksum of kernel and initramfs.
        if directory.name.rpartition("-")[2] not in needed
    )
    return sum(_read_size(file) for directory in others for file in _list_entries(directory))


def list_stored_layers(root: Root) -> frozenset[str]:
    """Return the digests of the image layers in the OSTree repository."""
    return frozenset(
        ref.name.replace(_ESCAPED_COLON, ":")
        for ref in _list_entries(root.resolve_path(_LAYER_REFS))
        if _ESCAPED_COLON in ref.name
    )


def _read_boot_checksum(root: Root) -> str:
    """Return CHECKSUM of ostree=/ostree/boot.N/OS/CHECKSUM/SERIAL on the kernel command line."""
    try:
        command_line = root.resolve_path("/proc/cmdline").read_text("utf-8", "replace")
    except OSError:
        return ""
    for argument in command_line.split():
        if argument.startswith("ostree="):
            parts = argument.split("/")
            return parts[-2] if len(parts) > 2 else ""
    return ""


def _find_boot_checksums(root: Root, commits: Collection[str]) -> Iterator[str]:
    """Yield the boot checksums of commits: parents of symlinks to …/deploy/COMMIT.SERIAL."""
    for version in ("/ostree/boot.0", "/ostree/boot.1"):
        for link in _walk_levels(root.resolve_path(version), 3):
            # realpath does not raise: ostree may replace the symlinks at the same time.
            commit, _, _ = Path(os.path.realpath(link)).name.partition(".")
            if commit in commits:
                yield link.parent.name


def _walk_levels(directory: Path, levels: int) -> Iterator[Path]:
    for entry in _list_entries(directory):
        if levels > 1:
            yield from _walk_levels(entry, levels - 1)
        else:
            yield entry


def _list_entries(directory: Path) -> Iterator[Path]:
    try:
        yield from directory.iterdir()
    except OSError:
        return


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _format_device(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _find_read_only_devices(mountinfo: Path) -> frozenset[str]:
    """Return the devices whose file system, not only one mount, is read-only; see proc(5)."""
    try:
        lines = mountinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return frozenset()
    devices: set[str] = set()
    for line in lines:
        before, _, after = line.partition(" - ")
        number, options = before.split(" ")[2:3], after.rpartition(" ")[2].split(",")
        if "ro" in options or "emergency_ro" in options:
            devices.update(number)
    return frozenset(devices)


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
                # A file that is only extended would be sparse and occupy nothing.
                os.posix_fallocate(descriptor, 0, RESERVATION_SIZE)
            finally:
                os.close(descriptor)
        except (OSError, errors.FileError) as error:
            log.warning("cannot reserve disk space for a rollback: %s", error)

    def release_space(self) -> None:
        """Release the space, if it is reserved."""
        try:
            self._root.resolve_path(RESERVATION_PATH).unlink(missing_ok=True)
        except (OSError, errors.FileError) as error:
            log.warning("cannot release the disk space reserved for a rollback: %s", error)
