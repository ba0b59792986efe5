"""Somebody changes a node behind its agent's back: found at once, told, and put right."""

import json
from collections.abc import Iterator

import pytest

from tests.integration.commands import status, treenail
from tests.integration.site import PASSWORD, Site
from tests.integration.test_config import APP, LIMIT_S, UNIT, UNIT_FILE, UNIT_TEXT, Configs, files
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.config.names import FORCE_FILE
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
    site.reach(site.goal())


def change(site: Site, path: str, text: str) -> None:
    (site.machine.root / path[1:]).write_text(text)


def gauge(site: Site) -> str:
    """What Prometheus is told."""
    lines = (site.machine.root / METRICS_FILE[1:]).read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("mcd_config_drift "))


def done(site: Site) -> bool:
    return site.notes().get(key.STATE) == "Done"


def test_a_changed_file_degrades_the_node_until_it_is_healed(site: Site, configs: Configs) -> None:
    change(site, APP, "second\n")
    reason = site.wait_degraded(f"{APP}: expected contents sha256:")
    assert "treenail drift --heal PATH" in reason
    assert f"Drift        {APP}: expected contents" in status(site).stdout
    assert int(gauge(site)) > 0

    shown = treenail(site, "drift")
    assert shown.returncode == 4
    assert "-first" in shown.stdout
    assert "+second" in shown.stdout

    healed = treenail(site, "drift", "--repair", APP)
    assert (healed.returncode, healed.stderr) == (0, "")
    assert configs.text(APP) == "first\n"
    wait_until(lambda: done(site), limit_s=LIMIT_S)
    assert gauge(site) == "0"
    assert configs.reboots() == 0
    assert not configs.drained()


def test_no_update_begins_while_drift_stands(site: Site, configs: Configs) -> None:
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


def test_the_force_file_has_the_config_applied_anew(site: Site, configs: Configs) -> None:
    current = site.notes()[key.CURRENT_CONFIG]
    change(site, APP, "second\n")
    change(site, UNIT_FILE, "[Unit]\n")
    site.wait_degraded(APP)
    change(site, FORCE_FILE, "")

    wait_until(lambda: configs.at(current), limit_s=LIMIT_S)
    assert configs.text(APP) == "first\n"
    assert configs.text(UNIT_FILE) == UNIT_TEXT
    assert configs.text(FORCE_FILE) is None


def test_a_secret_that_was_changed_is_told_of_and_not_told(site: Site, configs: Configs) -> None:
    change(site, SECRET, "canary-of-another")
    reason = site.wait_degraded(SECRET)
    shown = treenail(site, "drift", "--json")
    (found,) = json.loads(shown.stdout)["drifts"]
    assert (found["subject"], found["diff"]["lines"]) == (SECRET, [])
    assert found["diff"]["note"].startswith("contents withheld")
    told = reason + shown.stdout + status(site).stdout + str(site.events())
    assert PASSWORD not in told
    assert "canary-of-another" not in told
    assert treenail(site, "drift", "--repair", SECRET).returncode == 0


def test_a_path_that_has_not_drifted_is_not_healed(site: Site, configs: Configs) -> None:
    refused = treenail(site, "drift", "--repair", APP)
    assert refused.returncode != 0
    assert f"{APP} has not drifted" in refused.stderr


def test_a_disabled_unit_is_found_and_enabled_again(site: Site, configs: Configs) -> None:
    link = site.machine.root / f"etc/systemd/system/multi-user.target.wants/{UNIT}"
    link.unlink()
    site.wait_degraded(f"{UNIT}: expected enablement enabled, found disabled")
    assert treenail(site, "drift", "--repair", UNIT).returncode == 0
    assert link.is_symlink()
    wait_until(lambda: done(site), limit_s=LIMIT_S)


def test_what_only_is_reported_is_told_once_and_holds_no_update_up(
    site: Site, configs: Configs
) -> None:
    dropins = site.machine.root / f"{UNIT_FILE[1:]}.d"
    dropins.mkdir()
    (dropins / "99-else.conf").write_text("[Unit]\n")
    wait_until(lambda: "99-else.conf" in status(site).stdout, limit_s=LIMIT_S)
    assert done(site)

    configs.reach(configs.add(**{**configs.config, **files(**{APP: "third\n"})}))
    assert (dropins / "99-else.conf").exists()
    (dropins / "99-else.conf").unlink()
