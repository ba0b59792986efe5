"""Signatures in the format of cosign: payload, manifest, and what nodes need to verify them.

The signature of an image is a layer of the manifest under the tag ``sha256-….sig``, where
containers/image looks for it (containers-registries.d(5), ``use-sigstore-attachments``).
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from treenail import oci_content
from treenail.api.decode import Json
from treenail.image.oci import documents

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
    layer: Json = field(repr=False)


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


def make_signature_layer(payload: bytes, signature: bytes) -> Json:
    """Return the descriptor of a signature."""
    return {
        "mediaType": PAYLOAD_TYPE,
        "digest": oci_content.compute_digest(payload),
        "size": len(payload),
        "annotations": {_ANNOTATION: base64.b64encode(signature).decode()},
    }


def make_signature_manifest(layers: Iterable[Json]) -> tuple[bytes, bytes]:
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
