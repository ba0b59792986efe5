"""Objects for tests of the Ignition server: a pool, its rendered config, a ControllerConfig."""

import base64
import random
from typing import Any

Json = dict[str, Any]

GROUP = "machineconfiguration.openshift.io/v1"
IMAGE = "quay.io/example/os@sha256:" + "ab" * 32
BASE = "quay.io/example/base@sha256:" + "cd" * 32
CLUSTER_IMAGE = "registry.internal:5000/os/worker@sha256:" + "ef" * 32
OLD, NEW = "rendered-worker-" + "0" * 32, "rendered-worker-" + "1" * 32
_SUCCEEDED: Json = {
    "type": "Succeeded",
    "status": "True",
    "reason": "Ready",
    "message": "Build Ready",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def make_pool(
    *, new: str = NEW, old: str = OLD, updated: int = 1, name: str = "worker", **spec: Any
) -> Json:
    """A pool whose generation the status has observed."""
    return {
        "apiVersion": GROUP,
        "kind": "MachineConfigPool",
        "metadata": {"name": name, "generation": 3},
        "spec": {"configuration": {"name": new}, **spec},
        "status": {
            "observedGeneration": 3,
            "machineCount": 2,
            "updatedMachineCount": updated,
            "configuration": {"name": old},
        },
    }


def encode(text: str) -> str:
    """A data URL."""
    return "data:;base64," + base64.b64encode(text.encode()).decode()


def make_file(path: str, text: str = "x", **more: Any) -> Json:
    return {"path": path, "mode": 0o644, "contents": {"source": encode(text)}, **more}


def make_config(name: str = NEW, *files: Json, image: str = BASE, **ignition: Any) -> Json:
    """A rendered MachineConfig."""
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": list(files)}, **ignition}
    return {
        "apiVersion": GROUP,
        "kind": "MachineConfig",
        "metadata": {"name": name, "managedFields": []},
        "spec": {"config": config, "osImageURL": image, "kernelArguments": ["quiet"]},
    }


def make_large_configs() -> list[Json]:
    """Configs that together, and compressed, are more than the server keeps without a pool."""
    texts = [random.Random(number).randbytes(450_000).hex() for number in range(4)]
    return [
        make_config(f"rendered-worker-{number + 2:032x}", make_file(f"/etc/large-{number}", text))
        for number, text in enumerate(texts)
    ]


def make_controller_config(name: str = "machine-config-controller", **spec: Any) -> Json:
    """A ControllerConfig with three CAs."""
    found: Json = {
        "kubeAPIServerServingCAData": base64.b64encode(b"kubelet ca").decode(),
        "cloudProviderCAData": base64.b64encode(b"cloud ca").decode(),
        "imageRegistryBundleData": [
            {"file": "registry.example..5000", "data": base64.b64encode(b"registry ca").decode()}
        ],
        **spec,
    }
    return {
        "apiVersion": GROUP,
        "kind": "ControllerConfig",
        "metadata": {"name": name},
        "spec": found,
    }


def make_image_config(pull_spec: str = IMAGE, pool: str = "worker") -> Json:
    return {
        "apiVersion": GROUP,
        "kind": "MachineOSConfig",
        "metadata": {"name": pool},
        "spec": {
            "machineConfigPool": {"name": pool},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": "quay.io/example/os:latest",
        },
        "status": {"currentImagePullSpec": pull_spec},
    }


def make_image_build(config: str = NEW, pull_spec: str = IMAGE, pool: str = "worker") -> Json:
    return {
        "apiVersion": GROUP,
        "kind": "MachineOSBuild",
        "metadata": {"name": f"{pool}-1"},
        "spec": {
            "machineConfig": {"name": config},
            "machineOSConfig": {"name": pool},
            "renderedImagePushSpec": "quay.io/example/os:latest",
        },
        "status": {
            "builder": {"imageBuilderType": "Job"},
            "digestedImagePushSpec": pull_spec,
            "conditions": [_SUCCEEDED],
        },
    }
