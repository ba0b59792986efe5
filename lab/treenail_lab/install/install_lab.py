"""Machines and registries of an installation in image mode; the cluster comes with the first node.

The release registry has the base image, as quay.io has it. The final registry refuses connections
until `open_final_registry`: no cluster has a registry before it runs. The user's files are an
install configuration, Containerfiles and manifests.
"""

import base64
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from treenail.api import documents
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MASTER, WORKER
from treenail.errors import ClusterError
from treenail.kube.resources import CONTROLLERCONFIGS, NODES
from treenail_lab import images
from treenail_lab.apiserver.controllers.pods import BUILDER_LABEL
from treenail_lab.cluster import Lab, LabPlan, build_login_ignition, build_rendered_config
from treenail_lab.image_builds import (
    BuilderNode,
    LabRegistry,
    merge_logins,
)
from treenail_lab.images import ARCHITECTURE, ImageCatalogue
from treenail_lab.machine.ignition.ignition import Ignition
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.ostree.sysroot import SysrootDeployment
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

log = logging.getLogger(__name__)

BASE_VERSION = "42.20260101"
_RESULT = "etc/.ignition-result.json"


def make_install_plan(
    control_planes: int = 3, workers: int = 2, settings: MachineSettings | None = None
) -> LabPlan:
    """Return the plan of an installation."""
    masters = tuple(f"{MASTER}-{number}" for number in range(control_planes))
    others = tuple(f"{WORKER}-{number}" for number in range(workers))
    return LabPlan(
        (*masters, *others),
        (),
        machine_settings=settings or MachineSettings(boot_s=0.5, pull_bytes_per_s=1e9),
        registry_version=BASE_VERSION,
        control_plane=frozenset(masters),
    )


class InstallLab(Lab):
    """A lab whose machines are off, and whose cluster does not exist before `start_cluster`."""

    def __init__(self, directory: Path, plan: LabPlan) -> None:
        super().__init__(directory, plan)
        self.final = RegistryService()
        self.release: LabRegistry
        self._has_final = False

    def start(self) -> None:
        """Start the registries; no machine runs."""
        self.release = self.registry = LabRegistry(
            self.directory, self.plan.registry_version
        ).__enter__()
        self.final.__enter__()
        self._has_final = True
        self.final.stop_backend()
        hosts = self.release.host, self.final.host
        images.save_catalogue(ImageCatalogue(registries=hosts), self._images_file)

    def stop(self) -> None:
        """Stop everything; no process is left when this returns."""
        super().stop()
        if self._has_final:
            self._has_final = False
            self.final.__exit__()

    def open_final_registry(self) -> None:
        """Let the final registry answer."""
        self.final.start_backend()

    def start_cluster(self) -> None:
        """Start the API server; the Nodes of machines whose first boot is done appear."""
        self.start_api()
        self.start_kubelets()

    def build_pull_secret(self) -> str:
        """Return the nodes' logins: for the release registry and for the final one."""
        return merge_logins(self.release.pull_login, self.final.make_auth_json(PULLER))

    def build_push_secret(self) -> str:
        """Return the login that may push to the final registry."""
        return merge_logins(self.final.make_auth_json(PUSHER))

    def read_certificates(self) -> str:
        """Return the CAs of both registries."""
        return self.release.ca_pem + self.final.ca_file.read_text("ascii")

    def install_machine(self, name: str, user_data: bytes, server_port: int) -> LabMachine:
        """Install a machine from the base image; its first start runs Ignition with the user data.

        Ignition reaches the port of its config server only.
        """
        machine = self.create_machine(name, self.installed_image, has_first_boot=True)
        runner = Ignition(self.directory / name, machine.root, server_port=server_port)
        runner.write_pointer_config(user_data)

        def run_ignition(_booted: SysrootDeployment) -> None:
            if not (machine.root / _RESULT).exists():
                runner.provision()

        machine.on_boot = run_ignition
        return machine

    def is_first_boot_done(self) -> bool:
        """Return whether a machine of the control plane may run its kubelet."""
        return any(
            self._is_past_first_boot(machine)
            for name, machine in list(self.machines.items())
            if name in self.plan.control_plane
        )

    def _may_run_kubelet(self, machine: LabMachine) -> bool:
        """Let the kubelet of a control-plane machine join as soon as its first boot is done.

        The OpenShift installer approves its certificate; no controller does.
        """
        if machine.name not in self.plan.control_plane or machine.name in self._admitted:
            return super()._may_run_kubelet(machine)
        if not self._is_past_first_boot(machine):
            return False
        try:
            self._admit_machine(machine)
        except ClusterError as error:
            log.debug("cannot create the Node %s: %s", machine.name, error)
        return machine.name in self._admitted

    def _admit_machine(self, machine: LabMachine) -> None:
        super()._admit_machine(machine)
        labels = {"kubernetes.io/arch": ARCHITECTURE, "kubernetes.io/os": "linux"}
        is_builder = self.builder is None and machine.name in self.plan.control_plane
        if is_builder:
            # The lab's scheduler considers Nodes with this label, which runs containers.
            labels[BUILDER_LABEL] = ""
        self.client.patch(NODES, machine.name, {"metadata": {"labels": labels}})
        if is_builder:
            self._start_builder(machine.name)

    def _start_builder(self, name: str) -> None:
        """Let the kubelet of a control-plane node run pods: no worker exists before its image."""
        hidden = self.release.service.directory, self.final.directory
        hosts = self.release.host, self.final.host
        builder = BuilderNode(self.directory, self.client, *hosts, hidden=hidden, name=name)
        self.server.api.pod_logs.directories.append(builder.log_directory)
        self.builder = builder
        builder.start(self.open_client(self.server.write_node_kubeconfig(name)))


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
    config = build_rendered_config(name, spec)
    config["metadata"] = {"name": name, "labels": {_ROLE: pool}}
    return config


def _write_manifest(manifests: Path, document: Json) -> None:
    metadata = document["metadata"]
    name = metadata["name"] if isinstance(metadata, dict) else ""
    _write(manifests / f"{name}.yaml", documents.dump_document(document))


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, "utf-8")


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
