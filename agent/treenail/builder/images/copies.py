"""Copy images between registries with all architectures, attachments and tags, byte by byte."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from treenail.registry import errors, images, names, referrers
from treenail.registry.client import RegistryClient

_PARTS_LIMIT = 700
"""Entries of a list of manifests, or blobs of one image."""
_ATTACHMENT_DEPTH = 3
"""A signature of a provenance of an image: nothing refers to it."""
_ATTACHED_TAG = re.compile(r"(sha256-[a-f0-9]{64})\.(?![a-f0-9]{32}$)[A-Za-z0-9._-]{1,32}")
"""Tag of an attachment as cosign writes it, such as ``sha256-….sig``; not the tags of `referrers`,
which writes its own in the target."""


@dataclass(frozen=True, slots=True)
class Place:
    """A repository, and a client of its registry."""

    client: RegistryClient
    repository: str


@dataclass(slots=True)
class CopiedImage:
    """Counts of a copy, and the tags of the image."""

    manifests: int = 0
    attachments: int = 0
    moved_bytes: int = 0
    tags: tuple[str, ...] = ()


class CopyStopped(Exception):
    """The caller no longer wants the copy; what is copied stays, and the next copy goes on."""


@dataclass(frozen=True, slots=True)
class ImageCopier:
    """Copies images from one repository to another one.

    Every call can be repeated: what the target has is not moved again.
    """

    source: Place
    target: Place
    should_stop: Callable[[], bool] = field(default=lambda: False)

    def copy_image(self, digest: str) -> CopiedImage:
        """Copy an image or list of manifests with its attachments and tags.

        Raises `RegistryError`, and `CopyStopped` between two blobs.
        """
        copied = CopiedImage()
        digests = list(self._copy_tree(digest, copied, depth=0))
        for instance in digests:
            self._copy_attachments(instance, copied, depth=0)
        # Last: a tag names an image only when all of it is there.
        copied.tags = self._copy_tags(frozenset(digests), copied)
        return copied

    def _copy_tree(self, digest: str, copied: CopiedImage, *, depth: int) -> Iterator[str]:
        """Copy a manifest and all below it; yield their digests."""
        self._check_stop()
        manifest = self.source.client.get_manifest(self.source.repository, digest)
        yield manifest.digest
        if manifest.is_index:
            if depth:
                raise errors.AnswerInvalid(
                    f"cannot copy {digest}: a list of manifests contains another"
                )
            for entry in self._read_entries(manifest, "manifests"):
                yield from self._copy_tree(entry.digest, copied, depth=depth + 1)
        if self.target.client.head_manifest(self.target.repository, digest) is not None:
            # It had all blobs at its push.
            return
        if not manifest.is_index:
            different = {blob.digest: blob for blob in self._list_blobs(manifest)}.values()
            copied.moved_bytes += images.copy_new_blobs(
                different,
                self.source.client,
                self.source.repository,
                self.target.client,
                self.target.repository,
                self._check_stop,
            )
        self.target.client.push_manifest(
            self.target.repository, digest, manifest.media_type, manifest.content
        )
        copied.manifests += 1

    def _copy_attachments(self, digest: str, copied: CopiedImage, *, depth: int) -> None:
        """Copy what refers to a manifest, and what refers to that."""
        if depth >= _ATTACHMENT_DEPTH:
            return
        present: frozenset[str] | None = None
        for referrer in referrers.get_referrers(self.source.client, self.source.repository, digest):
            list(self._copy_tree(referrer.digest, copied, depth=0))
            if present is None:
                attached = referrers.get_referrers(
                    self.target.client, self.target.repository, digest
                )
                present = frozenset(entry.digest for entry in attached)
            if referrer.digest not in present:
                # The target has no API for referrers, or the push did not list it.
                referrers.add_to_referrers_tag(
                    self.target.client, self.target.repository, digest, referrer
                )
            copied.attachments += 1
            self._copy_attachments(referrer.digest, copied, depth=depth + 1)

    def _copy_tags(self, digests: frozenset[str], copied: CopiedImage) -> tuple[str, ...]:
        """Copy the tags of these manifests, and the attachments that are found by a tag."""
        lists = {referrers.make_referrers_tag(instance) for instance in digests}
        tags = []
        for tag in self.source.client.list_tags(self.source.repository):
            if tag in lists:
                # A list of referrers: the target has its own.
                continue
            head = self.source.client.head_manifest(self.source.repository, tag)
            if head is None:
                continue
            match = _ATTACHED_TAG.fullmatch(tag)
            is_attached = match is not None and match[1] in lists
            if is_attached:
                list(self._copy_tree(head.digest, copied, depth=0))
                copied.attachments += 1
            if is_attached or head.digest in digests:
                self._copy_tag(tag, head.digest)
                tags.append(tag)
        return tuple(tags)

    def _copy_tag(self, tag: str, digest: str) -> None:
        client, repository = self.target.client, self.target.repository
        head = client.head_manifest(repository, tag)
        if head is not None and head.digest == digest:
            return
        manifest = self.source.client.get_manifest(self.source.repository, digest)
        client.push_manifest(repository, tag, manifest.media_type, manifest.content)

    def _list_blobs(self, manifest: names.Manifest) -> list[names.Descriptor]:
        where = self._describe(manifest)
        config = names.parse_descriptor(_load_object(manifest, where).get("config"), where=where)
        return [config, *self._read_entries(manifest, "layers")]

    def _read_entries(self, manifest: names.Manifest, name: str) -> list[names.Descriptor]:
        where = self._describe(manifest)
        entries = _load_object(manifest, where).get(name)
        if not isinstance(entries, list) or len(entries) > _PARTS_LIMIT:
            raise errors.AnswerInvalid(
                f"cannot copy {where}: expected at most {_PARTS_LIMIT} {name}"
            )
        return [names.parse_descriptor(entry, where=where) for entry in entries]

    def _describe(self, manifest: names.Manifest) -> str:
        return self.source.client.format_image(self.source.repository, manifest.digest)

    def _check_stop(self) -> None:
        if self.should_stop():
            raise CopyStopped


def _load_object(manifest: names.Manifest, where: str) -> dict[str, object]:
    try:
        document = json.loads(manifest.content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise errors.AnswerInvalid(f"cannot copy {where}: its manifest is no JSON object")
    return document
