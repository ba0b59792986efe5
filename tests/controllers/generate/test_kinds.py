"""The kinds that ``manifests --enable generate`` adds, on the lab's API server and a real one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.generated.random_policies import make_key
from tests.fixtures.clusters import REAL
from tests.fixtures.controllers import open_client
from tests.fixtures.objects import make_object
from tests.waiting import wait_until
from treenail.errors import AlreadyExistsError, InvalidError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import CUSTOMRESOURCEDEFINITIONS, GENERATOR_SOURCES, Resource
from treenail.manifests import installation

Json = dict[str, Any]
KINDS = {resource.kind: resource for resource in GENERATOR_SOURCES}
ROOT = {"policyType": "PublicKey", "publicKey": {"keyData": make_key()}}
MIRRORS = [{"source": "a.example.com", "mirrors": ["b.example.com"],
            "mirrorSourcePolicy": "NeverContactSource"}]  # fmt: skip


@pytest.fixture(scope="module", params=["lab", REAL])
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[Client, bool]]:
    """A client of an API server with the kinds, and whether it evaluates rules."""
    path: Path = request.getfixturevalue(f"{request.param}_kubeconfig")
    documents: Any = installation.load_crds("crds/generate")
    with open_client(path) as client:
        for document in documents:
            # Another module may have left the kind, or its deletion may not be complete.
            wait_until(lambda document=document: create_kind(client, document), limit_s=60.0)  # type: ignore[misc]
        for resource in GENERATOR_SOURCES:
            wait_until(lambda resource=resource: is_served(client, resource), limit_s=60.0)  # type: ignore[misc]
        yield client, request.param != "lab"
        for document in documents:
            client.delete(CUSTOMRESOURCEDEFINITIONS, document["metadata"]["name"])


def create_kind(client: Client, document: Json) -> bool:
    """Create a CustomResourceDefinition; False while an earlier one is being deleted."""
    try:
        client.create(CUSTOMRESOURCEDEFINITIONS, document)
    except AlreadyExistsError:
        found = client.find(CUSTOMRESOURCEDEFINITIONS, document["metadata"]["name"])
        return found is not None and "deletionTimestamp" not in found["metadata"]
    return True


def is_served(client: Client, resource: Resource) -> bool:
    try:
        client.list(resource)
    except NotFoundError:
        return False
    return True


def make_policy(**fields: Any) -> Json:
    return {"scopes": ["example.com"], "policy": {"rootOfTrust": ROOT, **fields}}


VALID: list[tuple[str, Json]] = [
    ("KubeletConfig", {"kubeletConfig": {"anything": {"nested": [1]}}, "logLevel": 10,
                       "autoSizingReserved": True, "machineConfigPoolSelector": {
                           "matchExpressions": [{"key": "a", "operator": "Exists"}]},
                       "tlsSecurityProfile": {"type": "Custom", "custom": {
                           "ciphers": ["A"], "minTLSVersion": "VersionTLS12"}}}),
    ("ContainerRuntimeConfig", {"containerRuntimeConfig": {
        "pidsLimit": 2048, "logLevel": "debug", "logSizeMax": "8M", "overlaySize": 8,
        "defaultRuntime": "crun", "additionalImageStores": [{"path": "/a"}]}}),
    ("ImageDigestMirrorSet", {"imageDigestMirrors": MIRRORS}),
    ("ImageTagMirrorSet", {"imageTagMirrors": MIRRORS}),
    ("ImageContentSourcePolicy", {"repositoryDigestMirrors": [
        {"source": "a.example.com", "mirrors": ["b.example.com"]}]}),
    ("ClusterImagePolicy", make_policy(signedIdentity={"matchPolicy": "MatchRepository"})),
    ("ImagePolicy", make_policy(signedIdentity={
        "matchPolicy": "RemapIdentity",
        "remapIdentity": {"prefix": "a.example.com", "signedPrefix": "b.example.com"}})),
    ("Image", {"registrySources": {"allowedRegistries": ["a.example.com"]}, "additionalTrustedCA": {
        "name": "x"}}),
]  # fmt: skip
INVALID: list[tuple[str, Json, str]] = [
    ("KubeletConfig", {"logLevel": 11}, "logLevel"),
    ("KubeletConfig", {"tlsSecurityProfile": {"type": "New"}}, "tlsSecurityProfile"),
    ("ContainerRuntimeConfig", {}, "containerRuntimeConfig"),
    ("ContainerRuntimeConfig", {"containerRuntimeConfig": {"defaultRuntime": "kata"}}, "defaultR"),
    ("ContainerRuntimeConfig", {"containerRuntimeConfig": {"pidsLimit": "1"}}, "pidsLimit"),
    ("ImageDigestMirrorSet", {"imageDigestMirrors": [{}]}, "source"),
    ("ImageTagMirrorSet", {"imageTagMirrors": [{**MIRRORS[0], "mirrorSourcePolicy": "x"}]}, "Poli"),
    ("ImagePolicy", {"scopes": ["example.com"]}, "policy"),
    ("ClusterImagePolicy", {**make_policy(), "scopes": [1]}, "scopes"),
]
BY_RULES: list[tuple[str, Json, str]] = [
    ("Image", {"registrySources": {"allowedRegistries": ["a"], "blockedRegistries": ["b"]}},
     "Only one of blockedRegistries or allowedRegistries"),
    ("ClusterImagePolicy", make_policy(rootOfTrust={"policyType": "PublicKey"}),
     "publicKey is required when policyType is PublicKey"),
    ("ImagePolicy", make_policy(rootOfTrust={**ROOT, "policyType": "PKI"}),
     "pki is required when policyType is PKI"),
    ("ImagePolicy", make_policy(signedIdentity={"matchPolicy": "ExactRepository"}),
     "exactRepository is required"),
]  # fmt: skip


def create(client: Client, kind: str, spec: Json) -> Json:
    resource = KINDS[kind]
    namespace = "default" if resource.namespaced else ""
    metadata = {"namespace": namespace} if namespace else {}
    document = make_object(resource, "tested", spec, **metadata)
    created: Json = client.create(resource, document, namespace=namespace)
    client.delete(resource, "tested", namespace=namespace)
    return created


@pytest.mark.parametrize(("kind", "spec"), VALID)
def test_valid_object_is_stored_unchanged(
    cluster: tuple[Client, bool], kind: str, spec: Json
) -> None:
    assert create(cluster[0], kind, spec)["spec"] == spec


@pytest.mark.parametrize(("kind", "spec", "expected"), INVALID)
def test_invalid_object_is_refused(
    cluster: tuple[Client, bool], kind: str, spec: Json, expected: str
) -> None:
    with pytest.raises(InvalidError, match=expected):
        create(cluster[0], kind, spec)


@pytest.mark.parametrize(("kind", "spec", "expected"), BY_RULES)
def test_object_against_a_rule_is_refused_by_a_real_server(
    cluster: tuple[Client, bool], kind: str, spec: Json, expected: str
) -> None:
    client, has_rules = cluster
    if has_rules:
        with pytest.raises(InvalidError, match=expected):
            create(client, kind, spec)
    else:
        create(client, kind, spec)
