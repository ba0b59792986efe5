"""Choice of the images to delete from a push repository: none that anything refers to by digest.

Deleting a manifest removes all its tags, and equal inputs give equal digests. So tags decide
nothing here, except that a tag of another name than treenail's protects an image.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.oci_content import DIGEST, make_digest_tag

_DEPTH_LIMIT = 40


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image or a list of manifests in the push repository."""

    digest: str
    tags: tuple[str, ...] = ()
    build: str = ""
    """The tag that its build gave it; empty for an image that must stay."""
    instances: tuple[str, ...] = ()
    """The digests that a list of manifests names."""
    owner: str = ""
    """The MachineOSConfig that built it; empty for an image that treenail did not build."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The images to delete, lists before their instances, and why each other image stays."""

    deleted: tuple[StoredImage, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)


def find_digests(document: object, *, depth: int = 0) -> Iterator[str]:
    """Yield each digest that any text of a document contains, keys included."""
    if depth > _DEPTH_LIMIT:
        return
    if isinstance(document, str):
        yield from DIGEST.findall(document)
    elif isinstance(document, Mapping):
        for key, value in document.items():
            yield from find_digests(key, depth=depth + 1)
            yield from find_digests(value, depth=depth + 1)
    elif isinstance(document, list | tuple):
        for part in document:
            yield from find_digests(part, depth=depth + 1)


def collect_references(objects: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Return what refers to each digest; ``objects`` are documents with their names.

    Pass the metadata, spec and status of Nodes, MachineConfigNodes, MachineOSBuilds,
    MachineOSConfigs and pools, and osImageURL of the served configs. A digest in any text counts:
    a reference too many keeps an image, a missing one breaks a node.
    """
    references: dict[str, str] = {}
    for name, document in objects:
        for digest in find_digests(document):
            references.setdefault(digest, name)
    return references


def plan_pruning(
    images: Sequence[StoredImage],
    references: Mapping[str, str],
    previous: Iterable[str],
) -> PrunePlan:
    """Return the images that nothing refers to.

    ``previous`` are the digests of one previous image per MachineOSConfig.
    """
    reasons = {digest: f"{name} refers to it" for digest, name in references.items()}
    reasons |= {digest: "it is a previous image" for digest in previous if digest not in reasons}
    kept: dict[str, str] = {}
    for image in images:
        if reason := _find_reason(image, reasons):
            kept[image.digest] = reason
    by_digest = {image.digest: image for image in images}
    _keep_families(by_digest, kept)
    deleted = [image for image in by_digest.values() if image.digest not in kept]
    deleted.sort(key=lambda image: (not image.instances, image.digest))
    return PrunePlan(tuple(deleted), kept)


def _find_reason(image: StoredImage, reasons: Mapping[str, str]) -> str:
    if image.digest in reasons:
        return reasons[image.digest]
    # Nodes record the digest of the instance, not that of the list.
    instance = next((digest for digest in image.instances if digest in reasons), "")
    if instance:
        return f"{reasons[instance]}, by its instance"
    if not image.build:
        return "treenail did not build it"
    own = {image.build, make_digest_tag(image.digest)}
    foreign = sorted(set(image.tags) - own)
    return f"it has the tag {foreign[0]}" if foreign else ""


def _keep_families(by_digest: Mapping[str, StoredImage], kept: dict[str, str]) -> None:
    """Keep the instances of each list that is kept, and lists of such lists."""
    waiting = list(kept)
    while waiting:
        digest = waiting.pop()
        image = by_digest.get(digest)
        for instance in image.instances if image else ():
            if instance not in kept:
                kept[instance] = f"the list {digest} names it"
                waiting.append(instance)
