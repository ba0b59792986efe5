"""The root directory of a machine: its installation, and the files that a boot creates."""

import shutil
import uuid
from pathlib import Path

from treenail_lab.images import Image, find_layer_file
from treenail_lab.machine.ostree.sysroot import Sysroot, SysrootDeployment, make_deployment
from treenail_lab.machine.unit_files import VENDOR, UnitFileTree

PLATFORM_ARGUMENTS = ("root=LABEL=root", "rw", "console=ttyS0", "ignition.platform.id=lab")
_DIRECTORIES = ("etc/systemd/system", "usr/lib/systemd/system", "var/lib", "var/log", "proc", "run")
_UNIT_FILES = {
    "default.target": "[Unit]\nDescription=Multi-User System\n",
    "multi-user.target": "[Unit]\nDescription=Multi-User System\n",
    "crio.service": (
        "[Unit]\nDescription=Container Runtime Interface for OCI (CRI-O)\n"
        "[Service]\nType=notify\nExecStart=/usr/bin/crio\nExecReload=/bin/kill -s HUP $MAINPID\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
    "kubelet.service": (
        "[Unit]\nDescription=Kubernetes Kubelet\n"
        "[Service]\nType=notify\nExecStart=/usr/bin/kubelet\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
    "rpm-ostreed.service": (
        "[Unit]\nDescription=rpm-ostree System Management Daemon\n"
        "[Service]\nType=dbus\nExecStart=/usr/bin/rpm-ostree start-daemon\n"
    ),
    "chronyd.service": (
        "[Unit]\nDescription=NTP client/server\n"
        "[Service]\nType=forking\nExecStart=/usr/sbin/chronyd\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
}
_ENABLED_UNITS = ("crio.service", "kubelet.service", "chronyd.service")
_BOOT_ID = "proc/sys/kernel/random/boot_id"
_SOFT_REBOOTS = "run/systemd/soft-reboots"
_OS_RELEASE = "usr/lib/os-release"


def install_root(root: Path, image: Image, lab: Path | None = None) -> None:
    """Install ``image`` below ``root``, as on a machine that has never booted.

    ``lab`` is the lab's directory, which has the layers of an image of a real registry.
    """
    for directory in _DIRECTORIES:
        (root / directory).mkdir(parents=True, exist_ok=True)
    sysroot = Sysroot(root)
    if sysroot.read_written():
        return
    refspec = f"ostree-unverified-registry:{image.pull_spec}"
    arguments = (*PLATFORM_ARGUMENTS, *image.kernel_arguments)
    for layer in image.layers:
        sysroot.import_layer(layer.digest)
    if image.content and lab is not None:
        blobs = [find_layer_file(lab, layer.digest) for layer in image.layers]
        for layer, blob in zip(image.layers, blobs, strict=True):
            place = sysroot.find_blob(layer.digest)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(blob, place)
        sysroot.trees.unpacked.unpack_layers(image.content, blobs)
    deployment = make_deployment(image, refspec, arguments)
    sysroot.write_deployments((deployment,))
    (root / "etc/os-release").symlink_to("../" + _OS_RELEASE)
    for name, text in _UNIT_FILES.items():
        (root / VENDOR / name).write_text(text, encoding="utf-8")
    UnitFileTree(root).enable_units(list(_ENABLED_UNITS))
    sysroot.trees.record_base()
    sysroot.trees.switch_to(deployment, None)


def boot_root(root: Path, number: int = 0) -> SysrootDeployment:
    """Empty /run, write a new boot id and boot deployment ``number``."""
    run = root / "run"
    shutil.rmtree(run, ignore_errors=True)
    for directory in ("ostree", "systemd/journal", "systemd/system"):
        (run / directory).mkdir(parents=True)
    (run / "ostree-booted").touch()
    identity = root / _BOOT_ID
    identity.parent.mkdir(parents=True, exist_ok=True)
    identity.write_text(f"{uuid.uuid4()}\n", encoding="utf-8")
    sysroot = Sysroot(root)
    before = sysroot.find_live()
    booted = sysroot.boot_deployment(number)
    sysroot.trees.switch_to(booted, before)
    return _write_os_release(root, booted)


def soft_boot_root(root: Path) -> SysrootDeployment:
    """Reboot softly into the prepared root: /run and the boot id stay."""
    count = root / _SOFT_REBOOTS
    count.write_text(str(count_soft_reboots(root) + 1), encoding="utf-8")
    sysroot = Sysroot(root)
    before = sysroot.find_live()
    booted = sysroot.soft_boot_deployment()
    sysroot.trees.switch_to(booted, before)
    return _write_os_release(root, booted)


def count_soft_reboots(root: Path) -> int:
    """Count the soft reboots since the kernel booted."""
    count = root / _SOFT_REBOOTS
    return int(count.read_text(encoding="utf-8")) if count.exists() else 0


def _write_os_release(root: Path, booted: SysrootDeployment) -> SysrootDeployment:
    release = (
        'NAME="Lab OS"\n'
        "ID=lab\n"
        'ID_LIKE="fedora"\n'
        f'VERSION="{booted.version}"\n'
        f'PRETTY_NAME="Lab OS {booted.version}"\n'
        f'OSTREE_VERSION="{booted.version}"\n'
        "VARIANT_ID=coreos\n"
    )
    (root / _OS_RELEASE).write_text(release, encoding="utf-8")
    return booted


def read_boot_id(root: Path) -> str:
    """Return the id of the current boot."""
    return (root / _BOOT_ID).read_text(encoding="utf-8").strip()
