"""A machine that boots the stock image for the first time and must move to another one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from treenail.api import annotations as key
from treenail.config.node_paths import FIRST_BOOT_ANNOTATIONS, IGNITION_FILES
from treenail.daemon.firstboot import DONE_FILE, ENCAPSULATED_CONFIG
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.cluster import POOL, build_rendered_config
from treenail_lab.machine.ignition.ignition import PROGRAM, USER_DATA
from treenail_lab.provision import ConfigServer
from vmlab import ignition
from vmlab.site import Site

STAGING = """\
until journalctl -b --no-pager -o cat -u treenail-firstboot | grep -q '^staging '; do sleep 2; done
"""
"""Returns when the machine does."""
needs_ignition = pytest.mark.skipif(
    not PROGRAM.exists(), reason="no Ignition: install the package ignition"
)


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


@contextmanager
def serving_pool(site: Site) -> Iterator[ConfigServer]:
    """Serve the pool's config, with another image and a file."""
    entry = {"path": "/etc/pool", "mode": 0o644, "contents": {"source": "data:,worker"}}
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": [entry]}}
    site.first = site.goal(site.image("2"), {"config": config}, image_mode=False)
    server = ConfigServer(site.lab)
    create_pool(site)
    server.start()
    try:
        yield server
    finally:
        server.stop()


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


@needs_ignition
def test_machine_with_user_data_joins_by_ignition(new_site: Site) -> None:
    site = new_site
    with serving_pool(site) as server:
        user_data = server.create_pointer_config(ignition.HOST_NAME).decode()
        ignition.install(site.machine, user_data)
        site.machine.sh(f"rm {DONE_FILE}; sync")
        stock, wanted = site.story.digest, site.first.digest

        site.cut_power()
        site.wait(lambda: len(site.story.boots) == 2, "it boots the image", 900.0)
        assert [boot.digest for boot in site.story.boots] == [stock, wanted]
        site.wait(site.is_ready, "it has joined", 300.0)
    assert site.machine.sh("cat /etc/pool") == "worker"
    left = site.machine.sh(f"ls {' '.join(IGNITION_FILES)} {ENCAPSULATED_CONFIG} 2>&- || true")
    assert left == ""
    units = [each["MESSAGE"] for each in site.journal(f"UNIT={ignition.UNIT}")]
    assert any(each.startswith("Finished") for each in units)
    site.settle(site.first)
    assert len(site.story.boots) == 2


@needs_ignition
def test_machine_without_its_token_receives_nothing_and_does_not_join(new_site: Site) -> None:
    site = new_site
    with serving_pool(site) as server:
        user_data = json.loads(server.create_pointer_config(ignition.HOST_NAME))
        for reference in user_data["ignition"]["config"]["merge"]:
            del reference["httpHeaders"]
        ignition.install(site.machine, json.dumps(user_data))
        site.machine.sh(f"rm {DONE_FILE}; sync")

        site.cut_power()
        site.wait(lambda: read_state(site, ignition.UNIT) == "failed", "Ignition gives up", 300.0)
        site.wait(lambda: "No jobs" in site.machine.sh("systemctl list-jobs"), "it is at rest")
        # A user who starts it by hand does not get further.
        started = site.machine.sh("systemctl start treenail-firstboot 2>&1 && echo yes || echo no")
        log = server.log.read_text()
    assert started.endswith("no\n")
    assert read_state(site, "treenail-firstboot") == read_state(site, "kubelet") == "inactive"
    assert not site.is_ready()
    assert site.notes().get(key.CURRENT_CONFIG) != site.first.config
    assert "status 401" in log
    assert "served config" not in log
    places = (*IGNITION_FILES, ENCAPSULATED_CONFIG, FIRST_BOOT_ANNOTATIONS, "/etc/pool", DONE_FILE)
    # The user data stay: they contain no secret, and a user reads them to find the fault.
    left = site.machine.sh(f"ls {' '.join(places)} 2>&- || true").split()
    assert left == [f"/{USER_DATA}"]
    assert len(site.story.boots) == 1


def read_state(site: Site, unit: str) -> str:
    return site.machine.sh(f"systemctl show --property=ActiveState --value {unit}").strip()
