"""rpm-ostreed and the agent lose each other, and others use the machine too."""

import signal

import pytest

from tests.integration.site import Options, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

WATCHDOG_S = 2.0


@pytest.fixture(scope="module")
def options() -> Options:
    """A watchdog that kills an agent which says nothing for long."""
    return Options(
        behaviour=MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02, agent_watchdog_s=WATCHDOG_S)
    )


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_rpmostreed_is_restarted_in_mid_transaction(site: Site, number: int) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        site.wait_progress()
        site.machine.restart_service("rpm-ostreed", signal_number=number)
    site.settle(goal)
    assert not site.was("Degraded"), "a restarted service does not degrade the node"
    assert site.machine.boot_count == site.boots + 1


def test_rpmostreed_hangs_in_mid_transaction(site: Site) -> None:
    goal, starts = site.goal(), site.machine.agent.start_count
    with site.slow_pull():
        site.ask(goal)
        site.wait_progress()
        with site.machine.hang_daemon("rpm-ostreed"):
            unit = site.machine.agent
            assert not unit.wait_until(lambda unit: unit.start_count > starts, 1.5 * WATCHDOG_S)
    site.settle(goal)
    assert not site.was("Degraded")
    assert len(site.transactions("stage")) == 1


def test_agent_waiting_for_hung_rpmostreed_is_restarted_and_continues(site: Site) -> None:
    goal, starts = site.goal(), site.machine.agent.start_count
    site.machine.restart_service("rpm-ostreed")
    with site.machine.hang_daemon("rpm-ostreed"):
        site.ask(goal)
        assert site.machine.agent.wait_until(lambda unit: unit.start_count > starts, 5 * WATCHDOG_S)
    site.settle(goal)
    assert not site.was("Degraded")


def test_killed_agent_joins_the_transaction_it_left(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        left = site.wait_progress()
        starts = site.machine.agent.start_count
        site.machine.kill_agent()
        assert site.machine.agent.wait_until(
            lambda unit: unit.start_count > starts and unit.is_ready, 10.0
        )
        assert site.wait_progress() >= left
    site.settle(goal)
    assert len(site.transactions("stage")) == 1


def test_stopped_agent_leaves_transaction_running(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        left = site.wait_progress()
        site.machine.stop_agent()
        assert site.transactions() == []
        site.machine.start_agent()
        assert site.wait_progress() >= left
    site.settle(goal)
    assert len(site.transactions("stage")) == 1
    assert not site.was("Degraded")


def test_image_that_was_staged_while_no_agent_ran_is_used(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        site.wait_progress()
        site.machine.stop_agent()
    wait_until(lambda: site.machine.staged_deployment is not None)
    site.machine.start_agent()
    site.settle(goal)
    assert len(site.transactions("stage")) == 1


def test_agent_waits_for_transaction_of_another_client(site: Site) -> None:
    goal = site.goal()
    with site.machine.hold_transaction():
        site.ask(goal)
        wait_until(lambda: any("busy with RefreshMd" in text for text in site.messages()))
    site.settle(goal)
    assert not site.was("Degraded")
    whose = [line.split()[0] for line in site.transactions()]
    assert whose == ["rpm-ostree", "treenail:", "treenail:"]


def test_failed_pull_is_retried_while_node_serves(site: Site) -> None:
    goal = site.goal()
    site.machine.change_settings(pull_error="connection reset by peer")
    site.ask(goal)
    site.wait_degraded("connection reset by peer")
    assert not site.was_cordoned()
    site.machine.change_settings(pull_error="")
    site.settle(goal)


def test_agent_waits_for_block_inhibitor_and_names_it(site: Site) -> None:
    goal = site.goal()
    with site.machine.inhibit_shutdown("backup", "nightly run"):
        site.ask(goal)
        reason = site.wait_degraded("backup")
        assert "nightly run" in reason
        assert "systemd-inhibit --list" in reason
        assert site.cordoned()
        assert site.machine.boot_count == site.boots
    site.settle(goal)
    assert site.notes()[key.REASON] == ""


def test_image_that_fails_finalization_is_quarantined_after_three_reboots(site: Site) -> None:
    before = site.current
    site.machine.change_settings(
        finalization_error="Bootloader write config: No space left on device"
    )
    site.ask(site.goal())
    reason = site.wait_degraded("each of 3 reboots")
    assert "ostree-finalize-staged failed: Bootloader write config: No space left" in reason
    assert "journalctl -b -1 -u ostree-finalize-staged" in reason
    assert site.machine.boot_count == site.boots + 3
    assert site.booted() == before.image.digest
    wait_until(lambda: not site.cordoned())
    site.machine.change_settings(finalization_error="")
    site.reach(site.goal())
