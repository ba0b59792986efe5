"""Reboots that keep the kernel, on a machine whose systemd can do them and counts them."""

from dataclasses import replace

import pytest

from tests.integration.site import FAST, LIMIT_S, SETTINGS, Options, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=["rpm-ostree", "bootc"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(
        backend="bootc" if request.param == "bootc" else "",
        agent_settings='reboot = "auto"\n' + SETTINGS,
        behaviour=MachineSettings(pull_bytes_per_s=FAST, staging_s=0.02, systemd_version=257),
    )


def rebooted(site: Site) -> list[str]:
    """Return the agent's messages about its reboots."""
    return [said.partition(" into ")[0] for said in site.messages() if "rebooting into" in said]


def test_image_with_the_same_kernel_starts_user_space_alone(site: Site) -> None:
    before, goal = site.machine.boot_id, site.goal()
    site.reach(goal)
    assert site.machine.boot_id == before
    assert site.machine.boot_count == site.boots + 1
    booted = site.machine.booted_deployment
    assert booted is not None
    assert booted.digest == goal.image.digest
    assert rebooted(site) == ["soft-rebooting"]


@pytest.mark.long("bootc")
def test_target_replaced_during_delayed_reboot_is_not_booted(
    site: Site,
) -> None:
    before, goal = site.current, site.goal()
    with site.machine.inhibit_shutdown("backup", "copying"):
        site.ask(goal)
        prepared = site.machine.root / "run/ostree/nextroot-booted"
        wait_until(prepared.exists, limit_s=LIMIT_S)
        site.ask(before)
        site.wait_note(key.STATE, "Done")
        wait_until(lambda: not prepared.exists(), limit_s=LIMIT_S)
    site.settle(before)
    assert site.machine.boot_count == site.boots
    assert site.machine.staged_deployment is None


@pytest.mark.long("bootc")
def test_image_with_another_kernel_reboots_the_machine(site: Site) -> None:
    before, goal = site.machine.boot_id, site.goal()
    site.lab.add_image(replace(goal.image, kernel="6.13.0-1.lab"))
    site.reach(goal)
    assert site.machine.boot_id != before
    assert site.machine.boot_count == site.boots + 1
    assert rebooted(site) == ["rebooting"]
