"""The real machine-config-controller rolls out images that treenail's build controller made.

The MachineOSConfigs have the form of those in the MCO's tests. With a Containerfile, the real Job
controller creates the pods, so KUBE_CONTROLLER_MANAGER must name its program.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mco import operator
from tests.mco.builds import PULL, PUSH, BuildSide, read_image_labels
from tests.mco.nodes import LabNodes
from tests.mco.operator import GROUP, MCO, NAMESPACE, Json
from tests.mco.pool import LIMIT_S, POOL, Pool, run_pool
from tests.realcluster import RealCluster
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail_lab.image_builds import LabRegistry, find_build_refusal
from treenail_lab.lifetime.owner import owner

pytestmark = [pytest.mark.integration, pytest.mark.limit(900)]

NAMES = ["n1", "n2"]
IMAGE_CONFIG = f"{MCO}/machineosconfigs/{POOL}"
BUILDS = f"{MCO}/machineosbuilds"
CONTAINERFILE = """\
FROM configs AS final
RUN echo made > /etc/made
"""


@pytest.fixture(scope="module")
def node_names() -> list[str]:
    return NAMES


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The directory of machines and registry: a machine is installed from files of its image."""
    with owner.temporary_directory() as found:
        yield found


@pytest.fixture(scope="module")
def registry(directory: Path) -> Iterator[LabRegistry]:
    with LabRegistry(directory, "41.1") as found:
        yield found


@pytest.fixture(scope="module")
def shared_pool(
    kube_server: RealCluster,
    controller: operator.Controller,
    node_names: list[str],
    directory: Path,
    registry: LabRegistry,
) -> Iterator[Pool]:
    """The pool ``worker``, installed from an image of a registry."""
    image = registry.installed
    nodes = LabNodes(directory, kube_server, [image], node_names, registry=registry)
    with run_pool(nodes, image, controller) as pool:
        yield pool


@pytest.fixture
def builds(kube_server: RealCluster, registry: LabRegistry) -> Iterator[BuildSide]:
    """The build controller with its Secrets; its log is shown if the test failed."""
    with owner.temporary_directory() as scratch:
        found = BuildSide(scratch, kube_server, registry)
        try:
            found.start()
            yield found
        finally:
            found.stop()
            sys.stdout.write(found.log.read_text("utf-8"))


def create_image_config(pool: Pool, registry: LabRegistry, containerfile: str = "") -> None:
    spec: Json = {
        "machineConfigPool": {"name": POOL},
        "imageBuilder": {"imageBuilderType": "Job"},
        "baseImagePullSecret": {"name": PULL},
        "renderedImagePushSecret": {"name": PUSH},
        "renderedImagePushSpec": f"{registry.host}/os/{POOL}:latest",
        "containerFile": [],
    }
    if containerfile:
        spec["containerFile"] = [{"containerfileArch": "NoArch", "content": containerfile}]
    document = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "MachineOSConfig",
        "metadata": {"name": POOL},
        "spec": spec,
    }
    pool.cluster.post(f"{MCO}/machineosconfigs", document).ok()


def read_image(pool: Pool) -> str:
    status = pool.cluster.get(IMAGE_CONFIG).ok().get("status") or {}
    return str(status.get("currentImagePullSpec", ""))


def wait_nodes(pool: Pool, but: str = "") -> str:
    """Wait until each node boots the pool's image and the MCO reports it; return the image."""

    def find() -> str:
        image = read_image(pool)
        notes = [pool.nodes.read_notes(name) for name in NAMES]
        is_done = all(each.get(key.CURRENT_IMAGE) == image for each in notes)
        return image if image not in ("", but) and is_done else ""

    image = wait_until(find, limit_s=2 * LIMIT_S)
    pool.wait_updated()
    assert image in pool.read_condition("Updated")["message"]
    for machine in pool.nodes.machines.values():
        booted = machine.booted_deployment
        assert booted is not None
        assert image.endswith(booted.digest)
    return image


def wait_base(pool: Pool) -> None:
    """Delete the MachineOSConfig, and wait until each node is out of image mode."""
    pool.cluster.delete(IMAGE_CONFIG)
    wait_until(
        lambda: not any(pool.nodes.read_notes(name).get(key.CURRENT_IMAGE) for name in NAMES),
        limit_s=2 * LIMIT_S,
    )
    pool.wait_updated()
    for machine in pool.nodes.machines.values():
        booted = machine.booted_deployment
        assert booted is not None
        assert booted.digest == pool.image.digest
    wait_until(lambda: not pool.cluster.get(BUILDS).ok()["items"], limit_s=LIMIT_S)


def read_files(pool: Pool, path: str) -> list[str]:
    return [(each.root / path).read_text("utf-8") for each in pool.nodes.machines.values()]


@pytest.mark.usefixtures("builds")
def test_image_with_only_the_config_is_rolled_out_and_left(
    pool: Pool, registry: LabRegistry
) -> None:
    pool.add_file("50-first", "/etc/treenail-test/first", "1\n")
    pool.wait_updated()
    create_image_config(pool, registry)
    first = wait_nodes(pool)
    labels = read_image_labels(registry, first)
    assert labels["machineconfig"] == pool.read_target()
    assert labels["machineconfigpool"] == POOL

    pool.add_file("60-second", "/etc/treenail-test/second", "2\n")
    wait_nodes(pool, but=first)
    assert read_files(pool, "etc/treenail-test/second") == ["2\n", "2\n"]
    jobs = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    assert pool.cluster.get(jobs).ok()["items"] == []
    wait_base(pool)
    assert read_files(pool, "etc/treenail-test/first") == ["1\n", "1\n"]


def test_image_of_a_containerfile_is_rolled_out(
    pool: Pool, registry: LabRegistry, builds: BuildSide
) -> None:
    if not os.environ.get("KUBE_CONTROLLER_MANAGER"):
        pytest.skip("KUBE_CONTROLLER_MANAGER is not set: the program creates pods of Jobs")
    if why := " ".join(find_build_refusal()).strip():
        pytest.skip(why)
    builds.start_builder()
    pool.add_file("50-built", "/etc/treenail-test/built", "1\n")
    pool.wait_updated()
    create_image_config(pool, registry, CONTAINERFILE)
    wait_nodes(pool)
    assert read_files(pool, "etc/made") == ["made\n", "made\n"]
    assert read_files(pool, "etc/treenail-test/built") == ["1\n", "1\n"]
    wait_base(pool)
