import os
import stat
import threading
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import FileSpec, HostFiles
from treenail.host.filesystem.disk import Disk, StrPath
from treenail.host.filesystem.root_directory import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def files(root: Root) -> HostFiles:
    return HostFiles(root)


def tree(root: Root) -> dict[str, bytes | str | None]:
    """Every entry below the root: the content of a file, the target of a link, None otherwise."""
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
        super().__init__()
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


def test_write_file_makes_missing_directories_and_sets_mode(root, files):
    assert files.write_file("/etc/a/b/c", b"hello", mode=0o4750) is True
    assert tree(root) == {"/etc": None, "/etc/a": None, "/etc/a/b": None, "/etc/a/b/c": b"hello"}
    assert mode(root, "/etc/a/b/c") == 0o4750
    assert mode(root, "/etc/a/b") == 0o755


def test_write_file_ignores_umask(root, files):
    before = os.umask(0o077)
    try:
        files.write_file("/etc/a", b"", mode=0o666)
    finally:
        os.umask(before)
    assert (mode(root, "/etc/a"), mode(root, "/etc")) == (0o666, 0o755)


def test_write_files_of_unchanged_file_writes_nothing(root):
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
def test_write_files_of_changed_file_writes_it(root, files, other):
    files.write_file("/etc/a", b"x", mode=0o600)
    assert files.write_files([other]) == ("/etc/a",)
    assert tree(root) == {"/etc": None, "/etc/a": other.content}
    assert mode(root, "/etc/a") == other.mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_write_file_sets_owner_and_corrects_a_wrong_one(root, files):
    files.write_file("/etc/a", b"x", mode=0o6755, uid=1234)
    found = (root.prefix / "etc/a").stat()
    assert (found.st_uid, found.st_gid, mode(root, "/etc/a")) == (1234, 0, 0o6755)
    assert files.write_file("/etc/a", b"x", mode=0o6755, uid=1234, gid=4321) is True
    found = (root.prefix / "etc/a").stat()
    assert (found.st_uid, found.st_gid, mode(root, "/etc/a")) == (1234, 4321, 0o6755)
    assert files.write_file("/etc/a", b"x", mode=0o6755, uid=1234, gid=4321) is False


def test_write_file_replaces_link_and_leaves_its_target(root, files):
    files.write_file("/var/target", b"precious")
    files.make_symlink("/etc/a", "/var/target")
    assert files.write_file("/etc/a", b"mine") is True
    assert tree(root) == {
        "/etc": None,
        "/etc/a": b"mine",
        "/var": None,
        "/var/target": b"precious",
    }


def test_write_file_follows_parent_links_inside_the_root(root, files):
    (root.prefix / "opt").symlink_to("/var/opt")
    files.write_file("/opt/a", b"x")
    assert tree(root) == {"/opt": "/var/opt", "/var": None, "/var/opt": None, "/var/opt/a": b"x"}


def test_write_files_of_many_flushes_file_system_and_directories_once(root):
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


def test_write_file_flushes_file_and_directory_only(root):
    disk = CountingDisk()
    files = HostFiles(root, disk)
    files.write_file("/a", b"x")
    assert disk.flushes == ["file", "directory"]


def test_write_files_with_one_path_twice_writes_nothing(root, files):
    (root.prefix / "etc").mkdir()
    (root.prefix / "conf").symlink_to("etc")
    with pytest.raises(FileError, match="cannot write /conf/a twice: /etc/a is the same file"):
        files.write_files([FileSpec("/etc/a", b"1"), FileSpec("/conf/a", b"2")])
    assert tree(root) == {"/conf": "etc", "/etc": None}


def test_write_files_after_error_leaves_no_temporary_files(root, files):
    (root.prefix / "etc/b").mkdir(parents=True)
    with pytest.raises(FileError, match=r"cannot replace .*/etc/b: Is a directory"):
        files.write_files([FileSpec("/etc/b", b"1"), FileSpec("/etc/c", b"2")])
    assert tree(root) == {"/etc": None, "/etc/b": None}


def test_write_file_removes_leftovers_of_a_crashed_run(root, files):
    for name in (".treenail-0", ".treenail-57"):
        (root.prefix / name).write_text("half")
    (root.prefix / ".treenail").write_text("not ours")
    files.write_file("/a", b"x")
    files.make_symlink("/b", "a")
    assert tree(root) == {"/.treenail": b"not ours", "/a": b"x", "/b": "a"}


def test_write_file_with_temporary_name_is_refused(files):
    with pytest.raises(FileError, match="this name is reserved for temporary files"):
        files.write_file("/etc/.treenail-1", b"x")


def test_write_file_below_a_file_is_refused(root, files):
    (root.prefix / "etc").write_text("a file")
    with pytest.raises(FileError, match="/etc: it is not a directory"):
        files.write_file("/etc/a", b"x")
    with pytest.raises(FileError, match="/etc: it is not a directory"):
        files.make_directory("/etc")
    assert tree(root) == {"/etc": b"a file"}


def test_read_file_returns_content_or_none(root, files):
    (root.prefix / "etc").mkdir()
    (root.prefix / "etc/a").write_bytes(b"x" * 3_000_000)
    (root.prefix / "b").symlink_to("/etc/a")
    assert files.read_file("/etc/a") == b"x" * 3_000_000
    assert files.read_file("/b") == b"x" * 3_000_000
    assert files.read_file("/etc/none") is None
    assert files.read_file("/etc/a/none") is None


def test_read_file_above_limit_is_refused(files):
    files.write_file("/a", b"12345")
    assert files.read_file("/a", limit=5) == b"12345"
    with pytest.raises(FileError, match="/a: it has more than 4 bytes"):
        files.read_file("/a", limit=4)


def test_read_file_of_directory_or_fifo_is_refused_at_once(root, files):
    (root.prefix / "directory").mkdir()
    os.mkfifo(root.prefix / "fifo")
    for path in ("/directory", "/fifo"):
        with pytest.raises(FileError, match=f"cannot read .*{path}: it is not a regular file"):
            files.read_file(path)


def test_read_file_of_proc_ignores_its_size_of_zero():
    assert (
        HostFiles(Root("/")).read_file("/proc/version", limit=4096)
        == Path("/proc/version").read_bytes()
    )


def test_make_symlink_makes_replaces_and_keeps_links(root, files):
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


def test_remove_file_removes_link_and_leaves_its_target(root, files):
    files.write_file("/a", b"x")
    files.make_symlink("/b", "a")
    assert files.remove_file("/b") is True
    assert files.remove_file("/b") is False
    assert files.remove_file("/no/such") is False
    assert files.remove_file("/a/such") is False
    assert tree(root) == {"/a": b"x"}


def test_remove_file_of_directory_is_refused(root, files):
    files.make_directory("/a")
    with pytest.raises(FileError, match="cannot remove"):
        files.remove_file("/a")
    assert tree(root) == {"/a": None}


def test_make_directory_sets_mode_and_keeps_entries(root, files):
    files.write_file("/var/lib/a/b", b"x")
    assert files.make_directory("/var/lib/a", mode=0o700) is True
    assert files.make_directory("/var/lib/a", mode=0o700) is False
    assert mode(root, "/var/lib/a") == 0o700
    assert files.read_file("/var/lib/a/b") == b"x"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_write_file_without_permission_has_a_remedy(root, files):
    root.prefix.chmod(0o500)
    with pytest.raises(FileError) as refused:
        files.write_file("/a", b"x")
    root.prefix.chmod(0o700)
    assert str(refused.value) == f"cannot write {root.prefix}/a: Permission denied"
    assert refused.value.remedy == "run the agent as root"


class FullDisk(Disk):
    """A disk that accepts three bytes of each file."""

    def write(self, descriptor: int, content: bytes) -> int:
        if os.stat(descriptor).st_size:
            raise OSError(28, "No space left on device")
        return super().write(descriptor, content[:3])


def test_write_file_on_full_disk_keeps_old_file_and_has_a_remedy(root):
    HostFiles(root).write_file("/a", b"old")
    with pytest.raises(FileError) as refused:
        HostFiles(root, FullDisk()).write_file("/a", b"longer than before")
    assert str(refused.value) == f"cannot write {root.prefix}/a: No space left on device"
    assert refused.value.remedy == "free some space on that file system"
    assert tree(root) == {"/a": b"old"}


def test_file_spec_hides_content_in_its_representation():
    assert "hunter2" not in repr(FileSpec("/a", b"hunter2"))


class LabellingDisk(Disk):
    """The disk of a machine with SELinux: new files get the label of their directory."""

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


def test_write_file_without_policy_keeps_label_of_replaced_file(root):
    disk = LabellingDisk()
    files = HostFiles(root, disk)
    files.write_file("/a", b"old")
    assert (disk.read_label(root.prefix / "a"), disk.changes) == (b"etc_t", 0)
    disk.given[(root.prefix / "a").stat().st_ino] = b"shadow_t"
    files.write_file("/a", b"new")
    assert (disk.read_label(root.prefix / "a"), disk.changes) == (b"shadow_t", 1)


class InterruptingDisk(Disk):
    """A disk on which ``other`` starts before a file is renamed; it may have to wait."""

    def __init__(self, other: threading.Thread) -> None:
        super().__init__()
        self._other = other

    def replace(self, path: StrPath, target: StrPath) -> None:
        if Path(path).is_file():
            self._other.start()
            self._other.join(0.2)
        super().replace(path, target)


def test_two_threads_write_in_one_directory_without_loss(root: Root) -> None:
    other = threading.Thread(target=HostFiles(root).write_file, args=("/run/status", b"two"))
    HostFiles(root, InterruptingDisk(other)).write_file("/run/output", b"one")
    other.join()
    assert tree(root) == {"/run": None, "/run/output": b"one", "/run/status": b"two"}
