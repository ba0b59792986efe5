"""Labels by the real libselinux, with patterns of the test, on file systems that have labels."""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem import selinux
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk, StrPath
from treenail.host.filesystem.entries import DirectoryEntry, FileEntry, SymlinkEntry
from treenail.host.filesystem.path_stat import stat_paths
from treenail.host.filesystem.root_directory import Root
from treenail.host.filesystem.selinux import SelinuxPolicy
from treenail.host.rollback.transaction import UndoTransaction
from treenail.host.rollback.undo_log import PathChange

CONTEXTS = """\
/.*                     system_u:object_r:default_t:s0
/etc(/.*)?              system_u:object_r:etc_t:s0
/etc/secret        --   system_u:object_r:secret_t:s0
/etc/link          -l   system_u:object_r:link_t:s0
/etc/d             -d   system_u:object_r:directory_t:s0
/etc/alone              <<none>>
"""
ATTRIBUTE = "security.selinux"
REGULAR = stat.S_IFREG | 0o644


def label(kind: str, user: str = "system_u") -> bytes:
    return f"{user}:object_r:{kind}:s0\0".encode()


def labelled(path: Path) -> bytes:
    try:
        return os.getxattr(path, ATTRIBUTE, follow_symlinks=False)
    except OSError:
        return b""


@pytest.fixture
def library() -> ctypes.CDLL:
    try:
        return selinux.load_library()
    except OSError as error:
        pytest.skip(f"no libselinux: {error}")


@pytest.fixture
def contexts(tmp_path: Path) -> Path:
    below = tmp_path / "policy/contexts/files"
    below.mkdir(parents=True)
    (below.parent / "customizable_types").write_text("by_hand_t\n")
    path = below / "file_contexts"
    path.write_text(CONTEXTS)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "machine/etc").mkdir(parents=True)
    return Root(tmp_path / "machine")


@pytest.fixture
def policy(library: ctypes.CDLL, contexts: Path, root: Root) -> SelinuxPolicy:
    return SelinuxPolicy(root, library, contexts, is_labelled=lambda _: True)


@pytest.fixture
def disk(policy: SelinuxPolicy, tmp_path: Path) -> Disk:
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.setxattr(probe, ATTRIBUTE, label("etc_t"))
    except OSError as error:
        pytest.skip(f"no labels here: {error}")
    return Disk(policy)


@pytest.mark.parametrize(
    ("path", "mode", "expected"),
    [
        ("/etc/motd", REGULAR, "etc_t"),
        ("/etc/secret", REGULAR, "secret_t"),
        ("/etc/secret", stat.S_IFDIR, "etc_t"),
        ("/etc/link", stat.S_IFLNK, "link_t"),
        ("/var/x", REGULAR, "default_t"),
    ],
)
def test_default_label_depends_on_path_and_kind(policy, path, mode, expected):
    assert policy.find_default_label(path, mode) == label(expected).rstrip(b"\0")


def test_path_without_pattern_has_no_default_label(policy):
    assert policy.find_default_label("/etc/alone", REGULAR) == b""


def test_label_of_path_below_a_root_is_that_within_the_root(policy, root):
    place = root.prefix / "etc/secret"
    place.touch()
    assert policy.decide_label(str(place), place.stat(), b"") == label("secret_t")


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (b"", label("secret_t")),
        (label("etc_t"), label("secret_t")),
        # User and range depend on who wrote the file.
        (label("secret_t", "unconfined_u"), label("secret_t", "unconfined_u")),
        (label("by_hand_t"), label("by_hand_t")),
        (b"damaged", label("secret_t")),
    ],
)
def test_label_is_kept_unless_restorecon_would_change_it(policy, root, present, expected):
    place = root.prefix / "etc/secret"
    place.touch()
    assert policy.decide_label(str(place), place.stat(), present) == expected


def test_label_on_device_without_labels_is_kept(library, contexts, root):
    policy = SelinuxPolicy(root, library, contexts, is_labelled=lambda _: False)
    place = root.prefix / "etc/secret"
    place.touch()
    assert policy.decide_label(str(place), place.stat(), label("dosfs_t")) == label("dosfs_t")


def test_changed_policy_is_reloaded(policy, contexts):
    assert policy.find_default_label("/etc/secret", REGULAR) == label("secret_t").rstrip(b"\0")
    contexts.write_text(CONTEXTS.replace("secret_t", "hidden_t"))
    os.utime(contexts, ns=(1, 1))
    assert policy.find_default_label("/etc/secret", REGULAR) == label("hidden_t").rstrip(b"\0")


def test_local_patterns_and_directory_aliases_apply(policy, contexts):
    contexts.with_name("file_contexts.subs_dist").write_text("/var/home /home\n")
    contexts.with_name("file_contexts.local").write_text(
        "/home/core/\\.ssh(/.*)?  system_u:object_r:ssh_home_t:s0\n"
    )
    keys = "/var/home/core/.ssh/authorized_keys.d/ignition"
    assert policy.find_default_label(keys, REGULAR) == label("ssh_home_t").rstrip(b"\0")


def test_policy_after_release_of_memory_gives_the_same_labels(policy):
    before = [policy.find_default_label(path, REGULAR) for path in ("/etc/secret", "/etc/motd")]
    policy.release_memory()
    policy.release_memory()
    assert [policy.find_default_label(path, REGULAR) for path in ("/etc/secret", "/var/x")] == [
        before[0],
        label("default_t").rstrip(b"\0"),
    ]


def test_unreadable_policy_is_logged_once_and_gives_no_labels(library, root, tmp_path, caplog):
    policy = SelinuxPolicy(root, library, tmp_path / "none")
    assert [policy.find_default_label(path, REGULAR) for path in ("/a", "/b")] == [b"", b""]
    policy.release_memory()
    assert policy.find_default_label("/c", REGULAR) == b""
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_disabled_selinux_is_logged_once_and_gives_no_policy(root, caplog):
    if Path("/sys/fs/selinux/enforce").exists():
        pytest.skip("SELinux is enabled here")
    caplog.set_level("DEBUG")
    selinux.load_if_enabled.cache_clear()
    assert [selinux.load_policy(root), selinux.load_policy(root)] == [None, None]
    assert [record.message for record in caplog.records] == [
        "SELinux is disabled; the kernel labels new files"
    ]


def changes() -> Iterator[PathChange]:
    yield PathChange("/etc/secret", FileEntry(lambda: b"new", 0o600))
    yield PathChange("/etc/link", SymlinkEntry("secret"))
    yield PathChange("/etc/d/e/file", FileEntry(lambda: b"new"))
    yield PathChange("/etc/alone", FileEntry(lambda: b"new"))


def test_applied_changes_get_the_label_of_the_policy(disk, root):
    undo = UndoTransaction(root, disk)
    undo.apply_changes(tuple(changes()))
    undo.commit_changes()
    etc = root.prefix / "etc"
    assert {
        name: labelled(etc / name) for name in ("secret", "link", "d", "d/e", "d/e/file", "alone")
    } == {
        "secret": label("secret_t"),
        "link": label("link_t"),
        "d": label("directory_t"),
        "d/e": label("etc_t"),
        "d/e/file": label("etc_t"),
        "alone": b"",
    }


def test_replaced_file_keeps_customized_label_and_undo_restores_it(disk, root):
    etc = root.prefix / "etc"
    (etc / "d").mkdir()
    for name, kind in (("secret", "by_hand_t"), ("motd", "wrong_t"), ("d", "wrong_t")):
        (etc / name).touch() if name != "d" else None
        os.setxattr(etc / name, ATTRIBUTE, label(kind))
    undo = UndoTransaction(root, disk)
    undo.apply_changes(
        (
            PathChange("/etc/secret", FileEntry(lambda: b"new")),
            PathChange("/etc/motd", FileEntry(lambda: b"new")),
            PathChange("/etc/d", DirectoryEntry(0o700)),
        )
    )
    names = ("secret", "motd", "d")
    assert [labelled(etc / name) for name in names] == [
        *(label("by_hand_t"), label("etc_t"), label("directory_t")),
    ]
    undo.undo_changes()
    assert [labelled(etc / name) for name in names] == [
        *(label("by_hand_t"), label("wrong_t"), label("wrong_t")),
    ]


def test_write_file_labels_files_and_directories_by_the_policy(disk, root):
    files = HostFiles(root, disk)
    files.write_file("/etc/secret", b"1")
    files.write_file("/etc/d/a", b"1")
    files.make_symlink("/etc/link", "d")
    etc = root.prefix / "etc"
    assert [labelled(etc / name) for name in ("secret", "d", "d/a", "link")] == [
        *(label("secret_t"), label("directory_t"), label("etc_t"), label("link_t")),
    ]


def test_path_stat_has_current_and_expected_label(disk, root):
    (root.prefix / "etc/secret").touch()
    os.setxattr(root.prefix / "etc/secret", ATTRIBUTE, label("etc_t", "unconfined_u"))
    found = stat_paths(root, disk, ["/etc/secret"])["/etc/secret"]
    assert (found.label, found.expected_label) == (
        "unconfined_u:object_r:etc_t:s0",
        "system_u:object_r:secret_t:s0",
    )
    assert stat_paths(root, Disk(), ["/etc/secret"])["/etc/secret"].expected_label == ""


class Refusing(Disk):
    """A kernel whose policy rejects one of the labels."""

    def set_label(self, target: StrPath | int, label: bytes) -> None:
        if b"secret_t" in label:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().set_label(target, label)


def test_rejected_label_fails_and_changes_nothing(disk, root):
    assert disk.labels
    undo = UndoTransaction(root, Refusing(disk.labels))
    with pytest.raises(FileError, match=r"cannot write .*/etc/secret: Invalid argument"):
        undo.apply_changes((PathChange("/etc/secret", FileEntry(lambda: b"new")),))
    undo.undo_changes()
    assert [*(root.prefix / "etc").iterdir()] == []


def test_device_is_labelled_unless_its_mount_is_not():
    # Without SELinux no mount has seclabel; a device that is not listed counts as labelled.
    enabled = Path("/sys/fs/selinux/enforce").exists()
    assert (selinux.is_labelled_device(Path("/proc").stat().st_dev)) is False
    assert selinux.is_labelled_device(os.makedev(4000, 4000)) is True
    assert enabled or not selinux.is_labelled_device(Path("/sys").stat().st_dev)
