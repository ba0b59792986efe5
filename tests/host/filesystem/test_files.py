import os
import stat
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.files import FileSpec, HostFiles
from treenail.host.filesystem.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def files(root: Root) -> HostFiles:
    return HostFiles(root)


def tree(root: Root) -> dict[str, bytes | str | None]:
    """Every entry below the root: a file's content, a link's text, None for a directory."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(root.prefix.rglob("*")):
        name = f"/{path.relative_to(root.prefix)}"
        if path.is_symlink():
            found[name] = os.readlink(path)  # noqa: PTH115 - a Path would tidy it
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def mode(root: Root, path: str) -> int:
    return stat.S_IMODE((root.prefix / path[1:]).lstat().st_mode)


class CountingDisk(Disk):
    """A real disk that counts its flushes and its new files."""

    def __init__(self) -> None:
        self.flushes: list[str] = []
        self.created = 0

    def create(self, path: Path) -> int:
        self.created += 1
        return super().create(path)

    def fsync(self, descriptor: int) -> None:
        directory = stat.S_ISDIR(os.stat(descriptor).st_mode)
        self.flushes.append("directory" if directory else "file")
        super().fsync(descriptor)

    def syncfs(self, descriptor: int) -> None:
        self.flushes.append("file system")
        super().syncfs(descriptor)


def test_a_file_is_written_with_its_mode_and_its_missing_directories(root, files):
    assert files.write_file("/etc/a/b/c", b"hello", mode=0o4750) is True
    assert tree(root) == {"/etc": None, "/etc/a": None, "/etc/a/b": None, "/etc/a/b/c": b"hello"}
    assert mode(root, "/etc/a/b/c") == 0o4750
    assert mode(root, "/etc/a/b") == 0o755


def test_the_umask_does_not_matter(root, files):
    before = os.umask(0o077)
    try:
        files.write_file("/etc/a", b"", mode=0o666)
    finally:
        os.umask(before)
    assert (mode(root, "/etc/a"), mode(root, "/etc")) == (0o666, 0o755)


def test_what_is_as_wanted_is_not_written_again(root):
    disk = CountingDisk()
    files = HostFiles(root, disk)
    wanted = FileSpec("/etc/a", b"x", 0o600, os.getuid(), os.getgid())
    assert files.write_files([wanted]) == ("/etc/a",)
    assert files.write_files([wanted]) == ()
    assert disk.created == 1


@pytest.mark.parametrize(
    "other",
    [
        FileSpec("/etc/a", b"y", 0o600),
        FileSpec("/etc/a", b"xx", 0o600),
        FileSpec("/etc/a", b"x", 0o640),
    ],
    ids=["content", "length", "mode"],
)
def test_any_difference_is_written(root, files, other):
    files.write_file("/etc/a", b"x", mode=0o600)
    assert files.write_files([other]) == ("/etc/a",)
    assert tree(root) == {"/etc": None, "/etc/a": other.content}
    assert mode(root, "/etc/a") == other.mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_the_owner_is_given_and_a_wrong_one_is_a_difference(root, files):
    files.write_file("/etc/a", b"x", mode=0o6755, uid=1234)
    found = (root.prefix / "etc/a").stat()
    assert (found.st_uid, found.st_gid, mode(root, "/etc/a")) == (1234, 0, 0o6755)
    assert files.write_file("/etc/a", b"x", mode=0o6755, uid=1234, gid=4321) is True
    found = (root.prefix / "etc/a").stat()
    assert (found.st_uid, found.st_gid, mode(root, "/etc/a")) == (1234, 4321, 0o6755)
    assert files.write_file("/etc/a", b"x", mode=0o6755, uid=1234, gid=4321) is False


def test_a_link_is_replaced_by_the_file_and_its_target_stays(root, files):
    files.write_file("/var/target", b"precious")
    files.make_symlink("/etc/a", "/var/target")
    assert files.write_file("/etc/a", b"mine") is True
    assert tree(root) == {
        "/etc": None,
        "/etc/a": b"mine",
        "/var": None,
        "/var/target": b"precious",
    }


def test_links_before_the_last_component_are_followed_inside_the_root(root, files):
    (root.prefix / "opt").symlink_to("/var/opt")
    files.write_file("/opt/a", b"x")
    assert tree(root) == {"/opt": "/var/opt", "/var": None, "/var/opt": None, "/var/opt/a": b"x"}


def test_a_batch_flushes_the_file_system_and_each_directory_once(root):
    disk = CountingDisk()
    files = HostFiles(root, disk)
    for directory in ("/etc/a", "/etc/b"):
        files.make_directory(directory)
    disk.flushes.clear()
    batch = [FileSpec(f"/etc/{'ab'[n % 2]}/{n}", b"%d" % n) for n in range(1000)]
    assert files.write_files(batch) == tuple(file.path for file in batch)
    assert disk.flushes == ["file system", "directory", "directory"]
    assert {path: content for path, content in tree(root).items() if content is not None} == {
        file.path: file.content for file in batch
    }


def test_one_file_flushes_itself_and_its_directory_only(root):
    disk = CountingDisk()
    files = HostFiles(root, disk)
    files.write_file("/a", b"x")
    assert disk.flushes == ["file", "directory"]


def test_a_path_twice_in_a_batch_is_refused_before_anything_is_written(root, files):
    (root.prefix / "etc").mkdir()
    (root.prefix / "conf").symlink_to("etc")
    with pytest.raises(FileError, match="/conf/a is to be written twice: it is /etc/a"):
        files.write_files([FileSpec("/etc/a", b"1"), FileSpec("/conf/a", b"2")])
    assert tree(root) == {"/conf": "etc", "/etc": None}


def test_a_batch_that_fails_leaves_no_temporary_files(root, files):
    (root.prefix / "etc/b").mkdir(parents=True)
    with pytest.raises(FileError, match=r"can't replace .*/etc/b: Is a directory"):
        files.write_files([FileSpec("/etc/b", b"1"), FileSpec("/etc/c", b"2")])
    assert tree(root) == {"/etc": None, "/etc/b": None}


def test_what_a_crashed_run_left_is_removed_by_the_next_write_there(root, files):
    for name in (".treenail-0", ".treenail-57"):
        (root.prefix / name).write_text("half")
    (root.prefix / ".treenail").write_text("not ours")
    files.write_file("/a", b"x")
    files.make_symlink("/b", "a")
    assert tree(root) == {"/.treenail": b"not ours", "/a": b"x", "/b": "a"}


def test_a_name_that_temporary_files_have_is_refused(files):
    with pytest.raises(FileError, match="only temporary files have"):
        files.write_file("/etc/.treenail-1", b"x")


def test_a_file_in_the_place_of_a_directory_is_refused(root, files):
    (root.prefix / "etc").write_text("a file")
    with pytest.raises(FileError, match="/etc is not a directory"):
        files.write_file("/etc/a", b"x")
    with pytest.raises(FileError, match="/etc is not a directory"):
        files.make_directory("/etc")
    assert tree(root) == {"/etc": b"a file"}


def test_reading_gives_the_content_and_nothing_for_nothing(root, files):
    (root.prefix / "etc").mkdir()
    (root.prefix / "etc/a").write_bytes(b"x" * 3_000_000)
    (root.prefix / "b").symlink_to("/etc/a")
    assert files.read_file("/etc/a") == b"x" * 3_000_000
    assert files.read_file("/b") == b"x" * 3_000_000
    assert files.read_file("/etc/none") is None
    assert files.read_file("/etc/a/none") is None


def test_reading_stops_at_its_limit(files):
    files.write_file("/a", b"12345")
    assert files.read_file("/a", limit=5) == b"12345"
    with pytest.raises(FileError, match="/a holds more than 4 bytes"):
        files.read_file("/a", limit=4)


def test_reading_what_is_not_a_file_is_refused_at_once(root, files):
    (root.prefix / "directory").mkdir()
    os.mkfifo(root.prefix / "fifo")
    for path in ("/directory", "/fifo"):
        with pytest.raises(FileError, match=f"{path} is not a regular file"):
            files.read_file(path)


def test_files_of_the_kernel_are_read_though_they_say_they_are_empty():
    assert (
        HostFiles(Root("/")).read_file("/proc/version", limit=4096)
        == Path("/proc/version").read_bytes()
    )


def test_a_link_is_made_replaced_and_left_alone(root, files):
    assert files.make_symlink("/run/x", "../etc/a") is True
    assert files.make_symlink("/run/x", "../etc/a") is False
    assert files.make_symlink("/run/x", "./b//c/") is True
    assert files.make_symlink("/run/x", "./b//c/") is False
    files.write_file("/run/y", b"a file")
    assert files.make_symlink("/run/y", "x") is True
    assert tree(root) == {"/run": None, "/run/x": "./b//c/", "/run/y": "x"}
    assert files.read_link("/run/x") == "./b//c/"
    assert files.read_link("/run") is None
    assert files.read_link("/none") is None


def test_removing_takes_the_entry_and_not_what_a_link_names(root, files):
    files.write_file("/a", b"x")
    files.make_symlink("/b", "a")
    assert files.remove_file("/b") is True
    assert files.remove_file("/b") is False
    assert files.remove_file("/no/such") is False
    assert files.remove_file("/a/such") is False
    assert tree(root) == {"/a": b"x"}


def test_a_directory_is_not_removed(root, files):
    files.make_directory("/a")
    with pytest.raises(FileError, match="can't remove"):
        files.remove_file("/a")
    assert tree(root) == {"/a": None}


def test_a_directory_gets_its_mode_and_keeps_what_is_in_it(root, files):
    files.write_file("/var/lib/a/b", b"x")
    assert files.make_directory("/var/lib/a", mode=0o700) is True
    assert files.make_directory("/var/lib/a", mode=0o700) is False
    assert mode(root, "/var/lib/a") == 0o700
    assert files.read_file("/var/lib/a/b") == b"x"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_what_is_not_allowed_says_what_to_do(root, files):
    root.prefix.chmod(0o500)
    with pytest.raises(FileError) as refused:
        files.write_file("/a", b"x")
    root.prefix.chmod(0o700)
    assert str(refused.value) == f"can't write {root.prefix}/a: Permission denied"
    assert refused.value.remedy == "run the agent as root"


class FullDisk(Disk):
    """A disk that takes a few bytes of each file."""

    def write(self, descriptor: int, content: bytes) -> int:
        if os.stat(descriptor).st_size:
            raise OSError(28, "No space left on device")
        return super().write(descriptor, content[:3])


def test_a_full_disk_leaves_the_old_file_and_says_what_to_do(root):
    HostFiles(root).write_file("/a", b"old")
    with pytest.raises(FileError) as refused:
        HostFiles(root, FullDisk()).write_file("/a", b"longer than before")
    assert str(refused.value) == f"can't write {root.prefix}/a: No space left on device"
    assert refused.value.remedy == "free some space on that file system"
    assert tree(root) == {"/a": b"old"}


def test_the_content_does_not_show_in_the_representation():
    assert "hunter2" not in repr(FileSpec("/a", b"hunter2"))


class LabellingDisk(Disk):
    """A disk of a machine with SELinux: new files have the label of their directory."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, bytes] = {}
        self.changes = 0

    def read_label(self, target: Path | int) -> bytes:
        try:
            status = self.fstat(target) if isinstance(target, int) else self.lstat(target)
        except FileNotFoundError:
            return b""
        return self.given.get(status.st_ino, b"etc_t")

    def set_label(self, target: Path | int, label: bytes) -> None:
        self.changes += 1
        status = self.fstat(target) if isinstance(target, int) else self.lstat(target)
        self.given[status.st_ino] = label


def test_a_replaced_file_keeps_its_label_and_a_new_one_has_that_of_its_directory(root):
    disk = LabellingDisk()
    files = HostFiles(root, disk)
    files.write_file("/a", b"old")
    assert (disk.read_label(root.prefix / "a"), disk.changes) == (b"etc_t", 0)
    disk.given[(root.prefix / "a").stat().st_ino] = b"shadow_t"
    files.write_file("/a", b"new")
    assert (disk.read_label(root.prefix / "a"), disk.changes) == (b"shadow_t", 1)
