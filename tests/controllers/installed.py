"""A cluster with the applied manifests, and the service account of the controllers."""

from pathlib import Path

from treenail.clocks import SystemClock
from treenail.kube.api_client import Client, Json, PatchType
from treenail.kube.resources import Resource
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests.installation import NAME, InstallOptions, build_documents
from treenail_lab.apiserver.serving.server import LabServer

OPTIONS = InstallOptions()
ACCOUNT = f"system:serviceaccount:{OPTIONS.namespace}:{NAME}"

Granted = frozenset[tuple[str, str]]


def apply(server: LabServer, found: list[Json]) -> None:
    """Apply documents in order, as ``kubectl apply --server-side`` does."""
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
    """Return the resource of this kind."""
    kind = server.call_api(
        lambda api: api.kinds.find_by_name(str(document["apiVersion"]), str(document["kind"]))
    )
    assert kind is not None, f"{document['kind']} is not served"
    return Resource(kind.group, kind.version, kind.plural, kind.kind, namespaced=kind.is_namespaced)


def account_kubeconfig(server: LabServer) -> Path:
    """Write a kubeconfig with the token of the controllers' service account."""
    return server.write_account_kubeconfig(OPTIONS.namespace, NAME)


def used(server: LabServer) -> Granted:
    """Return resource (without its group) and verb of all requests of the account."""
    counts = server.call_api(lambda api: api.requests.count_by_user())
    return frozenset((resource, verb) for user, verb, resource in counts if user == ACCOUNT)


def denied(server: LabServer) -> Granted:
    """Return the requests that were rejected as forbidden."""
    latest = server.call_api(lambda api: api.requests.list_latest())
    return frozenset(
        (entry.resource, entry.verb)
        for entry in latest
        if entry.user == ACCOUNT and entry.code == 403
    )


def without(resource: str, verb: str) -> list[Json]:
    """Return the manifests without one permission of the controllers."""
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
