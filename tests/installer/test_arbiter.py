"""A control plane with an arbiter: two images, one registry, one hand-over."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.controllers import open_client
from tests.installer.directories import make_config, make_pool
from tests.installer.failures import BrokenSite
from tests.installer.pool_builds import GROUP, InstallSite
from tests.installer.processes import run_install
from tests.installer.test_failed_installs import run_bootstrap, start_cluster
from tests.registry.images import make_client
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from treenail.api.component_names import NAMESPACE
from treenail.api.decode import Json
from treenail.installer.directory.install_manifests import (
    read_install_manifests,
    render_install_pools,
)
from treenail.kube.api_client import Client
from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINECONFIGS, MACHINEOSBUILDS

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]


def make_arbiter(site: InstallSite) -> Iterator[Json]:
    """Return pool, config and MachineOSConfig of the arbiter, which pushes beside the masters."""
    yield make_pool("arbiter")
    motd = {"path": "/etc/motd", "contents": {"source": "data:,arbiter"}, "mode": 0o644}
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": [motd]}}
    yield make_config("00-arbiter", "arbiter", config=config, osImageURL=site.base)
    yield {
        "apiVersion": GROUP,
        "kind": "MachineOSConfig",
        "metadata": {"name": "arbiter"},
        "spec": {
            "machineConfigPool": {"name": "arbiter"},
            "imageBuilder": {"imageBuilderType": "Job"},
            "baseImagePullSecret": {"name": "pull"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": f"{site.final}/os/node:latest",
        },
    }


def create_arbiter_pool(client: Client, site: InstallSite) -> None:
    rendered = render_install_pools(read_install_manifests(site.root))
    pool = next(each for each in rendered if each.pool.name == "arbiter")
    client.create(MACHINECONFIGS, pool.rendered.config.to_json())
    document = {name: value for name, value in pool.document.items() if name != "status"}
    client.create(MACHINECONFIGPOOLS, document)


def test_master_and_arbiter_get_images_of_their_own(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    root = tmp_path / "cluster"
    root.mkdir()
    install = InstallSite(root, lab_registry, final=lab_registry.host, namespace=NAMESPACE)
    install.push_base()
    install.extra = list(make_arbiter(install))
    install.write()
    site = BrokenSite(install, has_controller=True)
    with (
        start_cluster(site, tmp_path / "api"),
        open_client(install.directory.kubeconfig) as client,
    ):
        create_arbiter_pool(client, install)
        code, errors = run_bootstrap(site)
        assert code == 0, errors
        found: Any = client.list(MACHINEOSBUILDS).items
    images = {each["metadata"]["name"].split("-")[0]: each["status"]["digestedImagePushSpec"]
              for each in found}  # fmt: skip
    assert set(images) == {"master", "arbiter"}
    assert images["master"] != images["arbiter"]
    final = make_client(lab_registry)
    for image in images.values():
        assert final.head_manifest("os/node", image.partition("@")[2]) is not None
    final.close()
    assert run_install("wait-for", "bootstrap-complete", "--dir", root).returncode == 0
