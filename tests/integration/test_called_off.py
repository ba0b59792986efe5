"""A person on the machine calls an update off, and has it tried again."""

import json
from contextlib import ExitStack

import pytest

from tests.integration.commands import treenail
from tests.integration.site import SLOW, Site
from treenail.api import annotations as key

pytestmark = pytest.mark.integration

CANCELLED = "cancelled on this node"


def test_cancel_during_pull_and_outage_drops_update(site: Site) -> None:
    goal = site.goal()
    # On a busy machine the command starts after seconds.
    with site.slow_pull(SLOW / 10):
        site.ask(goal)
        site.wait_progress()
        site.stop_server()
        ended = treenail(site, "cancel")
        site.start_server()
        site.wait_degraded(CANCELLED)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"cancelled the update to {goal.config} ")
    site.assert_unchanged()
    assert not site.was_cordoned()
    history = json.loads(treenail(site, "history", "--json").stdout)["items"]
    assert (history[0]["to"]["config"], history[0]["outcome"]) == (goal.config, "cancelled")
    assert treenail(site, "retry").returncode == 0
    site.settle(goal)


def test_cancel_while_drain_is_awaited_uncordons(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        site.wait_note(key.DESIRED_DRAIN, f"drain-{goal.config}")
        assert treenail(site, "cancel").returncode == 0
        site.wait_note(key.DESIRED_DRAIN, f"uncordon-{goal.config}")
    site.wait_degraded(CANCELLED)
    site.assert_unchanged()
    another = site.goal()
    site.ask(another)
    site.settle(another)


def test_cancel_after_reboot_request_is_refused(site: Site) -> None:
    goal = site.goal()
    with ExitStack() as late:
        with site.drains_held():
            site.ask(goal)
            site.wait_phase("draining")
            late.enter_context(site.machine.inhibit_shutdown("backup", "nightly run"))
        site.wait_phase("rebooting")
        ended = treenail(site, "cancel")
    assert ended.returncode == 1
    assert "cannot cancel the update: the agent has already requested the reboot" in ended.stderr
    site.settle(goal)
