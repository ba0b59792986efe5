"""Documents that are attached to images: signatures, provenance and the list of packages. Pure.

Signatures have the format of cosign. That of an image is a layer of the manifest under the tag
``sha256-….sig``, where containers/image looks for it (containers-registries.d(5),
``use-sigstore-attachments``). The provenance is an in-toto statement with SLSA provenance 1.0, and
the packages are an SPDX document.
"""

import base64
import binascii
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from treenail import oci_content
from treenail.api import decode, pullspec
from treenail.encoding import codec
from treenail.image.oci import documents

SPDX_TYPE = "application/spdx+json"
"""The artifact type and the media type of an attached document."""
MAX_PACKAGES = 20_000
_NONE = "NOASSERTION"
_TEXT_LIMIT = 300
_ShortText = Annotated[str, codec.Via(lambda text: text[:_TEXT_LIMIT])]
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")


@dataclass(frozen=True, slots=True, order=True)
class InstalledPackage(codec.JsonObject):
    """A package as its database names it."""

    manager: _ShortText
    """``rpm`` or ``deb``, as in package URLs."""
    name: _ShortText
    version: _ShortText
    """With the epoch, as in ``1:2.3-4``."""
    architecture: _ShortText = ""
    license: _ShortText = ""
    source: _ShortText = ""
    """The source package."""


@dataclass(frozen=True, slots=True)
class PackageList(codec.JsonObject, where="package list"):
    """The packages of an image and the ID of its distribution. Long texts are shortened."""

    packages: Annotated[
        tuple[InstalledPackage, ...], codec.Via(lambda packages: packages[:MAX_PACKAGES])
    ]
    distribution: _ShortText = ""


def make_spdx_document(
    packages: PackageList, *, image: str, digest: str, version: str, created: str
) -> bytes:
    """Return an SPDX 2.3 document of the packages of an image.

    ``image`` is its repository with the registry, ``version`` that of treenail, and ``created`` is
    in RFC 3339.
    """
    root = "SPDXRef-Image"
    listed = [
        _describe_package(package, number, packages.distribution)
        for number, package in enumerate(sorted(packages.packages))
    ]
    described: decode.Json = {
        "SPDXID": root,
        "name": image,
        "versionInfo": digest,
        "primaryPackagePurpose": "CONTAINER",
        "downloadLocation": _NONE,
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.partition(":")[2]}],
    }
    return documents.encode(
        {
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": f"{image}@{digest}",
            "documentNamespace": f"https://treenail.io/spdx/{digest.replace(':', '-')}",
            "creationInfo": {"created": created, "creators": [f"Tool: treenail-{version}"]},
            "packages": [described, *listed],
            "relationships": [
                _relate("SPDXRef-DOCUMENT", "DESCRIBES", root),
                *(
                    _relate(root, "CONTAINS", str(described_package["SPDXID"]))
                    for described_package in listed
                ),
            ],
        }
    )


def _describe_package(package: InstalledPackage, number: int, distribution: str) -> decode.Json:
    description: decode.Json = {
        "SPDXID": f"SPDXRef-Package-{number}-{_UNSAFE.sub('-', package.name)}",
        "name": package.name,
        "versionInfo": package.version,
        "downloadLocation": _NONE,
        "filesAnalyzed": False,
        "licenseConcluded": _NONE,
        "licenseDeclared": _NONE,
        "copyrightText": _NONE,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": _make_url(package, distribution),
            }
        ],
    }
    if package.license:
        # Names of distributions, which are no expressions of SPDX.
        description["licenseComments"] = package.license
    if package.source:
        description["sourceInfo"] = f"built from {package.source}"
    return description


def _make_url(package: InstalledPackage, distribution: str) -> str:
    """Return the package URL: the epoch of RPM is a qualifier (purl-spec, rpm-definition)."""
    version, qualifiers = package.version, []
    if package.architecture:
        qualifiers.append(f"arch={_quote(package.architecture)}")
    if package.manager == "rpm":
        epoch, colon, rest = version.partition(":")
        if colon:
            version = rest
            qualifiers.append(f"epoch={_quote(epoch)}")
    namespace = f"{_quote(distribution)}/" if distribution else ""
    name, shown = _quote(package.name), _quote(version, safe=":")
    suffix = f"?{'&'.join(qualifiers)}" if qualifiers else ""
    return f"pkg:{package.manager}/{namespace}{name}@{shown}{suffix}"


def _quote(text: str, *, safe: str = "") -> str:
    """Encode a part of a package URL by percent signs (RFC 3986)."""
    kept = _UNRESERVED | set(safe)
    return "".join(
        char if char in kept else "".join(f"%{byte:02X}" for byte in char.encode()) for char in text
    )


def _relate(subject: str, kind: str, related: str) -> decode.Json:
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": related}


STATEMENT_TYPE = "application/vnd.in-toto+json"
"""The artifact type of an attached statement."""
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "https://treenail.io/image-build/v1"
_BUILDER = "https://treenail.io/builder"


@dataclass(frozen=True, slots=True)
class BuildProvenance:
    """Inputs and circumstances of one build."""

    name: str
    """The repository of the image with its registry."""
    digest: str
    materials: tuple[str, ...]
    """Pull specs with digests: base image, extensions image."""
    machine_config: str
    pool: str
    build: str
    content_key: str
    containerfile_digest: str
    """Empty without a Containerfile."""
    version: str
    """The version of the builder."""
    started: str
    """RFC 3339; empty if unknown."""
    finished: str


def make_statement(provenance: BuildProvenance) -> bytes:
    """Return the statement; raises `ConfigError` for a material without a digest."""
    parameters = {
        "machineConfig": provenance.machine_config,
        "machineConfigPool": provenance.pool,
        "contentKey": provenance.content_key,
    }
    if provenance.containerfile_digest:
        parameters["containerfile"] = provenance.containerfile_digest
    return documents.encode(
        {
            "_type": _STATEMENT,
            "subject": [{"name": provenance.name, "digest": _split_digest(provenance.digest)}],
            "predicateType": _PREDICATE,
            "predicate": {
                "buildDefinition": {
                    "buildType": _BUILD_TYPE,
                    "externalParameters": parameters,
                    "resolvedDependencies": [
                        _describe_material(material) for material in provenance.materials
                    ],
                },
                "runDetails": {
                    "builder": {"id": _BUILDER, "version": {"treenail": provenance.version}},
                    "metadata": {
                        "invocationId": provenance.build,
                        **({"startedOn": provenance.started} if provenance.started else {}),
                        "finishedOn": provenance.finished,
                    },
                },
            },
        }
    )


def _describe_material(pull_spec: str) -> Mapping[str, object]:
    spec = pullspec.parse_pull_spec(pull_spec, where="material")
    return {
        "uri": f"docker://{spec.registry}/{spec.repository}",
        "digest": _split_digest(spec.digest),
    }


def _split_digest(digest: str) -> Mapping[str, str]:
    algorithm, _, value = digest.partition(":")
    return {algorithm: value}


PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_ANNOTATION = "dev.cosignproject.cosign/signature"
_KIND = "cosign container image signature"
_LAYERS_LIMIT = 100
_PAYLOAD_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class StoredSignature:
    """One signature of a manifest: the blob with the payload, and the signature of its bytes."""

    payload_digest: str
    payload_size: int
    signature: bytes = field(repr=False)
    layer: decode.Json = field(repr=False)


def make_signature_tag(digest: str) -> str:
    """Return the tag of the signatures of an image."""
    return f"{digest.replace(':', '-', 1)}.sig"


def make_payload(name: str, digest: str) -> bytes:
    """Return the payload that states that the image ``name`` has this digest."""
    return documents.encode(
        {
            "critical": {
                "identity": {"docker-reference": name},
                "image": {"docker-manifest-digest": digest},
                "type": _KIND,
            },
            "optional": {},
        }
    )


def find_payload_problem(payload: bytes, name: str, digest: str) -> str:
    """Return why a payload states something else; empty if it fits."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        return "its payload is no JSON"
    critical = document.get("critical") if isinstance(document, dict) else None
    if not isinstance(critical, dict) or critical.get("type") != _KIND:
        return "its payload is no cosign signature"
    image, identity = critical.get("image"), critical.get("identity")
    if not isinstance(image, dict) or image.get("docker-manifest-digest") != digest:
        return "it is of another image"
    if not isinstance(identity, dict) or identity.get("docker-reference") != name:
        return "it is of another repository"
    return ""


def read_signatures(manifest: bytes) -> Iterator[StoredSignature]:
    """Yield the signatures of a manifest; layers that are none are skipped."""
    try:
        document = json.loads(manifest)
    except (ValueError, RecursionError):
        return
    layers = document.get("layers") if isinstance(document, dict) else None
    for layer in layers[:_LAYERS_LIMIT] if isinstance(layers, list) else ():
        if not isinstance(layer, dict) or layer.get("mediaType") != PAYLOAD_TYPE:
            continue
        digest, size, annotations = (layer.get(name) for name in ("digest", "size", "annotations"))
        encoded = annotations.get(_ANNOTATION) if isinstance(annotations, dict) else None
        if not isinstance(digest, str) or not isinstance(encoded, str):
            continue
        if not isinstance(size, int) or not 0 < size <= _PAYLOAD_LIMIT:
            continue
        try:
            signature = binascii.a2b_base64(encoded, strict_mode=True)
        except ValueError:
            continue
        yield StoredSignature(digest, size, signature, layer)


def make_signature_layer(payload: bytes, signature: bytes) -> decode.Json:
    """Return the descriptor of a signature."""
    return {
        "mediaType": PAYLOAD_TYPE,
        "digest": oci_content.compute_digest(payload),
        "size": len(payload),
        "annotations": {_ANNOTATION: base64.b64encode(signature).decode()},
    }


def make_signature_manifest(layers: Iterable[decode.Json]) -> tuple[bytes, bytes]:
    """Return the manifest of signatures, and its config."""
    listed = list(layers)
    config = documents.encode(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in listed]},
        }
    )
    manifest = documents.encode(
        {
            "schemaVersion": 2,
            "mediaType": oci_content.OCI_MANIFEST,
            "config": {
                "mediaType": CONFIG_TYPE,
                "digest": oci_content.compute_digest(config),
                "size": len(config),
            },
            "layers": listed,
        }
    )
    return manifest, config


def make_policy(name: str, key_path: str) -> Mapping[str, object]:
    """Return a policy.json that requires signatures for one repository (policy.json(5))."""
    requirement = {
        "type": "sigstoreSigned",
        "keyPath": key_path,
        "signedIdentity": {"type": "matchRepository"},
    }
    return {
        "default": [{"type": "insecureAcceptAnything"}],
        "transports": {"docker": {name: [requirement]}},
    }


def make_registry_settings(name: str) -> str:
    """Return a file of registries.d that makes nodes read the signatures of one repository."""
    return f"docker:\n  {name}:\n    use-sigstore-attachments: true\n"
