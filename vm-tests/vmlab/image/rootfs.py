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
)  # fmt: skip
UNUSED = ("usr/lib/cni", "usr/libexec/podman/podman-testing")
"""A fifth of the base layer with podman, which the guest unpacks under emulation."""
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
_NETWORK = "[Match]\nName=en* eth*\n[Network]\nDHCP=yes\n"


def bootstrap(target: Path, suite: str, packages: tuple[str, ...], variant: str) -> None:
    """Unpack Debian packages into ``target``, from the mirror that this host uses."""
    say(f"fetching {len(packages)} packages of Debian {suite}")
    shutil.rmtree(target, ignore_errors=True)
    options = [
        *(f"--aptopt={line}" for line in _apt_options()),
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        *(f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("man", "locale", "doc")),
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
    _configure(tree)
    compile_modules(tree, "/usr/lib/python3", "/usr/lib/python3.13")
    _reshape(tree)


def compile_modules(tree: Path, *places: str, strip: str = "/") -> None:
    """Compile a root's Python modules so that they stay compiled in OSTree, which has no times.

    Otherwise each start of a program would compile all that it imports.
    """
    options = ("-q", "-f", "-s", strip, "-p", "/", "--invalidation-mode", "unchecked-hash")
    run("chroot", tree, "python3", "-m", "compileall", *options, *places)


def _configure(tree: Path) -> None:
    for name in UNUSED:
        if (tree / name).exists():
            _remove(tree / name)
    run("systemctl", "--root", tree, "mask", *MASKED)
    run("systemctl", "--root", tree, "enable", "systemd-networkd.service")
    (tree / "etc/systemd/network/80-dhcp.network").write_text(_NETWORK)
    (tree / "etc/machine-id").write_text("")
    (tree / "etc/hostname").write_text("node\n")
    (tree / "etc/fstab").write_text("LABEL=boot /boot ext4 ro,nodev,nosuid 0 2\n")
    (tree / "usr/lib/tmpfiles.d/ostree-host.conf").write_text(_TMPFILES)
    settings = tree / "usr/lib/systemd/journald.conf.d/persistent.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("[Journal]\nStorage=persistent\n")
    release = tree / "usr/lib/os-release"
    release.write_text(release.read_text() + "VARIANT_ID=treenail-vm\n")


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
