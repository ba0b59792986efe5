"""A disk with a snapshot of its machine after the first boot, made once: scenarios start there.

The snapshot's directory is named by a digest of everything that it depends on: the disk with its
kernel and initramfs, QEMU and its command line, and the code that makes it. A scenario gets a copy,
whose backing file is the disk.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from vmlab import registry
from vmlab.drivers import Driver, accelerator, describe_machine
from vmlab.image.build import Built
from vmlab.image.layers import digest
from vmlab.machine import Machine
from vmlab.tools import ToolError, run, say

FIRST_BOOT_LIMIT_S = 1800.0
"""A disk that the user provides pulls its image first."""
_DISK, _CHECKSUM = "disk.qcow2", "checksum"
# Without rpm-ostree the agent pulls with podman, which would unpack the base layer for each test.
_PULL_LAYERS = (
    "command -v rpm-ostree || ! command -v podman || "
    f"podman pull --quiet --creds {registry.USER}:{registry.PASSWORD} "
)
_PULL_LIMIT_S = 1200.0
_prepared: dict[str, Path] = {}
"""Snapshots of this process by their digest, so that each is read for its checksum once."""


def prepare_snapshot(built: Built, driver: Driver, limit_s: float = FIRST_BOOT_LIMIT_S) -> Path:
    """Return the disk with the snapshot; boot the machine for it if there is none that fits."""
    parts = (str(built.disk.resolve()), built.key, describe_machine(driver))
    text = "\0".join((*parts, Path(__file__).read_text()))
    inputs_digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    if inputs_digest not in _prepared:
        _prepared[inputs_digest] = keep_snapshot(
            built.directory,
            f"booted-{driver.name}",
            inputs_digest,
            lambda disk: _boot(built, driver, limit_s, disk),
        )
    return _prepared[inputs_digest]


def keep_snapshot(
    directory: Path, name: str, inputs_digest: str, make: Callable[[Path], None]
) -> Path:
    """Return the snapshot with this digest, which ``make`` writes if it is missing or damaged.

    A build that is killed leaves a scratch directory, which the next build removes.
    """
    place = directory / f"{name}-{inputs_digest}"
    disk = place / _DISK
    others = sorted(directory.glob(f"{name}-*"))
    if place in others:
        if _has_checksum(place):
            return disk
        say(f"the snapshot {place.name} is damaged, making it again")
    elif others:
        say(f"the snapshot {others[-1].name} is stale, making {place.name}")
    scratch = directory / f"{name}.new"
    for old in (*others, scratch):
        _remove(old)
    scratch.mkdir()
    make(scratch / _DISK)
    (scratch / _CHECKSUM).write_text(digest(scratch / _DISK))
    scratch.rename(place)
    return disk


def copy_snapshot(snapshot: Path, target: Path) -> None:
    """Copy a disk with its snapshots; what a machine writes to the copy stays there."""
    run("cp", "--sparse=always", "--reflink=auto", snapshot, target)


def _has_checksum(place: Path) -> bool:
    try:
        return digest(place / _DISK) == (place / _CHECKSUM).read_text()
    except OSError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _boot(built: Built, driver: Driver, limit_s: float, disk: Path) -> None:
    run("qemu-img", "create", "-q", "-f", "qcow2", "-b", built.disk.resolve(),
        "-F", built.disk_format, disk)  # fmt: skip
    say(f"first boot, with {driver.name} and {accelerator()}")
    machine = Machine(
        disk.parent, disk, driver=driver, booted=lambda _: None, ignition=built.ignition
    )
    try:
        machine.start()
        machine.wait_boots(1, limit_s)
        # The agent waits for the end of the first boot, then for a kubeconfig.
        machine.sh("systemctl stop treenail")
        # Returns when it is over.
        machine.sh("systemctl start treenail-firstboot")
        machine.sh("systemctl stop treenail; systemctl reset-failed; sync")
        machine.sh(f"{_PULL_LAYERS}{built.pull_spec}", limit_s=_PULL_LIMIT_S)
        machine.sh("sync")
        machine.save()
    except ToolError as error:
        raise type(error)(f"{error}\n{machine.last_lines()}") from error
    finally:
        machine.stop()
    say("the booted machine is kept")
