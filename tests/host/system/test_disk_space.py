"""Room on file systems, asked of real ones."""

import os
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root import Root
from treenail.host.system.disk_space import (
    compute_freeable_boot_bytes,
    compute_kernel_bytes,
    list_stored_layers,
    read_file_system,
)

BOOTED, OLDER = "b" * 64, "c" * 64


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def test_a_file_system_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    found = read_file_system(Root(tmp_path), "/var")
    assert found is not None
    assert found.device == tmp_path.stat().st_dev
    assert 0 < found.free_bytes <= found.size_bytes
    assert found.free_files <= found.files
    assert not found.is_read_only


def test_a_path_that_is_not_there_has_no_file_system(tmp_path: Path) -> None:
    assert read_file_system(Root(tmp_path), "/boot") is None


def test_a_file_system_that_answers_with_an_error_is_named_by_it(tmp_path: Path) -> None:
    (tmp_path / "var").symlink_to("var")
    with pytest.raises(FileError, match="symbolic links"):
        read_file_system(Root(tmp_path), "/var")


@pytest.mark.parametrize(
    ("mount", "options", "read_only"),
    [("rw", "rw", False), ("ro", "rw", False), ("rw", "ro", True), ("ro", "ro", True)],
)
def test_a_read_only_mount_is_no_read_only_file_system(
    tmp_path: Path, mount: str, options: str, read_only: bool
) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:5 / /proc rw - proc proc ro\n"
        f"36 35 {number} /a /var {mount},noatime shared:1 - xfs /dev/vda4 {options},seclabel\n"
    )
    found = read_file_system(Root(tmp_path), "/", mountinfo=mounts)
    assert found is not None
    assert found.is_read_only is read_only


def test_the_next_kernel_is_taken_to_be_as_large_as_the_booted_one(tmp_path: Path) -> None:
    write(tmp_path / "usr/lib/modules/6.1/vmlinuz", 100)
    write(tmp_path / "usr/lib/modules/6.1/initramfs.img", 1000)
    write(tmp_path / "usr/lib/modules/6.0/modules.dep", 5)
    assert compute_kernel_bytes(Root(tmp_path)) == 1100
    assert compute_kernel_bytes(Root(tmp_path / "none")) == 0


def test_what_the_booted_kernel_takes_can_not_be_freed(tmp_path: Path) -> None:
    write(tmp_path / f"boot/ostree/fedora-{BOOTED}/vmlinuz-6.1", 100)
    write(tmp_path / f"boot/ostree/fedora-{OLDER}/vmlinuz-6.0", 70)
    root = Root(tmp_path)
    assert compute_freeable_boot_bytes(root) == 0, "who knows which is booted"
    write(tmp_path / "proc/cmdline", 0)
    (tmp_path / "proc/cmdline").write_text(f"quiet ostree=/ostree/boot.1/fedora/{BOOTED}/0\n")
    assert compute_freeable_boot_bytes(root) == 70


def link(root: Path, kernel: str, commit: str) -> None:
    """As ostree does, for the kernel's command line to name the deployment."""
    links = root / "ostree/boot.1.1/fedora" / kernel
    links.mkdir(parents=True, exist_ok=True)
    serial = len(list(links.iterdir()))
    (links / str(serial)).symlink_to(f"../../../deploy/fedora/deploy/{commit}.0")
    if not (root / "ostree/boot.1").is_symlink():
        (root / "ostree/boot.1").symlink_to("boot.1.1")


def test_the_kernel_of_a_deployment_that_is_kept_can_not_be_freed(tmp_path: Path) -> None:
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
        "the other one with it does not help"
    )
    assert compute_freeable_boot_bytes(root, retained={"4" * 64, "9" * 64}) == 70
    assert compute_freeable_boot_bytes(root, retained={"2" * 64, "4" * 64}) == 0


def test_layers_of_the_repository_are_known_by_digest(tmp_path: Path) -> None:
    blobs = tmp_path / "ostree/repo/refs/heads/ostree/container/blob"
    write(blobs / f"sha256_3A_{BOOTED}", 64)
    assert list_stored_layers(Root(tmp_path)) == {f"sha256:{BOOTED}"}
    assert list_stored_layers(Root(tmp_path / "none")) == frozenset()
