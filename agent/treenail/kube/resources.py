"""API resources that treenail uses, and their URL paths."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

# RFC 3986, 2.3. Almost every name has only these, and quote() is slow.
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]+")


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource: its group (empty for core), version, plural, kind and scope."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its objects: ``v1`` or ``policy/v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def build_path(self, name: str = "", *, namespace: str = "", subresource: str = "") -> str:
        """Build the URL path of the collection, of an object, or of its subresource.

        A namespaced collection without a namespace is that of all namespaces. Raises ValueError
        for a namespaced object without a namespace, a namespace for a cluster-scoped kind, a
        subresource without a name, and the name ``..``.
        """
        self._check_path_arguments(name, namespace, subresource)
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/" + "/".join(
            part if _UNRESERVED.fullmatch(part) else quote(part, safe="") for part in parts
        )

    def _check_path_arguments(self, name: str, namespace: str, subresource: str) -> None:
        if namespace and not self.namespaced:
            raise ValueError(f"{self.plural} have no namespace, found {namespace!r}")
        if name and self.namespaced and not namespace:
            raise ValueError(f"{self.plural} {name!r} needs a namespace")
        if subresource and not name:
            raise ValueError(f"{self.plural}: the subresource {subresource!r} needs a name")
        for part in (name, namespace):
            # kube-apiserver rejects these, too: IsValidPathSegmentName() in apimachinery.
            if part in {".", ".."}:
                raise ValueError(f"{self.plural}: {part!r} is not a name")


def find_changes(found: Mapping[str, object], wanted: Mapping[str, object]) -> dict[str, object]:
    """Return the merge patch that gives an object the wanted fields; empty if it has them."""
    changes: dict[str, object] = {}
    for name, value in wanted.items():
        if isinstance(value, dict):
            if part := find_changes(get_object(found, name), value):
                changes[name] = part
        elif found.get(name) != value:
            changes[name] = value
    return changes


def get_object(document: Mapping[str, object], name: str) -> dict[str, object]:
    """Return the object in a field; an empty one when the field is absent or malformed."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
PODS = Resource("", "v1", "pods", "Pod", namespaced=True)
EVENTS = Resource("", "v1", "events", "Event", namespaced=True)
SECRETS = Resource("", "v1", "secrets", "Secret", namespaced=True)
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap", namespaced=True)

ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role", namespaced=True)
ROLEBINDINGS = Resource(ROLES.group, "v1", "rolebindings", "RoleBinding", namespaced=True)

DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", namespaced=True)
DAEMONSETS = Resource("apps", "v1", "daemonsets", "DaemonSet", namespaced=True)
REPLICASETS = Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True)
JOBS = Resource("batch", "v1", "jobs", "Job", namespaced=True)
CERTIFICATESIGNINGREQUESTS = Resource(
    "certificates.k8s.io",
    "v1",
    "certificatesigningrequests",
    "CertificateSigningRequest",
    namespaced=False,
)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", namespaced=True)
PODDISRUPTIONBUDGETS = Resource(
    "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", namespaced=True
)
CUSTOMRESOURCEDEFINITIONS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)


def _define_mco_resource(plural: str, kind: str) -> Resource:
    return Resource("machineconfiguration.openshift.io", "v1", plural, kind, namespaced=False)


MACHINECONFIGS = _define_mco_resource("machineconfigs", "MachineConfig")
MACHINECONFIGPOOLS = _define_mco_resource("machineconfigpools", "MachineConfigPool")
MACHINECONFIGNODES = _define_mco_resource("machineconfignodes", "MachineConfigNode")
PINNEDIMAGESETS = _define_mco_resource("pinnedimagesets", "PinnedImageSet")
CONTROLLERCONFIGS = _define_mco_resource("controllerconfigs", "ControllerConfig")
MACHINEOSCONFIGS = _define_mco_resource("machineosconfigs", "MachineOSConfig")
MACHINEOSBUILDS = _define_mco_resource("machineosbuilds", "MachineOSBuild")
OSIMAGESTREAMS = _define_mco_resource("osimagestreams", "OSImageStream")
ROLLOUTPOLICIES = Resource(
    "treenail.io", "v1alpha1", "rolloutpolicies", "RolloutPolicy", namespaced=False
)
KUBELETCONFIGS = _define_mco_resource("kubeletconfigs", "KubeletConfig")
CONTAINERRUNTIMECONFIGS = _define_mco_resource("containerruntimeconfigs", "ContainerRuntimeConfig")


def _define_config_resource(plural: str, kind: str, *, namespaced: bool = False) -> Resource:
    return Resource("config.openshift.io", "v1", plural, kind, namespaced)


GENERATOR_SOURCES = (
    KUBELETCONFIGS,
    CONTAINERRUNTIMECONFIGS,
    _define_config_resource("imagedigestmirrorsets", "ImageDigestMirrorSet"),
    _define_config_resource("imagetagmirrorsets", "ImageTagMirrorSet"),
    Resource(
        "operator.openshift.io",
        "v1alpha1",
        "imagecontentsourcepolicies",
        "ImageContentSourcePolicy",
        namespaced=False,
    ),
    _define_config_resource("clusterimagepolicies", "ClusterImagePolicy"),
    _define_config_resource("imagepolicies", "ImagePolicy", namespaced=True),
    _define_config_resource("images", "Image"),
)
"""Kinds that become MachineConfigs."""
MACHINECONFIGURATIONS = Resource(
    "operator.openshift.io",
    "v1",
    "machineconfigurations",
    "MachineConfiguration",
    namespaced=False,
)


def _define_hosted_resource(group: str, version: str, kind: str) -> Resource:
    return Resource(group, version, f"{kind.lower()}s", kind, namespaced=True)


_HYPERSHIFT = ("hypershift.openshift.io", "v1beta1")
NODEPOOLS = _define_hosted_resource(*_HYPERSHIFT, "NodePool")
HOSTEDCLUSTERS = _define_hosted_resource(*_HYPERSHIFT, "HostedCluster")
HOSTEDCONTROLPLANES = _define_hosted_resource(*_HYPERSHIFT, "HostedControlPlane")
# In the preferred version; `discovery.find_served_version` returns that of an API server.
_CLUSTER_API = ("cluster.x-k8s.io", "v1beta2")
MACHINES = _define_hosted_resource(*_CLUSTER_API, "Machine")
MACHINESETS = _define_hosted_resource(*_CLUSTER_API, "MachineSet")
MACHINEDEPLOYMENTS = _define_hosted_resource(*_CLUSTER_API, "MachineDeployment")
MACHINEHEALTHCHECKS = _define_hosted_resource(*_CLUSTER_API, "MachineHealthCheck")
