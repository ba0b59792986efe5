"""The power is cut, or another program reboots the machine, in every phase of an update."""

from contextlib import ExitStack

import pytest

from tests.integration.site import NODE, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.api_client import Json
from treenail.kube.resources import PODDISRUPTIONBUDGETS
from treenail_lab.workload import APP, NAMESPACE, Workload

pytestmark = pytest.mark.integration


def boots(site: Site) -> int:
    """Count the boots of the machine in this test."""
    return site.machine.boot_count - site.boots


def cut_power(site: Site, phase: str) -> None:
    """Cut the power in this phase; the ledger outlives it."""
    assert site.phase() == phase
    site.machine.cut_power()


def test_power_cut_while_staging(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        site.wait_progress()
        cut_power(site, "staging")
    site.settle(goal)
    assert boots(site) == 2


def test_power_cut_while_the_drain_is_awaited(site: Site) -> None:
    before, goal = site.current, site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        cut_power(site, "draining")
        assert site.booted() == before.image.digest
        assert site.machine.staged_deployment is None, "what is staged lies in /run"
    site.settle(goal)
    assert boots(site) == 2
    assert len(site.transactions("stage")) == 2


@pytest.mark.long
def test_power_cut_between_the_drain_and_the_reboot(site: Site) -> None:
    goal = site.goal()
    with site.machine.inhibit_shutdown("backup", "nightly run"):
        site.ask(goal)
        site.wait_phase("rebooting")
        cut_power(site, "rebooting")
    site.settle(goal)
    assert boots(site) == 2
    assert len(site.transactions("stage")) == 2


def test_power_cut_while_the_machine_goes_down(site: Site) -> None:
    goal = site.goal()
    site.machine.change_settings(inhibit_delay_max_s=60.0)
    with site.machine.inhibit_shutdown("database", "writes its pages", mode="delay"):
        site.ask(goal)
        wait_until(
            lambda: site.machine.staged_deployment is not None and not site.machine.is_staged_locked
        )
        cut_power(site, "rebooting")
    site.machine.change_settings(inhibit_delay_max_s=1.0)
    site.settle(goal)
    assert boots(site) == 2


@pytest.mark.long
def test_power_cut_while_the_uncordon_is_awaited(site: Site) -> None:
    goal = site.goal()
    with ExitStack() as held:
        with site.machine.inhibit_shutdown("backup", "nightly run"):
            site.ask(goal)
            site.wait_phase("rebooting")
            held.enter_context(site.drains_held())
        site.wait_phase("uncordoning")
        cut_power(site, "uncordoning")
        assert site.cordoned()
    site.settle(goal)
    assert boots(site) == 2
    assert len(site.transactions("stage")) == 1


def test_power_cut_while_update_is_cancelled(site: Site) -> None:
    before = site.current
    with site.drains_held():
        site.ask(site.goal())
        site.wait_phase("draining")
        site.ask(before)
        site.wait_phase("cancelling")
        cut_power(site, "cancelling")
    site.settle(before)
    assert boots(site) == 1
    assert len(site.transactions("stage")) == 1


def test_foreign_reboot_between_staging_and_drain(site: Site) -> None:
    before, goal = site.current, site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        site.machine.reboot()
        assert site.booted() == before.image.digest, "no other OS while in service"
        wait_until(lambda: len(site.transactions("stage")) == 2)
        site.wait_phase("draining")
        assert site.machine.is_staged_locked
        assert not site.was_cordoned()
    site.settle(goal)
    assert boots(site) == 2


@pytest.mark.long
def test_foreign_reboot_while_node_is_drained(site: Site) -> None:
    before, goal = site.current, site.goal()
    workload = Workload(site.lab.client, replicas=2, max_unavailable=0)
    workload.start()
    try:
        site.ask(goal)
        wait_until(lambda: site.drains.blocked(NODE))
        site.machine.reboot()
        assert site.booted() == before.image.digest
        assert site.cordoned()
        wait_until(lambda: site.machine.is_staged_locked)
        site.wait_phase("draining")
        assert site.notes()[key.STATE] == "Working"
        allowed: Json = {"spec": {"maxUnavailable": 2}}
        site.lab.client.patch(PODDISRUPTIONBUDGETS, APP, allowed, namespace=NAMESPACE)
        site.settle(goal)
    finally:
        workload.stop()
    assert boots(site) == 2
