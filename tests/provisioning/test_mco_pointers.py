"""Pointer configs that the MCO wrote for existing clusters: `serve --tokens off` answers them."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.provisioning.process import Running, run_server
from tests.provisioning.samples import NEW, Json, make_config, make_file, make_pool
from tests.provisioning.serving import fetch_config, write_json
from treenail.api.ignition.model import Contents
from treenail.api.ignition.parser import parse_ignition
from treenail.config import node_paths
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.machine.ignition import ignition
from treenail_lab.machine.ignition.ignition import Ignition
from treenail_lab.machine.rootfs import VENDOR

pytestmark = pytest.mark.integration
ACCEPT_2 = (
    "application/vnd.coreos.ignition+json; version=2.4.0, "
    "application/vnd.coreos.ignition+json; version=1; q=0.5, */*; q=0.1"
)
"""What Ignition 0.35 sends."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    sources = tmp_path / "sources"
    sources.mkdir()
    write_json(sources / "pool.json", make_pool())
    write_json(sources / "config.json", make_config(NEW, make_file("/etc/motd", "welcome")))
    with run_server(tmp_path, f"--from={sources}", "--tokens=off") as running:
        yield running


def build_trust(tmp_path: Path, **more: object) -> Json:
    encoded = base64.b64encode(CertificateAuthority(tmp_path).pem).decode()
    source = f"data:text/plain;charset=utf-8;base64,{encoded}"
    return {"tls": {"certificateAuthorities": [{"source": source, **more}]}}


def build_pointer_3(port: int, tmp_path: Path) -> Json:
    """The Secret worker-user-data of clusters since OpenShift 4.6."""
    return {
        "ignition": {
            "config": {"merge": [{"source": f"https://localhost:{port}/config/worker"}]},
            "security": build_trust(tmp_path),
            "version": "3.2.0",
        }
    }


def build_pointer_2(port: int, tmp_path: Path) -> Json:
    """The Secret worker-user-data of clusters that were installed before OpenShift 4.6."""
    reference = {"source": f"https://localhost:{port}/config/worker", "verification": {}}
    return {
        "ignition": {
            "config": {"append": [reference]},
            "security": build_trust(tmp_path, verification={}),
            "timeouts": {},
            "version": "2.2.0",
        },
        "networkd": {},
        "passwd": {},
        "storage": {},
        "systemd": {},
    }


@pytest.mark.skipif(bool(ignition.find_refusal()), reason=ignition.find_refusal() or "none")
def test_pointer_config_3_2_of_the_mco_provisions_a_machine(
    running: Running, tmp_path: Path
) -> None:
    root = tmp_path / "machine/root"
    for directory in ("etc", VENDOR):
        (root / directory).mkdir(parents=True)
    machine = Ignition(root.parent, root, server_port=running.port)
    machine.write_pointer_config(json.dumps(build_pointer_3(running.port, tmp_path)).encode())
    machine.provision()
    assert (root / "etc/motd").read_text() == "welcome"
    served = json.loads((root / node_paths.ENCAPSULATED_CONFIG[1:]).read_text())
    assert served["metadata"]["name"] == NEW


def test_pointer_config_2_2_of_the_mco_receives_2_2(running: Running, tmp_path: Path) -> None:
    """Debian's Ignition does not read 2.2, so this test requests as Ignition 0.35 does."""
    pointer = build_pointer_2(running.port, tmp_path)
    (reference,) = pointer["ignition"]["config"]["append"]
    (trusted,) = pointer["ignition"]["security"]["tls"]["certificateAuthorities"]
    path = reference["source"].removeprefix(f"https://localhost:{running.port}")
    authority = Contents(trusted["source"]).decode_bytes()
    status, served = fetch_config(running.port, authority, path, Accept=ACCEPT_2)
    assert (status, served["ignition"]["version"]) == (200, "2.2.0")
    files = {each.path: each for each in parse_ignition(served).files}
    assert files["/etc/motd"].contents.decode_bytes() == b"welcome"
    assert node_paths.ENCAPSULATED_CONFIG in files
