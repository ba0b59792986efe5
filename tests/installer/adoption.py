"""Objects of an install directory in a cluster, as the installer and the hand-over create them."""

from typing import Any

from tests.installer.pool_builds import InstallSite
from treenail.installer.directory.install_manifests import (
    read_install_manifests,
    render_install_pools,
)
from treenail.kube.api_client import Client
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    SECRETS,
)

Json = dict[str, Any]


def create_rendered_pool(client: Client, install: InstallSite) -> Json:
    """Create the pool as the bootstrap host wrote it, with its rendered config; return it."""
    rendered = render_install_pools(read_install_manifests(install.root))
    pool = next(each for each in rendered if each.pool.name == "master")
    client.create(MACHINECONFIGS, pool.rendered.config.to_json())
    document = {name: value for name, value in pool.document.items() if name != "status"}
    return client.create(MACHINECONFIGPOOLS, document)


def create_manifests(client: Client, install: InstallSite) -> None:
    """Create the MachineConfigs, the ControllerConfig and the Secrets of the manifests."""
    manifests = read_install_manifests(install.root)
    for resource in (MACHINECONFIGS, CONTROLLERCONFIGS, SECRETS):
        for each in manifests.list_kind(resource.kind):
            client.create(resource, each.document, namespace=each.namespace)


def create_image_config(client: Client, install: InstallSite) -> Json:
    manifests = read_install_manifests(install.root)
    (manifest,) = manifests.list_kind(MACHINEOSCONFIGS.kind)
    return client.create(MACHINEOSCONFIGS, manifest.document)


def adopt_build(client: Client, install: InstallSite) -> None:
    """Create the MachineOSConfig, and the build with its owner."""
    config, build = create_image_config(client, install), install.read_object()
    name = config["metadata"]["name"]
    status = build["status"]
    assert isinstance(status, dict)
    owner = {
        "apiVersion": MACHINEOSCONFIGS.api_version, "kind": MACHINEOSCONFIGS.kind, "name": name,
        "uid": config["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    metadata = build["metadata"]
    assert isinstance(metadata, dict)
    client.create(MACHINEOSBUILDS, {**build, "metadata": {**metadata, "ownerReferences": [owner]}})
    client.patch(MACHINEOSBUILDS, metadata["name"], {"status": status}, subresource="status")
