"""A machine that boots the stock image for the first time and must move to another one."""

import json

import pytest

from treenail.config.node_paths import IGNITION_FILES
from treenail.daemon.firstboot import DONE_FILE, ENCAPSULATED_CONFIG
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.cluster import POOL, build_rendered_config
from treenail_lab.machine.ignition.ignition import PROGRAM
from treenail_lab.provision import ConfigServer
from vmlab import ignition
from vmlab.site import Site

STAGING = """\
until journalctl -b --no-pager -o cat -u treenail-firstboot | grep -q '^staging '; do sleep 2; done
"""
"""Returns when the machine does."""


def create_pool(site: Site) -> None:
    """Create the pool of which one node has the config, without controllers."""
    spec = {"configuration": {"name": site.first.config}}
    pool = {
        "apiVersion": MACHINECONFIGPOOLS.api_version,
        "kind": MACHINECONFIGPOOLS.kind,
        "metadata": {"name": POOL},
        "spec": spec,
    }
    created = site.lab.client.create(MACHINECONFIGPOOLS, pool)
    metadata = created["metadata"]
    assert isinstance(metadata, dict)
    status = {
        "observedGeneration": metadata["generation"],
        "machineCount": 1,
        "updatedMachineCount": 1,
        **spec,
    }
    site.lab.client.patch(MACHINECONFIGPOOLS, POOL, {"status": status}, subresource="status")


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


@pytest.mark.skipif(not PROGRAM.exists(), reason="no Ignition: install the package ignition")
def test_machine_with_user_data_joins_by_ignition(new_site: Site) -> None:
    site = new_site
    entry = {"path": "/etc/pool", "mode": 0o644, "contents": {"source": "data:,worker"}}
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": [entry]}}
    site.first = site.goal(site.image("2"), {"config": config}, image_mode=False)
    server = ConfigServer(site.lab)
    create_pool(site)
    server.start()
    try:
        user_data = server.create_pointer_config(ignition.HOST_NAME).decode()
        ignition.install(site.machine, user_data)
        site.machine.sh(f"rm {DONE_FILE}; sync")
        stock, wanted = site.story.digest, site.first.digest

        site.cut_power()
        site.wait(lambda: len(site.story.boots) == 2, "it boots the image", 900.0)
        assert [boot.digest for boot in site.story.boots] == [stock, wanted]
        site.wait(site.is_ready, "it has joined", 300.0)
    finally:
        server.stop()
    assert site.machine.sh("cat /etc/pool") == "worker"
    left = site.machine.sh(f"ls {' '.join(IGNITION_FILES)} {ENCAPSULATED_CONFIG} 2>&- || true")
    assert left == ""
    units = [each["MESSAGE"] for each in site.journal(f"UNIT={ignition.UNIT}")]
    assert any(each.startswith("Finished") for each in units)
    site.settle(site.first)
    assert len(site.story.boots) == 2
