"""The recorder sees every change of the real disk, and the model loses only what is not flushed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.disk_model import FILE, Inode, Tree, Version
from tests.crash.recorder import Recorder
from treenail.host.filesystem.atomic_files import FileSpec, HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root


def read_files(tree: Tree) -> dict[str, str]:
    return {p: each.version.content.decode() for p, each in tree.items() if each.kind == FILE}


def list_contents(recorder: Recorder) -> list[dict[str, str]]:
    """Return the different sets of files after a power cut."""
    found: list[dict[str, str]] = []
    for tree in recorder.model.list_trees(1000, 0):
        if (files := read_files(tree)) not in found:
            found.append(files)
    return found


def write(path: Path, content: bytes, *, fsync: bool = False) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, content)
    if fsync:
        os.fsync(descriptor)
    os.close(descriptor)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def exchange(root: Path) -> None:
    (root / "link").symlink_to("text")
    Disk().exchange(root / "link", root / "old")


def open_truncated(root: Path) -> None:
    os.close(os.open(root / "old", os.O_WRONLY | os.O_TRUNC))


def replace(root: Path) -> None:
    write(root / "new", b"new")
    (root / "new").replace(root / "old")


def make_directories(root: Path) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "d").rmdir()


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda root: write(root / "new", b"new"),
    "truncate": open_truncated,
    "rename": lambda root: (root / "old").rename(root / "new"),
    "replace": replace,
    "rename to another directory": lambda root: (root / "old").rename(root / "d/old"),
    "link": lambda root: (root / "new").hardlink_to(root / "old"),
    "unlink": lambda root: (root / "old").unlink(),
    "exchange": exchange,
    "directories": make_directories,
    "mode": lambda root: (root / "old").chmod(0o600),
    "owner": lambda root: shutil.chown(root / "old", os.getuid(), os.getgid()),
    "files of the product": lambda root: HostFiles(Root(root)).write_files(
        [FileSpec(f"/e/{number}", b"x") for number in range(9)]
    ),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    (tmp_path / "old").write_bytes(b"old")
    return tmp_path


@pytest.mark.parametrize("name", CHANGES)
def test_recorder_sees_every_change(root: Path, name: str) -> None:
    recorder = Recorder(root)
    with recorder.record():
        CHANGES[name](root)
    assert recorder.calls > 0
    assert recorder.find_unseen_changes() == []


def test_change_outside_of_the_recorder_is_found(root: Path) -> None:
    recorder = Recorder(root)
    (root / "old").write_bytes(b"other")
    assert recorder.find_unseen_changes() == ["/old"]


def test_open_for_writing_is_refused(root: Path) -> None:
    with Recorder(root).record(), pytest.raises(NotImplementedError, match="open"):
        (root / "old").write_text("x")


def test_file_without_fsync_may_be_empty_cut_or_zeros(root: Path) -> None:
    recorder = Recorder(root)
    with recorder.record():
        write(root / "new", b"abcd")
        fsync(root)
    contents = {found["/new"] for found in list_contents(recorder)}
    assert contents == {"", "ab", "\0\0\0\0", "abcd"}


def test_entry_without_fsync_of_its_directory_may_be_missing(root: Path) -> None:
    recorder = Recorder(root)
    with recorder.record():
        write(root / "new", b"abcd", fsync=True)
    assert list_contents(recorder) == [{"/old": "old"}, {"/old": "old", "/new": "abcd"}]


def test_rename_is_atomic_and_comes_after_the_creation(root: Path) -> None:
    recorder = Recorder(root)
    with recorder.record():
        write(root / "new", b"new", fsync=True)
        (root / "new").replace(root / "old")
    assert list_contents(recorder) == [
        {"/old": "old"},
        {"/old": "old", "/new": "new"},
        {"/old": "new"},
    ]


def test_fsynced_change_is_never_lost(root: Path) -> None:
    recorder = Recorder(root)
    with recorder.record():
        HostFiles(Root(root)).write_file("/d/f", b"content")
    assert list_contents(recorder) == [{"/old": "old", "/d/f": "content"}]


def test_omitted_fsync_is_not_made(root: Path) -> None:
    first = Recorder(root)
    with first.record():
        HostFiles(Root(root)).write_file("/d/f", b"content")
    site = next(
        each
        for each in first.sites
        if "HostFiles._write_temporary" in each.functions and each.call == "fsync"
    )
    recorder = Recorder(root, omitted=frozenset({site}))
    with recorder.record():
        HostFiles(Root(root)).write_file("/d/f", b"other")
    assert {found["/d/f"] for found in list_contents(recorder)} >= {"other"}


def test_sample_of_states_is_limited_and_repeatable(root: Path) -> None:
    recorder = Recorder(root)
    with recorder.record():
        for number in range(20):
            write(root / str(number), b"content")
    trees = list(recorder.model.list_trees(100, 7))
    assert len(trees) <= 100
    assert trees == list(recorder.model.list_trees(100, 7))
    assert read_files(trees[0]) == {"/old": "old"}
    assert len(read_files(trees[1])) == 21


def test_flushed_inode_has_one_outcome() -> None:
    inode = Inode(1, FILE, Version(0o644, 0, 0, (), b"old"), is_flushed=True)
    inode.write_version(Version(0o644, 0, 0, (), b"old and new"))
    assert inode.is_dirty
    inode.flush()
    assert not inode.is_dirty
