"""Paths in an install directory, which the stages of an installation share."""

from dataclasses import dataclass
from pathlib import Path

INSTALL_CONFIG = "install-config.yaml"
"""Install configuration of the OpenShift installer; may have the field ``imageMode``."""
OWN_INSTALL_CONFIG = "treenail-install.yaml"
"""Configuration of an installation without the OpenShift installer."""


@dataclass(frozen=True, slots=True)
class InstallDirectory:
    """An install directory; computes paths and reads nothing.

    ``machine-pools``, ``machine-configs`` and ``controller-config`` are those of the Machine Config
    Operator's bootstrap (bootstrap.go).
    """

    root: Path

    @property
    def manifests(self) -> Path:
        """Manifests of the user and of the stage ``prepare``."""
        return self.root / "manifests"

    @property
    def openshift(self) -> Path:
        """More manifests, written by the OpenShift installer."""
        return self.root / "openshift"

    @property
    def machine_pools(self) -> Path:
        """Pools with the names of their rendered configs, in spec and status."""
        return self.root / "machine-pools"

    @property
    def machine_configs(self) -> Path:
        """Rendered configs."""
        return self.root / "machine-configs"

    @property
    def controller_config(self) -> Path:
        """The ControllerConfig."""
        return self.root / "controller-config"

    @property
    def private(self) -> Path:
        """Files of treenail itself; only root may read them."""
        return self.root / ".treenail"

    @property
    def state(self) -> Path:
        """Steps of the stage ``bootstrap``, each written before it begins."""
        return self.private / "install.json"

    @property
    def status(self) -> Path:
        """Current state of the installation, for programs that wait."""
        return self.private / "status.json"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the cluster's administrator, as the OpenShift installer writes it."""
        return self.root / "auth" / "kubeconfig"

    @property
    def registry(self) -> Path:
        """Storage, certificate and logins of the registry on the bootstrap host."""
        return self.private / "registry"

    @property
    def registry_address(self) -> Path:
        """``HOST:PORT`` of the registry, from when machines may have it."""
        return self.registry / "address"

    @property
    def ca_certificate(self) -> Path:
        """The CA that signs certificates of the bootstrap host, unless the user names one."""
        return self.private / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """Key of `ca_certificate`."""
        return self.private / "ca.key"

    @property
    def builds(self) -> Path:
        """Working files of builds, and the images that an interrupted one has pulled."""
        return self.private / "builds"

    @property
    def cluster_objects(self) -> Path:
        """Objects that the cluster adopts: MachineOSBuilds and their reports."""
        return self.private / "cluster-objects"

    @property
    def logs(self) -> Path:
        """Logs of the registry, of the config server and of each attempt of a build."""
        return self.private / "logs"

    @property
    def registry_access_log(self) -> Path:
        """Output of the registry's process that machines reach, with a line for each request."""
        return self.logs / "registry-pull.log"

    @property
    def images(self) -> Path:
        """OCI directories of built images, by pool."""
        return self.private / "images"

    def get_build_logs(self, pool: str, attempt: int) -> Path:
        """Return the directory with the Containerfile, output and report of one attempt."""
        return self.logs / "builds" / pool / f"attempt-{attempt}"
