"""A machine that boots the stock image for the first time and must move to another one."""

import json

from treenail.daemon.firstboot import DONE_FILE, ENCAPSULATED_CONFIG
from treenail_lab.cluster import build_rendered_config
from vmlab.site import Site

STAGING = """\
until journalctl -b --no-pager -o cat -u treenail-firstboot | grep -q '^staging '; do sleep 2; done
"""
"""Returns when the machine does."""


def test_new_machine_moves_to_its_image_before_it_joins(new_site: Site) -> None:
    site = new_site
    site.first = site.goal(site.image("2"))
    document = build_rendered_config(site.first.config, {"osImageURL": site.first.pull_spec})
    site.machine.sh(
        f"rm {DONE_FILE}; umask 077; cat >{ENCAPSULATED_CONFIG}", stdin=json.dumps(document)
    )
    site.machine.sh("sync")
    stock, wanted = site.story.digest, site.first.digest

    site.cut_power()
    site.machine.sh(STAGING, limit_s=300.0)
    site.cut_power()
    site.wait(lambda: len(site.story.boots) == 3, "it boots the image", 600.0)
    assert [boot.digest for boot in site.story.boots] == [stock, stock, wanted]
    site.wait(site.is_ready, "it has joined", 300.0)
    assert (
        site.machine.sh(f"ls {DONE_FILE} {ENCAPSULATED_CONFIG}* | sort")
        == f"{ENCAPSULATED_CONFIG}.bak\n{DONE_FILE}\n"
    )
    entries = site.journal("UNIT=kubelet.service")
    started = {each["_BOOT_ID"] for each in entries if each["MESSAGE"].startswith("Started")}
    assert started == {site.machine.sh("tr -d - </proc/sys/kernel/random/boot_id").strip()}

    site.ask(site.first)
    site.settle(site.first)
    assert len(site.story.boots) == 3
