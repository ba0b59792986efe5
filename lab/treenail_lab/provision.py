"""A machine that joins the lab's cluster with nothing but user data.

``treenail-controller serve`` runs beside the lab with the ServiceAccount of its manifests. The real
Ignition fetches the machine's config from it and writes the machine's root directory. The agent's
first boot then moves the machine to the image of its pool. Its kubelet joins with the bootstrap
kubeconfig of the config: the controller ``approve`` approves its certificate and labels its Node.
"""

import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.errors import HostError
from treenail.kube.api_client import Json
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.manifests.ignition_server import (
    HOSTED_NAME,
    NAME,
    build_approval_access,
    build_hosted_documents,
    build_server_documents,
)
from treenail.manifests.installation import InstallOptions
from treenail.process import stop_process
from treenail_lab.apiserver.access.certificates import CertificateAuthority, write_private_file
from treenail_lab.cluster import POOL, Lab, build_login_ignition
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.demo.pool import build_config
from treenail_lab.images import Image, make_image
from treenail_lab.lifetime.fork_server import LabProcess, run_process
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition
from treenail_lab.machine.ignition.ignition import Ignition
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.ostree.sysroot import SysrootDeployment

STOCK = make_image("os/stock", "40.20250101", 300_000_000)
"""The image that new machines are installed from."""
_ADDRESS = re.compile(r"serving Ignition configs at https://127\.0\.0\.1:(\d+)/")
_WORKLOADS = ("DaemonSet", "Deployment")
_RESULT = "etc/.ignition-result.json"
_POLL_S, _START_TIMEOUT_S, _STOP_TIMEOUT_S = 0.1, 60.0, 30.0


class ConfigServer:
    """The server of Ignition configs, between `start` and `stop`; it requires tokens."""

    def __init__(
        self,
        lab: Lab,
        *,
        certificate: Path | None = None,
        arguments: Sequence[str] = ("--tokens=require",),
        hosted: InstallOptions | None = None,
    ) -> None:
        """``certificate`` has certificate and key, PEM; without it the server gets one here.

        With the options of ``hosted`` it serves hosted clusters.
        """
        self._lab = lab
        self._hosted = hosted
        self._certificate = certificate
        self._arguments = tuple(arguments)
        self._directory = lab.directory / "config-server"
        self._process: subprocess.Popen[bytes] | None = None
        self.log = lab.directory / "config-server.log"
        self.port = 0

    def start(self) -> None:
        """Start the server with the permissions of its manifests; raise `HostError`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        certificate = self._certificate or self._make_certificate()
        name, documents = HOSTED_NAME, build_hosted_documents(self._hosted or InstallOptions())
        if self._hosted is None:
            options = InstallOptions(controllers=("approve",))
            documents = [*build_server_documents(options), *build_approval_access(options)]
            name = NAME
        # The lab runs no pods of a DaemonSet or Deployment.
        self._lab.create_objects(
            document for document in documents if document["kind"] not in _WORKLOADS
        )
        kubeconfig = self._lab.server.write_account_kubeconfig(name, name)
        with self.log.open("wb") as output:
            self._process = LabProcess(
                [
                    *(*CONTROLLER_COMMAND, "serve", "--listen=127.0.0.1:0"),
                    *(f"--certificate={certificate}", f"--key={certificate}"),
                    *(f"--kubeconfig={kubeconfig}", "--metrics=127.0.0.1:0", *self._arguments),
                ],
                env={**os.environ, **owner.mark_environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.port = self._wait_for_port(self._process)

    def stop(self) -> None:
        """Stop the server with SIGTERM."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_TIMEOUT_S)

    def write_authority(self) -> Path:
        """Write the CA of the server's certificate; return its path."""
        authority = self._directory / "authority.pem"
        authority.write_bytes(CertificateAuthority(self._directory).pem)
        return authority

    def create_pointer_config(self, host: str = "localhost") -> bytes:
        """Create an access token; return the pointer config of one machine, with the token.

        The machine reaches this host as ``host``. Raises `HostError`.
        """
        authority = self.write_authority()
        done = run_process(
            [
                *(*CONTROLLER_COMMAND, "token", "create", f"--pool={POOL}", "--output=user-data"),
                *(f"--server=https://{host}:{self.port}", f"--ca={authority}", "--spec=3.1"),
                f"--kubeconfig={self._lab.server.admin_kubeconfig}",
            ],
            env={**os.environ, **owner.mark_environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_START_TIMEOUT_S,
        )
        if done.returncode != 0:
            text = done.stderr.decode("utf-8", "replace").strip()
            raise HostError(f"cannot create an access token: {text}")
        return bytes(done.stdout)

    def _make_certificate(self) -> Path:
        identity = CertificateAuthority(self._directory).make_server_identity()
        certificate = self._directory / "serving.pem"
        write_private_file(certificate, identity.private_key + identity.certificate)
        return certificate

    def _wait_for_port(self, process: "subprocess.Popen[bytes]") -> int:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            match = _ADDRESS.search(self.log.read_text("utf-8", "replace"))
            if match is not None:
                return int(match[1])
            time.sleep(_POLL_S)
        raise HostError(f"cannot start the config server: see {self.log}")


def build_login_config(lab: Lab) -> Json:
    """Return the MachineConfig of the pool with the cluster's pull secret.

    A new machine has no other way to receive it.
    """
    ignition = build_login_ignition(lab.build_pull_secret())
    return build_config(f"01-{POOL}-pull-secret", {"config": ignition})


def is_pool_updated(lab: Lab) -> bool:
    """Return whether a node of the pool has its config: the server then names its image."""
    pool = MachineConfigPool.from_json(lab.client.get(MACHINECONFIGPOOLS, POOL))
    return bool(pool.status.get("updatedMachineCount") and pool.status_configuration.name)


def install_new_machine(
    lab: Lab, name: str, image: Image, server: ConfigServer, user_data: bytes
) -> LabMachine:
    """Install a machine from an image, with user data; its first start runs Ignition.

    `LabMachine.start` raises `HostError` when Ignition fails.
    """
    machine = lab.create_machine(name, image, has_first_boot=True)
    runner = Ignition(lab.directory / name, machine.root, server_port=server.port)
    runner.write_pointer_config(user_data)

    def run_ignition(_booted: SysrootDeployment) -> None:
        if not (machine.root / _RESULT).exists():
            runner.provision()

    machine.on_boot = run_ignition
    return machine


def check_provisioning() -> None:
    """Raise `HostError` unless this host can run Ignition."""
    refusal = ignition.find_refusal()
    if refusal:
        raise HostError(f"cannot provision a machine: {refusal}")


class Newcomer:
    """A machine that `up` provisions when the other nodes have their config, and its server."""

    def __init__(self, lab: Lab, stream: TextIO) -> None:
        """``stream`` gets a line for each step."""
        self._lab = lab
        self._stream = stream
        self._stop_event = threading.Event()
        self._server = ConfigServer(lab)
        self._thread = threading.Thread(target=self._provision, name="lab-newcomer", daemon=True)

    def start(self) -> None:
        """Start the server; the machine follows."""
        self._lab.add_config(build_login_config(self._lab))
        self._lab.add_image(STOCK)
        self._server.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop the server. The lab stops the machine."""
        self._stop_event.set()
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def _provision(self) -> None:
        while not is_pool_updated(self._lab):
            if self._stop_event.wait(_POLL_S):
                return
        name = f"{POOL}-{len(self._lab.plan.nodes)}"
        print(f"# {name}: Ignition fetches its config, see {self._server.log}", file=self._stream)
        try:
            user_data = self._server.create_pointer_config()
            install_new_machine(self._lab, name, STOCK, self._server, user_data).start()
        except HostError as error:
            print(f"# {name}: {error}", file=self._stream, flush=True)
            return
        print(f"# try: kubectl get node {name} --watch", file=self._stream, flush=True)
