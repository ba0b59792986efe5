"""``install wait-for install-complete`` and the log bundle, when the image of workers fails."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.clusters import open_lab
from tests.fixtures.controllers import open_client
from tests.fixtures.files import read_parts
from tests.installer.directories import make_pool
from tests.installer.joined_nodes import join_node
from tests.installer.processes import make_directory, run_install
from treenail.api import annotations as key
from treenail.api.component_names import NAMESPACE
from treenail.api.decode import Json
from treenail.api.machineosbuild import BuildState
from treenail.controllers.handover.handover_objects import (
    HandoverResult,
    build_result_configmap,
    parse_objects,
)
from treenail.image.build_result import compute_build_conditions
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    CONFIGMAPS,
    MACHINECONFIGPOOLS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NAMESPACES,
)
from treenail_lab.apiserver.serving.server import LabServer

GROUP = "machineconfiguration.openshift.io/v1"
CAUSE = "InstructionFailed: line 2 of the Containerfile: dnf: no such package"
PULL_SPEC = "registry.example.com/os/worker@sha256:" + "ab" * 32


def make_status(*, total: int, updated: int) -> Json:
    return {"machineCount": total, "updatedMachineCount": updated}


def make_image_config(build: str) -> Json:
    return {
        "apiVersion": GROUP,
        "kind": "MachineOSConfig",
        "metadata": {"name": "worker", "annotations": {key.CURRENT_BUILD: build}},
        "spec": {
            "machineConfigPool": {"name": "worker"},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": "registry.example.com/os/worker:latest",
        },
    }


def make_build(name: str) -> Json:
    return {
        "apiVersion": GROUP,
        "kind": "MachineOSBuild",
        "metadata": {"name": name},
        "spec": {
            "machineConfig": {"name": "rendered-worker-1"},
            "machineOSConfig": {"name": "worker"},
            "renderedImagePushSpec": f"registry.example.com/os/worker:{name}",
        },
    }


def make_build_status(state: BuildState, message: str) -> Json:
    moment = "2026-01-01T00:00:00Z"
    found = compute_build_conditions(state, str(state), message)
    conditions = [replace(each, last_transition_time=moment) for each in found]
    pushed = {"digestedImagePushSpec": PULL_SPEC} if state is BuildState.SUCCEEDED else {}
    return {"conditions": [each.to_json() for each in conditions], **pushed}


def describe(build: Json, pool_status: Json) -> tuple[tuple[str, ...], tuple[str, ...]]:
    pools = ({**make_pool("worker"), "status": pool_status}, make_pool("master"))
    found = parse_objects(pools, [make_image_config("worker-1")], [build])
    return found.missing, found.failed


def test_pool_waits_for_its_build_and_its_nodes() -> None:
    status = make_status(total=2, updated=1)
    building = make_build("worker-1") | {"status": make_build_status(BuildState.BUILDING, "runs")}
    assert describe(building, status) == (
        ("pool worker waits for its image: worker-1 is Building: runs",),
        (),
    )
    built = make_build("worker-1") | {"status": make_build_status(BuildState.SUCCEEDED, "")}
    assert describe(built, status) == (("pool worker: 1 of 2 nodes have the image",), ())
    degraded = {"type": "Degraded", "status": "True", "reason": "x", "message": "worker-1 lacks y"}
    missing, _ = describe(built, status | {"conditions": [degraded]})
    assert missing == ("pool worker: 1 of 2 nodes have the image; worker-1 lacks y",)
    assert describe(built, make_status(total=2, updated=2)) == ((), ())
    assert describe(built, make_status(total=0, updated=0)) == ((), ())
    assert describe(make_build("other"), status)[0][0].endswith("its build has not begun")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Path, Client]]:
    """A cluster whose control plane is complete, and whose worker image failed."""
    root = make_directory(tmp_path / "cluster")
    with open_lab(tmp_path / "api") as (server, client):
        (root / "auth").mkdir()
        shutil.copy(server.admin_kubeconfig, root / "auth/kubeconfig")
        client.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
        result = build_result_configmap(HandoverResult({}, "", ""))
        client.create(CONFIGMAPS, result, namespace=NAMESPACE)
        join_node(client)
        client.create(MACHINECONFIGPOOLS, make_pool("worker"))
        status = {"status": make_status(total=0, updated=0)}
        client.patch(MACHINECONFIGPOOLS, "worker", status, subresource="status")
        client.create(MACHINEOSCONFIGS, make_image_config("worker-1"))
        add_build(client, "worker-1", BuildState.FAILED, CAUSE)
        yield root, client


def add_build(client: Client, name: str, state: BuildState, message: str) -> None:
    client.create(MACHINEOSBUILDS, make_build(name))
    status = {"status": make_build_status(state, message)}
    client.patch(MACHINEOSBUILDS, name, status, subresource="status")


@pytest.mark.integration
def test_failed_worker_image_is_reported_until_the_fix(
    cluster: tuple[Path, Client], tmp_path: Path
) -> None:
    root, client = cluster
    waited = run_install("wait-for", "install-complete", "--dir", root)
    assert waited.returncode == 5, waited.stdout + waited.stderr
    failure = f"the image of pool worker cannot be built: {CAUSE}"
    assert f"the installation failed: {failure}" in " ".join(waited.stdout.split())
    bundle = tmp_path / "bundle.tar.gz"
    assert run_install("gather", "--dir", root, "-o", bundle).returncode == 0
    parts = read_parts(bundle.read_bytes())
    assert failure in parts["bootstrap/treenail/summary.txt"].decode()
    assert CAUSE.encode() in parts["cluster/treenail/machineosbuilds.yaml"].replace(b"\n  ", b"")
    # The fix: another Containerfile, and the build controller builds again.
    add_build(client, "worker-2", BuildState.SUCCEEDED, "")
    notes: Json = {key.CURRENT_BUILD: "worker-2"}
    client.patch(MACHINEOSCONFIGS, "worker", {"metadata": {"annotations": notes}})
    waited = run_install("wait-for", "install-complete", "--dir", root)
    assert waited.returncode == 0, waited.stdout
    assert waited.stdout.endswith("all pools in image mode have their image\n")


@pytest.mark.integration
def test_bundle_of_a_cluster_without_controllers_has_its_nodes(tmp_path: Path) -> None:
    root, bundle = make_directory(tmp_path / "cluster"), tmp_path / "bundle.tar.gz"
    with LabServer(tmp_path / "api") as server, open_client(server.admin_kubeconfig) as client:
        join_node(client)
        kubeconfig = f"--kubeconfig={server.admin_kubeconfig}"
        gathered = run_install("gather", "--dir", root, kubeconfig, "-o", bundle)
    assert gathered.returncode == 0, gathered.stderr
    parts = read_parts(bundle.read_bytes())
    assert b"master-0" in parts["cluster/treenail/nodes.yaml"]
    assert "missing cluster/treenail/machineosbuilds.yaml" in gathered.stdout
