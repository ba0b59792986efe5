"""Which kinds the API server serves, and what is particular about each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from treenail_lab.apiserver.errors import no_such_path

Storage = tuple[str, str]
Path = tuple[str, ...]

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
METADATA_FIELDS: Mapping[str, Path] = MappingProxyType(
    {"metadata.name": ("metadata", "name"), "metadata.namespace": ("metadata", "namespace")}
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind in one API version.

    ``fields`` are the labels a field selector may use beside name and namespace;
    ``unconditional`` kinds may be PUT without a resourceVersion; ``create_on_update`` kinds are
    created by a PUT; ``generation`` kinds count changes of their spec. ``custom`` kinds have the
    OpenAPI ``schema`` of their definition.
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool
    short_names: tuple[str, ...] = ()
    subresources: frozenset[str] = frozenset()
    fields: Mapping[str, Path] = field(default_factory=dict)
    generation: bool = False
    unconditional: bool = True
    create_on_update: bool = False
    returns_deleted: bool = False
    custom: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def storage(self) -> Storage:
        """Where objects of every version of this kind are kept."""
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        return self.kind.lower()

    def field_path(self, label: str) -> Path | None:
        return METADATA_FIELDS.get(label) or self.fields.get(label)


def _paths(*labels: str) -> Mapping[str, Path]:
    return {label: tuple(label.split(".")) for label in labels}


STATUS = frozenset({"status"})
RBAC = "rbac.authorization.k8s.io"

BUILT_IN: tuple[Kind, ...] = (
    Kind("", "v1", "Namespace", "namespaces", namespaced=False, short_names=("ns",),
         subresources=STATUS, fields=_paths("status.phase")),
    Kind("", "v1", "Node", "nodes", namespaced=False, short_names=("no",), subresources=STATUS,
         fields=_paths("spec.unschedulable")),
    Kind("", "v1", "Pod", "pods", namespaced=True, short_names=("po",),
         subresources=frozenset({"status", "eviction"}), returns_deleted=True,
         fields=_paths("spec.nodeName", "spec.restartPolicy", "spec.schedulerName",
                       "spec.serviceAccountName", "status.phase", "status.podIP",
                       "status.nominatedNodeName")),
    Kind("", "v1", "Event", "events", namespaced=True, short_names=("ev",), create_on_update=True,
         fields=_paths("involvedObject.kind", "involvedObject.namespace", "involvedObject.name",
                       "involvedObject.uid", "involvedObject.apiVersion",
                       "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
                       "reportingComponent", "source.component", "type")),
    Kind("", "v1", "Secret", "secrets", namespaced=True, fields=_paths("type")),
    Kind("", "v1", "ConfigMap", "configmaps", namespaced=True, short_names=("cm",)),
    Kind("", "v1", "ServiceAccount", "serviceaccounts", namespaced=True, short_names=("sa",),
         subresources=frozenset({"token"}), returns_deleted=True),
    Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True,
         short_names=("pdb",), subresources=STATUS, generation=True, unconditional=False),
    Kind("coordination.k8s.io", "v1", "Lease", "leases", namespaced=True, unconditional=False,
         create_on_update=True),
    Kind("batch", "v1", "Job", "jobs", namespaced=True, subresources=STATUS, generation=True,
         fields=_paths("status.successful")),
    Kind("apps", "v1", "DaemonSet", "daemonsets", namespaced=True, short_names=("ds",),
         subresources=STATUS, generation=True),
    Kind("apps", "v1", "Deployment", "deployments", namespaced=True, short_names=("deploy",),
         subresources=STATUS, generation=True),
    Kind("apps", "v1", "ReplicaSet", "replicasets", namespaced=True, short_names=("rs",),
         subresources=STATUS, generation=True),
    Kind(RBAC, "v1", "ClusterRole", "clusterroles", namespaced=False, create_on_update=True),
    Kind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False,
         create_on_update=True),
    Kind(RBAC, "v1", "Role", "roles", namespaced=True, create_on_update=True),
    Kind(RBAC, "v1", "RoleBinding", "rolebindings", namespaced=True, create_on_update=True),
    # Kept and served; what the policies forbid here is nodes.restrict's.
    Kind("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicy",
         "validatingadmissionpolicies", namespaced=False, subresources=STATUS, generation=True),
    Kind("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicyBinding",
         "validatingadmissionpolicybindings", namespaced=False),
    Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions",
         namespaced=False, short_names=("crd", "crds"), subresources=STATUS, generation=True,
         unconditional=False),
)  # fmt: skip


class Kinds:
    """The kinds that are served now: the built-in ones, and those of CustomResourceDefinitions."""

    def __init__(self, built_in: Iterable[Kind] = BUILT_IN) -> None:
        self._by_path = {(kind.group, kind.version, kind.plural): kind for kind in built_in}

    def find(self, group: str, version: str, plural: str) -> Kind:
        """The kind at ``/apis/GROUP/VERSION/PLURAL``; 404 when it is not served."""
        kind = self._by_path.get((group, version, plural))
        if kind is None:
            raise no_such_path()
        return kind

    def of(self, api_version: str, kind: str) -> Kind | None:
        """The kind an owner reference or an object names; None when it is not served."""
        group, _, version = api_version.rpartition("/")
        for known in self._by_path.values():
            if (known.group, known.version, known.kind) == (group, version, kind):
                return known
        return None

    def of_storage(self, storage: Storage) -> Kind | None:
        for known in self._by_path.values():
            if known.storage == storage:
                return known
        return None

    def add(self, kind: Kind) -> None:
        self._by_path[kind.group, kind.version, kind.plural] = kind

    def discard(self, storage: Storage) -> None:
        """Stop serving every version of a kind."""
        self._by_path = {
            path: kind for path, kind in self._by_path.items() if kind.storage != storage
        }

    def __iter__(self) -> Iterator[Kind]:
        return iter(tuple(self._by_path.values()))
