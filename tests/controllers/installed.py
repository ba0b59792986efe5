"""A cluster that the manifests were applied to, and the controllers with only their account."""

from pathlib import Path

from treenail.clock import SystemClock
from treenail.controllers.install.installation import NAME, InstallOptions, build_documents
from treenail.kube.client import Client, Json, PatchType
from treenail.kube.kubeconfig import read_kubeconfig
from treenail.kube.resources import Resource
from treenail.kube.transport import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer

OPTIONS = InstallOptions()
ACCOUNT = f"system:serviceaccount:{OPTIONS.namespace}:{NAME}"

Granted = frozenset[tuple[str, str]]


def apply(server: LabServer, found: list[Json]) -> None:
    """Apply documents one after the other, as ``kubectl apply --server-side`` does."""
    transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock())
    client = Client(transport)
    for document in found:
        metadata = document["metadata"]
        assert isinstance(metadata, dict)
        client.patch(
            resource_of(server, document),
            str(metadata["name"]),
            document,
            PatchType.APPLY,
            namespace=str(metadata.get("namespace", "")),
        )
    transport.close()


def resource_of(server: LabServer, document: Json) -> Resource:
    """Where documents of this kind live."""
    kind = server.call_api(
        lambda api: api.kinds.find_by_name(str(document["apiVersion"]), str(document["kind"]))
    )
    assert kind is not None, f"{document['kind']} is not served"
    return Resource(kind.group, kind.version, kind.plural, kind.kind, namespaced=kind.is_namespaced)


def account_kubeconfig(server: LabServer) -> Path:
    """A kubeconfig with the token of the controllers' service account."""
    return server.write_account_kubeconfig(OPTIONS.namespace, NAME)


def used(server: LabServer) -> Granted:
    """Resource (without its group) and verb of all that the account asked for."""
    counts = server.call_api(lambda api: api.requests.count_by_user())
    return frozenset((resource, verb) for user, verb, resource in counts if user == ACCOUNT)


def denied(server: LabServer) -> Granted:
    """Of that, what was refused for want of a permission."""
    latest = server.call_api(lambda api: api.requests.list_latest())
    return frozenset(
        (entry.resource, entry.verb)
        for entry in latest
        if entry.user == ACCOUNT and entry.code == 403
    )


def without(resource: str, verb: str) -> list[Json]:
    """The manifests, with one permission of the controllers left out."""
    found = build_documents(OPTIONS)
    for document in found:
        metadata, rules = document["metadata"], document.get("rules")
        if not (isinstance(rules, list) and isinstance(metadata, dict)):
            continue
        if not str(metadata["name"]).startswith(NAME):
            continue
        for rule in rules:
            if resource in rule["resources"]:
                rule["verbs"] = [each for each in rule["verbs"] if each != verb]
    return found
