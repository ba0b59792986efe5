"""Configs that change, outside image mode, where the agent writes what they say."""

import pytest

from vmlab.configs import with_files
from vmlab.site import Site

FILE = "/etc/treenail-vm.conf"
RELOADED = "/etc/containers/registries.d/vm.yaml"
ARGUMENTS = ["treenail.first=1", "treenail.second=2"]


def test_configs_change_with_and_without_a_reboot_out_of_image_mode_and_back(site: Site) -> None:
    image = site.first.pull_spec
    out = site.goal(image, with_files({FILE: "one"}), image_mode=False)
    site.reach(out)
    assert site.machine.sh(f"stat -c '%a %U' {FILE}; cat {FILE}") == "644 root\none"
    boots = len(site.story.boots)

    reload = site.goal(image, with_files({FILE: "one", RELOADED: "docker:"}), image_mode=False)
    site.reach(reload)
    assert site.machine.sh(f"cat {RELOADED}") == "docker:"
    assert len(site.story.boots) == boots
    messages = [each["MESSAGE"] for each in site.journal("UNIT=crio.service")]
    assert any(message.startswith("Reloaded crio.service") for message in messages), messages

    reboot = site.goal(image, with_files({FILE: "two", RELOADED: "docker:"}), image_mode=False)
    site.reach(reboot)
    assert site.machine.sh(f"cat {FILE}") == "two"
    assert len(site.story.boots) == boots + 1

    back = site.goal(site.image("2"), with_files({}))
    site.reach(back)
    assert site.machine.sh("cat /usr/lib/treenail-vm/version") == "2\n"
    assert site.machine.sh(f"ls {FILE} {RELOADED} 2>/dev/null; true") == ""


@pytest.mark.usefixtures("with_rpm_ostree")
def test_image_files_and_kernel_arguments_change_with_one_reboot(site: Site) -> None:
    first = site.machine.sh("ostree admin status").split()[2]
    site.machine.sh("ostree admin pin 0")
    image = site.image("2")
    own = read_arguments(site)
    # The first one is the machine's already. It stays when the config drops it.
    asked = {**with_files({FILE: "one"}), "kernelArguments": [own[-1], *ARGUMENTS]}
    site.reach(site.goal(image, asked, image_mode=False))
    assert read_arguments(site) == [*own, *ARGUMENTS]
    assert site.machine.sh(f"cat /usr/lib/treenail-vm/version {FILE}") == "2\none"
    assert len(site.story.boots) == 1

    asked = {**with_files({FILE: "one"}), "kernelArguments": ARGUMENTS[1:]}
    site.reach(site.goal(image, asked, image_mode=False))
    assert read_arguments(site) == [*own, *ARGUMENTS[1:]]
    assert len(site.story.boots) == 2
    # Another machine would need two reboots more to drop what is not pinned.
    deployments = site.machine.sh("ostree admin status")
    assert "Pinned: yes" in deployments.partition(first)[2]


def read_arguments(site: Site) -> list[str]:
    """Return the kernel's arguments, without those that name the deployment."""
    words = site.machine.sh("cat /proc/cmdline").split()
    return [word for word in words if not word.startswith(("ostree=", "BOOT_IMAGE="))]
