"""The host's programs that images and machines are made with."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE_MAKING = {
    "cpio": "cpio",
    "grub-mkimage": "grub-common",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "ostree": "ostree",
    "sfdisk": "fdisk",
}
"""Program to its Debian package; not needed for an image that the user provides."""
RUNNING = {
    "htpasswd": "apache2-utils",
    "openssl": "openssl",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "skopeo": "skopeo",
}
VIRT_INSTALL = {
    "libvirtd": "libvirt-daemon",
    "virsh": "libvirt-clients",
    "virt-install": "virtinst",
}
"""What is left to QEMU alone without."""

PATIENCE = float(os.environ.get("TREENAIL_VM_PATIENCE", "1"))
"""The factor of all limits of time, for a host that is busy."""

PANIC_EXIT = 70
"""What tests exit with when a guest's kernel panicked; sysexits(3) calls it EX_SOFTWARE."""

_STARTED = time.monotonic()


class ToolError(Exception):
    """A program did not do what was asked of it."""


class GuestCommandError(ToolError):
    """A command in the guest returned something else than 0: no host is to blame for that."""


class GuestPanicError(ToolError):
    """The guest's kernel gave up, which no program that runs on it is to blame for."""


def cache() -> Path:
    """Where images are kept between runs."""
    chosen = os.environ.get("TREENAIL_VM_CACHE")
    place = Path(chosen) if chosen else Path.home() / ".cache/treenail-vm"
    place.mkdir(parents=True, exist_ok=True)
    return place


def given_image() -> Path | None:
    """Return the disk image that the user provides, if any."""
    name = os.environ.get("TREENAIL_VM_IMAGE")
    return Path(name) if name else None


def missing(*, virt_install: bool) -> list[str]:
    """The Debian packages that this host lacks; also those of virt-install, or not."""
    making = {} if given_image() else IMAGE_MAKING
    needed = {**RUNNING, **making, **(VIRT_INSTALL if virt_install else {})}
    return sorted({package for name, package in needed.items() if shutil.which(name) is None})


def unpacked(package: str, program: str) -> Path:
    """A program of a Debian package that is fetched and not installed.

    docker-registry would start a service, and busybox-static take the place of busybox.
    """
    place = cache() / "unpacked" / package
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            run("sh", "-c", 'cd "$1" && apt-get -q download "$2"', "sh", scratch, package)
            (found,) = Path(scratch).glob("*.deb")
            run("dpkg-deb", "-x", found, Path(scratch) / "tree")
            place.parent.mkdir(exist_ok=True)
            (Path(scratch) / "tree").rename(place)
    return next(place.glob(f"**/bin/{program}"))


def say(text: str) -> None:
    """Print progress, with the seconds since the run began."""
    print(f"[{time.monotonic() - _STARTED:7.1f}] {text}", file=sys.stderr, flush=True)


def run(
    *argv: str | Path,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 1800.0,
) -> str:
    """The program's output; raises `ToolError` with what it complained about."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{words[0]} took longer than {limit_s:g} s") from error
    except FileNotFoundError as error:
        raise ToolError(f"there is no {words[0]}") from error
    if done.returncode:
        complaint = done.stderr.strip()[-2000:]
        raise ToolError(f"{' '.join(words[:4])} failed with {done.returncode}: {complaint}")
    return done.stdout.strip()
