"""Free space of real file systems, and sizes of kernels on /boot."""

import os
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.disk_space import (
    compute_freeable_boot_bytes,
    compute_kernel_bytes,
    list_stored_layers,
    read_filesystem_space,
)

BOOTED, OLDER = "b" * 64, "c" * 64


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def test_read_filesystem_space_returns_space_and_files(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    found = read_filesystem_space(Root(tmp_path), "/var")
    assert found.device == tmp_path.stat().st_dev
    assert 0 < found.free_bytes <= found.size_bytes
    assert found.free_files <= found.files
    assert not found.is_read_only


def test_read_filesystem_space_of_missing_path_is_none(tmp_path: Path) -> None:
    assert read_filesystem_space(Root(tmp_path), "/boot") is None


def test_read_filesystem_space_error_states_cause(tmp_path: Path) -> None:
    (tmp_path / "var").symlink_to("var")
    with pytest.raises(FileError, match="symbolic links"):
        read_filesystem_space(Root(tmp_path), "/var")


@pytest.mark.parametrize(
    ("mount", "options", "read_only"),
    [("rw", "rw", False), ("ro", "rw", False), ("rw", "ro", True), ("ro", "ro", True)],
)
def test_read_only_mount_does_not_mean_read_only_file_system(
    tmp_path: Path, mount: str, options: str, read_only: bool
) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:5 / /proc rw - proc proc ro\n"
        f"36 35 {number} /a /var {mount},noatime shared:1 - xfs /dev/vda4 {options},seclabel\n"
    )
    found = read_filesystem_space(Root(tmp_path), "/", mountinfo=mounts)
    assert found.is_read_only is read_only


def test_kernel_bytes_are_those_of_the_booted_kernel(tmp_path: Path) -> None:
    write(tmp_path / "usr/lib/modules/6.1/vmlinuz", 100)
    write(tmp_path / "usr/lib/modules/6.1/initramfs.img", 1000)
    write(tmp_path / "usr/lib/modules/6.0/modules.dep", 5)
    assert compute_kernel_bytes(Root(tmp_path)) == 1100
    assert compute_kernel_bytes(Root(tmp_path / "none")) == 0


def test_freeable_boot_bytes_exclude_booted_kernel(tmp_path: Path) -> None:
    write(tmp_path / f"boot/ostree/fedora-{BOOTED}/vmlinuz-6.1", 100)
    write(tmp_path / f"boot/ostree/fedora-{OLDER}/vmlinuz-6.0", 70)
    root = Root(tmp_path)
    assert compute_freeable_boot_bytes(root) == 0, "the booted kernel is unknown"
    write(tmp_path / "proc/cmdline", 0)
    (tmp_path / "proc/cmdline").write_text(f"quiet ostree=/ostree/boot.1/fedora/{BOOTED}/0\n")
    assert compute_freeable_boot_bytes(root) == 70


def link(root: Path, kernel: str, commit: str) -> None:
    """Create the symlink to which ostree= on the kernel command line points."""
    links = root / "ostree/boot.1.1/fedora" / kernel
    links.mkdir(parents=True, exist_ok=True)
    serial = len(list(links.iterdir()))
    (links / str(serial)).symlink_to(f"../../../deploy/fedora/deploy/{commit}.0")
    if not (root / "ostree/boot.1").is_symlink():
        (root / "ostree/boot.1").symlink_to("boot.1.1")


def test_freeable_boot_bytes_exclude_kernels_of_retained_commits(tmp_path: Path) -> None:
    oldest = "d" * 64
    write(tmp_path / f"boot/ostree/fedora-{BOOTED}/vmlinuz-6.2", 100)
    write(tmp_path / f"boot/ostree/fedora-{OLDER}/vmlinuz-6.1", 70)
    write(tmp_path / f"boot/ostree/fedora-{oldest}/vmlinuz-6.0", 50)
    write(tmp_path / "proc/cmdline", 0)
    (tmp_path / "proc/cmdline").write_text(f"ostree=/ostree/boot.1/fedora/{BOOTED}/0\n")
    link(tmp_path, BOOTED, "1" * 64)
    link(tmp_path, OLDER, "2" * 64)
    link(tmp_path, OLDER, "3" * 64)
    link(tmp_path, oldest, "4" * 64)
    root = Root(tmp_path)
    assert compute_freeable_boot_bytes(root) == 120
    assert compute_freeable_boot_bytes(root, retained={"1" * 64}) == 120
    assert compute_freeable_boot_bytes(root, retained={"3" * 64}) == 50, (
        "a commit that shares its kernel with another one"
    )
    assert compute_freeable_boot_bytes(root, retained={"4" * 64, "9" * 64}) == 70
    assert compute_freeable_boot_bytes(root, retained={"2" * 64, "4" * 64}) == 0


def test_list_stored_layers_returns_digests(tmp_path: Path) -> None:
    blobs = tmp_path / "ostree/repo/refs/heads/ostree/container/blob"
    write(blobs / f"sha256_3A_{BOOTED}", 64)
    assert list_stored_layers(Root(tmp_path)) == {f"sha256:{BOOTED}"}
    assert list_stored_layers(Root(tmp_path / "none")) == frozenset()
