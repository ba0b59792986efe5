"""A machine of a control plane is installed in image mode, by a bootstrap host on this host."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.daemon.firstboot import DONE_FILE
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.machine.ignition.ignition import PROGRAM
from vmlab import ignition
from vmlab.image.build import Builder
from vmlab.installation import CONTENT, FILE, STATE, STATE_FILE, Installation
from vmlab.site import Site
from vmlab.tools import say

CONTAINERFILE = """\
FROM configs AS final
RUN echo "built on the bootstrap host" > /usr/lib/treenail-vm/built
"""
FIRST_BOOT_LIMIT_S = 900.0
HANDOVER_LIMIT_S = 300.0
STAGED = """\
until [ -e /run/ostree/staged-deployment ]; do sleep 0.2; done
systemctl kill --signal=STOP treenail-firstboot
"""
"""Returns when libostree has staged a deployment; the agent stops, so that no reboot is first."""
BUILT = "built on the bootstrap host\n"
READ_BUILT = "cat /usr/lib/treenail-vm/built 2>&- || true"
pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="no Ignition: install the package ignition"),
    pytest.mark.usefixtures("with_rpm_ostree"),
]


@pytest.fixture
def containerfile() -> str:
    """Without a Containerfile the image is the base with the files of the config."""
    return ""


@pytest.fixture
def installation(
    new_site: Site, builder: Builder, tmp_path: Path, containerfile: str
) -> Iterator[Installation]:
    """A bootstrap host that serves, and a machine with the stock system and its user data."""
    if containerfile and (why := " ".join(find_build_refusal()).strip()):
        pytest.skip(why)
    found = Installation(new_site, tmp_path, builder.certificate, containerfile)
    try:
        found.start()
        ignition.install(new_site.machine, found.create_user_data())
        found.name_host()
        new_site.machine.sh(f"rm {DONE_FILE}; sync")
        yield found
    finally:
        found.stop()


@pytest.mark.parametrize("containerfile", ["", CONTAINERFILE], ids=["layer", "containerfile"])
def test_new_machine_pulls_from_the_bootstrap_host_and_forgets_it(
    new_site: Site, installation: Installation, containerfile: str
) -> None:
    site = new_site
    stock, image = site.story.digest, installation.wait_image()
    installation.create_configs()
    site.cut_power()
    wait_joined(site, installation, image, boots=2)
    assert [boot.digest for boot in site.story.boots] == [stock, image.partition("@")[2]]
    assert site.machine.sh(READ_BUILT) == (BUILT if containerfile else "")
    boot_id = read_boot_id(site)

    installation.open_cluster()
    wait_handed_over(site, installation, image)
    assert read_boot_id(site) == boot_id
    assert len(site.story.boots) == 2


@pytest.mark.parametrize("containerfile", [CONTAINERFILE], ids=["containerfile"])
def test_power_cut_between_staging_and_reboot_still_boots_the_image(
    new_site: Site, installation: Installation, request: pytest.FixtureRequest
) -> None:
    site = new_site
    stock, image = site.story.digest, installation.wait_image()
    installation.create_configs()

    def cut_power(phase: str) -> None:
        site.cut_power()
        say(f"power cut, {phase}")
        request.node.user_properties.append(("cut", phase))

    site.cut_power()
    site.machine.sh(STAGED, limit_s=FIRST_BOOT_LIMIT_S)
    cut_power("staged")
    # libostree keeps a staged deployment in /run, so the boot after the cut is of the stock system.
    site.wait(lambda: len(site.story.boots) == 3, "it boots the image", FIRST_BOOT_LIMIT_S)
    cut_power("after the reboot")
    wait_joined(site, installation, image, boots=4)
    digest = image.partition("@")[2]
    assert [boot.digest for boot in site.story.boots] == [stock, stock, digest, digest]
    assert site.machine.sh(READ_BUILT) == BUILT

    installation.open_cluster()
    site.wait(lambda: len(installation.list_node_files()) < 3, "the hand-over", HANDOVER_LIMIT_S)
    cut_power("hand-over")
    wait_handed_over(site, installation, image)
    assert [boot.digest for boot in site.story.boots[4:]] == [digest]


def wait_joined(site: Site, installation: Installation, image: str, *, boots: int) -> None:
    """Wait until the machine runs the image after so many boots; verify it as a node."""
    site.wait(lambda: len(site.story.boots) == boots, "it boots the image", FIRST_BOOT_LIMIT_S)
    site.wait(site.is_ready, "it has joined", 300.0)
    assert installation.has_served(image)
    assert site.machine.sh(f"cat {FILE} /usr{FILE} {STATE_FILE}") == CONTENT * 2 + STATE
    assert len(installation.list_node_files()) == 3
    site.wait(lambda: installation.is_reported(image), "the Node has the image", 300.0)
    site.wait(installation.has_login, "the agent can pull from the bootstrap host", 120.0)


def wait_handed_over(site: Site, installation: Installation, image: str) -> None:
    """Wait until nothing needs the bootstrap host; verify the cluster that it leaves."""
    installation.wait_complete()
    forgets = "it forgets the bootstrap host"
    site.wait(lambda: not installation.list_node_files(), forgets, HANDOVER_LIMIT_S)
    site.wait(lambda: not installation.has_login(), "the login is gone", 120.0)
    site.wait(lambda: installation.is_reported(image), "the Node has the image", 120.0)
    assert installation.is_handed_over()
    assert installation.list_rendered() == installation.list_installed_configs()
    assert installation.list_builds() == ["BuiltAtInstall"]
    assert site.machine.sh("treenail drift").startswith("no drift: ")
    assert not site.node()["spec"].get("unschedulable")


def read_boot_id(site: Site) -> str:
    return site.machine.sh("cat /proc/sys/kernel/random/boot_id")
