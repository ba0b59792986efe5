"""Files of the user of an installation: install configuration, Containerfiles and manifests."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from treenail.api import documents
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MASTER, WORKER
from treenail.kube.resources import CONTROLLERCONFIGS
from treenail_lab.cluster import build_login_ignition, build_rendered_config
from treenail_lab.install.install_lab import InstallLab

POOLS = (MASTER, WORKER)
CONTAINERFILES = {
    MASTER: """\
FROM configs AS final
RUN mkdir -p /usr/share/demo && echo "built on the bootstrap host" > /usr/share/demo/how
""",
    WORKER: """\
FROM configs AS final
RUN mkdir -p /usr/share/demo && echo "built by the control plane" > /usr/share/demo/how
""",
}
INSTALL_CONFIG = "install-config.yaml"
PUSH_SECRET, CERTIFICATES = "push-secret.json", "registries.pem"
_ROLE = "machineconfiguration.openshift.io/role"


@dataclass(frozen=True, slots=True)
class InstallInputs:
    """The choices of the user."""

    containerfiles: dict[str, str]
    """Text by pool; empty for an image with the config alone."""
    workers: str = "Wait"
    registry: str = "Bootstrap"


def write_inputs(lab: InstallLab, root: Path, inputs: InstallInputs) -> None:
    """Write the files of the user into an install directory; a Containerfile in it stays."""
    manifests = root / "manifests"
    root.mkdir(mode=0o700, exist_ok=True)
    manifests.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(root / INSTALL_CONFIG, format_install_config(lab, inputs))
    for pool in POOLS:
        path = root / find_containerfile(pool)
        if not path.exists() and inputs.containerfiles[pool]:
            _write(path, inputs.containerfiles[pool])
        configs = [build_config(pool, lab.installed_image.pull_spec), build_login_config(lab, pool)]
        for document in configs:
            _write_manifest(manifests, document)
    _write_manifest(manifests, build_controller_config(lab))
    # Beside the directory: the installer carries all of it to the bootstrap host.
    _write(lab.directory / PUSH_SECRET, lab.build_push_secret())
    _write(lab.directory / CERTIFICATES, lab.read_certificates())


def find_containerfile(pool: str) -> str:
    """Return the name of a pool's Containerfile."""
    return f"{pool}.Containerfile"


def format_install_config(lab: InstallLab, inputs: InstallInputs) -> str:
    """Return the install configuration, as a user of the OpenShift installer writes it."""
    pools = "".join(
        f"  - name: {pool}\n"
        + (f"    containerFile: {find_containerfile(pool)}\n" if text else "")
        + f"    renderedImagePushSpec: {lab.final.host}/os/{pool}:latest\n"
        for pool, text in inputs.containerfiles.items()
    )
    secret = json.dumps(json.loads(lab.release.pull_login))
    return (
        "apiVersion: v1\n"
        "baseDomain: lab.example\n"
        "metadata:\n"
        "  name: demo\n"
        "# Images are built during the installation.\n"
        "imageMode:\n"
        "  enabled: true\n"
        f"  registry: {{type: {inputs.registry}}}\n"
        f"  workers: {inputs.workers}\n"
        "  pools:\n"
        f"{pools}"
        f"pullSecret: '{secret}'\n"
    )


def build_config(pool: str, base: str) -> Json:
    """Return the MachineConfig that names the release's image, and has a file for each node."""
    file: Json = {
        "path": "/etc/motd",
        "mode": 0o644,
        "contents": {"source": f"data:,A%20node%20of%20pool%20{pool}%0A"},
    }
    config: Json = {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}
    return _label(f"00-{pool}", pool, {"osImageURL": base, "config": config})


def build_login_config(lab: InstallLab, pool: str) -> Json:
    """Return the MachineConfig with the cluster's pull secret."""
    config = build_login_ignition(lab.build_pull_secret())
    return _label(f"01-{pool}-pull-secret", pool, {"config": config})


def build_controller_config(lab: InstallLab) -> Json:
    """Return the ControllerConfig by which builds and agents trust both registries."""
    authorities = {
        lab.release.host: lab.release.ca_pem,
        lab.final.host: lab.final.ca_file.read_text("ascii"),
    }
    bundles = [
        # ConfigMap keys allow no colon, so the MCO writes host..port.
        {"file": host.replace(":", ".."), "data": _encode(pem)}
        for host, pem in authorities.items()
    ]
    spec: Json = {
        "imageRegistryBundleUserData": bundles,
        "additionalTrustBundle": _encode(lab.read_certificates()),
        "internalRegistryPullSecret": _encode(lab.build_pull_secret()),
    }
    return {
        "apiVersion": CONTROLLERCONFIGS.api_version,
        "kind": CONTROLLERCONFIGS.kind,
        "metadata": {"name": "machine-config-controller"},
        "spec": spec,
    }


def _label(name: str, pool: str, spec: Json) -> Json:
    found = build_rendered_config(name, spec)
    found["metadata"] = {"name": name, "labels": {_ROLE: pool}}
    return found


def _write_manifest(manifests: Path, document: Json) -> None:
    metadata = document["metadata"]
    name = metadata["name"] if isinstance(metadata, dict) else ""
    _write(manifests / f"{name}.yaml", documents.dump_document(document))


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, "utf-8")


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
