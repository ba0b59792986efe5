"""A node that bootc manages, from the request to Done."""

import json
import re
from contextlib import ExitStack

import pytest

from tests.integration.commands import status
from tests.integration.site import FAST, LAYERS, LIMIT_S, SLOW, Options, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.host.bootc.backend import SWITCH_UNIT
from treenail.host.systemd.system_bus import SystemBus
from treenail.host.systemd.transient import TransientUnits

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(
        backend="bootc", agent_settings="[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
    )


def test_image_is_pulled_in_service_and_deployed_after_the_drain(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_note(key.DESIRED_DRAIN, f"drain-{goal.config}")
        assert site.machine.staged_deployment is None
        stored = site.machine.root / "var/lib/containers/storage/images.json"
        assert goal.pull_spec in stored.read_text()
    site.settle(goal)
    assert site.machine.boot_count == site.boots + 1
    booted = site.machine.booted_deployment
    assert booted is not None
    assert booted.digest == goal.image.digest


def test_status_shows_how_far_the_pull_is(site: Site) -> None:
    goal = site.goal()
    site.machine.change_settings(pull_bytes_per_s=SLOW)
    site.ask(goal)
    wait_until(lambda: 0 < site.wait_progress() < 100, limit_s=LIMIT_S)
    shown = " ".join(status(site).stdout.split())
    assert re.search(rf"\(\d+ %, pulling layer \d+ of {LAYERS}\)", shown), shown
    site.machine.change_settings(pull_bytes_per_s=FAST)
    site.settle(goal)


def is_switching(site: Site) -> bool:
    """Return whether bootc switch runs."""
    bus = SystemBus(site.machine.address)
    try:
        run = TransientUnits(bus).find_run(SWITCH_UNIT)
    finally:
        bus.close_connection()
    return run is not None and run.is_running


def test_killed_agent_finds_the_switch_that_it_began(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_note(key.DESIRED_DRAIN, f"drain-{goal.config}")
        site.machine.change_settings(pull_bytes_per_s=SLOW)
    wait_until(lambda: is_switching(site), limit_s=LIMIT_S)
    starts = site.machine.agent.start_count
    site.machine.kill_agent()
    wait_until(lambda: site.machine.agent.start_count > starts)
    site.machine.change_settings(pull_bytes_per_s=FAST)
    site.settle(goal)
    assert site.machine.boot_count == site.boots + 1
    started = f"Started treenail: switch to {goal.pull_spec}."
    assert site.messages(SYSLOG_IDENTIFIER="systemd").count(started) == 1


def test_changed_target_drops_pulled_image(site: Site) -> None:
    before, goal = site.current, site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_note(key.DESIRED_DRAIN, f"drain-{goal.config}")
        site.ask(before)
        site.wait_note(key.DESIRED_DRAIN, f"uncordon-{goal.config}")
    site.settle(before)
    stored = site.machine.root / "var/lib/containers/storage/images.json"
    assert goal.pull_spec not in stored.read_text()
    assert site.machine.boot_count == site.boots


def test_changed_target_drops_deployed_image(site: Site) -> None:
    before, goal = site.current, site.goal()
    with ExitStack() as locks:
        with site.drains_held():
            site.ask(goal)
            site.wait_phase("draining")
            locks.enter_context(site.machine.inhibit_shutdown("backup", "nightly run"))
        site.wait_degraded("backup")
        staged = site.machine.staged_deployment
        assert staged is not None
        assert (staged.digest, site.machine.is_staged_locked) == (goal.image.digest, False)
        site.ask(before)
        site.settle(before)
    assert site.machine.staged_deployment is None
    assert site.machine.boot_count == site.boots


def test_status_reports_backend_and_reason(site: Site) -> None:
    document = json.loads(status(site, "--json").stdout)
    assert document["backend"] == {"name": "bootc", "reason": "selected by the setting backend"}
    assert document["deployments"]["booted"]["digest"] == site.current.image.digest
