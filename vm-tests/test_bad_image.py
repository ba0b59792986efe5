"""Images and configs that break the node: it rolls back automatically."""

import json

import pytest

from treenail.api import annotations as key
from treenail.log import MessageId
from vmlab.configs import with_files
from vmlab.image.layers import Entry
from vmlab.site import Goal, Site

SYSTEM = "usr/lib/systemd/system"
CRASHING = Entry(b"[Service]\nExecStart=\nExecStart=/bin/false\nRestart=always\nRestartSec=1s\n")
# QEMU announces an IPv6 default route, too.
CUT_OFF = "[Match]\nName=en* eth*\n[Network]\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
NETWORK = "etc/systemd/network/10-cut-off.network"
FILL_UNIT = """\
[Unit]
RequiresMountsFor=/var
Before=treenail.service
[Service]
Type=oneshot
ExecStart=-/usr/lib/treenail-vm/fill
"""
FILL = """\
#!/bin/sh
fallocate -l $(($(stat -f -c '%a * %S' /var))) /var/full
cat /dev/zero >/var/full.rest
"""
FULL = {
    "usr/lib/treenail-vm/fill": Entry(FILL.encode(), 0o755),
    f"{SYSTEM}/full.service": Entry(FILL_UNIT.encode()),
    f"{SYSTEM}/multi-user.target.wants/full.service": Entry(link="../full.service"),
}
BAD = {
    "kubelet is masked": (
        {"usr/etc/systemd/system/kubelet.service": Entry(link="/dev/null")},
        "Kubelet failed",
    ),
    "kubelet crashes": (
        {f"{SYSTEM}/kubelet.service.d/crash.conf": CRASHING},
        "Kubelet failed",
    ),
    "container runtime crashes": (
        {f"{SYSTEM}/crio.service.d/crash.conf": CRASHING},
        "ContainerRuntime failed",
    ),
    "no network": (
        {f"usr/{NETWORK}": Entry(CUT_OFF.encode())},
        "Network failed",
    ),
}
DEADLINE_S = 60.0
UNIT = "kubelet.service"
ARGUMENT = "treenail.bad=1"
IGNITION = {"ignition": {"version": "3.5.0"}}


@pytest.mark.parametrize(("entries", "blamed"), BAD.values(), ids=BAD.keys())
def test_node_rolls_back_from_a_bad_image(
    site: Site, entries: dict[str, Entry], blamed: str
) -> None:
    site.set_deadline(DEADLINE_S)
    bad = site.goal(site.image("bad", entries))
    site.ask(bad)
    assert_rolls_back(site, bad, blamed)
    assert [boot.digest for boot in site.story.boots] == [bad.digest, site.first.digest]


def test_node_rolls_back_from_a_config_that_cuts_its_network(site: Site) -> None:
    site.set_deadline(DEADLINE_S)
    asked = with_files({f"/{NETWORK}": CUT_OFF})
    bad = site.goal(site.first.pull_spec, asked, image_mode=False)
    site.ask(bad)
    assert_rolls_back(site, bad, "Network failed")
    assert site.machine.sh(f"ls /{NETWORK} 2>/dev/null; true") == ""


def test_node_rolls_back_from_an_image_that_fills_its_disk(site: Site) -> None:
    site.set_deadline(DEADLINE_S)
    bad = site.goal(site.image("bad", FULL))
    site.ask(bad)
    assert_rolls_back(site, bad, "Ledger failed")
    assert "100%" in site.machine.sh("df --output=pcent /var; rm /var/full*")
    assert [boot.digest for boot in site.story.boots] == [bad.digest, site.first.digest]


@pytest.mark.usefixtures("with_rpm_ostree")
def test_node_rolls_back_from_a_config_that_masks_its_kubelet_and_changes_its_kernel(
    site: Site,
) -> None:
    site.set_deadline(DEADLINE_S)
    masked = {"config": {**IGNITION, "systemd": {"units": [{"name": UNIT, "mask": True}]}}}
    asked = {**masked, "kernelArguments": [ARGUMENT]}
    bad = site.goal(site.first.pull_spec, asked, image_mode=False)
    site.ask(bad)
    assert_rolls_back(site, bad, "Kubelet failed")
    assert ARGUMENT not in site.machine.sh("cat /proc/cmdline")
    assert "masked" not in site.machine.sh(f"systemctl is-enabled {UNIT}; true")


def assert_rolls_back(site: Site, bad: Goal, blamed: str) -> None:
    """The node has what it had before, is Ready and in service, and says why, wherever asked."""
    site.wait(lambda: len(site.story.boots) == 2, "the node boots twice", 900.0)
    site.wait(lambda: not site.node()["spec"].get("unschedulable"), "the node serves again", 300.0)
    notes = site.notes()
    assert notes[key.STATE] == "Degraded"
    assert bad.config in notes[key.REASON]
    assert blamed in notes[key.REASON]
    assert notes[key.CURRENT_CONFIG] == site.first.config
    site.wait(site.is_ready, "the kubelet of this boot says that the node is ready", 120.0)
    assert site.machine.sh("systemctl is-active kubelet crio").split() == ["active", "active"]
    refused = json.loads(site.machine.sh("cat /var/lib/treenail/ledger.json"))["quarantined"]
    assert refused["target"]["config"] == bad.config
    shown = site.machine.sh("treenail status; true")
    logged = site.journal(f"MESSAGE_ID={MessageId.HEALTH_CHECK_FAILED}")[-1]["MESSAGE"]
    assert [text for text in (shown, logged) if blamed not in text or bad.config not in text] == []
