"""Media types and digests of what OCI images consist of."""

import hashlib
import re

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST)
INDEX_TYPES = (OCI_INDEX, DOCKER_LIST)

DIGEST = re.compile(r"sha256:[a-f0-9]{64}")


def compute_digest(content: bytes) -> str:
    """Return the digest of content: ``sha256:`` and 64 hex digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_digest(text: object) -> bool:
    """Return whether the text is a SHA-256 digest; registries may use no other algorithm here."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None


def make_digest_tag(digest: str) -> str:
    """Return the tag that keeps a manifest while treenail needs it, also one that a list names."""
    return digest.replace("sha256:", "digest-", 1)
