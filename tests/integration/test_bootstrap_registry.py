"""The registry of an installation on a machine with the real agent."""

import json

import pytest

from tests.integration.site import LAYERS, NODE, SIZE, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.config.bootstrap_registry import (
    MIRROR_FILE,
    RECORD_FILE,
    BootstrapRegistryRecord,
    encode_record,
    format_mirror_file,
)
from treenail.kube.resources import NODES
from treenail_lab.images import Credential, make_image

pytestmark = pytest.mark.integration

REGISTRY = "10.0.0.5:22625"
PASSWORD = "canary-of-the-bootstrap-host"
RECORD = BootstrapRegistryRecord(REGISTRY, "puller", PASSWORD, ("final.example/os/node",))


def place_files(site: Site) -> None:
    files = {
        MIRROR_FILE: format_mirror_file(RECORD),
        RECORD.ca_path: b"pem",
        RECORD_FILE: encode_record(RECORD),
    }
    for path, content in files.items():
        found = site.machine.root / path[1:]
        found.parent.mkdir(parents=True, exist_ok=True)
        found.touch(mode=0o600)
        found.write_bytes(content)


def test_bootstrap_registry_serves_pulls_until_the_hand_over(site: Site) -> None:
    login = Credential(RECORD.username, PASSWORD)
    image = make_image(
        "os/node", "installed", SIZE, registry=REGISTRY, layers=LAYERS, credential=login
    )
    place_files(site)
    site.reach(site.goal(image=image))
    wait_until(lambda: site.notes().get(key.BOOTSTRAP_REGISTRY) == REGISTRY)
    boots, drains = site.machine.boot_count, site.notes()[key.DESIRED_DRAIN]
    notes = {key.REMOVE_BOOTSTRAP_REGISTRY: REGISTRY}
    site.lab.client.patch(NODES, NODE, {"metadata": {"annotations": notes}})
    wait_until(lambda: key.BOOTSTRAP_REGISTRY not in site.notes())
    for path in RECORD.paths:
        assert not (site.machine.root / path[1:]).exists()
    auth = (site.machine.root / "var/lib/treenail/auth.json").read_text()
    assert REGISTRY not in auth
    assert site.notes()[key.DESIRED_DRAIN] == drains
    assert (site.machine.boot_count, site.cordoned()) == (boots, False)
    wait_until(lambda: any(each[1] == "BootstrapRegistryRemoved" for each in site.events()))
    assert PASSWORD not in json.dumps(site.machine.read_journal()) + repr(site.events())
    site.reach(site.goal())
