"""A real cluster without nodes: etcd, kube-apiserver and, if named, kube-controller-manager.

The programs come from the variables ETCD, KUBE_APISERVER and KUBE_CONTROLLER_MANAGER. They listen
on loopback, with certificates of their own in a directory of the lab's owner. They end with the
process that started them, however it ends.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.contract.client import Cluster
from tests.waiting import wait_until
from treenail_lab.apiserver.access.certificates import (
    CertificateAuthority,
    CertificateIdentity,
    render_kubeconfig,
    write_private_file,
)
from treenail_lab.lifetime.owner import owner

MASTERS = ("system:masters",)
VARIABLES = ("ETCD", "KUBE_APISERVER", "KUBE_CONTROLLER_MANAGER")
_START_LIMIT_S = 120.0
_END_LIMIT_S = 20.0
_ATTEMPTS = 3
"""A free port may be taken by another process before the server listens on it."""
_IN_USE = "address already in use"


class RealClusterError(Exception):
    """The cluster cannot start; the text says which program failed, and with which words."""


@dataclass(frozen=True, slots=True)
class ClusterPrograms:
    """The programs of a control plane; without the last one, no controller runs."""

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path | None = None


def find_programs(environment: Mapping[str, str]) -> ClusterPrograms:
    """Return the programs that the variables name; raise RealClusterError naming what lacks."""
    found: dict[str, Path] = {}
    for variable in VARIABLES:
        if named := environment.get(variable):
            path = shutil.which(named)
            if path is None:
                raise RealClusterError(f"{variable} is {named}, which is no program")
            found[variable] = Path(path).resolve()
    lacking = [variable for variable in VARIABLES[:2] if variable not in found]
    if lacking:
        raise RealClusterError(f"{' and '.join(lacking)}: not set; set it to the program's path")
    return ClusterPrograms(*(found[variable] for variable in VARIABLES if variable in found))


class RealCluster:
    """Runs while entered. Logs of the programs, which hold no secrets, are in ``logs``."""

    def __init__(
        self, programs: ClusterPrograms, logs: Path | None = None, *, watches_nodes: bool = True
    ) -> None:
        self._programs = programs
        self._watches_nodes = watches_nodes
        self._keeps_logs = logs is not None
        self._logs = logs
        self._exits = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self._directory = self._exits.enter_context(owner.temporary_directory())
            self._logs = self._logs or self._directory
            self._logs.mkdir(parents=True, exist_ok=True)
            self._authority = CertificateAuthority(self._directory)
            self._write_keys()
            self._exits.callback(self.stop)
            self._start_api()
            if self._programs.kube_controller_manager is not None:
                self._start_controllers(self._programs.kube_controller_manager)
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    @property
    def authority(self) -> bytes:
        """The certificate authority in PEM."""
        return self._authority.pem

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self._directory / "admin.kubeconfig"

    def write_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig with a client certificate of this user."""
        path = self._directory / f"{user.replace(':', '-')}.kubeconfig"
        text = render_kubeconfig(
            server=f"https://127.0.0.1:{self.port}",
            authority=self._authority.pem,
            user=user,
            identity=self._authority.make_client_identity(user, groups),
        )
        write_private_file(path, text.encode())
        return path

    def write_node_kubeconfig(self, node: str) -> Path:
        """Write the kubeconfig of a node's kubelet."""
        return self.write_kubeconfig(f"system:node:{node}", ("system:nodes",))

    def stop(self) -> None:
        """End the programs, the API server before its etcd."""
        processes = list(reversed(self._processes.values()))
        self._processes.clear()
        for process in processes:
            process.terminate()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start_api(self) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            etcd_port, peer_port, self.port = find_ports(3)
            self.write_kubeconfig("admin", MASTERS).replace(self.kubeconfig)
            shutil.rmtree(self._directory / "etcd", ignore_errors=True)
            try:
                self._run("etcd", self._programs.etcd, *self._etcd_options(etcd_port, peer_port))
                self._run(
                    "kube-apiserver",
                    self._programs.kube_apiserver,
                    *self._api_options(f"https://127.0.0.1:{etcd_port}"),
                )
                admin = Cluster.of_kubeconfig(self.kubeconfig)
                self._wait("kube-apiserver", partial(answers_readyz, admin))
            except RealClusterError as error:
                self.stop()
                if _IN_USE not in str(error) or attempt == _ATTEMPTS:
                    raise
            else:
                return

    def _start_controllers(self, program: Path) -> None:
        kubeconfig = self.kubeconfig
        self._run(
            "kube-controller-manager",
            program,
            f"--kubeconfig={kubeconfig}",
            # No port: nothing reads its metrics.
            "--secure-port=0",
            f"--service-account-private-key-file={self._directory / 'accounts.key'}",
            f"--root-ca-file={self._authority.file}",
            # Signs the certificates of kubelets that a user approves.
            f"--cluster-signing-cert-file={self._authority.file}",
            f"--cluster-signing-key-file={self._directory / 'ca.key'}",
            "--leader-elect=false",
            # Nodes of tests renew no lease, so they would become unreachable.
            "--controllers=*" + ("" if self._watches_nodes else ",-node-lifecycle-controller"),
        )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        admin = Cluster.of_kubeconfig(kubeconfig)
        self._wait("kube-controller-manager", lambda: admin.get(account).code == 200)

    def _wait(self, name: str, condition: Callable[[], bool]) -> None:
        def is_over() -> bool:
            self._check_alive()
            return condition()

        try:
            wait_until(is_over, limit_s=_START_LIMIT_S)
        except AssertionError:
            why = f"not ready after {_START_LIMIT_S:g} s"
            raise self._explain(name, why) from None

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise self._explain(name, f"it exited with {process.returncode}")

    def _explain(self, name: str, why: str) -> RealClusterError:
        lines = self._log(name).read_text(errors="replace").strip().splitlines() or [""]
        said = next((line for line in lines if _IN_USE in line), lines[-1])[:500]
        text = f"cannot start {name}: {why}: {said}"
        return RealClusterError(text + (f"; read {self._log(name)}" if self._keeps_logs else ""))

    def _log(self, name: str) -> Path:
        return (self._logs or self._directory) / f"{name}.log"

    def _run(self, name: str, program: Path, *options: str) -> None:
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [program, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env={**owner.mark_environment(), "HOME": str(self._directory), "PATH": os.defpath},
                start_new_session=True,
            )

    def _write_keys(self) -> None:
        server = self._authority.make_server_identity()
        self._write_identity("server", server)
        # Proves to etcd that the API server calls; etcd has no other users.
        client = self._authority.make_client_identity("kube-apiserver", ())
        self._write_identity("etcd-client", client)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_private_file(self._directory / "accounts.key", pem)

    def _write_identity(self, name: str, identity: CertificateIdentity) -> None:
        (self._directory / f"{name}.crt").write_bytes(identity.certificate)
        write_private_file(self._directory / f"{name}.key", identity.private_key)

    def _etcd_options(self, port: int, peer_port: int) -> list[str]:
        place, authority = self._directory, self._authority.file
        client, peer = f"https://127.0.0.1:{port}", f"https://127.0.0.1:{peer_port}"
        return [
            f"--data-dir={place / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--client-cert-auth",
            "--peer-client-cert-auth",
            *(f"--{side}trusted-ca-file={authority}" for side in ("", "peer-")),
            *(f"--{side}cert-file={place / 'server.crt'}" for side in ("", "peer-")),
            *(f"--{side}key-file={place / 'server.key'}" for side in ("", "peer-")),
        ]

    def _api_options(self, etcd: str) -> list[str]:
        place = self._directory
        options = [
            f"--etcd-servers={etcd}",
            f"--etcd-cafile={self._authority.file}",
            f"--etcd-certfile={place / 'etcd-client.crt'}",
            f"--etcd-keyfile={place / 'etcd-client.key'}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            # Endpoints cannot have an address of loopback.
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--client-ca-file={self._authority.file}",
            f"--tls-cert-file={place / 'server.crt'}",
            f"--tls-private-key-file={place / 'server.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={place / 'accounts.key'}",
            f"--service-account-signing-key-file={place / 'accounts.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            "--enable-bootstrap-token-auth",
        ]
        if self._programs.kube_controller_manager is None:
            # Nothing makes the service accounts that it would demand of pods.
            options.append("--disable-admission-plugins=ServiceAccount")
        return options


def find_ports(count: int) -> list[int]:
    """Return different ports of loopback that nothing listens on."""
    with ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in found]


def answers_readyz(admin: Cluster) -> bool:
    """Return True if the API server answers, and says that it is ready."""
    try:
        return admin.get("/readyz").code == 200
    except OSError:
        return False
