"""Image mode on a real OSTree host: the image is compared with the config before the drain."""

from treenail.api import annotations as key
from vmlab.configs import with_files
from vmlab.image.layers import Entry
from vmlab.site import Site

FILE, STATE_FILE = "/etc/treenail-vm.conf", "/var/lib/treenail-vm.conf"


def test_image_is_refused_until_it_contains_the_config(site: Site) -> None:
    config = with_files({FILE: "baked", STATE_FILE: "state"})
    boots = len(site.story.boots)
    lacking = site.goal(site.image("lacking"), config)
    site.ask(lacking)
    site.wait(lambda: site.notes().get(key.STATE) == "Degraded", "the image is refused")
    assert f"{FILE} is missing" in site.notes()[key.REASON]
    assert not site.node()["spec"].get("unschedulable")
    assert len(site.story.boots) == boots

    complete = site.goal(site.image("complete", {f"usr{FILE}": Entry(b"baked")}), config)
    site.reach(complete)
    assert len(site.story.boots) == boots + 1
    assert site.machine.sh(f"cat {FILE} {STATE_FILE}") == "bakedstate"
    assert site.machine.sh(f"cmp {FILE} /usr{FILE}; ostree admin config-diff | grep -c {FILE[5:]}; "
                           "true") == "0\n"  # fmt: skip


def test_node_leaves_image_mode_with_one_reboot(site: Site) -> None:
    config = with_files({FILE: "baked", STATE_FILE: "state"})
    site.reach(site.goal(site.image("complete", {f"usr{FILE}": Entry(b"baked")}), config))
    boots = len(site.story.boots)

    plain = site.goal(site.first.pull_spec, config, image_mode=False)
    site.reach(plain)
    assert [boot.digest for boot in site.story.boots[boots:]] == [plain.digest]
    # The /etc merge drops a file that equals the one in the previous deployment's /usr/etc.
    assert site.machine.sh(f"cat {FILE} {STATE_FILE}") == "bakedstate"
    assert site.machine.sh(f"ls /usr{FILE} 2>/dev/null; true") == ""
    assert f"A    {FILE[5:]}" in site.machine.sh("ostree admin config-diff").splitlines()
    drift = site.machine.sh("treenail drift")
    assert drift == f"no drift: the machine matches {plain.config}\n"
    assert not any("state = Degraded" in event for event in site.story.events)
