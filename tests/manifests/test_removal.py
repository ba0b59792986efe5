"""The plan of ``uninstall``, and the label of every object that treenail creates."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import granted_verbs
from treenail.api import annotations as key
from treenail.api.component_names import PART_OF_LABELS
from treenail.api.object_meta import ObjectMeta, OwnerReference
from treenail.controllers.handover import adoption, handover_objects, image_mode, image_mode_field
from treenail.kube import resources
from treenail.kube.resources import Resource
from treenail.manifests import permissions, removal
from treenail.manifests.removal import FoundObject
from treenail.provisioning.tokens import bootstrap_tokens
from treenail.provisioning.tokens.tokens import make_token

AGENT = Path(removal.__file__).parents[1]
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role", namespaced=True)
POLICIES = Resource(
    "admissionregistration.k8s.io", "v1", "validatingadmissionpolicies",
    "ValidatingAdmissionPolicy", namespaced=False,
)  # fmt: skip
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", namespaced=True)
BINDINGS = Resource(
    "rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", namespaced=True
)
SERVICEACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", namespaced=True)
ENDPOINTS = Resource("", "v1", "endpoints", "Endpoints", namespaced=True)

# Each call of Client.create, and where the label is tested. A new call needs a row.
CREATED = {
    # Built by functions that this module or tests/controllers/test_builds_on_a_cluster.py calls.
    "controllers/handover/controller.py": ["CONFIGMAPS", "resource"],
    "controllers/image_build/job_builder.py": ["resource", "JOBS"],
    "controllers/image_build/writer.py": ["MACHINEOSBUILDS"],
    "provisioning/tokens/bootstrap_tokens.py": ["SECRETS"],
    # They stay: machines boot from these Secrets, and their owners are those of HyperShift.
    "controllers/hosted/owning/controller.py": ["resource", "SECRETS"],
    # In a hosted cluster, where the end of an update deletes them:
    # tests/controllers/hosted/in_place/test_upgrade_objects.py
    "controllers/hosted/in_place/upgrade_site.py": ["resource", "resource", "PODS"],
    # tests/controllers/hosted/conduct/test_rules.py
    "controllers/hosted/rollout_store.py": ["CONFIGMAPS"],
    # tests/controllers/test_run.py
    "kube/lease.py": ["LEASES"],
    # tests/cli/controller/test_uninstall.py
    "controllers/rollout/machineconfignodes.py": ["MACHINECONFIGNODES"],
    "provisioning/machines/request_log.py": ["CONFIGMAPS"],
    "provisioning/tokens/token_store.py": ["SECRETS"],
    # tests/installer: the namespace of the manifests, and a Secret that this module builds.
    "installer/bootstrap/cluster_steps.py": ["NAMESPACES", "SECRETS"],
    # They stay: Nodes name rendered configs, which contain generated ones, and Events expire.
    "controllers/generate/controller.py": ["MACHINECONFIGS"],
    "controllers/render/controller.py": ["MACHINECONFIGS"],
    "kube/event_recorder.py": ["EVENTS"],
}


def find(
    resource: Resource, name: str, namespace: str = "", *, labels: dict[str, str] | None = None,
    **meta: Any,
) -> FoundObject:  # fmt: skip
    labels = {**PART_OF_LABELS, **(labels or {})}
    meta = {"uid": f"{resource.kind}-{namespace}-{name}", **meta}
    return FoundObject(resource, ObjectMeta(name, namespace, labels=labels, **meta))


def plan(*found: FoundObject, **contents: list[FoundObject] | None) -> tuple[list[str], list[str]]:
    """Titles of what goes, and what stays."""
    deleted, kept = removal.plan_removal(found, contents, crd_keeper="")
    return [item.title for item in deleted], kept


def is_written(resource: Resource, name: str, namespace: str = "", **meta: Any) -> bool:
    return removal.is_written(find(resource, name, namespace, **meta), removal.list_written_names())


def iter_created() -> Iterator[tuple[str, str]]:
    """Module and resource of each call of a client's ``create``."""
    for path in sorted(AGENT.rglob("*.py")):
        if "client.create(" not in (text := path.read_text("utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("client.create"):
                name = ast.unparse(node.args[0]).rpartition(".")[2]
                yield str(path.relative_to(AGENT)), name


def test_every_manifest_has_the_label() -> None:
    unlabelled = [
        document
        for document in removal.build_all_manifests()
        if not PART_OF_LABELS.items() <= document["metadata"].get("labels", {}).items()  # type: ignore[attr-defined]  # a dict
    ]
    assert unlabelled == []


def test_every_object_of_the_manifests_is_taken_for_ours() -> None:
    names = removal.list_written_names()
    for document in removal.build_all_manifests():
        group, _, version = str(document["apiVersion"]).rpartition("/")
        metadata: Any = document["metadata"]
        kind = Resource(group, version, "things", str(document["kind"]), namespaced=True)
        found = FoundObject(kind, ObjectMeta(metadata["name"], labels=metadata["labels"]))
        assert removal.is_written(found, names), found.title


def test_every_created_object_is_known_here() -> None:
    created: dict[str, list[str]] = {}
    for module, name in iter_created():
        created.setdefault(module, []).append(name)
    assert created == CREATED


def test_controllers_may_create_what_they_create() -> None:
    rules = [
        rule
        for document in removal.build_all_manifests()
        for rule in document.get("rules") or ()  # type: ignore[attr-defined]  # a list
    ]
    granted = set(granted_verbs.iter_granted_verbs(rules))
    group = permissions.GROUP
    for name in ("configmaps", "secrets", "events", "jobs.batch", "leases.coordination.k8s.io",
                 f"machineosbuilds.{group}", f"machineconfignodes.{group}",
                 f"machineconfigs.{group}"):  # fmt: skip
        assert (name, "create") in granted, name


def test_objects_of_controllers_and_installer_have_the_label() -> None:
    _, record = make_token("worker", expires=2e9, uses=1)
    login = {"kind": "Secret", "metadata": {"name": "push"}, "data": {}}
    documents: list[Any] = [
        bootstrap_tokens.build_secret(record, "abcdef", "0" * 16, 2e9),
        adoption.clean_document(login),
        handover_objects.build_handover_secret(handover_objects.Handover(())),
        handover_objects.build_result_configmap(handover_objects.HandoverResult({}, "", "")),
        image_mode_field.build_settings_configmap(image_mode.ImageMode(is_enabled=True)),
    ]
    for document in documents:
        metadata = document["metadata"]
        resource = resources.SECRETS if document["kind"] == "Secret" else resources.CONFIGMAPS
        assert is_written(
            resource,
            metadata["name"],
            metadata.get("namespace", "treenail"),
            labels=metadata["labels"],
            annotations=metadata.get("annotations", {}),
        ), document
        assert PART_OF_LABELS.items() <= metadata["labels"].items()


@pytest.mark.parametrize(
    ("resource", "name", "namespace"),
    [
        (resources.SECRETS, "payroll", "treenail"),
        (resources.SECRETS, "bootstrap-token-abcdef", "shop"),
        (resources.CONFIGMAPS, "treenail-node", "treenail"),
        (DEPLOYMENTS, "treenail-exporter", "monitoring"),
        (resources.NAMESPACES, "kube-system", ""),
        (resources.NAMESPACES, "default", ""),
        (resources.NAMESPACES, "openshift-machine-config-operator", ""),
        (resources.MACHINECONFIGPOOLS, "worker", ""),
    ],
)
def test_label_without_a_name_of_ours_is_not_enough(
    resource: Resource, name: str, namespace: str
) -> None:
    found = find(resource, name, namespace)
    deleted, kept = plan(found)
    assert deleted == []
    assert kept == [f"{found.title}: it has treenail's label, but not a name that treenail uses"]


def test_name_of_ours_without_the_label_is_not_enough() -> None:
    names = removal.list_written_names()
    for resource in (DEPLOYMENTS, resources.LEASES, resources.MACHINEOSBUILDS):
        meta = ObjectMeta("treenail-controller", "shop", labels={key.EPHEMERAL_BUILD_OBJECT: ""})
        assert not removal.is_written(FoundObject(resource, meta), names)
        assert is_written(resource, "treenail-controller", "shop")


@pytest.mark.parametrize(
    ("resource", "meta"),
    [
        (resources.JOBS, {"labels": {key.EPHEMERAL_BUILD_OBJECT: ""}}),
        (resources.CONFIGMAPS, {"labels": {key.EPHEMERAL_BUILD_OBJECT: ""}}),
        (resources.SECRETS, {"labels": {key.EPHEMERAL_BUILD_OBJECT: ""}}),
        (resources.SECRETS, {"annotations": {key.ADOPTED_DATA: "0"}}),
    ],
)
def test_mark_of_an_arbitrary_name_is_needed(resource: Resource, meta: Any) -> None:
    assert is_written(resource, "x", "treenail", **meta)
    assert not is_written(resource, "x", "treenail")


def test_order_is_tokens_workloads_rest_bindings_policies_definitions() -> None:
    found = [
        find(resources.CUSTOMRESOURCEDEFINITIONS, "rolloutpolicies.treenail.io"),
        find(POLICIES, "treenail-node"),
        find(BINDINGS, "treenail-ignition-join", "kube-system"),
        find(resources.NAMESPACES, "treenail"),
        find(resources.SECRETS, "treenail-install-handover", "treenail"),
        find(resources.CONFIGMAPS, "treenail-dashboard", "treenail"),
        find(DEPLOYMENTS, "treenail-controller", "treenail"),
        find(resources.SECRETS, "bootstrap-token-abcdef", "kube-system"),
        find(resources.SECRETS, "treenail-ignition-tokens", "treenail-ignition"),
    ]
    deleted, _ = plan(*found, treenail=found)
    assert deleted == [
        "Secret treenail-ignition/treenail-ignition-tokens",
        "Secret kube-system/bootstrap-token-abcdef",
        "Deployment treenail/treenail-controller",
        "ConfigMap treenail/treenail-dashboard",
        "Secret treenail/treenail-install-handover",
        "RoleBinding kube-system/treenail-ignition-join",
        "Namespace treenail",
        "ValidatingAdmissionPolicy treenail-node",
        "CustomResourceDefinition rolloutpolicies.treenail.io",
    ]


def test_definitions_stay_for_the_given_reason() -> None:
    crd = find(resources.CUSTOMRESOURCEDEFINITIONS, "rolloutpolicies.treenail.io")
    assert removal.plan_removal([crd], {}, crd_keeper="a reason") == (
        [],
        [f"{crd.title} and its objects: a reason"],
    )
    # An administrator applied treenail's definition over that of OpenShift.
    release = {"include.release.openshift.io/self-managed-high-availability": "true"}
    crd = find(
        resources.CUSTOMRESOURCEDEFINITIONS, "images.config.openshift.io", annotations=release
    )
    assert plan(crd) == ([], [f"{crd.title} and its objects: the release of OpenShift has it"])


NAMESPACE = find(resources.NAMESPACES, "treenail")


def find_foreign(name: str, resource: Resource = resources.SECRETS, **meta: Any) -> FoundObject:
    meta = {"uid": f"{resource.kind}-{name}", **meta}
    return FoundObject(resource, ObjectMeta(name, "treenail", **meta))


def test_namespace_with_an_object_of_a_user_stays_and_names_it() -> None:
    own = find(DEPLOYMENTS, "treenail-controller", "treenail")
    content = [own, *(find_foreign(f"key-{number}") for number in range(5))]
    deleted, kept = plan(NAMESPACE, own, treenail=content)
    assert deleted == [own.title]
    (line,) = kept
    assert line == (
        "Namespace treenail: treenail did not create Secret treenail/key-0, Secret "
        "treenail/key-1, Secret treenail/key-2 and 2 more; to delete all of it: kubectl delete "
        "namespace treenail"
    )


def test_namespace_with_unknown_content_stays() -> None:
    deleted, kept = plan(NAMESPACE, treenail=None)
    assert (deleted, "its content is unknown" in kept[0]) == ([], True)
    deleted, kept = plan(NAMESPACE)
    assert deleted == []


@pytest.mark.parametrize(
    "generated",
    [
        find_foreign("kube-root-ca.crt", resources.CONFIGMAPS),
        find_foreign("default", SERVICEACCOUNTS),
        find_foreign("x.17", resources.EVENTS),
        find_foreign("treenail-controller", ENDPOINTS),
        find_foreign("system:deployers", BINDINGS),
        find_foreign(
            "default-token", annotations={"kubernetes.io/service-account.name": "default"}
        ),
    ],
    ids=lambda item: item.title,
)
def test_generated_object_does_not_keep_a_namespace(generated: FoundObject) -> None:
    assert plan(NAMESPACE, treenail=[generated]) == (["Namespace treenail"], [])


@pytest.mark.parametrize(
    "foreign",
    [
        find_foreign("kube-root-ca.crt-2", resources.CONFIGMAPS),
        find_foreign("default-robot", SERVICEACCOUNTS),
        find_foreign("default", ROLES),
        find(resources.SECRETS, "labelled", "treenail"),
    ],
    ids=lambda item: item.title,
)
def test_similar_object_keeps_a_namespace(foreign: FoundObject) -> None:
    assert plan(NAMESPACE, treenail=[foreign])[0] == []


def test_owned_object_goes_or_stays_with_its_owner() -> None:
    own = find(DEPLOYMENTS, "treenail-controller", "treenail")

    def make_owned(uid: str) -> FoundObject:
        owner = OwnerReference("apps/v1", "ReplicaSet", "x", uid)
        return find_foreign("pod", resources.PODS, owner_references=(owner,))

    assert plan(NAMESPACE, own, treenail=[own, make_owned(own.metadata.uid)])[1] == []
    # An owner outside of the namespace stays, and so does what it owns.
    assert plan(NAMESPACE, own, treenail=[own, make_owned("elsewhere")])[0] == [own.title]


def test_namespace_that_is_being_deleted_is_waited_for() -> None:
    deleting = find(resources.NAMESPACES, "treenail", others={"deletionTimestamp": "now"})
    assert plan(deleting, treenail=[find_foreign("key")]) == (["Namespace treenail"], [])
