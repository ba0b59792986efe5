"""Names in a registry: repositories, tags, digests, and descriptors of content."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail import oci_content, sanitize
from treenail.errors import ConfigError
from treenail.registry.errors import AnswerInvalid

_HOST = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?(:[0-9]{1,5})?")
# The grammar of names and tags is that of the OCI distribution API, Pulling manifests.
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REPOSITORY_LIMIT = 255
# Logins for Docker Hub are stored under any of these names: docker writes index.docker.io, podman
# docker.io.
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
# Larger integers are not portable in JSON (RFC 8259, section 6).
_SIZE_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob or manifest by media type, digest and size in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    artifact_type: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest or index as the registry has it; the digest is that of the content."""

    media_type: str
    digest: str
    content: bytes = field(repr=False)

    @property
    def is_index(self) -> bool:
        """Whether this is a list of manifests."""
        return self.media_type in oci_content.INDEX_TYPES


def check_host(host: str) -> str:
    """Return the host with its port if it is one; raise `ConfigError`."""
    if not _HOST.fullmatch(host):
        raise _make_name_error("registry", host, "a host name with an optional :PORT")
    return host


def check_repository(repository: str) -> str:
    """Return the repository if it is one; raise `ConfigError`."""
    if len(repository) > _REPOSITORY_LIMIT or not _REPOSITORY.fullmatch(repository):
        raise _make_name_error("repository", repository, "path components in lower case")
    return repository


def check_reference(reference: str) -> str:
    """Return the tag or digest if it is one; raise `ConfigError`."""
    if not _TAG.fullmatch(reference) and not oci_content.is_digest(reference):
        raise _make_name_error("reference", reference, "a tag, or sha256: and 64 hex digits")
    return reference


def check_digest(digest: str) -> str:
    """Return the digest if it is one; raise `ConfigError`."""
    if not oci_content.is_digest(digest):
        raise _make_name_error("digest", digest, "sha256: and 64 hex digits")
    return digest


def get_endpoint(host: str) -> str:
    """Return the host that serves the API of a registry: Docker Hub has another one."""
    # docker.io serves web pages; the API is on this host (containers/image, docker_client.go).
    return "registry-1.docker.io" if host in DOCKER_HUB else host


def parse_descriptor(document: object, *, where: str) -> Descriptor:
    """Parse a descriptor of a registry's document; raise `AnswerInvalid`, which names ``where``."""
    fields = document if isinstance(document, dict) else {}
    kind, digest, size = (fields.get(name) for name in ("mediaType", "digest", "size"))
    if not isinstance(kind, str):
        raise AnswerInvalid(f"cannot read {where}: a descriptor has no mediaType")
    if not oci_content.is_digest(digest) or not isinstance(digest, str):
        raise AnswerInvalid(
            f"cannot read {where}: expected a digest of sha256: and 64 hex digits, "
            f"found {sanitize.escape_line(repr(digest)[:100])}"
        )
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _SIZE_LIMIT:
        raise AnswerInvalid(f"cannot read {where}: the size of {digest} is not a number of bytes")
    annotations = fields.get("annotations")
    artifact = fields.get("artifactType")
    return Descriptor(
        kind,
        digest,
        size,
        {key: text for key, text in annotations.items() if isinstance(text, str)}
        if isinstance(annotations, dict)
        else {},
        artifact if isinstance(artifact, str) else "",
    )


def _make_name_error(what: str, text: str, expected: str) -> ConfigError:
    actual = sanitize.escape_line(repr(text[:200]))
    return ConfigError(f"cannot use {what} {actual}: expected {expected}")
