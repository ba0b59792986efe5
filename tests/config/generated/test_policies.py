"""Image policies: contents of files, refused objects, and the OS image of nodes."""

import base64
import json
from typing import Any

import pytest

from tests.config.generated.random_policies import (
    make_bundle,
    make_certificate,
    make_image_config,
    make_key,
    make_policy,
)
from tests.mco.operator import build_config, build_file, build_ignition
from treenail.api.machineconfig import MachineConfig
from treenail.config.generated import policies, registries, sources
from treenail.config.image_mirrors import MirrorLocation
from treenail.encoding import yaml11
from treenail.errors import ConfigError

Json = dict[str, Any]

CLUSTER, NAMESPACE = policies.CLUSTER_KIND, policies.NAMESPACE_KIND
OS_IMAGE = f"quay.example/os/node@sha256:{'a' * 64}"
FACTS = sources.ClusterFacts(node_images=(OS_IMAGE,))
ACCEPT, REJECT = {"type": "insecureAcceptAnything"}, {"type": "reject"}
SIGNED = {
    "type": "sigstoreSigned",
    "keyData": make_key(),
    "signedIdentity": {"type": "matchRepoDigestOrExact"},
}
BASE_TEXT = (
    '{ "default": [{"type":"insecureAcceptAnything"}], "transports": {"docker-daemon": {}} }'
)
KEY_ROOT = {"policyType": "PublicKey", "publicKey": {"keyData": make_key()}}
SUBJECT = {"oidcIssuer": "https://issuer.example", "signedEmail": "me@a.example"}
FULCIO = {"fulcioCAData": make_certificate(), "rekorKeyData": make_key(), "fulcioSubject": SUBJECT}
FULCIO_ROOT = {"policyType": "FulcioCAWithRekor", "fulcioCAWithRekor": FULCIO}


def make_pki(**subject: str) -> Json:
    pki = {"caRootsData": make_bundle(2), "pkiCertificateSubject": subject}
    return {"policyType": "PKI", "pki": pki}


def read(*documents: Json) -> list[sources.SourceObject]:
    return [sources.SourceObject.from_json(document) for document in documents]


def generate(
    *documents: Json, base: str | None = BASE_TEXT, known: tuple[registries.Registry, ...] = ()
) -> dict[str, str]:
    files = [] if base is None else [build_file(policies.POLICY_PATH, base)]
    config = build_config("worker", "01", config=build_ignition(storage={"files": files}))
    base_files = sources.BaseFiles([MachineConfig.from_json(config)])
    found = policies.generate_policy_files(read(*documents), base_files, FACTS, known)
    return {file.path: file.contents for file in found}


def check(document: Json, *others: Json, facts: sources.ClusterFacts = FACTS) -> str:
    """Return the error and its remedy; empty when the policy is accepted."""
    source, *rest = read(document, *others)
    try:
        policies.check_policy(source, [source, *rest], facts)
    except ConfigError as error:
        return f"{error}; {error.remedy}"
    return ""


def make_case(root: Json = KEY_ROOT, kind: str = CLUSTER, **policy: Any) -> Json:
    return make_policy(kind, "p", ["a.example/ns"], rootOfTrust=root, **policy)


# The files


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (KEY_ROOT, {"keyData": make_key()}),
        (
            {**KEY_ROOT, "publicKey": {"keyData": make_key(), "rekorKeyData": make_key(1)}},
            {"keyData": make_key(), "rekorPublicKeyData": make_key(1)},
        ),
        (
            FULCIO_ROOT,
            {
                "fulcio": {
                    "caData": make_certificate(),
                    "oidcIssuer": "https://issuer.example",
                    "subjectEmail": "me@a.example",
                },
                "rekorPublicKeyData": make_key(),
            },
        ),
        (
            make_pki(email="me@a.example", hostname="*.b.example"),
            {
                "pki": {
                    "caRootsData": make_bundle(2),
                    "subjectEmail": "me@a.example",
                    "subjectHostname": "*.b.example",
                }
            },
        ),
    ],
    ids=["key", "key and rekor", "fulcio", "pki"],
)
@pytest.mark.parametrize(
    ("identity", "signed"),
    [
        (None, {"type": "matchRepoDigestOrExact"}),
        ({"matchPolicy": "MatchRepoDigestOrExact"}, {"type": "matchRepoDigestOrExact"}),
        ({"matchPolicy": "MatchRepository"}, {"type": "matchRepository"}),
        (
            {"matchPolicy": "ExactRepository", "exactRepository": {"repository": "b.example/x"}},
            {"type": "exactRepository", "dockerRepository": "b.example/x"},
        ),
        (
            {
                "matchPolicy": "RemapIdentity",
                "remapIdentity": {"prefix": "a.example", "signedPrefix": "b.example"},
            },
            {"type": "remapIdentity", "prefix": "a.example", "signedPrefix": "b.example"},
        ),
    ],
)
def test_policy_becomes_a_requirement_in_the_order_of_the_mco(
    root: Json, expected: Json, identity: Json | None, signed: Json
) -> None:
    files = generate(make_case(root, signedIdentity=identity))
    requirement = {"type": "sigstoreSigned", **expected, "signedIdentity": signed}
    transports = {
        "atomic": {"a.example/ns": [requirement]},
        "docker": {"a.example/ns": [requirement]},
        "docker-daemon": {},
    }
    document = {"default": [ACCEPT], "transports": transports}
    assert files[policies.POLICY_PATH] == json.dumps(document, indent=2)


def test_texts_are_escaped_as_by_go_and_base64_is_normalized() -> None:
    key = f"{make_key()[:40]}\n{make_key()[40:]}\n"
    root = {"policyType": "PublicKey", "publicKey": {"keyData": key}}
    fulcio = {**FULCIO, "fulcioSubject": {**SUBJECT, "signedEmail": "<é>&\u2028@a"}}
    other = {**FULCIO_ROOT, "fulcioCAWithRekor": fulcio}
    text = generate(make_case(root), make_case(other))[policies.POLICY_PATH]
    assert f'"keyData": "{make_key()}"' in text
    assert r'"subjectEmail": "\u003cé\u003e\u0026\u2028@a"' in text


def read_scopes(text: str, transport: str = "docker") -> dict[str, list[Json]]:
    scopes: dict[str, list[Json]] = json.loads(text)["transports"][transport]
    return scopes


def test_policies_of_one_scope_are_joined_in_the_order_of_names() -> None:
    other = {"policyType": "PublicKey", "publicKey": {"keyData": make_key(7)}}
    second = make_policy(CLUSTER, "b", ["a.example/ns"], rootOfTrust=other)
    first = make_policy(CLUSTER, "a", ["a.example/ns", "*.b.example", "a.example/1/2/3"])
    text = generate(second, first)[policies.POLICY_PATH]
    keys = [entry["keyData"] for entry in read_scopes(text)["a.example/ns"]]
    assert keys == [make_key(), make_key(7)]
    assert list(read_scopes(text)) == ["*.b.example", "a.example/1/2/3", "a.example/ns"]
    assert list(read_scopes(text, "atomic")) == ["*.b.example", "a.example/ns"]


def test_policies_of_namespaces_add_to_those_of_the_cluster() -> None:
    cluster = make_policy(CLUSTER, "c", ["a.example"])
    one = make_policy(NAMESPACE, "p", ["a.example/x", "b.example"], "n1")
    two = make_policy(NAMESPACE, "p", ["b.example"], "n2")
    files = generate(two, one, cluster)
    assert list(files) == [
        policies.POLICY_PATH,
        policies.ATTACHMENTS_PATH,
        "/etc/crio/policies/n1.json",
        "/etc/crio/policies/n2.json",
    ]
    assert read_scopes(files[policies.POLICY_PATH]) == {"a.example": [SIGNED]}
    expected = {"a.example": [SIGNED], "b.example": [SIGNED]}
    assert read_scopes(files["/etc/crio/policies/n1.json"]) == expected
    (problem,) = policies.list_partial_problems(read(one)[0], read(cluster, one, two))
    assert "found a.example/x, where ClusterImagePolicy c has effect instead" in str(problem)
    assert policies.list_partial_problems(read(two)[0], read(cluster, one)) == ()
    assert check(one, cluster) == ""


def test_policies_of_namespaces_alone_keep_the_bytes_of_the_base() -> None:
    policy = make_policy(NAMESPACE, "p", ["a.example"], "n")
    files = generate(policy)
    assert files[policies.POLICY_PATH] == BASE_TEXT
    assert read_scopes(files["/etc/crio/policies/n.json"]) == {"a.example": [SIGNED]}
    accepting = json.loads(generate(policy, base=None)[policies.POLICY_PATH])
    assert accepting["default"] == [ACCEPT]


def test_scopes_of_an_own_base_stay() -> None:
    base = json.dumps({"default": [REJECT], "transports": {"docker": {"own.example": [ACCEPT]}}})
    files = generate(
        make_policy(CLUSTER, "c", ["a.example"]),
        make_policy(NAMESPACE, "p", ["b.example"], "n"),
        base=base,
    )
    expected = {"a.example": [SIGNED], "own.example": [ACCEPT]}
    assert read_scopes(files[policies.POLICY_PATH]) == expected
    assert json.loads(files[policies.POLICY_PATH])["default"] == [REJECT]
    expected["b.example"] = [SIGNED]
    assert read_scopes(files["/etc/crio/policies/n.json"]) == expected


@pytest.mark.parametrize(
    ("lists", "default", "scopes"),
    [
        ({"allowedRegistries": ["a.example", "b.example"]}, REJECT,
         {"a.example": [ACCEPT], "a.example/ns": [SIGNED], "b.example": [ACCEPT]}),
        ({"allowedRegistries": ["a.example/ns"]}, REJECT, {"a.example/ns": [SIGNED]}),
        ({"blockedRegistries": ["b.example"]}, ACCEPT,
         {"a.example/ns": [SIGNED], "b.example": [REJECT]}),
    ],
)  # fmt: skip
def test_lists_of_the_image_config_become_scopes(lists: Json, default: Json, scopes: Json) -> None:
    text = generate(make_case(), make_image_config(**lists))[policies.POLICY_PATH]
    assert json.loads(text)["default"] == [default]
    assert read_scopes(text) == scopes


def test_image_config_alone_makes_no_file_of_signatures() -> None:
    files = generate(make_image_config(blockedRegistries=["b.example"]))
    assert list(files) == [policies.POLICY_PATH]
    assert generate(make_image_config(insecureRegistries=["b.example"])) == {}
    assert generate() == {}


def mirror(scope: str, *locations: str) -> registries.Registry:
    mirrors = tuple(MirrorLocation(location, pull="digest-only") for location in locations)
    is_wildcard = scope.startswith("*.")
    return registries.Registry(
        scope if is_wildcard else "", "" if is_wildcard else scope, mirrors=mirrors
    )


@pytest.mark.parametrize(
    ("scope", "known", "places"),
    [
        ("a.example/ns", [mirror("a.example", "m.example/p")], ["m.example/p/ns"]),
        ("a.example/ns", [mirror("a.example", "m"), mirror("a.example/ns", "k")], ["k"]),
        ("a.example", [mirror("a.example/ns", "m.example")], ["a.example/ns", "m.example"]),
        ("a.example/ns:v1", [mirror("a.example", "m")], ["a.example/ns", "m/ns"]),
        (
            "a.example:5000",
            [mirror("a.example", "m.example")],
            ["a.example:5000", "m.example:5000"],
        ),
        ("*.example", [mirror("*.example", "m.example")], ["m.example"]),
        ("b.a.example/x", [mirror("*.a.example", "m.example")], ["m.example/x"]),
        ("b.example/x.a.example", [mirror("*.a.example", "m.example")], []),
        ("b.example", [mirror("a.example", "m.example")], []),
        ("a.b.example", [mirror("a.b.example", "k"), mirror("*.b.example", "m")], ["m"]),
        ("a.example/ns2", [mirror("a.example/ns", "m.example")], []),
    ],
)
def test_signatures_are_looked_up_at_mirrors(
    scope: str, known: list[registries.Registry], places: list[str]
) -> None:
    text = generate(make_policy(CLUSTER, "p", [scope]), known=tuple(known))[
        policies.ATTACHMENTS_PATH
    ]
    names = {line.strip().strip("'")[:-1].strip("'") for line in text.splitlines()[1::2]}
    assert names == {scope, *places}


def format_attachments(scopes: list[str]) -> str:
    return yaml11.dump_yaml(
        {"docker": {name: {"use-sigstore-attachments": True} for name in scopes}}
    )


# go-yaml 2.4.0 wrote these.
@pytest.mark.parametrize(
    ("scopes", "keys"),
    [
        (["a.example:5000", "*.a.example"], ["'*.a.example'", "a.example:5000"]),
        (["x.y", "1.2", "1.2e-5"], ['"1.2"', '"1.2e-5"', "x.y"]),
        (["a10.b", "a9.b", "a1-0", "a.b"], ["a.b", "a1-0", "a9.b", "a10.b"]),
        (["a4b", "a41"], ["a41", "a4b"]),
        (["a.100", "a.19", "a.07", "a.007"], ["a.07", "a.007", "a.19", "a.100"]),
        (["a.b", "a.b/" + "c" * 124], ["a.b", "a.b/" + "c" * 124]),
    ],
)
def test_attachments_are_written_as_by_go_yaml(scopes: list[str], keys: list[str]) -> None:
    text = format_attachments(scopes)
    lines = "".join(f"  {key}:\n    use-sigstore-attachments: true\n" for key in keys)
    assert text == f"docker:\n{lines}"


def test_long_scope_is_a_complex_key() -> None:
    scope = "a.b/" + "c" * 125
    expected = f"docker:\n  ? {scope}\n  : use-sigstore-attachments: true\n"
    assert format_attachments([scope]) == expected


# Refused objects


@pytest.mark.parametrize(
    ("scope", "is_valid"),
    [
        ("a.example", True), ("a.example:5000", True), ("localhost", True), ("*.a.example", True),
        ("localhost:5000/a/b_c--d", True), ("a.example/n/i:v1", True),
        (f"a.example/n/i@sha256:{'a' * 64}", True), (f"a.example/{'x' * 502}", True),
        ("a", False), ("a/b", False), ("*", False), ("a.*.example", False),
        ("*.a.example/b", False), ("a.example/", False), ("a.example/B", False),
        ("a.example:latest", False), ("", False),
        (f"a.example/{'x' * 503}", False), ("https://a.example", False), ("a.example/b?", False),
        ("a.example/i:v1", False), (f"a.example/i@sha256:{'a' * 64}", False),
        (f"a.example/n/i:v1@sha256:{'a' * 64}", False), ("a.example/n/m/i:v1", True),
    ],
)  # fmt: skip
def test_scopes_that_readers_refuse_are_refused(scope: str, is_valid: bool) -> None:
    problem = check(make_policy(CLUSTER, "p", [scope]))
    assert ("spec.scopes: expected" in problem) is not is_valid
    assert is_valid or repr(scope)[:60] in problem


def change(value: Any, path: str, new: Any) -> Any:
    """Return a copy with another value at a path of names; None removes the field."""
    name, _, rest = path.partition(".")
    inner = change(value.get(name, {}), rest, new) if rest else new
    others = {key: each for key, each in value.items() if key != name}
    return others if inner is None else {**others, name: inner}


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


PEM = base64.b64decode(make_key()).decode()
KEY_FIELD, CA_FIELD, ROOTS_FIELD = (
    "publicKey.keyData",
    "fulcioCAWithRekor.fulcioCAData",
    "pki.caRootsData",
)


@pytest.mark.parametrize(
    ("root", "path", "value"),
    [
        (KEY_ROOT, KEY_FIELD, None),
        (KEY_ROOT, KEY_FIELD, "not base64!"),
        (KEY_ROOT, KEY_FIELD, encode("no PEM")),
        (KEY_ROOT, KEY_FIELD, encode(PEM.replace("M", "!", 1))),
        (KEY_ROOT, KEY_FIELD, encode(PEM.replace("PUBLIC", "PRIVATE"))),
        (KEY_ROOT, KEY_FIELD, encode(f"x{PEM}")),
        (KEY_ROOT, KEY_FIELD, encode(f"{PEM}\n")),
        (KEY_ROOT, KEY_FIELD, encode(PEM[:-40] + PEM[-36:])),
        (KEY_ROOT, KEY_FIELD, encode(PEM[:60])),
        (KEY_ROOT, KEY_FIELD, encode("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----")),
        (KEY_ROOT, KEY_FIELD, encode(PEM.replace("==", "==!"))),
        (KEY_ROOT, KEY_FIELD, make_certificate()),
        (KEY_ROOT, KEY_FIELD, encode(PEM * 40)),
        (KEY_ROOT, "publicKey.rekorKeyData", encode("no PEM")),
        (FULCIO_ROOT, CA_FIELD, make_key()),
        (FULCIO_ROOT, CA_FIELD, encode(PEM.replace("PUBLIC KEY", "CERTIFICATE"))),
        (FULCIO_ROOT, "fulcioCAWithRekor.rekorKeyData", None),
        (FULCIO_ROOT, "fulcioCAWithRekor.fulcioSubject.oidcIssuer", None),
        (FULCIO_ROOT, "fulcioCAWithRekor.fulcioSubject.signedEmail", ""),
        (make_pki(email="a@b"), ROOTS_FIELD, make_key()),
        (make_pki(email="a@b"), "pki.caIntermediatesData", encode("no PEM")),
        (make_pki(), "pki.pkiCertificateSubject", {}),
        (KEY_ROOT, "policyType", "GPG"),
        (KEY_ROOT, "policyType", "PKI"),
    ],
)  # fmt: skip
def test_wrong_root_of_trust_is_refused_with_its_field(root: Json, path: str, value: Any) -> None:
    assert check(make_case(root)) == "" or path == "pki.pkiCertificateSubject"
    problem = check(make_case(change(root, path, value)))
    expected = "pki.caRootsData" if value == "PKI" else path
    assert problem.startswith(f"spec.policy.rootOfTrust.{expected}: expected")


@pytest.mark.parametrize(
    ("kind", "member", "name", "text"),
    [
        ("ExactRepository", "exactRepository", "repository", "A.example"),
        ("ExactRepository", "exactRepository", "repository", "a.example/x:v1"),
        ("ExactRepository", "exactRepository", "repository", "a.example:5000"),
        ("ExactRepository", "exactRepository", "repository", f"a.example/{'x' * 230}"),
        ("ExactRepository", "exactRepository", "repository", ""),
        ("RemapIdentity", "remapIdentity", "prefix", "x"),
        ("RemapIdentity", "remapIdentity", "signedPrefix", "*.a.example"),
    ],
)
def test_wrong_identity_is_refused_with_its_field(
    kind: str, member: str, name: str, text: str
) -> None:
    names = {"prefix": "a.example", "signedPrefix": "b.example", "repository": "a.example/x"}
    identity = {"matchPolicy": kind, member: names}
    assert check(make_case(signedIdentity=identity)) == ""
    identity[member] = {**names, name: text}
    problem = check(make_case(signedIdentity=identity))
    assert problem.startswith(f"spec.policy.signedIdentity.{member}.{name}: expected")


def test_too_many_scopes_and_scopes_twice_are_refused() -> None:
    many = [f"a.example/n{number}" for number in range(257)]
    assert check(make_policy(CLUSTER, "p", many[1:])) == ""
    assert "found 257" in check(make_policy(CLUSTER, "p", many))
    assert "none twice, found 2" in check(make_policy(CLUSTER, "p", ["a.example"] * 2))


@pytest.mark.parametrize("kind", [CLUSTER, NAMESPACE])
@pytest.mark.parametrize(
    ("lists", "name"),
    [
        ({"blockedRegistries": ["a.example"]}, "blocked"),
        ({"allowedRegistries": ["b.example", "a.example/ns/x"]}, "allowed"),
        ({"allowedRegistries": ["*.example"]}, ""),
        ({"blockedRegistries": ["a.example/ns/x"]}, ""),
    ],
)
def test_scope_against_the_image_config_is_refused(kind: str, lists: Json, name: str) -> None:
    problem = check(make_case(kind=kind), make_image_config(**lists))
    assert (
        problem.startswith(f"spec.scopes: expected scopes that the {name}") if name else not problem
    )


def test_scope_without_effect_may_contradict_the_image_config() -> None:
    lists = make_image_config(allowedRegistries=["*.example"])
    policy = make_policy(NAMESPACE, "p", ["b.other"], "n")
    assert "allowedRegistries" in check(policy, lists)
    assert check(policy, lists, make_policy(CLUSTER, "c", ["b.other"])) == ""


# The OS image of nodes


@pytest.mark.parametrize(
    ("scope", "is_covered"),
    [
        ("quay.example/os/node", True), ("quay.example/os", True), ("quay.example", True),
        ("*.example", True), ("quay.example/os/node/x", False), ("quay.example/o", False),
        (OS_IMAGE, False), ("quay.example/os/node:v1", False), ("other.example", False),
    ],
)  # fmt: skip
def test_policy_for_the_os_image_is_refused(scope: str, is_covered: bool) -> None:
    policy = make_policy(CLUSTER, "p", [scope, "z.example"])
    problem = check(policy)
    assert ("the node could never update again" in problem) is is_covered
    confirmation = "kubectl annotate clusterimagepolicy p treenail.io/covers-os-image=confirmed"
    assert (confirmation in problem) is is_covered
    assert check(policy, facts=sources.EMPTY_FACTS) == ""
    assert check(make_policy(NAMESPACE, "p", [scope], "n")) == ""


def test_confirmed_policy_and_policy_of_the_release_may_cover_the_os_image() -> None:
    policy = make_policy(CLUSTER, "openshift", ["quay.example/os/node"])
    owner = {
        "apiVersion": "config.openshift.io/v1",
        "kind": "ClusterVersion",
        "name": "version",
        "uid": "u",
    }
    for metadata in (
        {"annotations": {policies.COVERS_OS_IMAGE: policies.CONFIRMED}},
        {"ownerReferences": [owner]},
    ):
        assert check({**policy, "metadata": {"name": "openshift", **metadata}}) == ""
    wrong = {"annotations": {policies.COVERS_OS_IMAGE: "no"}}
    assert "never update" in check({**policy, "metadata": {"name": "openshift", **wrong}})


def test_only_the_narrowest_scope_covers_the_os_image() -> None:
    wide = make_policy(CLUSTER, "wide", ["quay.example"])
    narrow = make_policy(CLUSTER, "narrow", ["quay.example/os"])
    assert check(wide, narrow) == ""
    assert "never update" in check(narrow, wide)
    allowed = make_image_config(allowedRegistries=["quay.example", "quay.example/os/node"])
    assert check(narrow, allowed) == ""
