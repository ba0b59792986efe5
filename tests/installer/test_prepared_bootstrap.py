"""A directory that ``install prepare`` wrote goes through ``install bootstrap`` as planned."""

import base64
import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.installer.directories import GROUP, make_config, write_manifest
from tests.installer.processes import bootstrap
from tests.registry.images import make_client, push_image
from tests.registry.real_registry import (
    PUSHER,
    RegistryService,
    lab_registry,
    needs_docker_registry,
)
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.cli.controller.main import main
from treenail.installer.directory.install_files import InstallDirectory

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
FINAL = "final.registry.example"


def write_directory(root: Path, registry: RegistryService) -> None:
    """Write what a user writes: the field, MachineConfigs, and logins."""
    with closing(make_client(registry)) as client:
        base = push_image(client, "os/base", labels={"containers.bootc": "1"})
    for pool in ("master", "worker"):
        image = f"{registry.host}/os/base@{base.digest}"
        config = make_config(f"10-{pool}", pool, osImageURL=image)
        write_manifest(root, f"manifests/{pool}.yaml", config)
    bundle = base64.b64encode(registry.ca_file.read_bytes()).decode()
    write_manifest(
        root,
        "manifests/controllerconfig.yaml",
        {
            "apiVersion": GROUP,
            "kind": "ControllerConfig",
            "metadata": {"name": "machine-config-controller"},
            "spec": {"additionalTrustBundle": bundle},
        },
    )
    pools = "".join(
        f"  - {{name: {each}, renderedImagePushSpec: {FINAL}/os/{each}:latest}}\n"
        for each in ("master", "worker")
    )
    logins = json.loads(registry.make_auth_json(PUSHER))
    logins["auths"][FINAL] = {"auth": base64.b64encode(b"u:final-password").decode()}
    text = f"imageMode:\n  pools:\n{pools}pullSecret: '{json.dumps(logins)}'\n"
    (root / "treenail-install.yaml").write_text(text)


def test_prepared_directory_is_built_and_served_as_planned(
    tmp_path: Path, lab_registry: RegistryService, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "cluster"
    write_directory(root, lab_registry)
    assert main(["install", "prepare", "--dir", str(root), "--offline"]) == 0
    capsys.readouterr()
    assert main(["install", "plan", "--dir", str(root), "--offline", "--json"]) == 0
    master = json.loads(capsys.readouterr().out)["pools"][0]
    limits = ("--registry-listen=127.0.0.1:0", "--registry-storage-limit=500Mi")
    with bootstrap(root, *limits) as process:
        wait_until(
            lambda: (
                "beginning step first-boot" in process.log.read_text()
                or process.process.poll() is not None
            ),
            limit_s=60.0,
        )
        assert process.process.poll() is None, process.log.read_text()
        assert process.fetch()[0] == 200
        served = f"served config of pool master to 127.0.0.1: {master['machineConfig']}"
        # The server logs the request after its answer.
        wait_until(lambda: served in process.log.read_text(), limit_s=20.0)
    path = InstallDirectory(root).cluster_objects / "machineosbuild-master.json"
    build = json.loads(path.read_text())
    assert build["metadata"]["annotations"][key.CONTENT_KEY] == master["contentKey"]
    assert build["spec"]["machineConfig"]["name"] == master["machineConfig"]
    text = process.log.read_text()
    assert "final-password" not in text
    assert base64.b64encode(b"u:final-password").decode() not in text
