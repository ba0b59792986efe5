from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    for directory in ("etc/systemd", "var/lib", "usr/lib"):
        (tmp_path / "machine" / directory).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    return Root(tmp_path / "machine")


def link(root: Root, path: str, target: str) -> None:
    (root.prefix / path).symlink_to(target)


def test_a_path_is_below_the_prefix_whether_it_exists_or_not(root):
    assert root.resolve_path("/etc/systemd") == root.prefix / "etc/systemd"
    assert root.resolve_path("/no/such/file") == root.prefix / "no/such/file"
    assert root.resolve_path("/etc//./systemd/") == root.prefix / "etc/systemd"
    assert root.resolve_path("/") == root.prefix


def test_the_real_root_changes_nothing():
    assert Root("/").resolve_path("/proc/version") == Path("/proc/version")


def test_an_absolute_link_stays_in_the_tree(root):
    link(root, "var/run", "/run")
    assert root.resolve_path("/var/run/x") == root.prefix / "run/x"


def test_a_relative_link_is_followed_from_where_it_is(root):
    link(root, "etc/os-release", "../usr/lib/os-release")
    assert root.resolve_path("/etc/os-release") == root.prefix / "usr/lib/os-release"


@pytest.mark.parametrize("target", ["../../../outside", "../../outside", "/../outside"])
def test_a_link_that_climbs_stops_at_the_root_as_it_would_on_the_machine(root, target):
    link(root, "etc/out", target)
    assert root.resolve_path("/etc/out/x") == root.prefix / "outside/x"


def test_a_link_to_the_full_path_of_something_outside_leads_to_that_path_inside(root, tmp_path):
    outside = tmp_path / "outside"
    link(root, "etc/out", str(outside))
    assert root.resolve_path("/etc/out") == root.prefix / str(outside)[1:]


def test_links_to_links_are_followed_to_the_end(root):
    link(root, "a", "/b")
    link(root, "b", "etc/c")
    link(root, "etc/c", "../var/lib")
    assert root.resolve_path("/a/x") == root.prefix / "var/lib/x"


def test_a_circle_of_links_is_refused(root):
    link(root, "a", "b")
    link(root, "b", "a")
    with pytest.raises(FileError, match="/a/x leads through more than 40 symbolic links"):
        root.resolve_path("/a/x")


def test_an_entry_is_the_link_itself_and_its_parents_are_followed(root):
    link(root, "etc/x", "/var/lib/x")
    link(root, "conf", "/etc")
    assert root.resolve_entry("/conf/x") == root.prefix / "etc/x"
    assert root.resolve_path("/conf/x") == root.prefix / "var/lib/x"


def test_a_file_in_the_middle_is_left_for_the_caller_to_trip_over(root):
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
        ("/etc/\ud800", r"'/etc/\ud800' can't be the name of a file"),
    ],
)
def test_a_path_that_is_not_one_is_refused(root, below, why):
    with pytest.raises(FileError) as refused:
        root.resolve_path(below)
    assert str(refused.value) == why


def test_the_root_is_not_an_entry_of_itself(root):
    with pytest.raises(FileError, match="'/' is the root directory itself"):
        root.resolve_entry("/")


def test_a_name_that_is_too_long_is_an_error_of_ours(root):
    with pytest.raises(FileError, match="File name too long"):
        root.resolve_path("/etc/" + "x" * 300)
