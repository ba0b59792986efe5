"""A user swaps a directory for a link while root writes below it: nothing leaves the directory.

``/home/core/.ssh`` and directories of configs may belong to other users, who can rename them at any
moment between the check of a path and its use.
"""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.records import write_record
from treenail.errors import TreenailError
from treenail.host.filesystem.atomic_files import FileSpec, HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import AbsentEntry, FileEntry
from treenail.host.filesystem.root_directory import Root
from treenail.host.rollback.transaction import UndoTransaction
from treenail.host.rollback.undo_log import PathChange

USER = 12345
ROUNDS = 300
NAME = "authorized_keys"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for files of another user")

Write = Callable[[Root, int], object]


@contextlib.contextmanager
def swap_directory(directory: Path, other: Path) -> Iterator[None]:
    """Let a process of the user replace the directory by a link to ``other``, and back, quickly."""
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=_swap, args=(directory, other, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(60)
        assert process.exitcode == 0


def _swap(directory: Path, other: Path, stop: "multiprocessing.synchronize.Event") -> None:
    os.setgid(USER)
    os.setuid(USER)
    link, disk = directory.with_name("link"), Disk()
    link.symlink_to(other)
    while not stop.is_set():
        disk.exchange(link, directory)
        disk.exchange(link, directory)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home directory of the user on a machine, beside a directory of root.

    Not below `tmp_path`: each start of pytest closes the directory of all users again.
    """
    with tempfile.TemporaryDirectory() as name:
        machine = Path(name)
        machine.chmod(0o755)
        (machine / "etc").mkdir()
        (machine / "etc" / NAME).write_text("of root")
        home = machine / "home"
        (home / ".ssh").mkdir(parents=True)
        for path in (home, home / ".ssh"):
            os.chown(path, USER, USER)
        yield home


def write_files(root: Root, number: int) -> object:
    return HostFiles(root).write_files([FileSpec(f"/home/.ssh/{NAME}", b"%d" % number)])


def remove_file(root: Root, number: int) -> object:
    files = HostFiles(root)
    files.write_file(f"/home/.ssh/{NAME}", b"%d" % number)
    return files.remove_file(f"/home/.ssh/{NAME}")


def change_in_transaction(root: Root, number: int) -> object:
    undo = UndoTransaction(root, Disk())
    content = b"%d" % number
    entry = FileEntry(lambda: content, 0o600) if number % 3 else AbsentEntry()
    try:
        undo.apply_changes([PathChange(f"/home/.ssh/{NAME}", entry)])
        if number % 2:
            return undo.commit_changes()
    except TreenailError:
        undo.undo_changes()
        undo.discard_log()
        raise
    undo.undo_changes()
    return undo.discard_log()


@needs_root
@pytest.mark.process
@pytest.mark.parametrize("write", [write_files, remove_file, change_in_transaction])
def test_write_beside_a_swapped_directory_stays_inside(write: Write, home: Path) -> None:
    etc = home.parent / "etc"
    root = Root(home.parent)
    before = {path.name: path.read_bytes() for path in etc.iterdir()}
    refused = 0
    with swap_directory(home / ".ssh", etc):
        for number in range(ROUNDS):
            try:
                write(root, number)
            except TreenailError:
                refused += 1
    assert {path.name: path.read_bytes() for path in etc.iterdir()} == before
    write_record(
        "fuzz",
        what=f"a user swaps a directory for a link while root writes below it ({write.__name__})",
        result=f"nothing outside of the directory changed; {refused} writes were refused",
        count=ROUNDS,
        command="make test ARGS=tests/host/filesystem/test_link_races.py",
    )
