"""Entries of others at the paths of a config: taken over with a backup, or refused untouched."""

import os
import socket
from pathlib import Path

import pytest

from tests.fakes.host_machine import make_machine
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.errors import FileError
from treenail.host.filesystem.entries import FileEntry
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.rollback.backups import FileBackups
from treenail.host.rollback.transaction import UndoTransaction
from treenail.host.rollback.undo_log import PathChange
from treenail.update.steps.step_types import MakeDirectory, MakeLink, SetSshKeys, WriteFile


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for path in ("etc", "run", "var/lib/treenail"):
        (tmp_path / path).mkdir(parents=True)
    return make_machine(Root(tmp_path))


def apply(machine: Machine, *changes: PathChange) -> None:
    undo = UndoTransaction(machine.root)
    undo.apply_changes(changes)
    undo.commit_changes()


@pytest.mark.parametrize("length", [245, 246, 255])
def test_file_with_long_name_is_taken_over_and_restored(machine: Machine, length: int) -> None:
    path = "/etc/" + "n" * length
    real = machine.root.resolve_path(path)
    real.write_text("before")
    backups = FileBackups(machine.root)
    apply(machine, *backups.plan_backup(path), PathChange(path, FileEntry(lambda: b"after")))
    assert real.read_text() == "after"
    assert backups.list_paths() == {path}
    apply(machine, *backups.plan_restore(path))
    assert real.read_text() == "before"
    assert backups.list_paths() == frozenset()


@pytest.mark.parametrize(
    ("before", "default", "later", "after"),
    [
        ("one", "one", "two", "two"),
        ("one", "one", "one", "one"),
        ("one", "one", None, None),
        ("by a user", "one", "two", "by a user"),
        ("by a user", None, "two", "by a user"),
    ],
    ids=["updated", "unchanged", "gone", "changed by a user", "none before"],
)
@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
def test_path_goes_back_to_the_current_default(
    machine: Machine,
    before: str,
    default: str | None,
    later: str | None,
    after: str | None,
    *,
    is_link: bool,
) -> None:
    def write(path: Path, text: str | None) -> None:
        path.unlink(missing_ok=True)
        if text is not None and is_link:
            path.symlink_to(text)
        elif text is not None:
            path.write_text(text)

    def read(path: Path) -> str | None:
        if is_link:
            return str(path.readlink()) if path.is_symlink() else None
        return path.read_text() if path.exists() else None

    real, vendor = (machine.root.prefix / each for each in ("etc/a", "usr/etc/a"))
    vendor.parent.mkdir(parents=True)
    write(real, before)
    write(vendor, default)
    backups = FileBackups(machine.root)
    apply(machine, *backups.plan_backup("/etc/a"), PathChange("/etc/a", FileEntry(lambda: b"x")))
    write(vendor, later)
    handed_back = [change.path for change in backups.plan_handback()]
    apply(machine, *backups.plan_restore("/etc/a"))
    assert read(real) == after
    assert backups.list_paths() == frozenset()
    orig = "/etc/machine-config-daemon/orig/etc/a.mcdorig"
    assert (orig in handed_back) is (after is not None)


def test_directory_stays_when_an_update_drops_its_default(machine: Machine) -> None:
    for path in ("etc/d", "usr/etc/d"):
        (machine.root.prefix / path).mkdir(parents=True)
    backups = FileBackups(machine.root)
    apply(machine, *backups.plan_backup("/etc/d"))
    (machine.root.prefix / "usr/etc/d").rmdir()
    apply(machine, *backups.plan_restore("/etc/d"))
    assert (machine.root.prefix / "etc/d").is_dir()


def test_handback_keeps_backup_whose_name_is_too_long(machine: Machine) -> None:
    short, long = "/etc/short", "/etc/" + "n" * 250
    backups = FileBackups(machine.root)
    for path in (short, long):
        machine.root.resolve_path(path).write_text("before")
        apply(machine, *backups.plan_backup(path))
    apply(machine, *backups.plan_handback())
    assert backups.list_paths() == {short, long}
    kept = machine.root.resolve_path("/etc/machine-config-daemon/orig/etc/short.mcdorig")
    assert kept.read_text() == "before"


@pytest.mark.parametrize("kind", ["FIFO", "socket", "directory"])
def test_file_at_path_of_special_entry_is_refused(machine: Machine, kind: str) -> None:
    path = machine.root.resolve_path("/run/here")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{os.open(path.parent, os.O_PATH)}/here")
    for step in (
        WriteFile("/run/here", "text", 0o644, 0, 0, "new"),
        MakeLink("/run/here", "/etc", 0, 0, "new"),
    ):
        with pytest.raises(FileError) as caught:
            StepRunner(machine).check_path_kinds([step])
        assert str(caught.value) == f"cannot write /run/here: a {kind} exists at this path"
        assert "move /run/here away" in caught.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives links to other users")
def test_file_behind_link_of_another_user_is_refused(machine: Machine) -> None:
    link = machine.root.resolve_path("/var/lib/app")
    link.symlink_to("/etc")
    os.lchown(link, 1000, 1000)
    with pytest.raises(FileError, match="is a link of the user 1000"):
        StepRunner(machine).check_path_kinds(
            [WriteFile("/var/lib/app/file", "text", 0o644, 0, 0, "new")]
        )
    with pytest.raises(FileError, match="is a link of the user 1000"):
        apply(machine, PathChange("/var/lib/app/conf/file", FileEntry(lambda: b"text")))
    assert list(machine.root.resolve_path("/etc").iterdir()) == []


def test_path_below_read_only_usr_is_refused_before_any_change(machine: Machine) -> None:
    machine.root.resolve_path("/var/usrlocal").mkdir()
    machine.root.resolve_path("/usr").mkdir()
    machine.root.resolve_entry("/usr/local").symlink_to("../var/usrlocal")
    written = [
        WriteFile(path, "text", 0o644, 0, 0, "missing") for path in ("/usr/local/a", "/usr/bin/a")
    ]
    runner = StepRunner(machine)
    runner.check_path_kinds(written)
    machine.root.resolve_path("/run/ostree-booted").touch()
    runner.check_path_kinds(written[:1])
    with pytest.raises(FileError, match="cannot write /usr/bin/a: /usr is read-only"):
        runner.check_path_kinds(written)


KEYS = SetSshKeys("core", ("ssh-ed25519 A",), "keys differ")


def add_core(machine: Machine) -> Path:
    """Add the user core, and return its home directory."""
    machine.root.resolve_path("/etc/passwd").write_text("core:x:0:0::/home/core:/bin/sh\n")
    machine.root.resolve_path("/etc/group").write_text("core:x:0:\n")
    home = machine.root.resolve_path("/home/core")
    home.mkdir(parents=True)
    return home


def test_keys_that_can_be_written_pass_the_check(machine: Machine) -> None:
    home = add_core(machine)
    StepRunner(machine).check_path_kinds([KEYS])
    StepRunner(machine).check_owners([KEYS])
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "kind", "text"),
    [
        (".ssh", "file", "cannot make the directory .*: a file or link exists at this path"),
        (".ssh/authorized_keys.d", "link", "cannot make the directory .*: a file or link exists"),
        (".ssh/authorized_keys.d/ignition", "directory", "cannot write .*: a directory exists"),
        (".ssh/authorized_keys.d/ignition", "FIFO", "cannot write .*: a FIFO exists"),
    ],
)
def test_entry_at_path_of_ssh_keys_is_refused_before_any_change(
    machine: Machine, place: str, kind: str, text: str
) -> None:
    path = add_core(machine) / place
    path.parent.mkdir(parents=True, exist_ok=True)
    make = {
        "file": path.touch,
        "link": lambda: path.symlink_to("/etc"),
        "directory": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
    }
    make[kind]()
    with pytest.raises(FileError, match=text) as caught:
        StepRunner(machine).check_path_kinds([KEYS])
    assert "move " in caught.value.remedy


def test_ssh_keys_of_user_without_group_are_refused_before_any_change(machine: Machine) -> None:
    add_core(machine)
    machine.root.resolve_path("/etc/group").write_text("wheel:x:0:\n")
    with pytest.raises(FileError, match="core"):
        StepRunner(machine).check_owners([KEYS])


def test_directory_at_path_of_file_is_refused_before_any_change(machine: Machine) -> None:
    machine.root.resolve_path("/etc/app").touch()
    runner = StepRunner(machine)
    with pytest.raises(FileError, match=r"cannot make the directory .*/etc/app: a file"):
        runner.check_path_kinds([MakeDirectory("/etc/app", 0o755, 0, 0, "missing")])
    with pytest.raises(FileError, match="/etc/app is not a directory"):
        runner.check_path_kinds([WriteFile("/etc/app/a", "text", 0o644, 0, 0, "missing")])
    assert machine.root.resolve_path("/etc/app").is_file()
