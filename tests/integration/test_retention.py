"""The deployment that there is to go back to, and everybody who may drop it."""

import json

import pytest

from tests.integration.commands import status
from tests.integration.site import FAST, SETTINGS, Options, Site
from tests.lab.machine.client import RpmOstreeClient, run
from tests.waiting import wait_until
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

LIMIT_S = 30.0


@pytest.fixture(scope="module", params=["rpm-ostree", "bootc"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(
        backend="bootc" if request.param == "bootc" else "",
        agent_settings=SETTINGS.replace("[health]\n", "resync_s = 1\n[health]\nretention_s = 8\n"),
        behaviour=MachineSettings(pull_bytes_per_s=FAST, staging_s=0.02),
    )


def pinned(site: Site) -> list[str]:
    return [each.digest for each in site.machine.deployments if each.pinned]


def retained(site: Site) -> dict[str, str] | None:
    """Return the retained deployment that ``treenail status`` shows."""
    found: dict[str, str] | None = json.loads(status(site, "--json").stdout)["retained"]
    return found


@pytest.mark.long("bootc")
def test_previous_deployment_is_pinned_until_keep_time_ends(
    site: Site,
) -> None:
    before, goal = site.current.image.digest, site.goal()
    with site.machine.inhibit_shutdown("backup", "copying"):
        site.ask(goal)
        wait_until(lambda: pinned(site) == [before], limit_s=LIMIT_S)
    site.settle(goal)
    assert pinned(site) == [before]
    kept = retained(site)
    assert kept is not None
    assert kept["until"]
    wait_until(lambda: pinned(site) == [], limit_s=LIMIT_S)
    wait_until(lambda: retained(site) is None, limit_s=LIMIT_S)


def test_foreign_cleanup_keeps_pinned_deployment(site: Site) -> None:
    if not (site.machine.root / "usr/lib/systemd/system/rpm-ostreed.service").exists():
        pytest.skip("without rpm-ostree no program cleans up")
    before, goal = site.current.image.digest, site.goal()
    site.reach(goal)
    with RpmOstreeClient(site.machine.address) as client:
        run(client.os("Cleanup", "(as)", ["rollback-deploy"])[0])
    assert [each.digest for each in site.machine.deployments] == [goal.image.digest, before]
