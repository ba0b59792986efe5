"""Random image policies over all their fields, beside mirror sets and image configs."""

import base64
import datetime as dt
from functools import cache
from random import Random
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Json = dict[str, Any]

_GROUP = "config.openshift.io/v1"
_HOSTS = (
    "a.example", "a.example:5000", "b.a.example", "10.2", "r9.example", "r10.example",
    "localhost", "x-1.example", "A.example",
)  # fmt: skip
_PATHS = ("ns", "ns/img", "ns/img/deep", "ns2", "ns10", "n_s/a-b", "ns/img/deep/er", "l" * 110)
_TAILS = (":v1", f"@sha256:{'0f' * 32}")


@cache
def make_key(number: int = 0) -> str:
    """Return base64 of a public key in PEM."""
    key = ec.derive_private_key(1000 + number, ec.SECP256R1()).public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return base64.b64encode(key.public_bytes(serialization.Encoding.PEM, form)).decode()


@cache
def make_certificate(number: int = 0) -> str:
    """Return base64 of a certificate in PEM."""
    key = ec.derive_private_key(2000 + number, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ca {number}")])
    begin = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number + 1)
        .not_valid_before(begin)
        .not_valid_after(begin + dt.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    return base64.b64encode(certificate.public_bytes(serialization.Encoding.PEM)).decode()


def make_bundle(count: int) -> str:
    """Return base64 of several certificates in PEM."""
    pems = [base64.b64decode(make_certificate(number)) for number in range(count)]
    return base64.b64encode(b"".join(pems)).decode()


def make_policy(
    kind: str, name: str, scopes: list[str], namespace: str = "", **policy: Any
) -> Json:
    """Make a policy; without ``rootOfTrust`` one with a key."""
    root = {"policyType": "PublicKey", "publicKey": {"keyData": make_key()}}
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    spec = {"scopes": scopes, "policy": {"rootOfTrust": root, **policy}}
    return {"apiVersion": _GROUP, "kind": kind, "metadata": metadata, "spec": spec}


def make_image_config(**lists: Any) -> Json:
    return {
        "apiVersion": _GROUP,
        "kind": "Image",
        "metadata": {"name": "cluster"},
        "spec": {"registrySources": lists},
    }


def make_case(seed: int) -> list[Json]:
    """Make the objects of a cluster: three policies of each kind, and often what they meet."""
    random = Random(seed)
    documents = [
        make_policy(kind, f"p{number}", make_scopes(random), namespace, **make_contents(random))
        for kind in ("ClusterImagePolicy", "ImagePolicy")
        for number in range(3)
        for namespace in [random.choice(["n1", "n2", "n10"]) if kind == "ImagePolicy" else ""]
    ]
    if random.random() < 0.6:
        documents += [
            make_mirrors(random, kind) for kind in ("ImageDigestMirrorSet", "ImageTagMirrorSet")
        ]
    if random.random() < 0.5:
        documents.append(make_lists(random, documents))
    return documents


def make_scopes(random: Random) -> list[str]:
    return list(dict.fromkeys(make_scope(random) for _ in range(random.randint(0, 4))))


def make_scope(random: Random) -> str:
    host = random.choice(_HOSTS)
    if random.random() < 0.15:
        return random.choice(["*.example", "*.a.example"])
    if random.random() < 0.25:
        return host
    path = random.choice(_PATHS)
    return f"{host}/{path}" + (
        random.choice(_TAILS) if "/" in path and random.random() < 0.3 else ""
    )


def make_contents(random: Random) -> Json:
    contents: Json = {"rootOfTrust": make_root(random)}
    if random.random() < 0.8:
        contents["signedIdentity"] = make_identity(random)
    return contents


def make_root(random: Random) -> Json:
    number = random.randint(0, 4)
    kind = random.choice(["PublicKey", "FulcioCAWithRekor", "PKI"])
    email = random.choice(["me@a.example", "a<b>&c@\u2028é.example"])
    if kind == "PublicKey":
        key = {"keyData": make_key(number)}
        if random.random() < 0.5:
            key["rekorKeyData"] = make_key(number + 1)
        return {"policyType": kind, "publicKey": key}
    if kind == "PKI":
        subject = random.choice(
            [
                {"email": email},
                {"hostname": "*.a.example"},
                {"email": email, "hostname": "b.example"},
            ]
        )
        pki: Json = {"caRootsData": make_bundle(number + 1), "pkiCertificateSubject": subject}
        if random.random() < 0.5:
            pki["caIntermediatesData"] = make_certificate(number + 1)
        return {"policyType": kind, "pki": pki}
    subject = {"oidcIssuer": "https://issuer.example/?a=1&b=<2>", "signedEmail": email}
    fulcio = {
        "fulcioCAData": make_certificate(number),
        "rekorKeyData": make_key(number),
        "fulcioSubject": subject,
    }
    return {"policyType": kind, "fulcioCAWithRekor": fulcio}


def make_identity(random: Random) -> Json:
    kind = random.choice(
        ["MatchRepoDigestOrExact", "MatchRepository", "ExactRepository", "RemapIdentity"]
    )
    place = f"m.example:5000/{random.choice(_PATHS)}"
    if kind == "ExactRepository":
        return {"matchPolicy": kind, "exactRepository": {"repository": place}}
    if kind == "RemapIdentity":
        names = {"prefix": random.choice(["a.example", "localhost", place]), "signedPrefix": place}
        return {"matchPolicy": kind, "remapIdentity": names}
    return {"matchPolicy": kind}


def make_mirrors(random: Random, kind: str) -> Json:
    field = "imageDigestMirrors" if kind == "ImageDigestMirrorSet" else "imageTagMirrors"
    entries = []
    for _ in range(random.randint(1, 4)):
        source = make_scope(random).partition("@")[0].removesuffix(":v1")
        mirrors = random.sample(["m1.example/r", "m2.example:5000/p", "m3.example/p/q"], 2)
        entries.append({"source": source, "mirrors": mirrors})
    return {
        "apiVersion": _GROUP,
        "kind": kind,
        "metadata": {"name": "mirrors"},
        "spec": {field: entries},
    }


def make_lists(random: Random, documents: list[Json]) -> Json:
    """Make an image config that mostly allows the scopes of the policies."""
    named = (scope for document in documents for scope in document["spec"].get("scopes", ()))
    # A scope with a tag or digest is not inside of its repository, but of what that is in.
    scopes = [scope.rpartition("/")[0] if scope.endswith(_TAILS) else scope for scope in named]
    if random.random() < 0.4:
        return make_image_config(blockedRegistries=["evil.example", "*.bad.example"])
    if random.random() < 0.8:
        return make_image_config(allowedRegistries=[*dict.fromkeys(scopes), "other.example"])
    return make_image_config(blockedRegistries=["a.example/ns"], insecureRegistries=["a.example"])
