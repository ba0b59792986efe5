"""The API server is away, or is not well, during an update."""

import json

import pytest

from tests.integration.site import NODE, SETTINGS, USER, Options, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.apiserver.serving.faults import (
    DelayFault,
    Fault,
    FaultMatch,
    LoseAnswerFault,
    RefuseFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.server import ApiServer

pytestmark = pytest.mark.integration

LIMIT_S = 45.0


@pytest.fixture(scope="module")
def options() -> Options:
    """Return a short deadline: a boot without API server takes all of it."""
    return Options(agent_settings=SETTINGS.replace("deadline_s = 10", "deadline_s = 5"))


def api_server(site: Site) -> object:
    """Return whether the agent reports the API server as reachable."""
    found = site.lab.read_live_status(NODE).get("apiServer")
    return found.get("reachable") if isinstance(found, dict) else None


def test_outage_after_target_was_observed_does_not_stop_update(site: Site) -> None:
    before, goal = site.current, site.goal()
    with site.slow_pull():
        site.ask(goal)
        site.wait_progress()
        site.stop_server()
    site.wait_phase("draining")
    wait_until(lambda: api_server(site) is False)
    assert site.machine.is_staged_locked, "staging needs no API server"
    assert site.booted() == before.image.digest, "the drain could not be requested"
    assert not site.was_cordoned()
    site.start_server()
    site.settle(goal, limit_s=LIMIT_S)
    assert len(site.transactions("stage")) == 1


def answered_before(site: Site) -> bool:
    """Return whether the server answered when the reboot was last requested, by the ledger."""
    ledger = json.loads((site.machine.root / "var/lib/treenail/ledger.json").read_text())
    return bool(ledger["update"]["bootTrial"]["apiBeforeReboot"])


def test_outage_from_drain_until_boot_is_survived(site: Site) -> None:
    before, goal = site.current, site.goal()
    with site.machine.inhibit_shutdown("backup", "nightly run"):
        site.ask(goal)
        site.wait_phase("rebooting")
        site.stop_server()
        wait_until(lambda: not answered_before(site), limit_s=LIMIT_S)
    assert site.machine.wait_for_boot(site.boots + 1, LIMIT_S)
    site.wait_phase("uncordoning")
    assert site.booted() == goal.image.digest, "what was decided and drained for goes through"
    assert site.notes()[key.CURRENT_CONFIG] == before.config, "the config could not be reported"
    site.start_server()
    site.settle(goal, limit_s=LIMIT_S)
    assert site.machine.boot_count == site.boots + 1


def test_agent_starts_and_finishes_without_a_server(site: Site) -> None:
    goal = site.goal()
    with site.machine.inhibit_shutdown("backup", "nightly run"):
        site.ask(goal)
        site.wait_phase("rebooting")
        site.stop_server()
        wait_until(lambda: not answered_before(site), limit_s=LIMIT_S)
        site.machine.kill_agent()
    # Without a server the Node's condition is unknown, so the boot trial lasts until its deadline.
    site.wait_phase("uncordoning", limit_s=50.0)
    assert site.booted() == goal.image.digest
    site.machine.kill_agent()
    wait_until(lambda: api_server(site) is False)
    assert site.phase() == "uncordoning"
    site.start_server()
    site.settle(goal, limit_s=LIMIT_S)


def test_unreadable_config_stages_nothing(site: Site) -> None:
    goal = site.goal()
    number = site.server.inject_fault(
        RefuseFault(), FaultMatch(verb="get", resource="machineconfigs")
    )
    site.ask(goal)
    wait_until(lambda: goal.config in str(site.lab.read_live_status(NODE).get("failure")))
    assert site.machine.staged_deployment is None
    assert not site.was_cordoned()
    site.server.lift_fault(number)
    site.settle(goal)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(RefuseFault(), marks=pytest.mark.long),
        pytest.param(RejectFault(503), marks=pytest.mark.long),
        RejectFault(429),
        LoseAnswerFault(),
        pytest.param(DelayFault(0.2), marks=pytest.mark.long),
    ],
    ids=["refuse", "503", "429", "lost", "slow"],
)
def test_after_every_change_the_next_request_fails(site: Site, fault: Fault) -> None:
    goal = site.goal()
    with site.at_each_change(lambda api: api.inject_fault(fault, FaultMatch(user=USER), times=1)):
        site.ask(goal)
        site.settle(goal, limit_s=LIMIT_S)
    assert site.machine.boot_count == site.boots + 1
    assert not site.was("Degraded")


def test_after_every_change_watches_are_cut_and_versions_expire(site: Site) -> None:
    def strike(api: ApiServer) -> None:
        api.store.expire_versions()
        api.watches.cut_watches(user=USER)

    goal = site.goal()
    with site.at_each_change(strike):
        site.ask(goal)
        site.settle(goal, limit_s=LIMIT_S)
    assert site.machine.boot_count == site.boots + 1
    assert not site.was("Degraded")
