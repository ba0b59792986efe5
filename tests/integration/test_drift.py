"""Another program changes a node: the agent detects, reports and repairs the drift."""

import json
from collections.abc import Iterator

import pytest

from tests.integration.commands import status, treenail
from tests.integration.site import PASSWORD, Site
from tests.integration.test_config import APP, LIMIT_S, UNIT, UNIT_FILE, UNIT_TEXT, Configs, files
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.config.node_paths import FORCE_FILE
from treenail.daemon.local.metrics import METRICS_FILE

pytestmark = pytest.mark.integration

SECRET = "/etc/app.token"


@pytest.fixture
def configs(site: Site) -> Iterator[Configs]:
    """A node that has a file, a secret and a unit of a config, and is at rest."""
    found = Configs(site)
    config = files(**{APP: "first\n"})
    secret = {"path": SECRET, "mode": 0o600, "contents": {"source": f"data:,{PASSWORD}"}}
    config["storage"]["files"].append(secret)
    unit = {"name": UNIT, "contents": UNIT_TEXT, "enabled": True}
    found.config = {**config, "systemd": {"units": [unit]}}
    found.reach(found.add(**found.config))
    site.begin()
    yield found
    # What a failed test has left would hold the next update up.
    drifted = json.loads(treenail(site, "drift", "--json").stdout)["drifts"]
    if drifted:
        treenail(site, "drift", "--repair", *{each["subject"] for each in drifted})
    wait_until(lambda: done(site), limit_s=LIMIT_S)


def change(site: Site, path: str, text: str) -> None:
    (site.machine.root / path[1:]).write_text(text)


def gauge(site: Site) -> str:
    """The metrics that Prometheus reads."""
    lines = (site.machine.root / METRICS_FILE[1:]).read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("mcd_config_drift "))


def done(site: Site) -> bool:
    return site.notes().get(key.STATE) == "Done"


def test_changed_file_degrades_node_until_repaired(site: Site, configs: Configs) -> None:
    change(site, APP, "second\n")
    reason = site.wait_degraded(f"{APP}: contents differ")
    assert "treenail drift --repair PATH" in reason
    assert f"Drift        {APP}: contents differ" in status(site).stdout
    assert int(gauge(site)) > 0

    shown = treenail(site, "drift")
    assert shown.returncode == 3
    assert "-first" in shown.stdout
    assert "+second" in shown.stdout

    healed = treenail(site, "drift", "--repair", APP)
    assert (healed.returncode, healed.stderr) == (0, "")
    assert configs.text(APP) == "first\n"
    wait_until(lambda: done(site), limit_s=LIMIT_S)
    assert gauge(site) == "0"
    assert configs.reboots() == 0
    assert not configs.drained()


def test_drift_blocks_updates(site: Site, configs: Configs) -> None:
    change(site, APP, "second\n")
    site.wait_degraded(APP)
    asked = configs.add(**{**configs.config, **files(**{APP: "third\n"})})
    configs.ask(asked)
    site.wait_degraded(APP)
    assert configs.text(APP) == "second\n"
    assert not configs.drained()

    change(site, APP, "first\n")
    wait_until(lambda: configs.at(asked), limit_s=LIMIT_S)
    assert configs.text(APP) == "third\n"


def test_force_file_applies_config_again(site: Site, configs: Configs) -> None:
    current = site.notes()[key.CURRENT_CONFIG]
    change(site, APP, "second\n")
    change(site, UNIT_FILE, "[Unit]\n")
    site.wait_degraded(APP)
    change(site, FORCE_FILE, "")

    wait_until(lambda: configs.at(current), limit_s=LIMIT_S)
    assert configs.text(APP) == "first\n"
    assert configs.text(UNIT_FILE) == UNIT_TEXT
    assert configs.text(FORCE_FILE) is None


def test_changed_secret_is_reported_without_content(site: Site, configs: Configs) -> None:
    change(site, SECRET, "canary-of-another")
    reason = site.wait_degraded(SECRET)
    shown = treenail(site, "drift", "--json")
    (found,) = json.loads(shown.stdout)["drifts"]
    assert (found["subject"], found["diff"]["lines"]) == (SECRET, [])
    assert found["diff"]["note"].startswith("contents withheld")
    output = reason + shown.stdout + status(site).stdout + str(site.events())
    assert PASSWORD not in output
    assert "canary-of-another" not in output
    assert treenail(site, "drift", "--repair", SECRET).returncode == 0


def test_path_without_drift_is_not_repaired(site: Site, configs: Configs) -> None:
    refused = treenail(site, "drift", "--repair", APP)
    assert refused.returncode != 0
    assert f"cannot repair {APP}: it has not drifted" in refused.stderr


def test_disabled_unit_is_found_and_enabled_again(site: Site, configs: Configs) -> None:
    link = site.machine.root / f"etc/systemd/system/multi-user.target.wants/{UNIT}"
    link.unlink()
    site.wait_degraded(f"{UNIT}: expected enablement enabled, found disabled")
    assert treenail(site, "drift", "--repair", UNIT).returncode == 0
    assert link.is_symlink()
    wait_until(lambda: done(site), limit_s=LIMIT_S)


def test_reported_drift_emits_one_event_and_blocks_no_update(site: Site, configs: Configs) -> None:
    dropins = site.machine.root / f"{UNIT_FILE[1:]}.d"
    dropins.mkdir()
    (dropins / "99-else.conf").write_text("[Unit]\n")
    wait_until(lambda: "99-else.conf" in status(site).stdout, limit_s=LIMIT_S)
    assert done(site)

    configs.reach(configs.add(**{**configs.config, **files(**{APP: "third\n"})}))
    assert (dropins / "99-else.conf").exists()
    (dropins / "99-else.conf").unlink()
