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
from treenail.config.node_paths import USER_CA_BUNDLE
from treenail.daemon.configuration.trust_store import BUNDLE
from treenail_lab.apiserver.access.certificates import CertificateAuthority

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


@pytest.mark.long("bootc")
def test_anchor_of_an_image_is_trusted_until_an_image_lacks_it(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pem = CertificateAuthority(tmp_path_factory.mktemp("pki")).pem.decode()
    configs = Configs(site)
    goals = [
        derive_goal(site, configs.add(**files(**{APP: text})), {APP: text, **anchors})
        for text, anchors in (("trusted", {USER_CA_BUNDLE: pem}), ("plain", {}))
    ]
    for goal, is_trusted in zip(goals, (True, False), strict=True):
        site.ask(goal)
        site.settle(goal, limit_s=LIMIT_S)
        bundle = configs.text(BUNDLE) or ""
        assert (pem.strip() in bundle) is is_trusted
    shown = treenail(site, "drift", "--json")
    assert (shown.returncode, json.loads(shown.stdout)["drifts"]) == (0, [])
