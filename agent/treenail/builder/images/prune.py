"""Read the images of a push repository, and delete those of a plan."""

import json
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace

from treenail.image.oci import attachments, documents, prune
from treenail.registry import errors, referrers
from treenail.registry.client import RegistryClient
from treenail.registry.names import Manifest, parse_descriptor

log = logging.getLogger(__name__)

_ATTACHMENT = "sha256-"
_INSTANCES_LIMIT = 200
IMAGES_LIMIT = 5000
"""Tags of a repository that is pruned."""

CheckTime = Callable[[], None]
"""Raises `RegistryError` when the time for a pass is over."""

ImageCache = MutableMapping[str, prune.StoredImage]
"""Images by digest, without tags: their content never changes."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The deleted digests, and the problem that ended or limited the deletion."""

    deleted: tuple[str, ...] = ()
    problem: errors.RegistryError | None = None
    """`Unsupported` or `Denied` concerns every image of the repository: report it once."""


def never_late() -> None:
    """Permit any time."""


def read_stored_images(
    client: RegistryClient,
    repository: str,
    cache: ImageCache,
    check_time: CheckTime = never_late,
    *,
    limit: int = IMAGES_LIMIT,
) -> tuple[prune.StoredImage, ...]:
    """Return the tagged images of a repository with the instances of lists; raises `RegistryError`.

    Tags of attachments (``sha256-…``) are no images.
    """
    try:
        tagged = _read_tags(client, repository, check_time, limit)
    except errors.NotFound:
        return ()
    images: dict[str, prune.StoredImage] = {}
    for digest, names in tagged.items():
        check_time()
        image = read_image(client, repository, digest, cache)
        images[digest] = replace(image, tags=tuple(names))
        for instance in image.instances:
            if instance not in tagged:
                images[instance] = read_image(client, repository, instance, cache)
    return tuple(images.values())


def delete_images(
    client: RegistryClient,
    repository: str,
    plan: prune.PrunePlan,
    check_time: CheckTime = never_late,
    *,
    limit: int = IMAGES_LIMIT,
) -> PruneResult:
    """Delete the images of a plan with their attachments.

    An image whose tag moved meanwhile is deleted without it. An image with a new tag is kept.
    """
    deleted: list[str] = []
    try:
        current = _read_tags(client, repository, check_time, limit) if plan.deleted else {}
        for image in plan.deleted:
            check_time()
            if {*current.get(image.digest, ())} - {*image.tags}:
                log.info("kept %s in %s: it has a new tag", image.digest, repository)
                continue
            # First what refers to the image: without the image nothing would find it again.
            for digest in (*_list_attachments(client, repository, image.digest), image.digest):
                _delete(client, repository, digest)
            deleted.append(image.digest)
    except errors.RegistryError as error:
        return PruneResult(tuple(deleted), error)
    return PruneResult(tuple(deleted))


def is_lasting(problem: errors.RegistryError | None) -> bool:
    """Return whether the deletion fails until a person changes the registry or the login."""
    return isinstance(problem, errors.Unsupported | errors.Denied | errors.LoginRefused)


def _read_tags(
    client: RegistryClient, repository: str, check_time: CheckTime, limit: int
) -> dict[str, list[str]]:
    """Return all tags by digest. With a part of them, an image of another tag could be deleted."""
    tags = [tag for tag in client.list_tags(repository) if not tag.startswith(_ATTACHMENT)]
    if len(tags) > limit:
        raise errors.RegistryError(
            f"{repository} has {len(tags)} tags, and at most {limit} can be compared"
        )
    tags_by_digest: dict[str, list[str]] = {}
    for tag in tags:
        check_time()
        head = client.head_manifest(repository, tag)
        if head is not None:
            tags_by_digest.setdefault(head.digest, []).append(tag)
    return tags_by_digest


def _list_attachments(client: RegistryClient, repository: str, digest: str) -> list[str]:
    """Return the manifests that name an image as their subject, and those of the tags for them.

    Neither a list of referrers nor a tag is believed: each manifest is read.
    """
    attached = [
        referrer.digest
        for referrer in referrers.get_referrers(client, repository, digest)
        if _find_digest(client, repository, referrer.digest, "subject") == {digest}
    ]
    tag = referrers.make_referrers_tag(digest)
    # The list of referrers, and the signature of cosign.
    for name, part in ((tag, "manifests"), (f"{tag}.sig", "layers")):
        head = client.head_manifest(repository, name)
        if head is not None and (named := _find_digest(client, repository, head.digest, part)):
            is_list = part == "manifests" and named <= set(attached)
            if is_list or named == {attachments.PAYLOAD_TYPE}:
                attached.append(head.digest)
    return list(dict.fromkeys(attached))


def _delete(client: RegistryClient, repository: str, digest: str) -> None:
    try:
        client.delete_manifest(repository, digest)
    except errors.NotFound:
        return
    log.info("deleted %s", client.format_image(repository, digest))


def _find_digest(client: RegistryClient, repository: str, digest: str, part: str) -> set[str]:
    """Return the digests in a part of a manifest; of layers, their types."""
    try:
        document = json.loads(client.get_manifest(repository, digest).content)
    except errors.NotFound:
        return set()
    entries = document.get(part)
    listed = entries if isinstance(entries, list) else [entries]
    field = "mediaType" if part == "layers" else "digest"
    return {str(entry.get(field)) for entry in listed if isinstance(entry, dict)}


def read_image(
    client: RegistryClient, repository: str, digest: str, cache: ImageCache
) -> prune.StoredImage:
    if digest not in cache:
        cache[digest] = _parse_image(client, repository, client.get_manifest(repository, digest))
    return cache[digest]


def _read_origin(client: RegistryClient, repository: str, manifest: Manifest) -> tuple[str, str]:
    """Return who built an image, as its labels say."""
    where = client.format_image(repository, manifest.digest)
    config = parse_descriptor(json.loads(manifest.content).get("config"), where=where)
    return documents.read_origin(client.read_small_blob(repository, config))


def _parse_image(client: RegistryClient, repository: str, manifest: Manifest) -> prune.StoredImage:
    where = client.format_image(repository, manifest.digest)
    if not manifest.is_index:
        owner, tag = _read_origin(client, repository, manifest)
        return prune.StoredImage(manifest.digest, build=tag, owner=owner)
    document = json.loads(manifest.content)
    entries = document.get("manifests")
    listed = entries if isinstance(entries, list) else []
    if len(listed) > _INSTANCES_LIMIT:
        raise errors.RegistryError(
            f"{where} lists {len(listed)} images, and at most {_INSTANCES_LIMIT} can be compared"
        )
    instances = tuple(parse_descriptor(entry, where=where).digest for entry in listed)
    nothing = ("", "")
    origins = set()
    for instance in instances:
        try:
            inner = client.get_manifest(repository, instance)
            # treenail writes no list of lists, and a registry could nest them without end.
            origins.add(nothing if inner.is_index else _read_origin(client, repository, inner))
        except errors.NotFound:
            origins.add(nothing)
    # A list is treenail's if each of its images is.
    owner, tag = origins.pop() if len(origins) == 1 else nothing
    return prune.StoredImage(manifest.digest, build=tag, owner=owner, instances=instances)
