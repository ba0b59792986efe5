"""An initramfs of 5 MB: busybox, ostree-prepare-root and the disk's driver."""

import lzma
import shutil
import tempfile
from pathlib import Path

from vmlab.tools import run, unpacked

_MODULES = ("virtio_blk",)
_PREPARE = "usr/lib/ostree/ostree-prepare-root"
_INIT = """\
#!/bin/busybox sh
export PATH=/bin
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
$B mount -t tmpfs -o mode=755 tmpfs /run
for module in /mod/*.ko; do $B insmod $module; done
tries=0
until device=$($B findfs LABEL=root 2>/dev/null) && [ -b "$device" ]; do
    tries=$((tries+1))
    [ $tries -gt 200 ] && exec $B sh
    $B usleep 50000
done
$B mount -t ext4 -o rw $device /sysroot
/usr/lib/ostree/ostree-prepare-root /sysroot || exec $B sh
for each in dev proc sys run; do $B mount --move /$each /sysroot/$each; done
exec $B switch_root /sysroot /sbin/init
"""


def make(tree: Path, target: Path) -> None:
    """Write the initramfs for the kernel of ``tree``."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for name in ("bin", "dev", "etc", "mod", "proc", "run", "sys", "sysroot", "tmp"):
            (place / name).mkdir()
        # A dynamic one would need its libraries here.
        shutil.copy(unpacked("busybox-static", "busybox"), place / "bin/busybox")
        for file in (f"/{_PREPARE}", *_libraries(tree)):
            aim = place / file.lstrip("/")
            aim.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / file.lstrip("/"), aim)
        if (settings := tree / "etc/ostree").exists():
            shutil.copytree(settings, place / "etc/ostree")
        (place / "etc/initrd-release").touch()
        for number, module in enumerate(_MODULES):
            _unpack(tree, module, place / f"mod/{number:02}-{module}.ko")
        (place / "init").write_text(_INIT)
        (place / "init").chmod(0o755)
        names = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
        listed = place.parent / f"{place.name}.names"
        listed.write_text("\n".join(names))
        command = 'cd "$1" && cpio -o -H newc --quiet -R 0:0 < "$2" | gzip -9n > "$3"'
        run("sh", "-c", command, "sh", place, listed, target)
        listed.unlink()


def _libraries(tree: Path) -> list[str]:
    words = run("chroot", tree, "ldd", f"/{_PREPARE}").split()
    return [word for word in words if word.startswith("/")]


def _unpack(tree: Path, module: str, target: Path) -> None:
    found = next((tree / "usr/lib/modules").glob(f"*/kernel/**/{module}.ko*"))
    content = found.read_bytes()
    target.write_bytes(lzma.decompress(content) if found.suffix == ".xz" else content)
