"""The kinds that the API server serves, and how they differ."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from treenail_lab.apiserver.errors import path_not_found_error

StorageKey = tuple[str, str]
JsonPath = tuple[str, ...]

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
METADATA_FIELDS: Mapping[str, JsonPath] = MappingProxyType(
    {"metadata.name": ("metadata", "name"), "metadata.namespace": ("metadata", "namespace")}
)


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """One kind in one API version.

    The booleans are those of Kubernetes' rest strategies: AllowUnconditionalUpdate (a PUT needs no
    resourceVersion), AllowCreateOnUpdate (a PUT creates) and ReturnDeletedObject. ``fields`` are
    the labels that a field selector may use beside name and namespace. ``has_generation`` kinds
    count the changes of their spec. Dependents of ``should_orphan_dependents`` kinds survive a
    deletion that names no propagation policy. ``is_custom`` kinds have the ``schema`` of their
    definition.
    """

    group: str
    version: str
    kind: str
    plural: str
    is_namespaced: bool
    short_names: tuple[str, ...] = ()
    subresources: frozenset[str] = frozenset()
    fields: Mapping[str, JsonPath] = field(default_factory=dict)
    has_generation: bool = False
    can_update_unconditionally: bool = True
    can_create_on_update: bool = False
    should_return_deleted: bool = False
    should_orphan_dependents: bool = False
    is_custom: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def storage(self) -> StorageKey:
        """Return the key under which the store has objects of all versions of this kind."""
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        return self.kind.lower()

    def find_field_path(self, label: str) -> JsonPath | None:
        return METADATA_FIELDS.get(label) or self.fields.get(label)


def _build_paths(*labels: str) -> Mapping[str, JsonPath]:
    return {label: tuple(label.split(".")) for label in labels}


STATUS_SUBRESOURCE = frozenset({"status"})
RBAC = "rbac.authorization.k8s.io"

BUILT_IN: tuple[ResourceKind, ...] = (
    ResourceKind(
        "",
        "v1",
        "Namespace",
        "namespaces",
        is_namespaced=False,
        short_names=("ns",),
        subresources=STATUS_SUBRESOURCE,
        fields=_build_paths("status.phase"),
    ),
    ResourceKind(
        "",
        "v1",
        "Node",
        "nodes",
        is_namespaced=False,
        short_names=("no",),
        subresources=STATUS_SUBRESOURCE,
        fields=_build_paths("spec.unschedulable"),
    ),
    ResourceKind(
        "",
        "v1",
        "Pod",
        "pods",
        is_namespaced=True,
        short_names=("po",),
        subresources=frozenset({"status", "eviction", "log"}),
        should_return_deleted=True,
        fields=_build_paths(
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ),
    ),
    ResourceKind(
        "",
        "v1",
        "Event",
        "events",
        is_namespaced=True,
        short_names=("ev",),
        can_create_on_update=True,
        fields=_build_paths(
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source.component",
            "type",
        ),
    ),
    ResourceKind("", "v1", "Secret", "secrets", is_namespaced=True, fields=_build_paths("type")),
    ResourceKind("", "v1", "ConfigMap", "configmaps", is_namespaced=True, short_names=("cm",)),
    ResourceKind(
        "",
        "v1",
        "ServiceAccount",
        "serviceaccounts",
        is_namespaced=True,
        short_names=("sa",),
        subresources=frozenset({"token"}),
        should_return_deleted=True,
    ),
    # Stored only: the lab has no network of a cluster.
    ResourceKind(
        "",
        "v1",
        "Service",
        "services",
        is_namespaced=True,
        short_names=("svc",),
        subresources=STATUS_SUBRESOURCE,
        should_return_deleted=True,
        can_create_on_update=True,
        fields=_build_paths("spec.clusterIP", "spec.type"),
    ),
    ResourceKind(
        "policy",
        "v1",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        is_namespaced=True,
        short_names=("pdb",),
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
        can_update_unconditionally=False,
    ),
    ResourceKind(
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
        is_namespaced=True,
        short_names=("netpol",),
        has_generation=True,
    ),
    ResourceKind(
        "coordination.k8s.io",
        "v1",
        "Lease",
        "leases",
        is_namespaced=True,
        can_update_unconditionally=False,
        can_create_on_update=True,
    ),
    ResourceKind(
        "certificates.k8s.io",
        "v1",
        "CertificateSigningRequest",
        "certificatesigningrequests",
        is_namespaced=False,
        short_names=("csr",),
        subresources=frozenset({"status", "approval"}),
        fields=_build_paths("spec.signerName"),
    ),
    ResourceKind(
        "batch",
        "v1",
        "Job",
        "jobs",
        is_namespaced=True,
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
        should_orphan_dependents=True,
        fields=_build_paths("status.successful"),
    ),
    ResourceKind(
        "apps",
        "v1",
        "DaemonSet",
        "daemonsets",
        is_namespaced=True,
        short_names=("ds",),
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
    ),
    ResourceKind(
        "apps",
        "v1",
        "Deployment",
        "deployments",
        is_namespaced=True,
        short_names=("deploy",),
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
    ),
    ResourceKind(
        "apps",
        "v1",
        "ReplicaSet",
        "replicasets",
        is_namespaced=True,
        short_names=("rs",),
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
    ),
    ResourceKind(
        RBAC, "v1", "ClusterRole", "clusterroles", is_namespaced=False, can_create_on_update=True
    ),
    ResourceKind(
        RBAC,
        "v1",
        "ClusterRoleBinding",
        "clusterrolebindings",
        is_namespaced=False,
        can_create_on_update=True,
    ),
    ResourceKind(RBAC, "v1", "Role", "roles", is_namespaced=True, can_create_on_update=True),
    ResourceKind(
        RBAC, "v1", "RoleBinding", "rolebindings", is_namespaced=True, can_create_on_update=True
    ),
    # Stored, not evaluated: access.node_authorizer refuses what these policies refuse.
    ResourceKind(
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingAdmissionPolicy",
        "validatingadmissionpolicies",
        is_namespaced=False,
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
    ),
    ResourceKind(
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingAdmissionPolicyBinding",
        "validatingadmissionpolicybindings",
        is_namespaced=False,
    ),
    ResourceKind(
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        is_namespaced=False,
        short_names=("crd", "crds"),
        subresources=STATUS_SUBRESOURCE,
        has_generation=True,
        can_update_unconditionally=False,
    ),
)


class KindRegistry:
    """The served kinds: the built-in ones and those of CustomResourceDefinitions."""

    def __init__(self, built_in: Iterable[ResourceKind] = BUILT_IN) -> None:
        self._by_path = {(kind.group, kind.version, kind.plural): kind for kind in built_in}

    def find_kind(self, group: str, version: str, plural: str) -> ResourceKind:
        """Return the kind at ``/apis/GROUP/VERSION/PLURAL``; raise 404 when it is not served."""
        kind = self._by_path.get((group, version, plural))
        if kind is None:
            raise path_not_found_error()
        return kind

    def find_by_name(self, api_version: str, kind: str) -> ResourceKind | None:
        """Return the kind that an object or owner reference names; None when it is not served."""
        group, _, version = api_version.rpartition("/")
        for known in self._by_path.values():
            if (known.group, known.version, known.kind) == (group, version, kind):
                return known
        return None

    def find_by_storage(self, storage: StorageKey) -> ResourceKind | None:
        for known in self._by_path.values():
            if known.storage == storage:
                return known
        return None

    def add_kind(self, kind: ResourceKind) -> None:
        self._by_path[kind.group, kind.version, kind.plural] = kind

    def discard_kinds(self, storage: StorageKey) -> None:
        """Stop serving every version of a kind."""
        self._by_path = {
            path: kind for path, kind in self._by_path.items() if kind.storage != storage
        }

    def __iter__(self) -> Iterator[ResourceKind]:
        return iter(tuple(self._by_path.values()))
