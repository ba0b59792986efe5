"""The real inotify of the kernel, on directories of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.host.filesystem.inotify import InotifyEvents, InotifyWatcher
from treenail.host.filesystem.root_directory import Root


class Site:
    """A root with watches on /etc/a and /etc/b/c, and the events so far."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "etc/a").mkdir(parents=True)
        (top / "etc/a/file").write_text("1")
        self.inotify = InotifyWatcher(Root(top))
        self.inotify.watch_directories(["/etc/a", "/etc/b/c"])
        self.paths: set[str] = set()
        self.lost = False

    def until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            moved = self.inotify.wait_for_events(0.05) or InotifyEvents()
            self.paths |= moved.paths
            self.lost = self.lost or moved.is_incomplete
            return condition()

        wait_until(look)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.inotify.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("2"),
        lambda file: file.chmod(0o600),
        lambda file: file.unlink(),
        lambda file: file.rename(file.with_name("other")),
        lambda file: file.with_name("new").rename(file),
    ],
    ids=["written", "mode", "removed", "renamed", "replaced"],
)
def test_change_of_a_file_causes_an_event(site, change):
    (site.top / "etc/a/new").write_text("3")
    change(site.top / "etc/a/file")

    site.until(lambda: "/etc/a/file" in site.paths)


def test_wait_without_changes_returns_none(site):
    assert site.inotify.wait_for_events(0.0) is None


def test_read_of_a_file_causes_no_event(site):
    (site.top / "etc/a/file").read_text()

    assert site.inotify.wait_for_events(0.0) is None


def test_directory_made_later_is_watched(site):
    (site.top / "etc/b/c").mkdir(parents=True)
    site.until(lambda: site.lost)
    (site.top / "etc/b/c/file").write_text("1")

    site.until(lambda: "/etc/b/c/file" in site.paths)


def test_replaced_directory_stays_watched(site):
    (site.top / "etc/a").rename(site.top / "etc/old")
    (site.top / "etc/a").mkdir()
    site.until(lambda: site.lost)
    site.until(lambda: True)
    (site.top / "etc/a/file").write_text("2")

    site.until(lambda: "/etc/a/file" in site.paths)


def test_directory_that_is_not_requested_any_longer_is_silent(site):
    site.inotify.watch_directories(["/etc/b"])
    site.until(lambda: True)
    site.paths.clear()
    (site.top / "etc/a/file").write_text("2")

    assert (site.inotify.wait_for_events(0.0) or InotifyEvents()).paths == frozenset()


def test_link_out_of_the_root_is_not_followed(site, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (site.top / "etc/out").symlink_to(outside)
    site.inotify.watch_directories(["/etc/out"])
    site.until(lambda: True)
    (outside / "file").write_text("1")

    assert (site.inotify.wait_for_events(0.0) or InotifyEvents()).paths == frozenset()


def test_interrupt_ends_the_wait(site):
    site.inotify.interrupt_wait()

    assert site.inotify.wait_for_events(30.0) is None


def test_directory_with_two_names_causes_events_for_both(site):
    (site.top / "etc/link").symlink_to("a")
    site.inotify.watch_directories(["/etc/a", "/etc/link"])
    (site.top / "etc/a/file").write_text("2")

    site.until(lambda: {"/etc/a/file", "/etc/link/file"} <= site.paths)


def test_change_beside_an_awaited_directory_causes_no_event(site):
    (site.top / "etc/resolv.conf").write_text("1")

    assert (site.inotify.wait_for_events(0.0) or InotifyEvents()) == InotifyEvents()


def test_directory_renamed_with_its_parent_causes_an_event(site):
    (site.top / "etc/b/c").mkdir(parents=True)
    site.until(lambda: site.lost)
    site.lost = False
    (site.top / "etc/b").rename(site.top / "etc/gone")

    site.until(lambda: site.lost)
