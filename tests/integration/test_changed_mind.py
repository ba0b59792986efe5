"""The target changes before the reboot; and deployments that the agent did not stage."""

import pytest

from tests.integration.site import Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.images import make_image
from treenail_lab.machine.ostree.sysroot import Sysroot

pytestmark = pytest.mark.integration


def test_return_to_old_target_while_staging(site: Site) -> None:
    before = site.current
    with site.slow_pull():
        site.ask(site.goal())
        site.wait_progress()
        site.ask(before)
        site.settle(before)
    site.assert_unchanged()
    assert not site.was_cordoned()
    assert not site.was("Degraded")
    (ending,) = site.transactions("stage")
    assert "cancelled" in ending


def test_return_to_old_target_while_drain_is_awaited(site: Site) -> None:
    before, goal = site.current, site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        assert site.machine.is_staged_locked
        site.wait_note(key.DESIRED_DRAIN, f"drain-{goal.config}")
        site.ask(before)
        site.wait_note(key.DESIRED_DRAIN, f"uncordon-{goal.config}")
    site.settle(before)
    site.assert_unchanged()


def test_return_to_old_target_while_reboot_is_delayed(site: Site) -> None:
    before = site.current
    with site.machine.inhibit_shutdown("backup", "nightly run"):
        site.ask(site.goal())
        site.wait_degraded("backup")
        assert site.cordoned()
        site.ask(before)
        site.settle(before)
    site.assert_unchanged()


def test_another_target_while_staging(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(site.goal())
        site.wait_progress()
        site.ask(goal)
        wait_until(lambda: len(site.transactions("stage")) == 1)
    site.settle(goal)
    assert site.machine.boot_count == site.boots + 1
    assert not site.was("Degraded")


def test_another_target_while_drain_is_awaited(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(site.goal())
        site.wait_phase("draining")
        site.ask(goal)
        wait_until(lambda: site.phase() in ("cancelling", ""))
    site.settle(goal)
    assert site.machine.boot_count == site.boots + 1


def test_cancelled_update_is_reported(site: Site) -> None:
    before = site.current
    with site.drains_held():
        site.ask(site.goal())
        site.wait_phase("draining")
        site.ask(before)
        site.wait_phase("cancelling")
    site.settle(before)
    assert "OSUpdateCancelled" in [reason for _, reason, _ in site.events()]
    assert [text for text in site.messages() if "; the node stays at " in text]


@pytest.mark.parametrize("locked", [False, True])
def test_foreign_staged_deployment_is_reported_and_kept(site: Site, *, locked: bool) -> None:
    foreign = make_image("os/other", f"7-{locked}", 1_000_000)
    site.machine.stage_foreign_image(foreign, locked=locked)
    staged = site.machine.staged_deployment
    assert staged is not None
    goal = site.goal()
    site.ask(goal)
    site.wait_degraded(staged.id, "rpm-ostree cleanup --pending")
    assert site.machine.staged_deployment == staged
    assert not site.was_cordoned()
    assert site.transactions() == []
    Sysroot(site.machine.root).drop_staged()
    site.settle(goal)
    assert site.notes()[key.REASON] == ""


def test_deployment_staged_by_another_during_drain_is_reported(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        site.machine.stage_foreign_image(make_image("os/other", "8", 1_000_000))
        staged = site.machine.staged_deployment
    assert staged is not None
    site.wait_degraded(staged.id)
    assert site.machine.staged_deployment == staged
    assert site.machine.boot_count == site.boots
    Sysroot(site.machine.root).drop_staged()
    site.settle(goal)
