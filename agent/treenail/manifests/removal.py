"""Which objects of a cluster treenail created, and the order in which they go. Pure.

An object is treenail's when it has the label, and a kind and a name that the manifests, the
installer or a controller write. Objects of arbitrary names have another mark beside the label.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from treenail.api import annotations as key
from treenail.api import decode, object_meta
from treenail.api.component_names import HOSTED_ROLLOUTS, NAMESPACE, PART_OF_LABELS
from treenail.controllers.handover import handover_objects, image_mode
from treenail.installer.directory import prepared_manifests
from treenail.kube import resources
from treenail.manifests import ignition_server, installation, monitoring, permissions
from treenail.provisioning.tokens import bootstrap_tokens, token_store

SELECTOR = ",".join(f"{name}={text}" for name, text in PART_OF_LABELS.items())
WORKLOAD_STAGE = 2
"""Stage of what may create objects again: tokens go before it, everything else after it."""
_CRD = resources.CUSTOMRESOURCEDEFINITIONS.kind
# Bindings go before the admission policies that restrict their subjects.
_LAST_KINDS = (
    "ServiceAccount", "RoleBinding", "Role", "Namespace", "ClusterRoleBinding", "ClusterRole",
    "ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy", _CRD,
)  # fmt: skip
_ANY_NAME_KINDS = ("MachineConfigNode", "MachineOSBuild")
_BOOTSTRAP_TOKEN = f"Secret {bootstrap_tokens.NAMESPACE}/{bootstrap_tokens.SECRET_PREFIX}"
# Begins of kind and name of what Kubernetes and OpenShift create in every namespace.
_GENERATED = (
    "ConfigMap kube-root-ca.crt ", "ConfigMap openshift-service-ca.crt ", "Endpoints ", "Event ",
    "RoleBinding system:", "ServiceAccount builder ", "ServiceAccount default ",
    "ServiceAccount deployer ",
)  # fmt: skip
_RELEASE = "include.release.openshift.io/"
"""Annotations of the objects that the cluster version operator writes again."""
_ACCOUNT_ANNOTATION = "kubernetes.io/service-account.name"
"""Of a Secret that Kubernetes or OpenShift generated for a ServiceAccount."""

Names = Mapping[tuple[str, str], Collection[str]]
"""Names by API group and kind."""


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object of the cluster, without spec and status."""

    resource: resources.Resource
    metadata: object_meta.ObjectMeta

    @property
    def title(self) -> str:
        """Kind, namespace and name."""
        namespace = f"{self.metadata.namespace}/" if self.metadata.namespace else ""
        return f"{self.resource.kind} {namespace}{self.metadata.name}"

    @property
    def stage(self) -> int:
        """Place in the order of the removal."""
        kind = self.resource.kind
        if kind in _LAST_KINDS:
            return WORKLOAD_STAGE + 2 + _LAST_KINDS.index(kind)
        if kind == "Secret" and self.metadata.name == token_store.TOKEN_SECRET:
            return 0
        if self.title.startswith(_BOOTSTRAP_TOKEN):
            return 1
        return WORKLOAD_STAGE if kind in ("DaemonSet", "Deployment") else WORKLOAD_STAGE + 1


def build_all_manifests() -> list[decode.Json]:
    """Build the manifests of every option, in the default namespaces."""
    options = installation.InstallOptions(
        tuple(permissions.CONTROLLER_VERBS),
        control_planes={NAMESPACE: ""},
        node_pool_namespaces=(NAMESPACE,),
    )
    return [
        *installation.build_documents(options),
        *ignition_server.build_server_documents(options),
        *ignition_server.build_hosted_documents(options),
        *ignition_server.build_settings_access(options),
        *ignition_server.build_approval_access(options),
        *monitoring.build_monitoring(options, ignition_server.NAME),
    ]


@cache
def list_written_names() -> Names:
    """Return the kinds that treenail writes, and the names that do not depend on the cluster."""
    names: dict[tuple[str, str], set[str]] = {
        (resources.LEASES.group, "Lease"): {installation.NAME},
        (resources.JOBS.group, "Job"): set(),
        **{(permissions.GROUP, kind): set() for kind in _ANY_NAME_KINDS},
        ("", "ConfigMap"): {
            HOSTED_ROLLOUTS,
            image_mode.CONFIGMAP,
            handover_objects.RESULT_CONFIGMAP,
        },
        ("", "Secret"): {handover_objects.HANDOVER_SECRET, prepared_manifests.PULL_SECRET,
                         prepared_manifests.PUSH_SECRET},
    }  # fmt: skip
    for document in build_all_manifests():
        group = str(document["apiVersion"]).rpartition("/")[0]
        name = str(resources.get_object(document, "metadata").get("name"))
        names.setdefault((group, str(document["kind"])), set()).add(name)
    return names


def is_written(item: FoundObject, names: Names) -> bool:
    """Return whether treenail created the object."""
    kind, name = item.resource.kind, item.metadata.name
    if not PART_OF_LABELS.items() <= item.metadata.labels.items():
        return False
    if kind == "Namespace":
        # --namespace gives it any name, also that of a namespace of the cluster.
        return name != "default" and not name.startswith(("kube-", "openshift-"))
    if kind in ("ConfigMap", "Job", "Secret") and (
        key.EPHEMERAL_BUILD_OBJECT in item.metadata.labels
        or key.ADOPTED_DATA in item.metadata.annotations
        or item.title.startswith(_BOOTSTRAP_TOKEN)
    ):
        return True
    return kind in _ANY_NAME_KINDS or name in names.get((item.resource.group, kind), ())


def plan_removal(
    found: Iterable[FoundObject],
    contents: Mapping[str, list[FoundObject] | None],
    *,
    crd_keeper: str,
) -> tuple[list[FoundObject], list[str]]:
    """Return the objects to delete, in their order, and a line for each object that stays.

    ``contents`` has all objects of the namespaces that may go; None where they are unknown.
    ``crd_keeper`` says why CustomResourceDefinitions stay; empty if they go.
    """
    names, deleted, kept = list_written_names(), [], []
    for item in sorted(found, key=lambda item: (item.stage, item.title)):
        if not is_written(item, names):
            kept.append(f"{item.title}: it has treenail's label, but not a name that treenail uses")
        elif item.resource.kind == _CRD and (keeper := crd_keeper or find_release(item.metadata)):
            kept.append(f"{item.title} and its objects: {keeper}")
        else:
            deleted.append(item)
    removed = {item.metadata.uid for item in deleted}
    for item in deleted[:]:
        if item.resource.kind != "Namespace" or item.metadata.is_deleting:
            continue
        content = contents.get(item.metadata.name)
        cause = "its content is unknown" if content is None else _find_foreign(content, removed)
        if cause:
            deleted.remove(item)
            kept.append(f"{item.title}: {cause}; to delete all of it: kubectl delete namespace "
                        f"{item.metadata.name}")  # fmt: skip
    return deleted, kept


def find_release(metadata: object_meta.ObjectMeta) -> str:
    """Return why a kind stays that OpenShift had before treenail's manifests were applied."""
    is_released = any(name.startswith(_RELEASE) for name in metadata.annotations)
    return "the release of OpenShift has it" if is_released else ""


def _find_foreign(content: list[FoundObject], removed: Collection[str]) -> str:
    """Name the objects of a namespace that neither treenail nor Kubernetes created there.

    ``removed`` are the UIDs of treenail's objects. What an object owns goes or stays with it.
    """
    owners = {*removed, *(item.metadata.uid for item in content)}
    foreign = [
        item.title
        for item in content
        if item.metadata.uid not in removed
        and not f"{item.resource.kind} {item.metadata.name} ".startswith(_GENERATED)
        and _ACCOUNT_ANNOTATION not in item.metadata.annotations
        and not any(owner.uid in owners for owner in item.metadata.owner_references)
    ]
    more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    return f"treenail did not create {', '.join(foreign[:3])}{more}" if foreign else ""
