"""``treenail status`` on a node that is at rest, at work, cut off or without its agent."""

import json
import re

import pytest

from tests.integration.commands import status
from tests.integration.site import NODE, Site
from tests.waiting import wait_until
from treenail.api import annotations as key

pytestmark = pytest.mark.integration

DEGRADED = 3


def shown(site: Site) -> dict[str, str]:
    """The screen, line by line, by what stands before each."""
    found: dict[str, str] = {}
    name = ""
    for line in status(site).stdout.splitlines():
        name = line[:12].strip() or name
        found[name] = f"{found[name]} {line[13:]}" if name in found else line[13:]
    return found


def test_status_at_rest_shows_no_update(site: Site) -> None:
    site.reach(site.goal())
    before = site.machine.deployments[1]
    goal = site.current
    screen = shown(site)
    image = goal.image
    agent = rf"running since \d{{4}}-.*Z, process {site.machine.agent.pid}, \d+ MiB"
    assert re.fullmatch(agent, screen.pop("Agent"))
    assert screen.pop("API server").startswith("reachable since ")
    assert screen.pop("Managed by").startswith("rpm-ostree: installed")
    assert re.fullmatch(rf"done \d{{4}}-.*Z, to {goal.config}", screen.pop("Last update"))
    kept = rf"{re.escape(before.id)}, until \d{{4}}-.*Z, or the next update"
    assert re.fullmatch(kept, screen.pop("Pinned"))
    assert screen == {
        "Node": NODE,
        "State": "Done",
        "Activity": f"at {goal.config} with {image.pull_spec[:-52]}",
        "Current": f"{goal.config} {goal.pull_spec}",
        "Desired": f"{goal.config} {goal.pull_spec}",
        "Booted": f"{image.version} {image.digest}",
        "Staged": "none",
        "Rollback": f"{before.version} (pinned) {before.digest}",
    }


def test_status_while_staging_shows_progress(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        site.wait_progress()
        screen = shown(site)
        document = json.loads(status(site, "--json").stdout)
    assert re.fullmatch(r"Working, staging since \d{4}-.*Z", screen["State"])
    assert re.search(r"\(\d+ %, .*Fetching", screen["Activity"])
    assert screen["Desired"] == f"{goal.config} {goal.pull_spec}"
    assert document["update"]["target"] == {"config": goal.config, "image": goal.pull_spec}
    assert isinstance(document["progress"]["percent"], int)
    assert document["state"] == "Working"
    site.settle(goal)


def test_status_during_outage_shows_awaited_drain(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        site.stop_server()
        wait_until(lambda: shown(site)["API server"].startswith("unreachable since "))
        screen = shown(site)
        document = json.loads(status(site, "--json").stdout)
        site.start_server()
    assert screen["State"].startswith("Working, draining since ")
    assert screen["Staged"] == f"{goal.image.version} (locked) {goal.image.digest}"
    assert document["apiServer"]["reachable"] is False
    assert document["deployments"]["staged"]["locked"] is True
    assert document["problems"] == []
    site.settle(goal, limit_s=45.0)


def test_status_without_agent_reports_it(site: Site) -> None:
    goal = site.current
    site.machine.stop_agent()
    screen = shown(site)
    document = json.loads(status(site, "--json").stdout)
    site.machine.start_agent()
    assert screen["Agent"].startswith("not running; last status written 2")
    assert screen["Activity"].startswith("none; last activity: at ")
    assert screen["Remedy"].startswith("start the agent: systemctl start treenail; ")
    assert document["agent"]["running"] is False
    assert screen["State"] == "Done"
    assert screen["Booted"] == f"{goal.image.version} {goal.image.digest}"
    assert document["current"] == {"config": goal.config, "image": goal.pull_spec}


def test_degraded_node_has_an_exit_code_of_its_own(site: Site) -> None:
    site.ask(site.goal(published=False))
    site.wait_degraded("manifest unknown")
    ended = status(site)
    assert ended.returncode == DEGRADED
    assert "manifest unknown" in ended.stdout
    assert "push it again" in ended.stdout
    assert json.loads(status(site, "--json").stdout)["failure"]["state"] == "Degraded"
    site.reach(site.goal())
    assert status(site).returncode == 0


def test_damaged_ledger_degrades_node_until_restored(site: Site) -> None:
    ledger = site.machine.root / "var/lib/treenail/ledger.json"
    site.machine.stop_agent()
    good = ledger.read_bytes()
    ledger.write_text("{")
    site.machine.start_agent()
    assert "and start the agent again" in site.wait_degraded(
        f"cannot read the ledger {ledger}: it is damaged"
    )
    ended = status(site)
    assert ended.returncode == DEGRADED
    assert f"cannot read the ledger {ledger}: it is damaged" in ended.stdout
    site.machine.stop_agent()
    ledger.write_bytes(good)
    site.machine.start_agent()
    site.wait_note(key.STATE, "Done")
    assert site.notes()[key.REASON] == ""
