"""A host name that comes by DHCP after the agent has started."""

import json

import pytest

from treenail.log import MessageId
from vmlab.drivers import Driver
from vmlab.site import NODE, Site

KUBECONFIG = "/var/lib/kubelet/kubeconfig"
NETWORK = """\
[Match]
Name=en* eth*
[Network]
DHCP=ipv4
IPv6AcceptRA=no
LinkLocalAddressing=no
LLDP=no
"""
# systemd-networkd would need polkit to set the name. This does it as dhclient-script(8), but not
# before the agent waits for it.
UNIT = """\
[Service]
Type=oneshot
ExecStart=/bin/sh -c '\\
    until grep -q placeholder /run/treenail/status.json; do sleep 1; done; \\
    until grep -q ^HOSTNAME= /run/systemd/netif/leases/*; do sleep 1; done; \\
    hostname "$(sed -n s/^HOSTNAME=//p /run/systemd/netif/leases/*)"'
[Install]
WantedBy=multi-user.target
"""


def test_update_survives_a_name_that_dhcp_gives_after_the_boot(site: Site, chosen: Driver) -> None:
    if chosen.name == "libvirt":
        pytest.skip("the DHCP server of libvirt's user network gives no name")
    # No client certificate that names the Node.
    document = json.loads(site.machine.sh(f"cat {KUBECONFIG}"))
    token = site.lab.server.issue_token(f"system:node:{NODE}", ["system:nodes"])
    document["users"][0]["user"] = {"token": token}
    for path, text in (
        (KUBECONFIG, json.dumps(document)),
        ("/etc/systemd/network/80-user.network", NETWORK),
        ("/etc/systemd/system/late-name.service", UNIT),
    ):
        site.machine.sh(f"cat > {path}", stdin=text)
    site.machine.sh("rm /etc/hostname; systemctl enable late-name; sync")

    site.reach(site.goal(site.image("2")))
    assert len(site.story.boots) == 1
    assert site.machine.sh("hostname; cat /etc/hostname 2>/dev/null; true") == f"{NODE}\n"
    assert site.machine.sh("systemctl show -P Result late-name") == "success\n"
    assert not site.journal(f"MESSAGE_ID={MessageId.HEALTH_CHECK_FAILED}")
