"""An agent at rest after updates: its processes, its libraries and its memory."""

from pathlib import Path

import pytest

from tests.integration.site import Options, Site
from tests.waiting import wait_until
from treenail_lab.lifetime.interpreter import PYTHON_MODULE

pytestmark = pytest.mark.integration

MAX_RSS_KIB = 36 * 1024
"""Above what `make bench ARGS=node` measures: interpreters differ in size."""


@pytest.fixture(scope="module")
def options() -> Options:
    """Start the agent itself: a process of the lab's fork server has its memory and libraries."""
    return Options(agent=("env", *PYTHON_MODULE, "treenail", "run"))


def test_agent_at_rest_has_no_process_and_no_library_for_dbus(site: Site) -> None:
    site.reach(site.goal())
    pid = site.machine.agent.pid
    # It rests after some seconds without an event.
    wait_until(lambda: list_children(pid) == [], limit_s=60.0)
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert [name for name in ("libgio", "libgirepository", "/gi/") if name in mapped] == []
    assert read_rss_kib(pid) < MAX_RSS_KIB


def test_update_after_a_rest_talks_to_dbus_again(site: Site) -> None:
    site.reach(site.goal())
    pid = site.machine.agent.pid
    wait_until(lambda: list_children(pid) == [], limit_s=60.0)
    site.reach(site.goal())


def list_children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def read_rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
