"""Artifacts that refer to an image: signatures and provenance (OCI distribution API 1.1).

Registries without the referrers API keep the list in an index under the tag ``sha256-…``.
"""

import json
from collections.abc import Mapping
from functools import partial

from treenail import oci_content
from treenail.registry import errors, names, transport, uploads
from treenail.registry.client import RegistryClient

# The config of an artifact without one is this blob (image-spec, manifest.md, empty descriptor).
EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_REFERRERS_LIMIT = 1000
_WRITE_TRIES = 4


def get_referrers(
    client: RegistryClient, repository: str, digest: str, artifact_type: str = ""
) -> tuple[names.Descriptor, ...]:
    """Return the artifacts that refer to a manifest; all types if ``artifact_type`` is empty."""
    names.check_repository(repository)
    names.check_digest(digest)
    action = f"list the referrers of {client.format_image(repository, digest)}"
    try:
        artifacts = _list_by_api(client, repository, digest, action=action)
    # 404 means that the registry lacks the API: an image without referrers has an empty list.
    # docker-registry 2.8 lacks it.
    except (errors.NotFound, errors.Unsupported):
        artifacts = _list_by_tag(client, repository, digest)
    return tuple(
        artifact for artifact in artifacts if artifact_type in ("", artifact.artifact_type)
    )


def attach(
    client: RegistryClient,
    repository: str,
    subject: names.Descriptor,
    *,
    artifact_type: str,
    media_type: str,
    content: bytes,
    annotations: Mapping[str, str] | None = None,
) -> names.Descriptor:
    """Push ``content`` as an artifact that refers to ``subject``; return its manifest."""
    layer = uploads.upload_bytes(client, repository, media_type, content)
    config = uploads.upload_bytes(client, repository, EMPTY_TYPE, EMPTY)
    document = {
        "schemaVersion": 2,
        "mediaType": oci_content.OCI_MANIFEST,
        "artifactType": artifact_type,
        "config": encode_descriptor(config),
        "layers": [encode_descriptor(layer)],
        "subject": encode_descriptor(subject),
        "annotations": dict(annotations or {}),
    }
    manifest = encode_document(document)
    digest, is_listed = client.push_manifest(
        repository, oci_content.compute_digest(manifest), oci_content.OCI_MANIFEST, manifest
    )
    artifact = names.Descriptor(
        oci_content.OCI_MANIFEST, digest, len(manifest), dict(annotations or {}), artifact_type
    )
    if not is_listed:
        add_to_referrers_tag(client, repository, subject.digest, artifact)
    return artifact


def make_referrers_tag(digest: str) -> str:
    """Return the tag of the list of referrers in registries without the API."""
    # "Referrers Tag Schema" of the OCI distribution API 1.1.
    return digest.replace(":", "-", 1)


def encode_descriptor(descriptor: names.Descriptor) -> dict[str, object]:
    """Return a descriptor as JSON object."""
    document: dict[str, object] = {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
    }
    if descriptor.artifact_type:
        document["artifactType"] = descriptor.artifact_type
    if descriptor.annotations:
        document["annotations"] = dict(descriptor.annotations)
    return document


def encode_document(document: Mapping[str, object]) -> bytes:
    """Encode a manifest; equal documents give equal bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def _list_by_api(
    client: RegistryClient, repository: str, digest: str, *, action: str
) -> list[names.Descriptor]:
    artifacts: list[names.Descriptor] = []
    url: transport.Url | None = client.make_url(repository, f"referrers/{digest}")
    for _page in range(client.limits.pages):
        if url is None:
            return artifacts
        answer, content = client.retry(partial(client.get_page, repository, url, action))
        artifacts += _read_index(content, where=action)
        if len(artifacts) > _REFERRERS_LIMIT:
            break
        url = client.find_next_page(answer, action=action)
    raise errors.AnswerInvalid(f"cannot {action}: more than {_REFERRERS_LIMIT} referrers")


def _list_by_tag(client: RegistryClient, repository: str, digest: str) -> list[names.Descriptor]:
    try:
        manifest = client.get_manifest(repository, make_referrers_tag(digest))
    except errors.NotFound:
        return []
    where = client.format_image(repository, make_referrers_tag(digest))
    return _read_index(manifest.content, where=where)


def add_to_referrers_tag(
    client: RegistryClient, repository: str, digest: str, artifact: names.Descriptor
) -> None:
    """Add an artifact to the list under the tag, for registries without the API.

    A registry has no conditional write: another writer may replace the list, so it is read again.
    """
    tag = make_referrers_tag(digest)
    # A garbage collection of untagged manifests would delete what only the list names.
    manifest = client.get_manifest(repository, artifact.digest)
    own_tag = f"{tag}.{artifact.digest[7:39]}"
    client.put_manifest(repository, own_tag, manifest.media_type, manifest.content)
    for _try in range(_WRITE_TRIES):
        listed = _list_by_tag(client, repository, digest)
        if any(descriptor.digest == artifact.digest for descriptor in listed):
            return
        if len(listed) >= _REFERRERS_LIMIT:
            break
        index = {
            "schemaVersion": 2,
            "mediaType": oci_content.OCI_INDEX,
            "manifests": [encode_descriptor(descriptor) for descriptor in (*listed, artifact)],
        }
        client.put_manifest(repository, tag, oci_content.OCI_INDEX, encode_document(index))
    listed = _list_by_tag(client, repository, digest)
    if not any(descriptor.digest == artifact.digest for descriptor in listed):
        raise errors.AnswerInvalid(
            f"cannot add {artifact.digest} to {client.format_image(repository, tag)}: "
            "the list is full, or another client replaces it"
        )


def _read_index(content: bytes, *, where: str) -> list[names.Descriptor]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    entries = document.get("manifests") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise errors.AnswerInvalid(f"cannot read {where}: it is no index")
    return [names.parse_descriptor(entry, where=where) for entry in entries[: _REFERRERS_LIMIT + 1]]
