"""The agent's writes and their undoing in the sandbox of the shipped unit, by a real systemd."""

import subprocess
import sys

import pytest

from tests.system.nspawn import REPOSITORY, Container, missing

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]
UNIT = REPOSITORY / "systemd/treenail.service"
# What systemd-run sets itself, or what belongs to a service that keeps running.
OTHER = ("Type", "Exec", "Restart", "Timeout", "WatchdogSec", "RuntimeDirectoryPreserve")
PROGRAM = f"""
import os, stat, sys
sys.path[:0] = ["{REPOSITORY}/agent"]
from pathlib import Path
from treenail.host.filesystem.entries import AbsentEntry, DirectoryEntry, FileEntry
from treenail.host.filesystem.root_directory import Root
from treenail.host.rollback.undo_log import PathChange
from treenail.host.rollback.transaction import UndoTransaction

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
journal, tool = Path("/var/log/journal-here"), Path("/etc/tool")

def describe():
    found = journal.stat()
    return oct(found.st_mode), found.st_gid, tool.stat().st_mode, os.listxattr(tool)

journal.mkdir()
os.chown(journal, 0, 190)
journal.chmod(0o2755)
tool.write_text("before")
os.setxattr(tool, "security.capability", CAPABILITY)
tool.chmod(0o755)
before = describe()
UndoTransaction(Root()).apply_changes([
    PathChange("/var/log/journal-here", DirectoryEntry(0o700, 0, 0)),
    PathChange("/etc/tool", FileEntry(lambda: b"after", 0o6755, 0, 190, {{}})),
    PathChange("/etc/capable", FileEntry(
        lambda: b"new", 0o755, xattrs={{"security.capability": CAPABILITY}}
    )),
    PathChange("/run/flag", FileEntry(lambda: b"set")),
])
changed = describe()
print(UndoTransaction(Root()).undo_changes())
print(changed[0], oct(changed[2]), changed[3])
print(describe() == before, os.path.exists("/etc/capable"), os.path.exists("/run/flag"))
"""

BUS_PROGRAM = f"""
import os, sys
sys.path[:0] = ["{REPOSITORY}/agent"]
from treenail.host.systemd.system_bus import BusInterface, SystemBus
from treenail.host.systemd.bus_process import BusProcess

systemd = "org.freedesktop.systemd1"
manager = BusInterface(systemd, "/org/freedesktop/systemd1", systemd + ".Manager")
bus = SystemBus(service=BusProcess(os.environ))
print(bus.read_properties(manager, timeout_s=10)["Virtualization"])
print("gi" in sys.modules)
"""


def run_sandboxed(container: Container, *command: str) -> str:
    """Return the output of a command that runs with the properties of the unit."""
    lines = UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0].splitlines()
    properties = [f"--property={line}" for line in lines if line and not line.startswith("#")]
    kept = [each for each in properties if not each.partition("=")[2].startswith(OTHER)]
    inside = container.inside("systemd-run", "--quiet", "--wait", "--pipe", *kept, "--", *command)
    done = subprocess.run(inside, check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_undo_restores_special_modes_and_capabilities(container: Container) -> None:
    assert run_sandboxed(container, sys.executable, "-c", PROGRAM).splitlines() == [
        "()",
        "0o40700 0o106755 []",
        "True False False",
    ]


def test_undo_suite_passes_in_the_sandbox(container: Container) -> None:
    suite = REPOSITORY / "tests/daemon/configuration/test_apply.py"
    options = ("-q", "-x", "-p", "no:cacheprovider", "--basetemp=/var/tmp/suite")
    paths = f"PYTHONPATH={REPOSITORY}:{REPOSITORY}/agent:{REPOSITORY}/lab"
    output = run_sandboxed(
        container,
        "/usr/bin/env", "--chdir", str(REPOSITORY), paths, "PYTHONDONTWRITEBYTECODE=1",
        sys.executable, "-m", "pytest", *options, str(suite),
    )  # fmt: skip
    assert " passed" in output


def test_process_for_dbus_works_in_the_sandbox(container: Container) -> None:
    printed = run_sandboxed(container, sys.executable, "-c", BUS_PROGRAM).splitlines()
    assert printed == ["systemd-nspawn", "False"]
