"""A pool whose image its cluster builds: files of the config, labels, a change of files only."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.config.trust_anchors import find_certificates
from treenail.daemon.configuration.trust_store import BUNDLE
from treenail.kube.api_client import Json
from treenail.kube.resources import JOBS, MACHINECONFIGPOOLS, MACHINECONFIGS, MACHINEOSCONFIGS
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.pool import CONTAINERFILE, DemoBuild
from treenail_lab.image_builds import CERTIFICATES, LabRegistry, find_build_refusal
from treenail_lab.lifetime.owner import owner

pytestmark = pytest.mark.integration

NODES = ("worker-0", "worker-1")


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab with a registry, a Node for builds, and all controllers."""
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    plan = LabPlan(nodes=NODES, images=(), registry_version="41.20260101")
    with owner.temporary_directory() as directory, Lab(directory, plan) as found:
        controllers = ControllerReplicas(found, enable=(*ALL_CONTROLLERS, "build"))
        controllers.create_manifests()
        controllers.start_replica()
        try:
            yield found
        finally:
            controllers.stop()


def make_config(name: str, **files: str) -> Json:
    """A MachineConfig with files below /etc."""
    listed = [
        {"path": f"/etc/{name}", "mode": 0o644, "contents": {"source": f"data:,{text}"}}
        for name, text in files.items()
    ]
    spec: Json = {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": listed}}}
    return pool.build_config(name, spec)


def read_image(lab: Lab) -> str:
    return MachineOSConfig.from_json(lab.client.get(MACHINEOSCONFIGS, "worker")).pull_spec


def read_configuration(lab: Lab) -> str:
    """The rendered config that all nodes of the pool have; empty while not all have one."""
    worker = MachineConfigPool.from_json(lab.client.get(MACHINECONFIGPOOLS, "worker"))
    return worker.status_configuration.name


def wait_nodes(lab: Lab, before: str = "") -> str:
    """The image that all nodes have; ``before`` is one that does not count."""

    def read() -> str:
        image = read_image(lab)
        found = [lab.read_annotations(name) for name in NODES]
        is_done = all(
            (each.get(key.CURRENT_OS_IMAGE), each.get(key.STATE)) == (image, "Done")
            for each in found
        )
        return image if image != before and is_done else ""

    return wait_until(read, limit_s=120)


def inspect(registry: LabRegistry, image: str, directory: Path) -> dict[str, str]:
    """The labels of an image, as skopeo reads them."""
    login = directory / "login.json"
    login.write_bytes(registry.pull_login)
    completed = subprocess.run(
        ["skopeo", "inspect", "--authfile", str(login), "--cert-dir",
         str(directory / CERTIFICATES / registry.host), f"docker://{image}"],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    labels: dict[str, str] = json.loads(completed.stdout)["Labels"]
    return labels


def test_pool_boots_its_built_image_and_a_change_of_files_needs_no_job(lab: Lab) -> None:
    registry = lab.registry
    pool.create_pool_without_image(lab, registry.installed.pull_spec)
    lab.client.create(MACHINECONFIGS, make_config("50-files", one="first", two="same"))
    build = DemoBuild(lab, registry, CONTAINERFILE)
    build.create_inputs()
    build.request_build()
    image = wait_nodes(lab)
    assert image.startswith(f"{registry.host}/os/node@sha256:")
    for name in NODES:
        root = lab.machines[name].root
        assert (root / "usr/share/demo/how").read_text("utf-8") == "built in the lab\n"
        assert (root / "etc/motd").read_text("utf-8").startswith("Welcome")
        assert (root / "etc/one").read_text("utf-8") == "first"
        # The image has the trust bundle as an anchor, and nothing in it extracts the anchor.
        trusted = find_certificates((root / BUNDLE.lstrip("/")).read_bytes())
        assert find_certificates(registry.ca_pem.encode()) <= trusted
        booted = lab.machines[name].booted_deployment
        assert booted is not None
        assert image.endswith(booted.digest)
    if shutil.which("skopeo"):
        labels = inspect(registry, image, lab.directory)
        # The pool's status follows the last node's annotations.
        assert wait_until(lambda: read_configuration(lab)) == labels["machineconfig"]
        assert labels["machineconfigpool"] == "worker"
    jobs = len(lab.client.list(JOBS).items)

    lab.client.create(MACHINECONFIGS, make_config("60-files", one="second"))
    wait_nodes(lab, before=image)
    assert len(lab.client.list(JOBS).items) <= jobs
    for name in NODES:
        assert (lab.machines[name].root / "etc/one").read_text("utf-8") == "second"
        assert (lab.machines[name].root / "usr/share/demo/how").exists()
