"""Machines whose files, ledger and crash record are in a real directory.

The rest of the world (cluster, operating system, power) is that of `tests.fakes.world`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.crash.disk_model import DIRECTORY, LINK, Tree, Version
from tests.crash.recorder import StrPath, find_functions, read_tree
from tests.daemon.machines import BASE, TOP
from tests.daemon.nodes import Node, Process
from tests.fakes import disk as memory
from tests.fakes.clock import FakeClock
from tests.fakes.host_machine import make_machine
from tests.fakes.world import World, read_phase
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.rollback.undo_log import UNDO_DIRECTORY
from treenail.host.system.state_file import CrashRecordFile, Json, Ledger

STATUS_PATH = "/run/treenail/status.json"
_UNKNOWN = 1 << 40
_MEMORY = "/dev/shm"


class NumberedDisk(Disk):
    """The real disk, which shows the inode numbers of the recorded one.

    The undo log has inode numbers, and a rebuilt directory gets new ones.
    """

    def __init__(self, numbers: dict[int, int] | None = None) -> None:
        """Take the recorded number of each real one; without them, all real ones are shown."""
        super().__init__()
        self._numbers = numbers

    def lstat(self, path: StrPath) -> os.stat_result:
        return self._renumber(super().lstat(path))

    def fstat(self, descriptor: int) -> os.stat_result:
        return self._renumber(super().fstat(descriptor))

    def _renumber(self, status: os.stat_result) -> os.stat_result:
        if self._numbers is None:
            return status
        values = list(status)
        values[1] = self._numbers.get(status.st_ino, _UNKNOWN + status.st_ino)
        return os.stat_result(values)


def write_tree(root: Path, tree: Tree) -> dict[int, int]:
    """Write the tree into an empty directory; map the new inode numbers to those of the tree."""
    made: dict[int, str] = {}
    numbers: dict[int, int] = {}
    user, group = os.geteuid(), os.getegid()
    for path, (kind, version, number) in sorted(tree.items()):
        place = f"{root}{path}"
        if number in made and kind != DIRECTORY:
            os.link(made[number], place, follow_symlinks=False)
            continue
        if kind == DIRECTORY:
            if path:
                os.mkdir(place)
        elif kind == LINK:
            os.symlink(os.fsdecode(version.content), place)
        else:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, version.content)
            os.close(descriptor)
        made[number] = place
        if (version.uid, version.gid) != (user, group):
            os.chown(place, version.uid, version.gid, follow_symlinks=False)
        if kind != LINK:
            os.chmod(place, version.mode)
        numbers[os.lstat(place).st_ino] = number
    return numbers


def make_scratch_directory() -> TemporaryDirectory[str]:
    """Make a directory in memory where possible: thousands of trees are written there."""
    return TemporaryDirectory(prefix="tn", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)


class DirectoryDisk:
    """The directory as the disk of a `World`, which replaces all of it at a reboot."""

    def __init__(
        self,
        root: Path,
        *,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
        numbers: dict[int, int] | None = None,
    ) -> None:
        """``pause`` keeps a recorder from recording; ``numbers`` are those of `NumberedDisk`."""
        self.root = root
        self.numbers = numbers
        self.chunk = 1 << 20
        self._pause = pause
        self._last_read: memory.Tree = {}
        """The tree after a power cut, which nothing changes before the boot."""

    def tree(self) -> memory.Tree:
        return {
            TOP + path: memory.Entry(each.kind, each.version.mode, each.version.content,
                                     each.version.uid, each.version.gid, each.version.xattrs)
            for path, each in read_tree(self.root).items()
        }  # fmt: skip

    def content(self, path: str) -> bytes | None:
        place = self.root / path.removeprefix(f"{TOP}/")
        return place.read_bytes() if place.is_file() else None

    def replace_by(self, tree: memory.Tree) -> None:
        """Start a boot: /run is empty, and all else is flushed. Only /etc may differ."""
        with self._pause():
            shutil.rmtree(self.root / "run", ignore_errors=True)
            (self.root / "run").mkdir()
        if tree is not self._last_read and select_etc(tree) != select_etc(self.tree()):
            self.replace_etc(tree)

    def replace_etc(self, tree: memory.Tree) -> None:
        """Make all of /etc again, with new inodes, as another deployment has its own."""
        with self._pause():
            shutil.rmtree(self.root / "etc")
            (self.root / "etc").mkdir()
            for path, entry in sorted(select_etc(tree).items()):
                _write_entry(self.root / path.removeprefix(f"{TOP}/"), entry)

    def after_power_cut(self, _limit: int) -> Iterator[memory.Tree]:
        self._last_read = self.tree()
        yield self._last_read


def select_etc(tree: memory.Tree) -> memory.Tree:
    return {path: entry for path, entry in tree.items() if path.startswith(f"{TOP}/etc/")}


def _write_entry(place: Path, entry: memory.Entry) -> None:
    version = Version(entry.mode, entry.uid, entry.gid, entry.attributes, entry.content)
    if entry.kind == DIRECTORY:
        place.mkdir()
    elif entry.kind == LINK:
        place.symlink_to(os.fsdecode(version.content))
    else:
        place.write_bytes(version.content)
    if (version.uid, version.gid) != (os.geteuid(), os.getegid()):
        os.chown(place, version.uid, version.gid, follow_symlinks=False)
    if entry.kind != LINK:
        place.chmod(version.mode)


class StoredWorld(World):
    """A world with a directory as its disk."""

    disk: DirectoryDisk  # type: ignore[assignment] # World uses these methods only
    omitted_write: int = -1
    """The ledger write that does not happen, counted from the attachment of the directory."""
    has_own_link: bool = False
    """Another program made its link."""
    drains: int = 0
    """How often the drain controller drained the node."""
    ledger_calls: list[str]
    """The phase of the update in each ledger write, and the functions that lead to it."""

    @property
    def ledger_writes(self) -> int:
        return len(self.ledger_calls)

    def attach(self, disk: DirectoryDisk) -> None:
        self.disk = disk
        self.ledger_calls = []

    def drain_controller(self) -> None:
        was_in_service = not self.unschedulable
        super().drain_controller()
        self.drains += was_in_service and self.unschedulable

    def take_snapshot(self) -> "StoredWorld":
        """Copy everything but the disk."""
        found = copy(self)
        for name, value in vars(found).items():
            if isinstance(value, dict | list | set):
                setattr(found, name, copy(value))
        vars(found).pop("disk", None)
        found.fault_point, found.omitted_write = _ignore, -1
        return found

    def describe(self) -> str:
        """Return everything that later turns depend on."""
        left_out = {"configs", "disk", "writes", "events", "transitions", "policy", "ledger_calls"}
        return repr(
            {
                name: value
                for name, value in sorted(vars(self).items())
                if name not in left_out and not callable(value)
            }
        )

    def _merge(self, digest: str) -> None:
        super()._merge(digest)
        self.disk.replace_etc(self.disk.tree())

    def _replace_etc(self, etc: memory.Tree) -> None:
        self.disk.replace_etc(etc)


def _ignore(_step: str) -> None:
    """The fault point of a world that is not recorded."""


_LEDGER_WRITERS = frozenset({"UpdateLedger.save_record", "CrashCounter._write_record"})


class CountedLedger(Ledger):
    """The real ledger; it calls the fault points of its world and omits one write."""

    def __init__(self, world: StoredWorld, machine: Machine) -> None:
        super().__init__(machine.root, machine.files)
        self._world = world

    def write_document(self, document: Json) -> None:
        self._world.fault_point("ledger write")
        number = self._world.ledger_writes
        phase = str(read_phase(json.dumps(document)) or "none")
        functions = [each for each in find_functions() if each not in _LEDGER_WRITERS]
        self._world.ledger_calls.append(f"{phase} in {' > '.join(functions[-2:])}")
        if number != self._world.omitted_write:
            super().write_document(document)
        self._world.fault_point("ledger written")


class StoredProcess(Process):
    """The agent's process on a real directory."""

    def open_machine(self, world: World, clock: FakeClock) -> Machine:
        assert isinstance(world, StoredWorld)
        disk = world.disk
        machine = make_machine(Root(disk.root), NumberedDisk(disk.numbers), clock=clock)
        # The agent takes the lock before anything else.
        with machine.ledger.hold_lock():
            return machine

    def open_ledger(self, world: World, machine: Machine) -> Ledger:
        assert isinstance(world, StoredWorld)
        return CountedLedger(world, machine)

    def open_crash_record(self, world: World, machine: Machine) -> CrashRecordFile:
        return CrashRecordFile(machine.root, machine.files)

    def write_status(self, machine: Machine, content: bytes) -> None:
        machine.files.write_file(STATUS_PATH, content, mode=0o644)


class StoredNode(Node):
    """A node with a real directory; ``on_start`` is called after the start of each process."""

    def __init__(self, world: StoredWorld, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(world)
        self._on_start = on_start

    def start_process(self) -> Process:
        return StoredProcess(self.world, self.clock)

    def check_start(self) -> None:
        self._on_start()


OTHERS = {
    "/etc/others.conf": memory.Entry("file", 0o644, b"of another program"),
    "/etc/d/others": memory.Entry("file", 0o600, b"of another program"),
    "/etc/.others": memory.Entry("file", 0o644, b"hidden"),
    "/etc/others.link": memory.Entry("link", 0o777, b"others.conf"),
    "/etc/systemd/system/theirs.service": memory.Entry("file", 0o644, b"[Service]\n"),
    "/var/lib/theirs": memory.Entry("directory", 0o755, b""),
    "/var/lib/theirs/state": memory.Entry("file", 0o640, b"state"),
    "/opt": memory.Entry("directory", 0o755, b""),
    "/run": memory.Entry("directory", 0o755, b""),
}


def make_directory(root: Path) -> None:
    """Make a machine with files of others, which no config names."""
    write_entries(root, {p.removeprefix(TOP): e for p, e in BASE.items()} | OTHERS)


def write_entries(root: Path, entries: Mapping[str, memory.Entry]) -> None:
    """Write entries by their paths; missing parents get mode 0755."""
    for path, entry in sorted(entries.items()):
        if path:
            place = root / path[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            _write_entry(place, entry._replace(attributes=()))


class VisibleEntry(NamedTuple):
    """An entry as other programs see it."""

    kind: str
    version: Version


def select_visible(tree: Tree) -> dict[str, VisibleEntry]:
    """Return what other programs see: no state of treenail, and no temporary entries.

    A directory of systemd's links that is empty means nothing.
    """
    return {
        path: VisibleEntry(entry.kind, entry.version)
        for path, entry in tree.items()
        if not path.startswith(("/run", "/var/lib/treenail"))
        and "/.treenail" not in path
        and path != "/etc/.pwd.lock"
        and not path.endswith(".wants")
    }


def select_state(tree: Tree) -> dict[str, VisibleEntry]:
    """Return the durable state of treenail whose content is the same after each way to it."""
    varying = ("ledger.json", "crash-record.json", "lock", "update.prom")
    return {
        path: VisibleEntry(entry.kind, entry.version)
        for path, entry in tree.items()
        if path.startswith("/var/lib/treenail/")
        and path.removeprefix("/var/lib/treenail/") not in varying
        and path != UNDO_DIRECTORY
    }
