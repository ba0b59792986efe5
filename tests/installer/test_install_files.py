"""Files of an installation: atomic, durable, with errors for users."""

import os
from pathlib import Path

import pytest

from tests.installer.dying import DeathError, DyingFiles, FullDisk, Fuse
from treenail.errors import FileError
from treenail.installer.directory.install_files import InstallFiles


def test_write_of_equal_content_returns_false(tmp_path: Path) -> None:
    files, path = InstallFiles(), tmp_path / "a" / "b"
    assert files.write(path, b"x", mode=0o600)
    assert not files.write(path, b"x", mode=0o600)
    assert files.write(path, b"x", mode=0o644)
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert files.read(path) == b"x"


def test_mode_of_a_new_file_ignores_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        InstallFiles().write(tmp_path / "a", b"x", mode=0o644)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


class RecordingFiles(InstallFiles):
    """Files that record what a power cut must not lose, in order."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.effects: list[str] = []

    def _replace_file(self, temporary: Path, path: Path) -> None:
        super()._replace_file(temporary, path)
        assert not temporary.exists()
        self.effects.append(f"rename to {path.relative_to(self._root)}")

    def _sync_descriptor(self, descriptor: int) -> None:
        super()._sync_descriptor(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.effects.append(f"fsync {os.path.relpath(path, self._root)}")


def test_every_change_is_durable_when_it_returns(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)
    path = tmp_path / "a" / "b"
    files.write(path, b"x")
    assert files.effects == [
        "fsync ..",  # a killed process may have made the directory above
        "fsync .",  # the name of the new directory
        "fsync a/.treenail-new-b",
        "rename to a/b",
        "fsync a",
    ]
    files.effects.clear()
    # A killed process may have written it without an fsync.
    files.write(path, b"x")
    assert files.effects == ["fsync .", "fsync a/b", "fsync a"]
    files.effects.clear()
    inode = path.stat().st_ino
    files.write(path, b"y")
    assert files.effects == ["fsync .", "fsync a/.treenail-new-b", "rename to a/b", "fsync a"]
    assert path.stat().st_ino != inode
    files.effects.clear()
    files.remove(path)
    assert files.effects == ["fsync a"]


@pytest.mark.parametrize("point", range(1, 5))
def test_death_in_a_write_leaves_the_old_or_the_new_file(tmp_path: Path, point: int) -> None:
    path = tmp_path / "a"
    InstallFiles().write(path, b"old content")
    with pytest.raises(DeathError):
        DyingFiles(Fuse(point)).write(path, b"new content")
    assert path.read_bytes() == (b"new content" if point == 4 else b"old content")
    # The next process removes what the dead one left behind.
    InstallFiles().write(path, b"newer content")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_write_on_a_full_disk_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    files = FullDisk()
    files.write(tmp_path / "a", b"old")
    files.is_full = True
    with pytest.raises(FileError, match=r"cannot write .*/a: No space left on device") as caught:
        files.write(tmp_path / "a", b"new")
    assert caught.value.remedy == f"free some space: df -h {tmp_path}"
    assert (tmp_path / "a").read_bytes() == b"old"
    assert files.list_names(tmp_path) == ("a",)


def test_a_directory_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileError, match=r"cannot read .*/a: Is a directory"):
        InstallFiles().read(tmp_path / "a")


def test_a_file_above_the_limit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(FileError, match="it has more than 4 bytes"):
        InstallFiles().read(tmp_path / "a", limit=4)
    assert InstallFiles().read(tmp_path / "missing") is None
    assert not InstallFiles().remove(tmp_path / "missing")
    assert InstallFiles().list_names(tmp_path / "missing") == ()
