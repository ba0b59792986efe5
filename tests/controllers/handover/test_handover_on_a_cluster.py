"""The hand-over with all controllers and their permissions, on the lab and a real API server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.clusters import LIMIT_S, Place
from tests.controllers.handover.handover_site import HandoverSite, open_place
from tests.controllers.image_build.site import BuildSite
from tests.installer.adoption import create_manifests
from tests.installer.pool_builds import InstallSite
from tests.installer.registries import make_registry
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NODES,
)

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]


@pytest.fixture
def place(kubeconfig: Path, tmp_path: Path) -> Iterator[Place]:
    with open_place(kubeconfig, tmp_path, ("render", "rollout", "build", "install")) as found:
        yield found


def test_first_sync_after_the_hand_over_changes_no_node_and_builds_nothing(
    place: Place, tmp_path: Path, lab_registry: RegistryService
) -> None:
    install = InstallSite(
        tmp_path / "install", lab_registry, final=lab_registry.host, namespace=place.prefix
    )
    install.push_base()
    install.write()
    cluster = BuildSite(place.kubeconfig, lab_registry, namespace=place.prefix)
    with make_registry(install.root) as registry:
        site = HandoverSite(cluster, install, registry, namespace=place.prefix)
        create_manifests(place.client, install)
        # The nodes' login, where the rendered config has none.
        cluster.put_secret("global-pull-secret-copy")
        site.build()
        pool: Any = place.client.get(MACHINECONFIGPOOLS, "master")
        rendered = pool["spec"]["configuration"]["name"]
        configs = {
            str(each["metadata"]["name"]) for each in place.client.list(MACHINECONFIGS).items
        }
        node = f"{place.prefix}-m0"
        site.add_master(node)
        booted = {
            key.CURRENT_CONFIG: rendered, key.DESIRED_CONFIG: rendered, key.STATE: "Done",
            key.CURRENT_OS_IMAGE: site.image.pull_spec, key.DESIRED_OS_IMAGE: site.image.pull_spec,
        }  # fmt: skip
        place.client.patch(NODES, node, {"metadata": {"annotations": booted}})
        site.publish()
        with place.controllers():
            wait_until(site.find_result, limit_s=LIMIT_S)
            wait_until(lambda: not site.has_secret(), limit_s=LIMIT_S)
            wait_until(lambda: _count_updated(place) == 1, limit_s=LIMIT_S)
    notes = site.notes(node)
    assert {name: notes[name] for name in booted} == booted
    assert notes[key.REMOVE_BOOTSTRAP_REGISTRY] == registry.address
    (build,) = cluster.builds()
    assert build["metadata"]["name"] == site.image.build_name
    assert cluster.build_state()[:2] == ("Succeeded", "BuiltAtInstall")
    assert cluster.jobs() == []
    after: Any = place.client.get(MACHINECONFIGPOOLS, "master")
    assert after["spec"] == pool["spec"]
    assert configs == {
        str(each["metadata"]["name"]) for each in place.client.list(MACHINECONFIGS).items
    }
    cluster.transport.close()


def _count_updated(place: Place) -> int:
    found: Any = place.client.get(MACHINECONFIGPOOLS, "master")
    return int(found.get("status", {}).get("updatedMachineCount", 0))
