"""A user swaps a directory for a link while root writes below it: nothing leaves the directory.

``/home/core/.ssh`` and directories of configs may belong to other users, who can rename them at any
moment between the check of a path and its use. A test without a swap tries the link itself.
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
    _make_link(link, other)
    while not stop.is_set():
        disk.exchange(link, directory)
        disk.exchange(link, directory)


def _make_link(link: Path, other: Path) -> None:
    """Make a relative link: an absolute one would begin at the root of the machine."""
    link.symlink_to(os.path.relpath(other, link.parent))


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


def remove_file(root: Root, _number: int) -> object:
    return HostFiles(root).remove_file(f"/home/.ssh/{NAME}")


def make_link_and_directory(root: Root, number: int) -> object:
    files = HostFiles(root)
    files.make_directory("/home/.ssh/new", mode=0o700 + number % 8)
    files.make_directory("/home/.ssh", mode=0o750 + number % 8)
    return files.make_symlink(f"/home/.ssh/{NAME}", f"{number}")


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


WRITERS = [write_files, remove_file, make_link_and_directory, change_in_transaction]


def read_entries(directory: Path) -> dict[str, object]:
    """Return mode and contents of a directory."""
    return {".": directory.stat().st_mode} | {
        path.name: path.read_bytes() if path.is_file() else "another entry"
        for path in directory.iterdir()
    }


@needs_root
@pytest.mark.parametrize("write", WRITERS)
def test_write_through_a_link_of_a_user_to_an_entry_of_root_is_refused(
    write: Write, home: Path
) -> None:
    etc = home.parent / "etc"
    before = read_entries(etc)
    (home / ".ssh").rmdir()
    _make_link(home / ".ssh", etc)
    os.lchown(home / ".ssh", USER, USER)
    with pytest.raises(TreenailError, match=rf"link of the user {USER} to an entry of the user 0"):
        write(Root(home.parent), 1)
    assert read_entries(etc) == before


@needs_root
@pytest.mark.parametrize("write", WRITERS)
def test_write_through_a_link_of_a_user_to_an_own_directory_is_made(
    write: Write, home: Path
) -> None:
    (home / ".ssh").rename(home / "real")
    _make_link(home / ".ssh", home / "real")
    os.lchown(home / ".ssh", USER, USER)
    write(Root(home.parent), 1)
    assert (home / ".ssh").is_symlink()


@needs_root
@pytest.mark.process
@pytest.mark.parametrize("write", WRITERS)
def test_write_beside_a_swapped_directory_stays_inside(write: Write, home: Path) -> None:
    etc = home.parent / "etc"
    root = Root(home.parent)
    before = read_entries(etc)
    refused = 0
    with swap_directory(home / ".ssh", etc):
        for number in range(ROUNDS):
            try:
                write(root, number)
            except TreenailError:
                refused += 1
    assert read_entries(etc) == before
    # Else the user never had the link there in time.
    assert refused
    write_record(
        "fuzz",
        what=f"a user swaps a directory for a link while root writes below it ({write.__name__})",
        result=f"nothing outside of the directory changed; {refused} writes were refused",
        count=ROUNDS,
        command="make test ARGS=tests/host/filesystem/test_link_races.py",
    )


@needs_root
@pytest.mark.process
def test_link_of_a_user_in_the_place_of_a_link_of_root_is_never_followed(home: Path) -> None:
    """Target and owner belong to one link: the user exchanges two of them."""
    etc = home.parent / "etc"
    root = Root(home.parent)
    (home / ".ssh").rename(home / "real")
    _make_link(home / ".ssh", home / "real")  # of root
    refused = 0
    with swap_directory(home / ".ssh", etc):
        for _ in range(100 * ROUNDS):
            try:
                entry = root.resolve_entry(f"/home/.ssh/{NAME}", for_change=True)
                assert entry.parent == home / "real"
            except TreenailError:
                refused += 1
    assert refused
