"""A disk with an OSTree host on it: GRUB, /boot and a root with one deployment."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from vmlab.guest.names import (
    CONFIGURATION_KEY,
    DIGEST_KEY,
    ETC_FILTER,
    MANIFEST_KEY,
    SCHEME,
    STATEROOT,
    image_ref,
    layer_ref,
)
from vmlab.image import rootfs
from vmlab.image.layers import Layer
from vmlab.image.oci import Pushed
from vmlab.tools import run, say

GRUB_SUITE = "forky"  # the first whose GRUB reads boot loader entries, so that deployments switch
_GRUB_MODULES = (
    "biosdisk", "part_msdos", "ext2", "normal", "serial", "terminal", "linux", "blsuki", "loadenv",
    "test", "echo", "search", "search_label", "regexp", "configfile", "ls", "cat", "reboot",
    "halt", "minicmd",
)  # fmt: skip
_GRUB_CONFIG = """\
serial --unit=0 --speed=115200
terminal_input serial
terminal_output serial
set timeout=0
blscfg
"""
KERNEL_ARGUMENTS = (
    "root=LABEL=root", "rw", "console=ttyS0", "quiet", "systemd.show_status=no",
    # On a busy host udev takes longer than systemd's 90 s to name the disks.
    "systemd.default_device_timeout_sec=900",
    # With the same addresses in all processes, QEMU translates the code of a library once.
    "norandmaps",
    # What these leave out is slow under emulation, and protects a machine of users.
    "mitigations=off", "init_on_alloc=0", "cryptomgr.notests",
    # On a busy host the emulated timer is late, and the kernel panics in its check.
    "no_timer_check",
)  # fmt: skip
_BOOT_MIB, _ROOT_MIB = 200, 3072


def make_loader(directory: Path) -> None:
    """GRUB for the first sectors of a disk: ``boot.img`` and ``core.img``."""
    tree = directory / "packages"
    rootfs.bootstrap(tree, GRUB_SUITE, ("grub-pc-bin",), "extract")
    modules = tree / "usr/lib/grub/i386-pc"
    run(
        "grub-mkimage", "-O", "i386-pc", "-d", modules, "-p", "(hd0,msdos1)/grub",
        "-o", directory / "core.img", *_GRUB_MODULES,
    )  # fmt: skip
    shutil.copy(modules / "boot.img", directory / "boot.img")
    shutil.rmtree(tree)


def import_base(layer: Layer, repository: Path) -> None:
    """Make the base layer's commit, from which every disk is made."""
    run("ostree", "init", f"--repo={repository}", "--mode=bare")
    _commit(repository, layer_ref(layer.digest), f"tar={layer.path}", options=(ETC_FILTER,))


def make(
    disk: Path,
    *,
    repository: Path,
    layers: Sequence[Layer],
    pull_spec: str,
    image: Pushed,
    loader: Path,
) -> None:
    """Write ``disk``, installed from the image ``pull_spec`` that consists of ``layers``."""
    say(f"installing {pull_spec[-20:]} on a disk")
    for layer in layers[1:]:
        _commit(repository, layer_ref(layer.digest), f"tar={layer.path}", options=(ETC_FILTER,))
    digest = image.digest
    _commit(
        repository,
        image_ref(pull_spec),
        *(f"ref={layer_ref(layer.digest)}" for layer in layers),
        options=(
            "--bootable",
            f"--add-metadata-string={DIGEST_KEY}={digest}",
            # rpm-ostree and bootc read the image's parts from here, not from the registry.
            f"--add-metadata-string={MANIFEST_KEY}={image.manifest}",
            f"--add-metadata-string={CONFIGURATION_KEY}={image.configuration}",
            f"--add-metadata-string=version={digest.removeprefix('sha256:')[:12]}",
        ),
    )
    sysroot = disk.parent / "sysroot"
    _clear(sysroot)
    (sysroot / "boot").mkdir(parents=True)
    _deploy(sysroot, repository, layers, pull_spec)
    _write(disk, sysroot, loader)
    _clear(sysroot)


def _deploy(sysroot: Path, repository: Path, layers: Sequence[Layer], pull_spec: str) -> None:
    refs = [layer_ref(layer.digest) for layer in layers]
    ref = image_ref(pull_spec)
    at = f"--sysroot={sysroot}"
    own = f"--repo={sysroot}/ostree/repo"
    run("ostree", "admin", "init-fs", "--modern", sysroot)
    run("ostree", "admin", "os-init", at, STATEROOT)
    run("ostree", "config", own, "set", "sysroot.bootloader", "none")
    run("ostree", "config", own, "set", "sysroot.readonly", "true")
    run("ostree", own, "pull-local", repository, ref, *refs)
    origin = sysroot / "image.origin"
    origin.write_text(f"[origin]\ncontainer-image-reference={SCHEME}{pull_spec}\n")
    arguments = [f"--karg-append={each}" for each in KERNEL_ARGUMENTS]
    run("ostree", "admin", "deploy", at, f"--os={STATEROOT}", f"--origin-file={origin}",
        *arguments, ref)  # fmt: skip
    origin.unlink()
    (sysroot / "boot/grub").mkdir(parents=True)
    (sysroot / "boot/grub/grub.cfg").write_text(_GRUB_CONFIG)


def _write(disk: Path, sysroot: Path, loader: Path) -> None:
    disk.unlink(missing_ok=True)
    run("truncate", "-s", f"{_BOOT_MIB + _ROOT_MIB + 2}M", disk)
    start = 1 + _BOOT_MIB
    table = (
        "label: dos\n"
        f"start=1MiB,size={_BOOT_MIB}MiB,type=83,bootable\n"
        f"start={start}MiB,size={_ROOT_MIB}MiB,type=83\n"
    )
    run("sfdisk", "--quiet", disk, stdin=table)
    write = ("conv=notrunc", "status=none", f"of={disk}")
    run("dd", f"if={loader}/boot.img", "bs=440", "count=1", *write)
    run("dd", f"if={loader}/core.img", "bs=512", "seek=1", *write)
    boot = sysroot.with_name("boot")
    shutil.rmtree(boot, ignore_errors=True)
    (sysroot / "boot").rename(boot)
    (sysroot / "boot").mkdir()
    _format(disk, boot, "boot", 1, _BOOT_MIB)
    _format(disk, sysroot, "root", start, _ROOT_MIB)
    shutil.rmtree(boot)


def _format(disk: Path, content: Path, label: str, start_mib: int, size_mib: int) -> None:
    place = f"offset={start_mib << 20},lazy_itable_init=1,lazy_journal_init=1"
    run("mke2fs", "-q", "-F", "-t", "ext4", "-L", label, "-m", "0", "-E", place,
        "-d", content, disk, f"{size_mib}M")  # fmt: skip


def _commit(repository: Path, ref: str, *trees: str, options: Sequence[str] = ()) -> None:
    run(
        "ostree", "commit", f"--repo={repository}", f"--branch={ref}", "--no-bindings",
        "--tar-autocreate-parents", *options, *(f"--tree={tree}" for tree in trees),
    )  # fmt: skip


def _clear(sysroot: Path) -> None:
    if sysroot.exists():
        # Deployments are immutable directories.
        for deployment in sysroot.glob("ostree/deploy/*/deploy/*.[0-9]"):
            run("chattr", "-i", deployment)
        shutil.rmtree(sysroot)
