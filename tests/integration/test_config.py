"""A node is brought from config to config: files, units and users, with and without a reboot."""

import itertools
import json
import signal
from urllib.parse import quote

import pytest

from tests.integration.commands import status, treenail
from tests.integration.site import LOGIN, NODE, Goal, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import NODES
from treenail_lab.cluster import build_rendered_config
from treenail_lab.images import derive_image, make_image

pytestmark = pytest.mark.integration

APP = "/etc/app.conf"
FREE = "/etc/nmstate/openshift/net.yml"
POLICY = "/etc/crio/policies/app.json"
UNIT = "app.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
UNIT_TEXT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
DATA = "/var/lib/app.conf"
LIMIT_S = 30.0
_IMAGE_SIZE = 100_000
NUMBERS = itertools.count(1)


def files(**texts: str) -> dict[str, object]:
    """The part of a config that writes these files."""
    return {
        "storage": {
            "files": [
                {"path": path, "contents": {"source": f"data:,{quote(text)}"}}
                for path, text in texts.items()
            ]
        }
    }


class Configs:
    """Configs of the site's node, and what it has of them."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def add(self, *arguments: str, **config: object) -> str:
        """Create a rendered config, with these kernel arguments; returns its name."""
        name = f"rendered-config-{next(NUMBERS)}"
        spec = {
            "config": {"ignition": {"version": "3.5.0"}, **config},
            "kernelArguments": list(arguments),
        }
        return self._site.lab.add_config(build_rendered_config(name, spec))

    def ask(self, name: str) -> None:
        """Ask for the config without an image."""
        self._site.annotate({key.DESIRED_CONFIG: name})

    def reach(self, name: str) -> None:
        """Ask for the config, and wait until the node has it and is in service."""
        self.ask(name)
        wait_until(lambda: self.at(name), limit_s=LIMIT_S)

    def at(self, name: str) -> bool:
        notes = self._site.notes()
        return (
            notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_CONFIG) == name
            and not any(notes.get(each) for each in key.IMAGE_SPELLINGS.values())
            and self._site.calm()
        )

    def text(self, path: str) -> str | None:
        """Return the content of the file on the machine; None without a file."""
        place = self._site.machine.root / path[1:]
        return place.read_text() if place.exists() else None

    def drained(self) -> bool:
        return self._site.was_cordoned()

    def reboots(self) -> int:
        return self._site.machine.boot_count - self._site.boots


def derive_goal(
    site: Site, config: str, contents: dict[str, str], links: dict[str, str] | None = None
) -> Goal:
    """Publish an image with these files, to be requested beside the config."""
    base = make_image("os/node", config, _IMAGE_SIZE, credential=LOGIN)
    image = derive_image(base, contents, links)
    site.lab.add_image(image)
    return Goal(config, image)


def annotate_image_files(site: Site, value: str | None) -> None:
    """Choose, as a pool does, who provides files in image mode."""
    site.lab.client.patch(NODES, NODE, {"metadata": {"annotations": {key.IMAGE_FILES: value}}})


@pytest.fixture
def configs(site: Site) -> Configs:
    """The configs of a node outside image mode, which stays there after the test."""
    found = Configs(site)
    found.reach(found.add(**files(**{APP: "first", POLICY: "{}"})))
    site.begin()
    return found


def test_file_without_disruption_is_written_in_service(site: Site, configs: Configs) -> None:
    configs.reach(configs.add(**files(**{APP: "first", POLICY: "{}", FREE: "a"})))
    assert configs.text(FREE) == "a"
    assert not configs.drained()
    assert configs.reboots() == 0
    assert site.transactions() == []
    assert ("Normal", "SkipReboot", "Config changes do not require reboot.") in site.events()


def test_service_of_changed_file_is_reloaded(site: Site, configs: Configs) -> None:
    jobs = len(site.machine.read_journal({"UNIT": "crio.service", "JOB_TYPE": "reload"}))
    configs.reach(configs.add(**files(**{APP: "first", POLICY: "[]"})))
    assert configs.text(POLICY) == "[]"
    assert not configs.drained()
    assert configs.reboots() == 0
    reloaded = f"Reloaded crio.service for {site.notes()[key.CURRENT_CONFIG]}"
    wait_until(lambda: ("Normal", "ServiceReload", reloaded) in site.events())
    assert (
        len(site.machine.read_journal({"UNIT": "crio.service", "JOB_TYPE": "reload"})) == jobs + 1
    )


def test_changed_unit_drains_and_reboots_with_reason(site: Site, configs: Configs) -> None:
    unit = {"name": UNIT, "contents": UNIT_TEXT, "enabled": True}
    name = configs.add(**files(**{APP: "first", POLICY: "{}"}), systemd={"units": [unit]})
    with site.drains_held():
        configs.ask(name)
        site.wait_phase("draining")
        assert configs.text(UNIT_FILE) is None, "nothing changes in service"
        shown = status(site).stdout
        assert f"unit {UNIT} added (no policy for this unit)" in shown
    wait_until(lambda: configs.at(name), limit_s=LIMIT_S)
    assert configs.text(UNIT_FILE) == UNIT_TEXT
    assert (site.machine.root / f"etc/systemd/system/multi-user.target.wants/{UNIT}").is_symlink()
    assert configs.drained()
    assert configs.reboots() == 1
    assert site.transactions() == [], "there was nothing to ask of rpm-ostree"
    (past, *_) = ledger(site)["history"]
    assert past["reasons"] == [f"unit {UNIT} added (no policy for this unit)"]


def test_failed_step_is_undone_and_reported(site: Site, configs: Configs) -> None:
    before = site.notes()[key.CURRENT_CONFIG]
    wrong = {APP: "second", "/etc/plain/below": "x"}
    with site.drains_held():
        configs.ask(configs.add(**files(**wrong)))
        site.wait_phase("draining")
        # Before the drain the agent would refuse the config in service.
        (site.machine.root / "etc/plain").touch()
    reason = site.wait_degraded("is not a directory", "all steps were undone")
    assert "write /etc/plain/below" in reason
    wait_until(site.calm)
    assert configs.text(APP) == "first"
    assert configs.reboots() == 0
    assert site.was_cordoned()
    assert not site.cordoned()
    configs.reach(before)
    assert site.notes()[key.REASON] == ""


def test_kernel_arguments_come_in_the_same_reboot_as_files(site: Site, configs: Configs) -> None:
    def booted() -> set[str]:
        return set((site.machine.root / "proc/cmdline").read_text().split())

    configs.reach(configs.add("quiet", "loglevel=3", **files(**{APP: "args", POLICY: "{}"})))
    assert configs.text(APP) == "args"
    assert configs.reboots() == 1
    assert {"quiet", "loglevel=3"} <= booted()
    configs.reach(configs.add(**files(**{APP: "args", POLICY: "{}"})))
    assert configs.reboots() == 2
    assert not {"quiet", "loglevel=3"} & booted()


def test_agent_killed_between_apply_and_reboot_continues(site: Site, configs: Configs) -> None:
    name = configs.add("quiet", **files(**{APP: "second", POLICY: "{}"}))
    with site.machine.inhibit_shutdown("test", "rpm-ostreed finalizes nothing"):
        configs.ask(name)
        wait_until(lambda: configs.text(APP) == "second", limit_s=LIMIT_S)
        site.wait_phase("rebooting")
        site.machine.kill_agent(signal.SIGKILL)
        site.wait_degraded("inhibit")
    wait_until(lambda: configs.at(name), limit_s=LIMIT_S)
    assert configs.reboots() == 1


def test_target_changed_between_apply_and_reboot_restores_files(
    site: Site, configs: Configs
) -> None:
    before = site.notes()[key.CURRENT_CONFIG]
    with site.machine.inhibit_shutdown("test", "rpm-ostreed finalizes nothing"):
        configs.ask(configs.add("quiet", **files(**{APP: "second", POLICY: "{}"})))
        site.wait_phase("rebooting")
        assert configs.text(APP) == "second"
        configs.ask(before)
        wait_until(lambda: configs.text(APP) == "first", limit_s=LIMIT_S)
        wait_until(lambda: configs.at(before), limit_s=LIMIT_S)
    assert configs.reboots() == 0


def test_power_cut_before_the_reboot_ends_with_the_new_config(site: Site, configs: Configs) -> None:
    name = configs.add("quiet", **files(**{APP: "second", POLICY: "{}"}))
    with site.machine.inhibit_shutdown("test", "rpm-ostreed finalizes nothing"):
        configs.ask(name)
        site.wait_phase("rebooting")
    site.machine.cut_power()
    wait_until(lambda: configs.at(name), limit_s=LIMIT_S)
    assert configs.text(APP) == "second"


def test_image_mode_is_entered_and_left_with_one_reboot_each(site: Site, configs: Configs) -> None:
    outside = site.notes()[key.CURRENT_CONFIG]
    goal: Goal = site.goal()
    site.reach(goal)
    assert configs.reboots() == 1
    assert configs.text(APP) is None, "it would hide the image's own"
    configs.reach(outside)
    assert configs.text(APP) == "first"
    assert configs.reboots() == 2


def ledger(site: Site) -> dict[str, list[dict[str, object]]]:
    path = site.machine.root / "var/lib/treenail/ledger.json"
    found: dict[str, list[dict[str, object]]] = json.loads(path.read_text())
    return found


def test_config_cache_keeps_current_config_only(site: Site, configs: Configs) -> None:
    name = configs.add(**files(**{APP: "first", POLICY: "{}", FREE: "b"}))
    configs.reach(name)
    kept = site.machine.root / "var/lib/treenail/configs"
    wait_until(lambda: [path.name for path in kept.iterdir()] == [f"{name}.json"])


def test_image_without_the_config_is_refused_in_service_and_written_on_request(
    site: Site, configs: Configs
) -> None:
    other = "/etc/other.conf"
    unit = {"name": UNIT, "contents": UNIT_TEXT, "enabled": True}
    name = configs.add(**files(**{other: "text", DATA: "new state"}), systemd={"units": [unit]})
    before = configs.text(DATA)
    goal = derive_goal(site, name, {other: "another text"})
    site.ask(goal)
    reason = site.wait_degraded("the image differs from the config")
    assert f"{other} has other contents; {UNIT_FILE} is missing" in reason
    wait_until(lambda: site.machine.staged_deployment is None and site.phase() == "")
    assert not site.was_cordoned()
    assert (configs.text(other), configs.text(DATA)) == (None, before)
    annotate_image_files(site, "write")
    site.settle(goal)
    assert (configs.text(other), configs.text(DATA)) == ("text", "new state")
    assert configs.text(UNIT_FILE) == UNIT_TEXT
    assert (site.machine.root / f"etc/systemd/system/multi-user.target.wants/{UNIT}").is_symlink()
    annotate_image_files(site, None)


def test_drift_is_shown_and_repaired(site: Site, configs: Configs) -> None:
    place = site.machine.root / APP[1:]
    place.write_text("foreign")
    site.wait_degraded(APP)
    shown = treenail(site, "drift", "--json")
    assert shown.returncode == 3
    (found,) = json.loads(shown.stdout)["drifts"]
    assert (found["subject"], found["reaction"]) == (APP, "block")
    assert found["diff"]["lines"] == ["@@ -1,1 +1,1 @@", "-first", "+foreign"]
    planned = treenail(site, "plan")
    assert (planned.returncode, planned.stdout.splitlines()[1]) == (0, "nothing differs")
    assert "note: something has drifted; see: treenail drift" in planned.stdout
    ended = treenail(site, "drift", "--repair", APP)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert place.read_text() == "first"
    wait_until(lambda: site.notes().get(key.STATE) == "Done")
    assert configs.reboots() == 0


def test_plan_of_config_matches_its_update(site: Site, configs: Configs) -> None:
    # The machine has the first argument from its installation.
    content = files(**{APP: "second", POLICY: "{}"})
    name = configs.add("console=ttyS0", "quiet", **content)
    with site.drains_held():
        configs.ask(name)
        site.wait_phase("draining")
        ended = treenail(site, "plan", "--json")
    plan = json.loads(ended.stdout)
    assert ended.returncode == 3
    assert [(each["kind"], each["name"], each["details"]) for each in plan["changes"]] == [
        ("kernelArguments", "", ["+ quiet"]),
        ("file", APP, []),
    ]
    assert plan["changes"][1]["diffs"][0]["lines"] == ["@@ -1,1 +1,1 @@", "-first", "+second"]
    wait_until(lambda: configs.at(name), limit_s=LIMIT_S)
    reasons = json.loads(treenail(site, "why", "--json").stdout)["last"]["reasons"]
    assert reasons == [
        f"{each['subject']} ({each['rule']})"
        for action in plan["actions"]
        for each in action["reasons"]
    ]
    with site.drains_held():
        configs.ask(last := configs.add(**content))
        site.wait_phase("draining")
        plan = json.loads(treenail(site, "plan", "--json").stdout)
    assert [each["details"] for each in plan["changes"]] == [["- quiet"]]
    assert [note.partition(":")[0] for note in plan["notes"]] == [
        "keeping the kernel argument console=ttyS0"
    ]
    wait_until(lambda: configs.at(last), limit_s=LIMIT_S)
