"""The host's programs that images and machines are made with."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "cpio": "cpio",
    "docker-registry": "docker-registry",
    "grub-mkimage": "grub-common",
    "htpasswd": "apache2-utils",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "openssl": "openssl",
    "ostree": "ostree",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "sfdisk": "fdisk",
    "skopeo": "skopeo",
}
"""Program to the Debian package that has it."""
BUSYBOX = Path("/bin/busybox")  # of busybox-static: a dynamic one is no use in an initramfs

_STARTED = time.monotonic()


class ToolError(Exception):
    """A program did not do what was asked of it."""


def cache() -> Path:
    """Where images are kept between runs."""
    chosen = os.environ.get("TREENAIL_VM_CACHE")
    place = Path(chosen) if chosen else Path.home() / ".cache/treenail-vm"
    place.mkdir(parents=True, exist_ok=True)
    return place


def missing() -> list[str]:
    """The Debian packages that this host lacks."""
    packages = {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    if not BUSYBOX.exists():
        packages.add("busybox-static")
    return sorted(packages)


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


def option(name: str, key: str) -> str:
    """How ``apt`` options of this host are passed on: ``key "value";``."""
    return f'{key} "{name}";'
