"""Another program has the sysroot of a node that never moved: nothing of its is kept yet."""

import pytest

from tests.integration.commands import status
from tests.integration.site import Site
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


def test_sysroot_held_by_bootc_is_reported_and_retried(site: Site) -> None:
    goal = site.goal()
    with site.machine.lock_sysroot():
        site.ask(goal)
        wait_until(lambda: said(site, "failed with the same error; retrying in") >= 2, limit_s=30.0)
        # The first failure is reported in full, and the last try may be in progress.
        assert (
            said(site, "waiting: another program") <= said(site, "failed with the same error") + 2
        )
        assert "another program, such as bootc or ostree, holds the sysroot" in status(site).stdout
    site.settle(goal)
    assert not site.was("Degraded")


def said(site: Site, words: str) -> int:
    """Count the agent's messages with this text."""
    return sum(words in text for text in site.messages())
