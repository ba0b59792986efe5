"""The first sync of a cluster after an installation, on the lab and on a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controllers.clusters import LIMIT_S, Place
from tests.controllers.handover.handover_site import open_place
from tests.controllers.image_build.site import BuildSite
from tests.installer.adoption import adopt_build, create_manifests, create_rendered_pool
from tests.installer.pool_builds import InstallSite
from tests.installer.registries import make_registry
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from tests.waiting import wait_until
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
)

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]


@pytest.fixture
def place(kubeconfig: Path, tmp_path: Path) -> Iterator[Place]:
    with open_place(kubeconfig, tmp_path, ("render", "build")) as found:
        yield found


def test_first_sync_renders_and_builds_nothing(
    place: Place, tmp_path: Path, lab_registry: RegistryService
) -> None:
    install = InstallSite(
        tmp_path / "install", lab_registry, final=lab_registry.host, namespace=place.prefix
    )
    install.push_base()
    install.write()
    with make_registry(install.root) as registry:
        image = install.build(registry)
    client = place.client
    create_manifests(client, install)
    pool = create_rendered_pool(client, install)
    adopt_build(client, install)
    configs = {str(each["metadata"]["name"]) for each in client.list(MACHINECONFIGS).items}
    site = BuildSite(place.kubeconfig, lab_registry, namespace=place.prefix)
    try:
        with place.controllers():
            wait_until(
                lambda: site.image_config("master").get("status", {}).get("machineOSBuild"),
                limit_s=LIMIT_S,
            )
            wait_until(lambda: site.pool_condition("RenderDegraded", "master")[0], limit_s=LIMIT_S)
        (build,) = site.builds()
        assert build["metadata"]["name"] == image.build_name
        assert site.build_state()[:2] == ("Succeeded", "BuiltAtInstall")
        assert site.image("master") == image.pull_spec
        assert site.jobs() == []
    finally:
        site.transport.close()
    found = client.get(MACHINECONFIGPOOLS, "master")
    assert found["spec"] == pool["spec"]
    assert {str(each["metadata"]["name"]) for each in client.list(MACHINECONFIGS).items} == configs
