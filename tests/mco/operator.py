"""Objects that the MCO's operator creates, and the machine-config-controller (MCC).

The operator itself does not run: it needs the images of a release.
"""

import base64
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.contract.client import Cluster
from tests.mco import programs
from tests.waiting import wait_until
from treenail_lab.lifetime.owner import owner

Json = dict[str, Any]

NAMESPACE = "openshift-machine-config-operator"
VERSION = "5.0.0"
GROUP = "machineconfiguration.openshift.io"
MCO = f"/apis/{GROUP}/v1"
CONFIG = "/apis/config.openshift.io/v1"
OPERATOR = "/apis/operator.openshift.io/v1"
ROLE = f"{GROUP}/role"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POLICY = f"{OPERATOR}/machineconfigurations/cluster"
CONTROLLER_CONFIG = f"{MCO}/controllerconfigs/machine-config-controller"

_NAMESPACES = (
    NAMESPACE,
    "openshift-config",
    "openshift-config-managed",
    "openshift-machine-api",
    "openshift-kube-apiserver-operator",
    "kube-system",
)
_KINDS = frozenset(
    {
        f"{plural}.{GROUP}"
        for plural in (
            "containerruntimeconfigs", "controllerconfigs", "internalreleaseimages",
            "kubeletconfigs", "machineconfignodes", "machineconfigpools", "machineconfigs",
            "machineosbuilds", "machineosconfigs", "osimagestreams", "pinnedimagesets",
        )
    }
    | {
        f"{plural}.config.openshift.io"
        for plural in (
            "apiservers", "clusterimagepolicies", "clusterversions", "featuregates",
            "imagedigestmirrorsets", "imagepolicies", "images", "imagetagmirrorsets",
            "infrastructures", "nodes", "schedulers",
        )
    }
    | {
        "imagecontentsourcepolicies.operator.openshift.io",
        "machineconfigurations.operator.openshift.io",
    }
)  # fmt: skip
_FEATURE_SET = "release.openshift.io/feature-set"
_TOPOLOGY = "include.release.openshift.io/self-managed-high-availability"
# The gates of the feature set whose kinds are installed.
_ENABLED_FEATURES = ("IrreconcilableMachineConfig",)
_DISABLED_FEATURES = (
    "AdditionalStorageConfig", "BootImageSkewEnforcement", "CRIOCredentialProviderConfig",
    "ConfigurablePKI", "ImageModeStatusReporting", "ManagedBootImagesCPMS", "OSStreams",
    "SigstoreImageVerification",
)  # fmt: skip
BASE_FILE, BASE_TEXT = "/etc/treenail-test/base", "base\n"
"""The file of the template, which a new machine has before its first boot."""
_TEMPLATE = f"""\
mode: 0644
path: "{BASE_FILE}"
contents:
  inline: |
    {BASE_TEXT}"""
_LIMIT_S = 60.0


def install_kinds(cluster: Cluster, directory: Path) -> None:
    """Create the CustomResourceDefinitions of the default feature set."""
    found = {each["metadata"]["name"]: each for each in _read_kinds(directory)}
    assert found.keys() >= _KINDS, (
        f"{directory} lacks {sorted(_KINDS - found.keys())}: expected the tree "
        "vendor/github.com/openshift/api of the MCO, with a directory for v1 and one for v1alpha1"
    )
    for document in found.values():
        cluster.post(DEFINITIONS, document).ok()
    for document in found.values():
        path = _build_path(document)
        wait_until(lambda path=path: cluster.get(path).code == 200, limit_s=_LIMIT_S)


def _read_kinds(directory: Path) -> Iterator[Json]:
    for file in sorted(directory.rglob("*.crd.yaml")):
        document = yaml.load(file.read_text("utf-8"), Loader=yaml.CSafeLoader)
        metadata = document["metadata"]
        notes = metadata.get("annotations") or {}
        features = str(notes.get(_FEATURE_SET, "Default")).split(",")
        versions = [each["name"] for each in document["spec"]["versions"]]
        if (
            metadata["name"] in _KINDS
            and "Default" in features
            and notes.get(_TOPOLOGY, "true") == "true"
            and ("v1" in versions or "imagecontentsourcepolicies" in metadata["name"])
        ):
            yield document


def parse_version(text: str) -> str:
    """Return the version in the output of ``machine-config-controller version``."""
    match = re.search(r"(\S+)-([0-9a-f]{7,40})\s*$", text)
    # Without both the MCC never accepts the ControllerConfig, and all tests wait for their limit.
    assert match, (
        f"expected VERSION-HASH at the end of machine-config-controller version, found {text!r}: "
        "build it with -ldflags -X PACKAGE/pkg/version.Raw=VERSION -X PACKAGE/pkg/version.Hash=HASH"
    )
    return match[1]


def _build_path(document: Json) -> str:
    spec = document["spec"]
    served = next(each["name"] for each in spec["versions"] if each["served"])
    return f"/apis/{spec['group']}/{served}/{spec['names']['plural']}"


def create_objects(
    cluster: Cluster, version: str, authority: bytes, features: Iterable[str] = ()
) -> None:
    """Create what the MCC reads; ``version`` is that of its build, ``authority`` the CA in PEM.

    ``features`` are enabled beside those of the feature set.
    """
    enabled = {*_ENABLED_FEATURES, *features}
    for name in _NAMESPACES:
        answer = cluster.post("/api/v1/namespaces", {"metadata": {"name": name}})
        assert answer.code in {201, 409}, answer.body
    gates = {
        "version": VERSION,
        "enabled": [{"name": name} for name in sorted(enabled)],
        "disabled": [{"name": name} for name in _DISABLED_FEATURES if name not in enabled],
    }
    _create(cluster, f"{CONFIG}/featuregates", "FeatureGate", "cluster", {},
            {"featureGates": [gates]})  # fmt: skip
    _create(cluster, f"{CONFIG}/infrastructures", "Infrastructure", "cluster", {}, _INFRASTRUCTURE)
    _create(cluster, f"{CONFIG}/schedulers", "Scheduler", "cluster", {"mastersSchedulable": False})
    _create(cluster, f"{CONFIG}/apiservers", "APIServer", "cluster", {})
    _create(
        cluster,
        f"{OPERATOR}/machineconfigurations",
        "MachineConfiguration",
        "cluster",
        {"managementState": "Managed"},
    )
    write_policy_status(cluster, [])
    encoded = base64.b64encode(b'{"auths": {}}').decode()
    secret = {
        "metadata": {"name": "pull-secret"},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": encoded},
    }
    cluster.post("/api/v1/namespaces/openshift-config/secrets", secret).ok()
    cluster.post(
        f"{MCO}/controllerconfigs",
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "ControllerConfig",
            "metadata": {
                "name": "machine-config-controller",
                "annotations": {f"{GROUP}/generated-by-version": version},
            },
            "spec": build_controller_config(authority),
        },
    ).ok()


def _create(  # each is a part of an object
    cluster: Cluster, path: str, kind: str, name: str, spec: Json, status: Json | None = None
) -> None:
    group_version = path.removeprefix("/apis/").rpartition("/")[0]
    document = {
        "apiVersion": group_version,
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }
    cluster.post(path, document).ok()
    if status is not None:
        cluster.patch(f"{path}/{name}/status", {"status": status}).ok()


def write_policy_status(cluster: Cluster, files: list[Json]) -> None:
    """Merge the node disruption policy into its status; no node updates before."""
    generation = cluster.get(POLICY).ok()["metadata"]["generation"]
    ssh = {"actions": [{"type": "None"}]}
    policies = {"clusterPolicies": {"files": files, "units": [], "sshkey": ssh}}
    status = {"nodeDisruptionPolicyStatus": policies, "observedGeneration": generation}
    cluster.patch(f"{POLICY}/status", {"status": status}).ok()


_INFRASTRUCTURE: Json = {
    "infrastructureName": "lab",
    "apiServerURL": "https://api.lab.example:6443",
    "apiServerInternalURI": "https://api-int.lab.example:6443",
    "controlPlaneTopology": "HighlyAvailable",
    "infrastructureTopology": "HighlyAvailable",
    "platform": "None",
    "platformStatus": {"type": "None"},
}


def build_controller_config(authority: bytes, **changes: Any) -> Json:
    """Build the spec of the ControllerConfig of a cluster without a cloud."""
    encoded = base64.b64encode(authority).decode()
    return {
        "additionalTrustBundle": None,
        "baseOSContainerImage": "",
        "cloudProviderCAData": None,
        "cloudProviderConfig": "",
        "clusterDNSIP": "10.0.0.10",
        "dns": {
            "apiVersion": "config.openshift.io/v1",
            "kind": "DNS",
            "metadata": {"name": "cluster"},
            "spec": {"baseDomain": "lab.example"},
            "status": {},
        },
        "images": {},
        "infra": {
            "apiVersion": "config.openshift.io/v1",
            "kind": "Infrastructure",
            "metadata": {"name": "cluster"},
            "spec": {"cloudConfig": {"name": ""}},
            "status": _INFRASTRUCTURE,
        },
        "ipFamilies": "IPv4",
        "kubeAPIServerServingCAData": encoded,
        "network": None,
        "proxy": None,
        "pullSecret": {"name": "pull-secret", "namespace": "openshift-config"},
        "releaseImage": "registry.lab.example/release@sha256:" + "0" * 64,
        "rootCAData": encoded,
        **changes,
    }


def build_pool(name: str, **spec: Any) -> Json:
    """Build a pool whose nodes have the role's label."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "MachineConfigPool",
        "metadata": {"name": name, "labels": {"test": name}},
        "spec": {
            "machineConfigSelector": {"matchLabels": {ROLE: name}},
            "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{name}": ""}},
            **spec,
        },
    }


def build_config(pool: str, name: str, **spec: Any) -> Json:
    """Build a MachineConfig of a pool."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "MachineConfig",
        "metadata": {"name": name, "labels": {ROLE: pool}},
        "spec": spec,
    }


def build_ignition(**sections: Any) -> Json:
    return {"ignition": {"version": "3.5.0"}, **sections}


def build_file(path: str, text: str, mode: int = 0o644) -> Json:
    """Build a file of an Ignition config."""
    encoded = base64.b64encode(text.encode()).decode()
    return {
        "path": path,
        "mode": mode,
        "overwrite": True,
        "contents": {"source": f"data:;base64,{encoded}"},
    }


class Controller:
    """The real machine-config-controller, with templates of one file."""

    def __init__(self, directory: Path, kubeconfig: Path) -> None:
        self._program = programs.CONTROLLER.read()
        self._directory, self._kubeconfig = directory, kubeconfig
        self.log = directory / "machine-config-controller.log"
        self._process: subprocess.Popen[bytes] | None = None

    def read_version(self) -> str:
        """Return the version of the build, which the ControllerConfig must name."""
        done = subprocess.run([self._program, "version"], check=True, capture_output=True,
                              text=True, timeout=30)  # fmt: skip
        return parse_version(done.stdout)

    def start(self, arguments: Mapping[str, str] | None = None) -> None:
        templates = self._directory / "templates"
        for role in ("worker", "master"):
            place = templates / role / f"00-{role}" / "_base" / "files"
            place.mkdir(parents=True, exist_ok=True)
            (place / "base.yaml").write_text(_TEMPLATE, "utf-8")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "start",
                    f"--kubeconfig={self._kubeconfig}",
                    f"--templates={templates}",
                    f"--resourcelock-namespace={NAMESPACE}",
                    f"--payload-version={VERSION}",
                    "--metrics-listen-address=127.0.0.1:0",
                    "--streams-cache=",
                    "-v=4",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**owner.mark_environment(), "HOME": str(self._directory)},
                start_new_session=True,
            )

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
