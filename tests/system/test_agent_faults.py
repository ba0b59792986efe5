"""Faults of the host during updates of an agent in the sandbox of the shipped unit."""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

from tests.records import write_record
from tests.system.nspawn import Container, missing
from tests.system.sandboxed_node import LIMIT_S, SandboxedNode
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
FREE = "/etc/nmstate/openshift"
"""A change below this directory needs neither a drain nor a reboot."""
KEYS = "/home/core/.ssh/authorized_keys.d/ignition"


@pytest.fixture(scope="module")
def node(container: Container) -> Iterator[SandboxedNode]:
    with SandboxedNode(container) as found:
        found.add_config("first", {f"{FREE}/net.yml": "first"})
        found.request("first")
        found.start_agent()
        found.wait_done("first")
        yield found


def test_update_in_the_sandbox_writes_files_and_keys(node: SandboxedNode) -> None:
    users = {"users": [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 AAAA"]}]}
    node.request(node.add_config("keys", {f"{FREE}/net.yml": "keys"}, passwd=users))
    node.wait_done("keys")
    assert node.read(f"{FREE}/net.yml") == "keys"
    assert node.read(KEYS) == "ssh-ed25519 AAAA\n"
    assert node.run("stat", "-c", "%U %a", KEYS) == "core 600\n"


MOUNT = f"{FREE}/mounted"
NUMBERS = itertools.count(1)


class MemoryDisk:
    """A tmpfs that is full, out of inodes, or read-only."""

    def __init__(self, begin: str, cause: str, options: str = "size=64k") -> None:
        """``begin`` makes it fail; ``cause`` is what the agent must report."""
        self._begin = begin
        self._options = options
        self.cause = cause

    def mount(self, node: SandboxedNode) -> None:
        node.shell(f"mount -t tmpfs -o {self._options} tmpfs {MOUNT}")

    def fail(self, node: SandboxedNode) -> None:
        node.shell(self._begin)

    def repair(self, node: SandboxedNode) -> None:
        node.shell(f"mount -o remount,rw {MOUNT}; rm -f {MOUNT}/filler*")

    def unmount(self, node: SandboxedNode) -> None:
        node.shell(f"umount {MOUNT}")


class LoopDisk:
    """An ext4 on a loop device that shrinks: the kernel fails each write beyond its new end.

    It has no journal, which would lie there, too.
    """

    cause = "Input/output error"
    _size, _shrunk = 8 << 20, 1 << 20

    def __init__(self) -> None:
        self._image = Path()
        self._device = ""

    def mount(self, node: SandboxedNode) -> None:
        self._image = node.container.shared / f"disk-{next(NUMBERS)}"
        self._image.touch()
        os.truncate(self._image, self._size)
        run("mkfs.ext4", "-q", "-O", "^has_journal", self._image)
        self._device = run("losetup", "--find", "--show", self._image).strip()
        # An earlier failed test may have left the device.
        minor = os.minor(Path(self._device).stat().st_rdev)
        node.shell(
            f"rm -f {self._device}; mknod {self._device} b 7 {minor}; mount {self._device} {MOUNT}"
        )

    def fail(self, node: SandboxedNode) -> None:
        # Ends behind the new end of the device, so that there is no room before it.
        filler = f"{MOUNT}/filler"
        node.shell(f"dd if=/dev/zero of={filler} bs=1k count={self._shrunk >> 10}; sync -f {MOUNT}")
        self._resize(self._shrunk)

    def repair(self, node: SandboxedNode) -> None:
        self._resize(self._size)
        node.shell(f"rm -f {MOUNT}/filler")

    def unmount(self, node: SandboxedNode) -> None:
        try:
            node.shell(f"umount {MOUNT}")
        finally:
            run("losetup", "--detach", self._device)

    def _resize(self, size: int) -> None:
        os.truncate(self._image, size)
        run("losetup", "--set-capacity", self._device)


def run(*command: str | Path) -> str:
    """Run a command outside the container, and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


FULL = "No space left on device"
DISKS: dict[str, MemoryDisk | LoopDisk] = {
    "full": MemoryDisk(f"dd if=/dev/zero of={MOUNT}/filler bs=4k count=15", FULL),
    "out of inodes": MemoryDisk(
        f"touch {MOUNT}/filler1 {MOUNT}/filler2 {MOUNT}/filler3", FULL, "size=64k,nr_inodes=4"
    ),
    "read-only": MemoryDisk(f"mount -o remount,ro {MOUNT}", "Read-only file system"),
    "failing": LoopDisk(),
}
NAMES = {
    "out of inodes": "file system out of inodes",
    "failing": "file system whose device fails each write (EIO)",
}


def add_update(node: SandboxedNode, *paths: str) -> str:
    """Create a config that writes its name into these files, of which each needs two pages."""
    name = f"update-{next(NUMBERS)}"
    text = name.ljust(6_000, ".")
    return node.add_config(name, dict.fromkeys((f"{FREE}/net.yml", *paths), text))


@contextmanager
def mounted(node: SandboxedNode, disk: MemoryDisk | LoopDisk) -> Iterator[None]:
    """Mount a file system, into the mount namespace of the running agent too."""
    node.shell(f"mkdir -p {MOUNT}")
    disk.mount(node)
    try:
        yield
    finally:
        without = add_update(node)
        node.request(without)
        disk.repair(node)
        node.wait_done(without)
        disk.unmount(node)
        node.shell(f"rmdir {MOUNT}")


NEEDS_LOOP = pytest.mark.skipif(
    not (Path("/dev/loop-control").exists() and which("mkfs.ext4") and which("losetup")),
    reason="no loop device, mkfs.ext4 or losetup",
)
CASES = [
    ("full", "KILL"),
    ("out of inodes", ""),
    ("out of inodes", "KILL"),
    ("read-only", ""),
    ("read-only", "KILL"),
    pytest.param("failing", "", marks=NEEDS_LOOP),
    pytest.param("failing", "KILL", marks=NEEDS_LOOP),
]


# A file that the agent writes in its sandbox is in the short lane, in the test above.
@pytest.mark.long
@pytest.mark.parametrize(("disk", "signal"), CASES)
def test_update_on_failing_disk_is_undone_and_completed(
    node: SandboxedNode, disk: str, signal: str
) -> None:
    fault = DISKS[disk]
    cause = fault.cause
    with mounted(node, fault):
        fault.fail(node)
        before = node.read(f"{FREE}/net.yml")
        name = add_update(node, f"{MOUNT}/other.yml")
        node.request(name)
        node.wait_degraded(cause, f"{MOUNT}/other.yml")
        assert node.read(f"{FREE}/net.yml") == before
        if signal:
            started = node.show("ExecMainStartTimestampMonotonic")
            # systemd restarts the unit after each signal but SIGTERM.
            node.run("systemctl", "kill", "--kill-whom=main", f"--signal={signal}", "treenail")
            wait_until(lambda: node.show("ActiveState") != "active"
                       or node.show("ExecMainStartTimestampMonotonic") != started,
                       limit_s=LIMIT_S)  # fmt: skip
            node.start_agent()
            node.wait_degraded(cause)
            assert node.read(f"{FREE}/net.yml") == before
        fault.repair(node)
        if disk == "read-only" and signal:
            # The mount namespace of the new process has the mount as it was.
            node.wait_degraded("run: systemctl restart treenail")
            node.run("systemctl", "restart", "treenail")
        node.retry()
        node.wait_done(name)
        assert node.read(f"{MOUNT}/other.yml").startswith(name)
    then = f", then SIG{signal}" if signal else ""
    write_record(
        "host",
        what=f"{NAMES.get(disk, f'{disk} file system')}{then}, under the shipped unit's sandbox",
        count=1,
        result="undone, reported with its cause, and completed by the next try",
        command="make test-long ARGS=tests/system/test_agent_faults.py",
    )
