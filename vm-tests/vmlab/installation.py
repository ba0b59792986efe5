"""An installation in image mode: a bootstrap host on this host, and the cluster that follows.

The machine reaches the config server and the registry of the bootstrap host by the name `HOST`. The
processes of this host have that name in a mount namespace of their own.
"""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treenail.api import annotations as key
from treenail.api import documents
from treenail.api.machineconfigpool import MASTER
from treenail.config.bootstrap_registry import MIRROR_FILE, RECORD_FILE
from treenail.installer.directory.install_files import InstallDirectory
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    Resource,
)
from treenail.provisioning.content.document import build_pointer
from treenail_lab.cluster import build_rendered_config
from treenail_lab.controllers import CONTROLLER_COMMAND, ControllerReplicas
from vmlab import registry
from vmlab.configs import with_files
from vmlab.site import NODE, Site
from vmlab.tools import PATIENCE, ToolError, run, say

Json = dict[str, Any]
HOST = "bootstrap.test"
FILE, STATE_FILE = "/etc/treenail-vm.conf", "/var/lib/treenail-vm.conf"
CONTENT, STATE = "of the config", "of the machine"
_GUEST_FILES = (MIRROR_FILE, RECORD_FILE)
_ROLE = "machineconfiguration.openshift.io/role"
_KUBELET_LOGIN = "/var/lib/kubelet/config.json"
_LOOPBACK, _HOST_OF_GUEST = "127.0.0.1", "10.0.2.2"
_CONTROLLERS = ("render", "rollout", "build", "install")
_ARGUMENTS = ("--settle=0", "--report-blockers-after=2")
_BUILD_LIMIT_S, _HANDOVER_LIMIT_S = 900.0, 300.0
_STOP_LIMIT_S = 30.0
_FIRST_BOOT_LIMIT_MINUTES = 60
_APPLIED_FIRST = ("Namespace", "ConfigMap", "Secret", CONTROLLERCONFIGS.kind)
_SETTINGS = f"""\
imageMode:
  enabled: true
  registry: {{{{type: Bootstrap}}}}
  workers: Follow
  pools:
  - name: worker
    renderedImagePushSpec: {registry.LOCAL}/os/worker:latest
  - name: {MASTER}
    renderedImagePushSpec: {{}}
"""
_CONTAINERFILE = "master.Containerfile"
_WITH_HOST = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Installation:
    """The bootstrap host and the controllers of the new cluster, between `start` and `stop`."""

    def __init__(
        self, site: Site, directory: Path, certificate: Path, containerfile: str = ""
    ) -> None:
        """``certificate`` is that of the registry; without a Containerfile one layer is added."""
        self._site = site
        self._certificate = certificate
        self._containerfile = containerfile
        self._place = directory
        self.directory = InstallDirectory(directory / "install")
        self.log = directory / "bootstrap.log"
        # The registry is kept between runs. In a new repository the hand-over really copies. The
        # machine cannot reach it: no port of its loopback is forwarded.
        self.push_spec = f"{registry.LOCAL}/os/{MASTER}-{time.time_ns()}:latest"
        self._port = _find_free_port()
        self._process: subprocess.Popen[bytes] | None = None
        hosts = directory / "hosts"
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{_LOOPBACK} {HOST}\n")
        self._wrapper = ("unshare", "--mount", "sh", "-c", _WITH_HOST, "sh", str(hosts))
        self._controllers = ControllerReplicas(
            site.lab,
            enable=_CONTROLLERS,
            arguments=_ARGUMENTS,
            command=(*self._wrapper, *CONTROLLER_COMMAND),
        )

    def start(self) -> None:
        """Write the install directory, prepare it, and start the bootstrap host."""
        self._write_inputs()
        files = ("--pull-secret", "--push-secret")
        logins = [word for name in files for word in (name, str(self._place / "login.json"))]
        say(run(*self._command("prepare"), *logins, "--offline"))
        address = ("--host", HOST, "--listen", f"{_LOOPBACK}:{self._port}")
        limit = ("--first-boot-timeout", f"{_FIRST_BOOT_LIMIT_MINUTES * PATIENCE:.0f}m")
        registry_address = ("--registry-listen", f"{_LOOPBACK}:0")
        command = self._command("bootstrap", *address, *registry_address, *limit)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._wrapper, *command, "--stop-when-complete"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._wait(self.directory.ca_certificate.exists, "the CA of the installation")

    def stop(self) -> None:
        self._controllers.stop()
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        # pytest keeps the directory, and nothing but the log explains a failure.
        shutil.rmtree(self.directory.registry, ignore_errors=True)

    # The machine

    def create_user_data(self) -> str:
        """Return the user data of a machine of the control plane."""
        authorities = self.directory.ca_certificate.read_bytes()
        url = f"https://{HOST}:{self._port}"
        return json.dumps(build_pointer(url, MASTER, "3.1.0", authorities=authorities))

    def name_host(self) -> None:
        """Let the machine find the bootstrap host by its name."""
        self._site.machine.sh(f"echo {_HOST_OF_GUEST} {HOST} >> /etc/hosts")

    def list_node_files(self) -> list[str]:
        """List the files on the machine by which it pulls from the bootstrap host."""
        places = f"{' '.join(_GUEST_FILES)} /etc/docker/certs.d/{HOST}:*/ca.crt"
        return self._site.machine.sh(f"ls {places} 2>&- || true").split()

    def has_login(self) -> bool:
        """Return whether the login of the bootstrap registry is among those for pulls."""
        found = self._site.machine.sh(f"grep -l {HOST} /run/ostree/* /etc/ostree/* 2>&- || true")
        return found != ""

    # The bootstrap host

    def wait_image(self) -> str:
        """Wait until machines can have the image; return its pull spec."""
        self._wait(lambda: self._read_status().get("is_serving"), "the image is served")
        return str(self._read_status()["pools"][MASTER]["image"])

    def has_served(self, image: str) -> bool:
        """Return whether the machine pulled the image by its digest from the bootstrap host."""
        log = (self.directory.logs / "registry-pull.log").read_text()
        wanted = f"/manifests/{image.partition('@')[2]} "
        return any(wanted in line and "skopeo" in line for line in log.splitlines())

    def wait_complete(self) -> None:
        """Wait until the bootstrap host has ended, and its registry with it."""
        site = self._site
        site.wait(lambda: self._find_exit_code() == 0, "the hand-over", _HANDOVER_LIMIT_S)

    # The cluster

    def create_configs(self) -> None:
        """Create the rendered configs, as the temporary control plane does before machines join."""
        for path in self.directory.machine_configs.glob("rendered-*.yaml"):
            text = path.read_bytes()
            self._site.lab.create_objects(documents.load_documents(text, where=path.name))

    def open_cluster(self) -> None:
        """Apply the manifests, start the controllers, and publish the kubeconfig."""
        lab = self._site.lab
        label = "node-role.kubernetes.io/{}"
        labels = {label.format("worker"): None, label.format("control-plane"): ""}
        lab.client.patch(NODES, NODE, {"metadata": {"labels": labels}})
        self._controllers.create_manifests()
        found: list[Json] = []
        for path in sorted(self.directory.manifests.glob("*.yaml")):
            found += documents.load_documents(path.read_bytes(), where=path.name)
        found.sort(key=lambda each: each["kind"] not in _APPLIED_FIRST)
        found.sort(key=lambda each: each["kind"] != "Namespace")
        lab.create_objects(found)
        kubeconfig = self.directory.kubeconfig
        kubeconfig.parent.mkdir(mode=0o700, exist_ok=True)
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_bytes(lab.server.admin_kubeconfig.read_bytes())
        self._controllers.start_replica()

    def list_rendered(self) -> set[str]:
        """Return the names of the configs that the cluster rendered for the pool."""
        names = {str(each["metadata"]["name"]) for each in self._list(MACHINECONFIGS)}
        return {each for each in names if each.startswith(f"rendered-{MASTER}-")}

    def list_installed_configs(self) -> set[str]:
        """Return the names of the configs that the bootstrap host rendered for the pool."""
        found = self.directory.machine_configs.glob(f"rendered-{MASTER}-*.yaml")
        return {each.stem for each in found}

    def list_builds(self) -> list[str]:
        """Return the results of the pool's builds in the cluster."""
        return [
            str(condition["reason"])
            for each in self._list(MACHINEOSBUILDS)
            if each["metadata"]["name"].startswith(f"{MASTER}-")
            for condition in each.get("status", {}).get("conditions", ())
            if (condition["type"], condition["status"]) == ("Succeeded", "True")
        ]

    def is_handed_over(self) -> bool:
        found: Json = self._site.lab.client.get(MACHINEOSCONFIGS, MASTER)
        conditions = found.get("status", {}).get("conditions", ())
        return ("ImageHandedOver", "True") in {(x["type"], x["status"]) for x in conditions}

    def is_reported(self, image: str) -> bool:
        """Return whether the Node has the image and the config of the installation."""
        notes = self._site.notes()
        return (
            notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_OS_IMAGE) == image
            and {notes.get(key.CURRENT_CONFIG)} == self.list_installed_configs()
        )

    # Inputs

    def _write_inputs(self) -> None:
        manifests = self.directory.manifests
        manifests.mkdir(mode=0o700, parents=True)
        settings = _SETTINGS.format(self.push_spec)
        if self._containerfile:
            (self.directory.root / _CONTAINERFILE).write_text(self._containerfile)
            settings += f"    containerFile: {_CONTAINERFILE}\n"
        (self.directory.root / "treenail-install.yaml").write_text(settings)
        base = f"{registry.LOCAL}/os/node@{self._site.first.digest}"
        login = with_files({_KUBELET_LOGIN: registry.pull_secret()})
        login["config"]["storage"]["files"][0]["mode"] = 0o600  # type: ignore[index]
        for name, spec in (
            (f"00-{MASTER}", {"osImageURL": base}),
            (f"01-{MASTER}-login", login),
            (f"50-{MASTER}-files", with_files({FILE: CONTENT, STATE_FILE: STATE})),
            ("00-worker", {"osImageURL": base}),
        ):
            pool = MASTER if MASTER in name else "worker"
            document = build_rendered_config(name, spec)
            document["metadata"] = {"name": name, "labels": {_ROLE: pool}}
            self._write_manifest(name, document)
        self._write_manifest("controller-config", self._make_controller_config())
        path = self._place / "login.json"
        path.touch(mode=0o600)
        path.write_text(registry.pull_secret())

    def _make_controller_config(self) -> Json:
        pem = base64.b64encode(self._certificate.read_bytes()).decode()
        # ConfigMap keys allow no colon, so the MCO writes host..port.
        bundle = {"file": registry.LOCAL.replace(":", ".."), "data": pem}
        login = base64.b64encode(registry.pull_secret().encode()).decode()
        return {
            "apiVersion": CONTROLLERCONFIGS.api_version,
            "kind": CONTROLLERCONFIGS.kind,
            "metadata": {"name": "machine-config-controller"},
            "spec": {
                "imageRegistryBundleUserData": [bundle],
                "internalRegistryPullSecret": login,
            },
        }

    def _write_manifest(self, name: str, document: Json) -> None:
        path = self.directory.manifests / f"{name}.yaml"
        path.write_text(documents.dump_document(document))

    # Processes

    def _command(self, verb: str, *arguments: str) -> tuple[str, ...]:
        directory = ("--dir", str(self.directory.root))
        return (*CONTROLLER_COMMAND, "install", verb, *directory, *arguments)

    def _wait(self, reached: Callable[[], object], what: str) -> None:
        def check() -> object:
            if self._find_exit_code() is not None:
                raise ToolError(f"install bootstrap ended: {self.log.read_text()[-2000:]}")
            return reached()

        self._site.wait(check, what, _BUILD_LIMIT_S)

    def _find_exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def _read_status(self) -> Json:
        try:
            found: Json = json.loads(self.directory.status.read_text())
        except FileNotFoundError:
            return {}
        return found

    def _list(self, resource: Resource) -> list[Json]:
        return list(self._site.lab.client.list(resource).items)


def _find_free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])
