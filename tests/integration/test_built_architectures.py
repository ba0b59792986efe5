"""A pool with nodes of two architectures: one Job for each, a list of manifests on the nodes.

The machines and the builder have the architecture of this host. Nodes report another one, and
images of it differ in their config alone.
"""

import json
from collections.abc import Iterator

import pytest

from tests.integration.test_built_pool import make_config, wait_nodes
from tests.waiting import wait_until
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.pullspec import parse_pull_spec
from treenail.image.oci.documents import ImageInstance, make_index
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    JOBS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
)
from treenail.oci_content import OCI_MANIFEST
from treenail.registry.client import RegistryClient
from treenail.registry.images import resolve_image
from treenail.registry.uploads import upload_bytes
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.pool import CONTAINERFILE, DemoBuild
from treenail_lab.image_builds import BASE_REPOSITORY, BUILDER, LabRegistry, find_build_refusal
from treenail_lab.images import ARCHITECTURE
from treenail_lab.lifetime.owner import owner

pytestmark = [pytest.mark.integration]

NODES_OF_POOL = ("worker-0", "worker-1")
OTHER = "arm64" if ARCHITECTURE == "amd64" else "amd64"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab with a registry, a Node for builds, nodes of two architectures, and all controllers."""
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    plan = LabPlan(
        nodes=NODES_OF_POOL,
        images=(),
        registry_version="41.20260101",
        architectures={"worker-1": OTHER},
    )
    with owner.temporary_directory() as directory, Lab(directory, plan) as found:
        controllers = ControllerReplicas(found, enable=(*ALL_CONTROLLERS, "build"))
        controllers.create_manifests()
        controllers.start_replica()
        try:
            yield found
        finally:
            controllers.stop()


def push_base_list(registry: LabRegistry) -> str:
    """Push a list with the base image, and the same image for the other architecture."""
    base = parse_pull_spec(registry.installed.pull_spec, where="the test")
    client = registry.open_client()
    try:
        found = resolve_image(client, BASE_REPOSITORY, base.digest, ARCHITECTURE)
        instances = [
            ImageInstance(OCI_MANIFEST, found.digest, len(found.manifest.content), ARCHITECTURE),
            push_other(client, found.manifest.content, found.config),
        ]
        media_type, content = make_index(instances)
        digest = client.put_manifest(BASE_REPOSITORY, "both", media_type, content)
    finally:
        client.close()
    return f"{registry.host}/{BASE_REPOSITORY}@{digest}"


def push_other(client: RegistryClient, manifest: bytes, config: bytes) -> ImageInstance:
    changed = json.dumps({**json.loads(config), "architecture": OTHER}).encode()
    blob = upload_bytes(client, BASE_REPOSITORY, CONFIG_TYPE, changed)
    entry = {"mediaType": CONFIG_TYPE, "digest": blob.digest, "size": blob.size}
    content = json.dumps({**json.loads(manifest), "config": entry}).encode()
    digest = client.put_manifest(BASE_REPOSITORY, OTHER, OCI_MANIFEST, content)
    return ImageInstance(OCI_MANIFEST, digest, len(content), OTHER)


def read_build(lab: Lab) -> MachineOSBuild | None:
    found = lab.client.list(MACHINEOSBUILDS).items
    return MachineOSBuild.from_json(found[0]) if found else None


def count_jobs(lab: Lab) -> int:
    return len(lab.client.list(JOBS).items)


def test_pool_of_two_architectures_boots_a_list_that_two_jobs_built(lab: Lab) -> None:
    registry = lab.registry
    base = push_base_list(registry)
    pool.create_pool_without_image(lab, base)
    lab.client.create(MACHINECONFIGS, make_config("50-files", one="first"))
    build = DemoBuild(lab, registry, CONTAINERFILE)
    build.create_inputs()
    build.request_build()

    def find_unschedulable() -> str:
        found = read_build(lab)
        condition = None if found is None else found.condition
        is_found = condition is not None and condition.reason == "Unschedulable"
        return condition.message if is_found and condition is not None else ""

    message = wait_until(find_unschedulable, limit_s=60)
    assert f"waits for a node of architecture {OTHER}: 0 " in message
    wait_until(lambda: read_progress(lab) == "Unschedulable", limit_s=30)

    # The builder gets the other architecture, after it has built the first image.
    wait_until(lambda: has_system_image(lab), limit_s=90)
    label: Json = {"metadata": {"labels": {"kubernetes.io/arch": OTHER}}}
    lab.client.patch(NODES, BUILDER, label)
    image = wait_until(
        lambda: MachineOSConfig.from_json(lab.client.get(MACHINEOSCONFIGS, "worker")).pull_spec,
        limit_s=120,
    )
    spec = parse_pull_spec(image, where="the test")
    client = registry.open_client()
    try:
        found = {
            name: resolve_image(client, spec.repository, spec.digest, name)
            for name in (ARCHITECTURE, OTHER)
        }
    finally:
        client.close()
    assert {each.index_digest for each in found.values()} == {spec.digest}
    assert found[ARCHITECTURE].digest != found[OTHER].digest
    assert wait_nodes(lab) == image
    for name in NODES_OF_POOL:
        machine = lab.machines[name]
        assert (machine.root / "usr/share/demo/how").read_text("utf-8") == "built in the lab\n"
        assert (machine.root / "etc/one").read_text("utf-8") == "first"
        booted = machine.booted_deployment
        assert booted is not None
        assert booted.digest == found[ARCHITECTURE].digest

    jobs = count_jobs(lab)
    lab.client.create(MACHINECONFIGS, make_config("60-files", one="second"))
    second = wait_nodes(lab, before=image)
    assert count_jobs(lab) <= jobs
    assert second != image
    for name in NODES_OF_POOL:
        assert (lab.machines[name].root / "etc/one").read_text("utf-8") == "second"


def read_progress(lab: Lab) -> str:
    """Return the reason of the condition BuildProgressing."""
    config = MachineOSConfig.from_json(lab.client.get(MACHINEOSCONFIGS, "worker"))
    reasons = {each.type: each.reason for each in config.conditions}
    return reasons.get("BuildProgressing", "")


def has_system_image(lab: Lab) -> bool:
    """Return whether one architecture is built."""
    found = read_build(lab)
    text = "" if found is None else found.metadata.annotations.get("treenail.io/systems", "")
    return any(each["image"] for each in json.loads(text or "{}").values())
