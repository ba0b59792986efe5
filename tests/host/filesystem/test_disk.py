"""The fake disks of the tests behave as the real one, and never reach it."""

import ast
import inspect
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyfakefs.fake_filesystem_unittest import Patcher

from tests.fakes.disk import Entry, MemoryDisk
from treenail.host.filesystem import disk as module
from treenail.host.filesystem.atomic_files import FileSpec, HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root


class FakedDisk(Disk):
    """The real disk for pyfakefs, which changes the mode of a file that is opened for reading."""

    def open(self, path: Path) -> int:
        mode = path.lstat().st_mode
        descriptor = super().open(path)
        path.chmod(stat.S_IMODE(mode))
        return descriptor


@pytest.fixture(params=["real", "pyfakefs", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], HostFiles]]:
    """Makes `HostFiles` below one root, which is empty at first."""
    match request.param:
        case "real":
            yield lambda: HostFiles(Root(tmp_path))
        case "memory":
            root = Root("/no-such-root")
            disk = MemoryDisk({"/no-such-root": Entry("directory", 0o755, b"")})
            yield lambda: HostFiles(root, disk)
        case _:
            with Patcher() as patcher:
                assert patcher.fs
                patcher.fs.create_dir("/machine")
                yield lambda: HostFiles(Root("/machine"), FakedDisk())


def test_every_disk_gives_the_same_results(make):
    files = make()
    seen = [
        files.write_file("/etc/a", b"one", mode=0o600),
        files.write_file("/etc/a", b"one", mode=0o600),
        files.has_file(FileSpec("/etc/a", b"one", 0o600)),
        files.has_file(FileSpec("/etc/a", b"one", 0o644)),
        files.write_file("/etc/a", b"two, and longer", mode=0o640),
        files.read_file("/etc/a"),
        files.read_file("/etc/none"),
        files.write_files([FileSpec(f"/etc/d/{n}", b"%d" % n) for n in range(3)]),
        files.make_symlink("/etc/l", "a"),
        files.make_symlink("/etc/l", "a"),
        files.read_link("/etc/l"),
        files.make_symlink("/etc/a", "d/1"),
        files.read_link("/etc/a"),
        files.read_link("/etc/d/1"),
        files.make_directory("/etc/e/f", mode=0o700),
        files.make_directory("/etc/e/f", mode=0o755),
        files.make_directory("/etc/e/f", mode=0o755),
        files.remove_file("/etc/l"),
        files.remove_file("/etc/l"),
        files.remove_file("/none/l"),
    ]
    again = make()
    seen += [again.read_file("/etc/d/2"), again.read_link("/etc/a")]
    assert seen == [
        *(True, False, True, False, True),
        *(b"two, and longer", None),
        ("/etc/d/0", "/etc/d/1", "/etc/d/2"),
        *(True, False, "a", True, "d/1", None),
        *(True, True, False),
        *(True, False, False),
        *(b"2", "d/1"),
    ]


def test_memory_disk_has_every_method_of_the_real_disk():
    def own(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert own(Disk) <= own(MemoryDisk)


def test_disk_uses_only_calls_that_pyfakefs_replaces():
    tree = ast.parse(inspect.getsource(module))
    called = {
        ast.unparse(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    # os.fchown, os.fchmod, os.pwrite, os.statvfs and os.copy_file_range reach the real process.
    assert called == {
        "directory.split",
        "stat.S_ISLNK",
        "os.geteuid",
        "os.chmod",
        "os.fspath(path).rpartition",
        "self._checked.add",
        "self._checked.clear",
        "self._is_safe",
        "self._locate",
        "os.chown",
        "os.close",
        "os.fsync",
        "os.getxattr",
        "os.lchown",
        "os.fsencode",
        "os.fspath",
        "os.link",
        "os.listdir",
        "os.listxattr",
        "os.lstat",
        "os.mkdir",
        "os.open",
        "os.read",
        "os.readlink",
        "os.removexattr",
        "os.replace",
        "os.rmdir",
        "os.setxattr",
        "os.stat",
        "os.strerror",
        "os.symlink",
        "os.unlink",
        "os.write",
        # syncfs, for many files only, and the exchange of two names.
        "ctypes.CDLL",
        "ctypes.get_errno",
        "_load_libc().renameat2",
        "_load_libc().syncfs",
        "self.labels.decide_label",
        "self.labels.release_memory",
    }
