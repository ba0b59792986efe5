"""Install directories for tests."""

import json
from pathlib import Path

from treenail.installer.directory.install_manifests import InstallManifests

DIGEST = "sha256:" + "0123456789abcdef" * 4
BASE = f"registry.example.com/os/base@{DIGEST}"
OUTPUTS = ("machine-pools", "machine-configs", "controller-config")
"""Folders of an install directory that a stage writes."""
GROUP = "machineconfiguration.openshift.io/v1"


def make_pool(name: str, *, is_built_in: bool = False, **spec: object) -> dict[str, object]:
    labels = {"machineconfiguration.openshift.io/mco-built-in": ""} if is_built_in else {}
    role = {"machineconfiguration.openshift.io/role": name}
    return {
        "apiVersion": GROUP,
        "kind": "MachineConfigPool",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "machineConfigSelector": {"matchLabels": role},
            "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{name}": ""}},
            **spec,
        },
    }


def make_image_config(pool: str, *, name: str = "", **metadata: object) -> dict[str, object]:
    return {
        "apiVersion": GROUP,
        "kind": "MachineOSConfig",
        "metadata": {"name": name or pool, **metadata},
        "spec": {
            "machineConfigPool": {"name": pool},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": f"registry.example.com/os/{pool}:latest",
        },
    }


def make_config(name: str, role: str, **spec: object) -> dict[str, object]:
    return {
        "apiVersion": GROUP,
        "kind": "MachineConfig",
        "metadata": {
            "name": name,
            "labels": {"machineconfiguration.openshift.io/role": role},
        },
        "spec": {"config": {"ignition": {"version": "3.5.0"}}, **spec},
    }


def write_manifest(root: Path, name: str, *objects: object) -> Path:
    """Write objects as documents of one YAML file; JSON is YAML."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"---\n{json.dumps(each, indent=1)}\n" for each in objects))
    return path


def list_texts(manifests: InstallManifests) -> list[tuple[str, str]]:
    """Return location and JSON of each object."""
    return [(part.location, json.dumps(part.document)) for part in manifests.objects.values()]
