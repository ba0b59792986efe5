"""``treenail plan`` and ``treenail why`` on a node, beside what its agent then does."""

import json

import pytest

from tests.integration.commands import treenail
from tests.integration.site import Site

pytestmark = pytest.mark.integration

REASON = "osImageURL changed (part of the operating system), from the image beside the config"


def test_plan_of_update_matches_its_record(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        site.stop_server()
        ended = treenail(site, "plan", "--json")
        pending = json.loads(treenail(site, "why", "--json").stdout)["pending"]
        site.start_server()
    plan = json.loads(ended.stdout)
    assert ended.returncode == 3
    assert (plan["old"] != goal.config, plan["new"]) == (True, goal.config)
    assert [(each["kind"], each["details"]) for each in plan["changes"]] == [
        ("osImageURL", [f"+ {goal.pull_spec}"])
    ]
    (action,) = plan["actions"]
    assert (action["action"], pending["reasons"]) == ("drain and reboot", [REASON])
    assert action["reasons"] == [
        {
            "subject": "osImageURL changed",
            "rule": "part of the operating system",
            "source": "the image beside the config",
        }
    ]
    site.settle(goal)
    assert f"    because {REASON}" in treenail(site, "why").stdout.splitlines()
    assert treenail(site, "plan").returncode == 0
