"""Image mode with both back ends: the image is compared with the config before the drain."""

import json

import pytest

from tests.integration.commands import treenail
from tests.integration.site import Options, Site
from tests.integration.test_config import (
    APP,
    UNIT,
    UNIT_FILE,
    UNIT_TEXT,
    Configs,
    derive_goal,
    files,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

STATE = "/var/lib/app.conf"
VENDOR_UNIT = f"/usr/lib/systemd/system/{UNIT}"
WANTS = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
# bootc runs several programs for each look at the deployments.
LIMIT_S = 90.0
SYSTEMD = {"units": [{"name": UNIT, "contents": UNIT_TEXT, "enabled": True}]}


@pytest.fixture(scope="module", params=["rpm-ostree", "bootc"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(backend=request.param)


@pytest.mark.long("bootc")
def test_image_mode_is_left_and_entered_with_one_reboot_each(
    site: Site,
) -> None:
    configs = Configs(site)
    name = configs.add(**files(**{APP: "text", STATE: "state"}), systemd=SYSTEMD)
    outside = configs.add(**files(**{APP: "text", STATE: "state"}), systemd=SYSTEMD)
    boots = site.machine.boot_count
    configs.ask(outside)
    wait_until(lambda: configs.at(outside), limit_s=LIMIT_S)
    assert site.machine.boot_count == boots + 1
    assert (configs.text(APP), configs.text(UNIT_FILE)) == ("text", UNIT_TEXT)
    contents = {APP: "text", VENDOR_UNIT: UNIT_TEXT}
    goal = derive_goal(site, name, contents, {WANTS: VENDOR_UNIT})
    site.ask(goal)
    site.settle(goal, limit_s=LIMIT_S)
    assert site.machine.boot_count == boots + 2
    assert (configs.text(APP), configs.text(STATE)) == ("text", "state")
    assert (configs.text(UNIT_FILE), configs.text(VENDOR_UNIT)) == (None, UNIT_TEXT)
    shown = treenail(site, "drift", "--json")
    assert (shown.returncode, json.loads(shown.stdout)["drifts"]) == (0, [])
