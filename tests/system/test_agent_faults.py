"""Faults of the host during updates of an agent in the sandbox of the shipped unit."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

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
FULL = "No space left on device"
DISKS = {
    "full": ("size=64k", f"dd if=/dev/zero of={MOUNT}/filler bs=4k count=15", FULL),
    "out of inodes": (
        "size=64k,nr_inodes=4",
        f"touch {MOUNT}/filler1 {MOUNT}/filler2 {MOUNT}/filler3",
        FULL,
    ),
    "read-only": ("size=64k", f"mount -o remount,ro {MOUNT}", "Read-only file system"),
}
"""Options of a tmpfs, what makes it fail, and the cause that the agent must report."""
NAMES = {"out of inodes": "file system out of inodes"}
END = f"mount -o remount,rw {MOUNT}; rm -f {MOUNT}/filler*"


def add_update(node: SandboxedNode, *paths: str) -> str:
    """Create a config that writes its name into these files, of which each needs two pages."""
    name = f"update-{next(NUMBERS)}"
    text = name.ljust(6_000, ".")
    return node.add_config(name, dict.fromkeys((f"{FREE}/net.yml", *paths), text))


@contextmanager
def mounted(node: SandboxedNode, options: str) -> Iterator[None]:
    """Mount a file system, into the mount namespace of the running agent too."""
    node.shell(f"mkdir -p {MOUNT}; mount -t tmpfs -o {options} tmpfs {MOUNT}")
    try:
        yield
    finally:
        without = add_update(node)
        node.request(without)
        node.shell(END)
        node.wait_done(without)
        node.shell(f"umount {MOUNT}; rmdir {MOUNT}")


CASES = [
    ("full", "KILL"),
    ("out of inodes", ""),
    ("out of inodes", "KILL"),
    ("read-only", ""),
    ("read-only", "KILL"),
]


# A file that the agent writes in its sandbox is in the short lane, in the test above.
@pytest.mark.long
@pytest.mark.parametrize(("disk", "signal"), CASES)
def test_update_on_failing_disk_is_undone_and_completed(
    node: SandboxedNode, disk: str, signal: str
) -> None:
    options, begin, cause = DISKS[disk]
    with mounted(node, options):
        node.shell(begin)
        before = node.read(f"{FREE}/net.yml")
        name = add_update(node, f"{MOUNT}/other.yml")
        node.request(name)
        node.wait_degraded(cause, f"{MOUNT}/other.yml")
        assert node.read(f"{FREE}/net.yml") == before
        if signal:
            started = node.show("ExecMainStartTimestampMonotonic")
            # systemd restarts the unit after each signal but SIGTERM.
            node.run("systemctl", "kill", f"--signal={signal}", "treenail")
            wait_until(lambda: node.show("ActiveState") != "active"
                       or node.show("ExecMainStartTimestampMonotonic") != started,
                       limit_s=LIMIT_S)  # fmt: skip
            node.start_agent()
            node.wait_degraded(cause)
            assert node.read(f"{FREE}/net.yml") == before
        node.shell(END)
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
