"""A process that is killed at any system call of a writer leaves the old state or the new one."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon import walk_budget
from tests.fakes.host_machine import make_machine
from treenail.daemon.configuration.node_configuration import (
    apply_steps,
    recover_interrupted,
    restore_pending,
)
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.host.bootc.backend import SwitchRecord
from treenail.host.filesystem.atomic_files import FileSpec
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import CrashRecordFile, Ledger
from treenail.update.steps.step_types import MakeDirectory, MakeLink, WriteFile

pytestmark = pytest.mark.process

EFFECTS = (
    "create", "write", "fsync", "syncfs", "replace", "exchange", "symlink", "link", "unlink",
    "mkdir", "rmdir", "chmod", "chown", "lchown", "set_xattr", "remove_xattr",
)  # fmt: skip


class QuickDisk(Disk):
    """The real disk without flushes: a kill loses nothing that was written."""

    def fsync(self, descriptor: int) -> None:
        pass

    def syncfs(self, descriptor: int) -> None:
        pass


class CountingDisk(QuickDisk):
    """A disk that counts its effects, and kills its process before the one with this number."""

    def __init__(self, deadly: int = -1) -> None:
        super().__init__()
        self._deadly = deadly
        self.count = 0

    def __getattribute__(self, name: str) -> object:
        if name in EFFECTS:
            if self.count == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
        return super().__getattribute__(name)


STEPS = (
    MakeDirectory("/etc/new", 0o750, 0, 0, "missing"),
    WriteFile("/etc/new/a", "a", 0o600, 0, 0, "missing"),
    WriteFile("/etc/motd", "new", 0o644, 0, 0, "contents differ"),
    MakeLink("/etc/link", "motd", 0, 0, "missing"),
)


def start(machine: Machine) -> StepRunner:
    """Recover, as each start of the agent does first."""
    runner = StepRunner(machine)
    recover_interrupted(runner)
    return runner


def confirm(machine: Machine) -> None:
    runner = start(machine)
    if runner.pending.find_owner():
        runner.pending.confirm_change()


def undo(machine: Machine) -> None:
    restore_pending(start(machine))


def stay(_machine: Machine) -> None:
    """The next start does nothing."""


@dataclass(frozen=True)
class Writer:
    """Something that is written, what was there before, and what the next start does."""

    write: Callable[[Machine], object]
    prepare: Callable[[Machine], object] = stay
    restart: Callable[[Machine], object] = stay
    is_whole: bool = True
    """All files change together; otherwise each one alone."""


def write_ledger(text: str) -> Callable[[Machine], object]:
    return lambda machine: Ledger(machine.root, machine.files).write_document({"text": text})


def write_crashes(text: str) -> Callable[[Machine], object]:
    return lambda machine: CrashRecordFile(machine.root, machine.files).write_document({"t": text})


def write_three(text: str) -> Callable[[Machine], object]:
    specs = [FileSpec(f"/etc/{name}", text.encode(), 0o644) for name in "abc"]
    return lambda machine: machine.files.write_files(specs)


def apply(machine: Machine) -> None:
    apply_steps(STEPS, start(machine))


def leave_pending(machine: Machine) -> None:
    apply_steps(STEPS, start(machine), owner="owner")


WRITERS = {
    "ledger": Writer(write_ledger("new"), write_ledger("old")),
    "first ledger": Writer(write_ledger("new")),
    "crash record": Writer(write_crashes("new"), write_crashes("old")),
    "end of the crash record": Writer(
        lambda machine: CrashRecordFile(machine.root, machine.files).remove_document(),
        write_crashes("old"),
    ),
    "switch record": Writer(
        lambda machine: SwitchRecord(machine.files, machine.kernel).write_image("image")
    ),
    "three files": Writer(write_three("new"), write_three("old"), is_whole=False),
    "config": Writer(apply, restart=start),
    "pending config": Writer(leave_pending, restart=undo),
    "confirmation": Writer(confirm, leave_pending, confirm),
    "undoing": Writer(undo, leave_pending, undo),
    "password": Writer(lambda machine: machine.shadow.set_password_hash("core", "$6$new"), stay),
}


def open_machine(root: Path, disk: Disk | None = None) -> Machine:
    """The machine below the root, whose every write is one of the disk."""
    machine = make_machine(Root(root), disk or QuickDisk())
    # Without a systemd that counts soft reboots.
    machine.kernel = HostKernel(machine.root)
    return machine


def make_root(root: Path) -> None:
    for path in ("etc", "proc/sys/kernel/random", "var/lib/treenail"):
        (root / path).mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("boot\n")
    (root / "etc/motd").write_text("old")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\ncore:x:0:0::/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\ncore:x:0:\n")
    (root / "etc/shadow").write_text("core:!:1::::::\n")


def describe(root: Path) -> dict[str, object]:
    """Each file, directory and link that is no temporary one, and no lock."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if "/.treenail" in f"/{name}" or name.endswith((".lock", "treenail/undo")):
            continue
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            content = path.read_text() if path.is_file() else "directory"
            found[name] = path.stat().st_mode, content
    return found


def write_killed(root: Path, writer: Writer, deadly: int) -> None:
    """Write in a process of its own, which is killed before this effect."""
    child = os.fork()
    if child == 0:
        try:
            writer.write(open_machine(root, CountingDisk(deadly)))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def prepare(root: Path, writer: Writer) -> None:
    make_root(root)
    writer.prepare(open_machine(root))


@pytest.mark.parametrize("name", WRITERS)
@walk_budget.exhaustive
def test_writer_killed_at_any_effect_leaves_old_or_new(tmp_path: Path, name: str) -> None:
    writer, disk = WRITERS[name], CountingDisk()
    before, after = tmp_path / "before", tmp_path / "after"
    for root in (before, after):
        prepare(root, writer)
    writer.write(open_machine(after, disk))
    for root in (before, after):
        writer.restart(open_machine(root))
    old, new = describe(before), describe(after)
    assert disk.count > 1
    for deadly in walk_budget.sample(range(disk.count)):
        root = tmp_path / str(deadly)
        prepare(root, writer)
        write_killed(root, writer, deadly)
        writer.restart(open_machine(root))
        found = describe(root)
        if writer.is_whole:
            assert found in (old, new), deadly
        else:
            assert found.keys() == new.keys()
            assert all(value in (old[path], new[path]) for path, value in found.items())
