"""The base of every image: Debian packages in the shape of an OSTree host's image.

The image has /etc, as builds on it expect. Its commit has that below /usr/etc.

What dracut and a distribution's own scripts do is left out where it costs time under emulation and
has no part in an update: the initramfs is busybox and ostree-prepare-root.
"""

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from vmlab.image import initramfs
from vmlab.image.programs import Program
from vmlab.tools import ToolError, run, say

SUITE = "trixie"
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "udev", "kmod", "e2fsprogs", "iproute2",
    "linux-image-cloud-amd64", "ostree", "ostree-boot", "gir1.2-ostree-1.0",
    "skopeo", "ca-certificates",
    "python3-minimal", "python3-gi", "python3-pydbus", "python3-tenacity", "python3-psutil",
    "python3-yaml",
)  # fmt: skip
MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
    "e2scrub_reap.service", "fstrim.timer", "ldconfig.service", "proc-sys-fs-binfmt_misc.automount",
    "systemd-binfmt.service", "systemd-firstboot.service", "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service", "systemd-networkd-wait-online.service",
    "systemd-pcrphase.service", "systemd-pstore.service", "systemd-timesyncd.service",
    "dev-hugepages.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
    "modprobe@drm.service", "modprobe@configfs.service", "getty@tty1.service",
    "serial-getty@ttyS0.service", "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path", "systemd-creds.socket", "systemd-initctl.socket",
    "systemd-modules-load.service", "systemd-network-generator.service",
    "systemd-networkd-persistent-storage.service", "systemd-pcrextend.socket",
    "systemd-pcrlock.socket", "systemd-random-seed.service", "systemd-remount-fs.service",
    "systemd-sysext.socket", "systemd-sysusers.service", "systemd-tmpfiles-clean.timer",
    "systemd-udev-load-credentials.service", "systemd-update-done.service",
    "systemd-user-sessions.service", "dev-mqueue.mount", "run-lock.mount",
)  # fmt: skip
"""Units without a part in an update: each process costs a tenth of a second under emulation."""
MASKED_WITHOUT_PROGRAMS = (
    "kmod-static-nodes.service", "modprobe@fuse.service", "sys-fs-fuse-connections.mount",
    "systemd-tmpfiles-setup-dev-early.service", "systemd-tmpfiles-setup-dev.service",
)  # fmt: skip
"""Device nodes for containers, which only real programs start."""
_GENERATORS = {"ostree-system-generator", "systemd-fstab-generator"}
"""systemd runs all generators at each boot and reload; these write units that are needed here."""
_UDEV_RULES = {
    "50-udev-default.rules", "60-block.rules", "60-persistent-storage.rules", "80-drivers.rules",
    "99-systemd.rules",
}  # fmt: skip
_UDEV_SUBSYSTEMS = ("block", "net", "virtio", "virtio-ports")
"""The devices of these machines: at a boot udev runs its rules for hundreds of others."""
EXCLUDED = (
    "usr/share/man", "usr/share/locale", "usr/share/doc", "usr/share/bash-completion",
    "usr/share/lintian", "usr/share/bug", "usr/lib/cni", "usr/lib/udev/hwdb.d",
)  # fmt: skip
"""What is not unpacked of the packages."""
UNUSED = (
    "usr/libexec/podman/podman-testing", "usr/lib/udev/hwdb.bin", "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl-base", "usr/share/perl5", "usr/share/zoneinfo",
    "usr/lib/klibc", "usr/lib/python3.13/_pyrepl", "usr/lib/python3.13/test",
    "usr/share/initramfs-tools", "usr/share/zsh",
)  # fmt: skip
"""What is removed from the base layer. Each file takes the guest time: it copies the links to all
files for each deployment, and with podman it unpacks the layer."""
_UNUSED_WITHOUT_PROGRAMS = ("usr/lib/x86_64-linux-gnu/xtables",)
_MODULES = (
    "autofs4", "overlay", "qemu_fw_cfg", "virtio_blk", "virtio_console", "virtio_net", "virtio_pci",
    "virtio-rng",
)  # fmt: skip
"""The kernel's modules for these machines, which stay with what they depend on. Without real
programs the others are removed: they were every fifth file."""
_VAR_LINKS = {
    "home": "var/home",
    "opt": "var/opt",
    "srv": "var/srv",
    "mnt": "var/mnt",
    "root": "var/roothome",
    "media": "run/media",
    "usr/local": "../var/usrlocal",
}
_TMPFILES = """\
d /var/home 0755 root root -
d /var/roothome 0700 root root -
d /var/opt 0755 root root -
d /var/srv 0755 root root -
d /var/mnt 0755 root root -
d /var/usrlocal 0755 root root -
d /var/lib 0755 root root -
d /var/log/journal 2755 root systemd-journal -
d /run/media 0755 root root -
"""
# QEMU's user network has these addresses. DHCP and IPv6 would take time at each boot.
_NETWORK = """\
[Match]
Name=en* eth*
[Network]
Address=10.0.2.15/24
Gateway=10.0.2.2
IPv6AcceptRA=no
LinkLocalAddressing=no
LLDP=no
"""


def bootstrap(target: Path, suite: str, packages: tuple[str, ...], variant: str) -> None:
    """Unpack Debian packages into ``target``, from the mirror that this host uses."""
    say(f"fetching {len(packages)} packages of Debian {suite}")
    shutil.rmtree(target, ignore_errors=True)
    options = [
        *(f"--aptopt={line}" for line in _apt_options()),
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        *(f"--dpkgopt=path-exclude=/{name}/*" for name in EXCLUDED),
    ]
    included = f"--include={','.join(packages)}"
    run("mmdebstrap", f"--variant={variant}", *options, included, suite, target, _mirror())


def make(base: Path, tree: Path, programs: Sequence[Program]) -> None:
    """Make ``tree`` of a bootstrapped ``base``: what the base layer of every image holds."""
    say("shaping the root file system")
    shutil.rmtree(tree, ignore_errors=True)
    run("cp", "-a", "--reflink=auto", base, tree)
    kernel = next((tree / "usr/lib/modules").iterdir())
    shutil.move(next((tree / "boot").glob("vmlinuz-*")), kernel / "vmlinuz")
    initramfs.make(tree, kernel / "initramfs.img")
    for program in programs:
        say(f"adding {program.name} {program.version}")
        program.copy_to(tree)
    if programs:
        run("chroot", tree, "ldconfig")
    _configure(tree, (*MASKED, *(() if programs else MASKED_WITHOUT_PROGRAMS)))
    _remove_all(tree, (*UNUSED, *(() if programs else _UNUSED_WITHOUT_PROGRAMS)))
    if not programs:
        _limit_modules(tree, kernel)
    _limit_udev(tree)
    compile_modules(tree, "/usr/lib/python3", "/usr/lib/python3.13")
    _reshape(tree)


def compile_modules(tree: Path, *places: str, strip: str = "/") -> None:
    """Compile a root's Python modules so that they stay compiled in OSTree, which has no times.

    Otherwise each start of a program would compile all that it imports.
    """
    options = ("-q", "-f", "-s", strip, "-p", "/", "--invalidation-mode", "unchecked-hash")
    run("chroot", tree, "python3", "-m", "compileall", *options, *places)


def _configure(tree: Path, masked: Sequence[str]) -> None:
    run("systemctl", "--root", tree, "mask", *masked)
    run("systemctl", "--root", tree, "enable", "systemd-networkd.service")
    (tree / "etc/systemd/network/80-user.network").write_text(_NETWORK)
    (tree / "etc/machine-id").write_text("")
    (tree / "etc/hostname").write_text("node\n")
    (tree / "etc/fstab").write_text("LABEL=boot /boot ext4 ro,nodev,nosuid 0 0\n")
    (tree / "usr/lib/tmpfiles.d/ostree-host.conf").write_text(_TMPFILES)
    settings = tree / "usr/lib/systemd/journald.conf.d/persistent.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("[Journal]\nStorage=persistent\n")
    for path in (tree / "usr/lib/systemd/system-generators").iterdir():
        if path.name not in _GENERATORS:
            path.unlink()
    release = tree / "usr/lib/os-release"
    release.write_text(release.read_text() + "VARIANT_ID=treenail-vm\n")


def _limit_modules(tree: Path, kernel: Path) -> None:
    """Remove the kernel's modules but `_MODULES` and what these depend on."""
    lines = (kernel / "modules.dep").read_text("ascii").splitlines()
    needs = {path: others.split() for path, _, others in (line.partition(":") for line in lines)}
    named = [path for path in needs if Path(path).name.partition(".")[0] in _MODULES]
    kept = {kernel / path for each in named for path in (each, *needs[each])}
    for path in (kernel / "kernel").rglob("*.ko*"):
        if path not in kept:
            path.unlink()
    run("chroot", tree, "find", f"/{(kernel / 'kernel').relative_to(tree)}", "-type", "d",
        "-empty", "-delete")  # fmt: skip
    run("chroot", tree, "depmod", kernel.name)


def _limit_udev(tree: Path) -> None:
    """Leave out rules, and devices that are there at the boot, which no test looks at."""
    for path in (tree / "usr/lib/udev/rules.d").iterdir():
        if path.name not in _UDEV_RULES:
            path.unlink()
    trigger = "udevadm trigger --type=devices --action=add"
    matches = " ".join(f"--subsystem-match={name}" for name in _UDEV_SUBSYSTEMS)
    drop_in = tree / "usr/lib/systemd/system/systemd-udev-trigger.service.d/devices.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(f"[Service]\nExecStart=\nExecStart={trigger} {matches}\n")


def _reshape(tree: Path) -> None:
    for name, aim in _VAR_LINKS.items():
        _remove(tree / name)
        (tree / name).symlink_to(aim)
    (tree / "sysroot").mkdir()
    (tree / "ostree").symlink_to("sysroot/ostree")
    for name in ("boot", "var", "run", "tmp", "dev", "proc", "sys"):
        _remove(tree / name)
        (tree / name).mkdir()
    (tree / "tmp").chmod(stat.S_ISVTX | 0o777)
    for link in (*tree.glob("vmlinuz*"), *tree.glob("initrd.img*")):
        link.unlink()


def _remove_all(tree: Path, names: Sequence[str]) -> None:
    for name in names:
        if (tree / name).exists():
            _remove(tree / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _mirror() -> str:
    sources = ("Origin: Debian", "Label: Debian", "Created-By: Packages")
    found = run("apt-get", "indextargets", "--format", "$(REPO_URI)", *sources).split()
    if not found:
        raise ToolError("apt knows no mirror of Debian; run: apt-get update")
    return found[0]


def _apt_options() -> list[str]:
    """Proxies, and whether to trust a mirror whose files are old."""
    kept = ("Acquire::http", "Acquire::https", "Acquire::Check-")
    lines = run("apt-config", "dump").splitlines()
    return [
        line.rstrip(";") for line in lines if line.startswith(kept) and not line.endswith('"";')
    ]
