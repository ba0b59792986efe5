import stat
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.path_stat import Accounts
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.users import ShadowFile, is_locked
from treenail.observations import EntryKind, PathEntry

SHADOW = "root:*:19000:0:99999:7:::\ncore:$6$old:19000:0:99999:7:::\nlast:!!:19000::::::\n"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0::/root:/bin/sh\ncore:x:1000:1001::/home/core:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\ncore:x:1001:\n")
    (etc / "shadow").write_text(SHADOW)
    (etc / "shadow").chmod(0o600)
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/passwd").write_text("chrony:x:990:990::/:/sbin/nologin\n+bad\n")
    return Root(tmp_path)


def shadow(root: Root) -> str:
    return (root.prefix / "etc/shadow").read_text()


def test_accounts_come_from_etc_and_usr_lib(root):
    accounts = Accounts(HostFiles(root))
    assert (accounts.find_uid("core"), accounts.find_gid("core"), accounts.find_uid("chrony")) == (
        1000,
        1001,
        990,
    )
    assert (accounts.find_uid(7), accounts.find_uid("root")) == (7, 0)
    core = accounts.name_owner(PathEntry(EntryKind.FILE, uid=1000, gid=1001))
    unnamed = accounts.name_owner(PathEntry(EntryKind.FILE, uid=5, gid=5))
    assert (core.user, core.group, unnamed.user, unnamed.group) == ("core", "core", "", "")
    assert (accounts.has_user("core"), accounts.has_user("guest")) == (True, False)
    with pytest.raises(FileError, match="there is no user guest on this machine"):
        accounts.find_uid("guest")


def test_set_password_hash_changes_one_line_and_keeps_mode(root):
    shadows = ShadowFile(root, FakeClock(86_400.0 * 20_000))
    shadows.set_password_hash("core", "$6$new")
    assert shadow(root) == SHADOW.replace("$6$old:19000", "$6$new:20000")
    assert stat.S_IMODE((root.prefix / "etc/shadow").stat().st_mode) == 0o600
    assert shadows.read_password_hash("core") == "$6$new"


def test_set_password_hash_adds_line_and_restore_removes_it(root):
    shadows = ShadowFile(root, FakeClock(86_400.0 * 20_000))
    shadows.set_password_hash("chrony", "*")
    assert shadow(root) == SHADOW + "chrony:*:20000:0:99999:7:::\n"
    shadows.restore_line("chrony", None)
    assert shadow(root) == SHADOW


def test_set_password_hash_keeps_last_line_without_newline(root):
    (root.prefix / "etc/shadow").write_text(SHADOW.removesuffix("\n"))
    shadows = ShadowFile(root, FakeClock(86_400.0 * 20_000))
    line = shadows.read_line("last")
    assert line == "last:!!:19000::::::"
    shadows.set_password_hash("core", "$6$new")
    assert shadow(root) == SHADOW.replace("$6$old:19000", "$6$new:20000")
    shadows.set_password_hash("last", "$6$last")
    shadows.restore_line("last", line)
    assert shadows.read_line("last") == line


def test_restore_line_keeps_changes_of_other_users(root):
    shadows = ShadowFile(root, FakeClock())
    line = shadows.read_line("core")
    shadows.set_password_hash("core", "$6$new")
    shadows.set_password_hash("root", "$6$other")
    shadows.restore_line("core", line)
    shadows.restore_line("core", line)
    assert shadows.read_password_hash("core") == "$6$old"
    assert shadows.read_password_hash("root") == "$6$other"


def test_hash_with_separator_is_rejected_and_withheld(root):
    with pytest.raises(FileError) as caught:
        ShadowFile(root, FakeClock()).set_password_hash("core", "canary\nroot::0:0")
    assert "canary" not in str(caught.value)
    assert shadow(root) == SHADOW


@pytest.mark.parametrize(
    ("field", "expected"),
    [("*", True), ("!!", True), ("!$6$x", True), ("", False), ("$6", False)],
)
def test_is_locked_is_false_for_empty_hash(field, expected):
    assert is_locked(field) is expected
