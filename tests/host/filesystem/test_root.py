import os
from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root_directory import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    for directory in ("etc/systemd", "var/lib", "usr/lib"):
        (tmp_path / "machine" / directory).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    return Root(tmp_path / "machine")


def link(root: Root, path: str, target: str) -> None:
    (root.prefix / path).symlink_to(target)


def test_resolve_path_returns_path_below_prefix_existing_or_not(root):
    assert root.resolve_path("/etc/systemd") == root.prefix / "etc/systemd"
    assert root.resolve_path("/no/such/file") == root.prefix / "no/such/file"
    assert root.resolve_path("/etc//./systemd/") == root.prefix / "etc/systemd"
    assert root.resolve_path("/") == root.prefix


def test_resolve_path_of_real_root_returns_the_same_path():
    assert Root("/").resolve_path("/proc/version") == Path("/proc/version")


def test_resolve_path_follows_absolute_link_inside_the_root(root):
    link(root, "var/run", "/run")
    assert root.resolve_path("/var/run/x") == root.prefix / "run/x"


def test_resolve_path_follows_relative_link_from_its_directory(root):
    link(root, "etc/os-release", "../usr/lib/os-release")
    assert root.resolve_path("/etc/os-release") == root.prefix / "usr/lib/os-release"


@pytest.mark.parametrize("target", ["../../../outside", "../../outside", "/../outside"])
def test_resolve_path_of_climbing_link_stops_at_the_root(root, target):
    link(root, "etc/out", target)
    assert root.resolve_path("/etc/out/x") == root.prefix / "outside/x"


def test_resolve_path_of_link_to_outside_stays_inside(root, tmp_path):
    outside = tmp_path / "outside"
    link(root, "etc/out", str(outside))
    assert root.resolve_path("/etc/out") == root.prefix / str(outside)[1:]


def test_resolve_path_follows_links_to_links(root):
    link(root, "a", "/b")
    link(root, "b", "etc/c")
    link(root, "etc/c", "../var/lib")
    assert root.resolve_path("/a/x") == root.prefix / "var/lib/x"


def test_resolve_path_of_link_loop_is_refused(root):
    link(root, "a", "b")
    link(root, "b", "a")
    with pytest.raises(FileError, match="/a/x leads through more than 40 symbolic links"):
        root.resolve_path("/a/x")


def test_resolve_entry_follows_parents_but_not_the_link_itself(root):
    link(root, "etc/x", "/var/lib/x")
    link(root, "conf", "/etc")
    assert root.resolve_entry("/conf/x") == root.prefix / "etc/x"
    assert root.resolve_path("/conf/x") == root.prefix / "var/lib/x"


def test_resolve_path_through_a_file_returns_the_path(root):
    (root.prefix / "etc/file").write_text("")
    assert root.resolve_path("/etc/file/x") == root.prefix / "etc/file/x"


@pytest.mark.parametrize(
    ("below", "why"),
    [
        ("etc/x", "'etc/x' is not an absolute path"),
        ("", "'' is not an absolute path"),
        ("/etc/../../x", "'/etc/../../x' has .. in it"),
        ("/etc/..", "'/etc/..' has .. in it"),
        ("/etc/a\0b", r"'/etc/a\x00b' has a null character in it"),
        ("/etc/\ud800", r"'/etc/\ud800' cannot be the name of a file"),
    ],
)
def test_resolve_path_of_invalid_path_is_refused(root, below, why):
    with pytest.raises(FileError) as refused:
        root.resolve_path(below)
    assert str(refused.value) == why


def test_resolve_entry_of_root_is_refused(root):
    with pytest.raises(FileError, match="'/' is the root directory itself"):
        root.resolve_entry("/")


def test_resolve_path_of_too_long_name_is_a_file_error(root):
    with pytest.raises(FileError, match="File name too long"):
        root.resolve_path("/etc/" + "x" * 300)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives links to other users")
def test_resolve_safely_refuses_link_of_user_into_directory_of_another(root):
    link(root, "var/lib/app", "/etc")
    assert root.resolve_safely("/var/lib/app/systemd") == root.prefix / "etc/systemd"
    os.lchown(root.prefix / "var/lib/app", 1000, 1000)
    for path in ("/var/lib/app", "/var/lib/app/systemd", "/var/lib/app/new/directory"):
        with pytest.raises(FileError) as caught:
            root.resolve_safely(path)
        assert str(caught.value) == (
            f"cannot change {path}: {root.prefix}/var/lib/app is a link of the user 1000 to an "
            "entry of the user 0"
        )
        assert f"chown -h root {root.prefix}/var/lib/app" in caught.value.remedy
    os.chown(root.prefix / "etc/systemd", 1000, 1000)
    assert root.resolve_safely("/var/lib/app/systemd") == root.prefix / "etc/systemd"
