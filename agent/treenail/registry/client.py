"""Client of an image registry: manifests, blobs, tags and deletion (OCI distribution API 1.1).

A client belongs to one registry, one login and one thread. Its calls retry outages for some
seconds (`treenail.retry`), and can all be repeated.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from treenail import clocks, oci_content
from treenail.registry import errors, names
from treenail.registry.authorization import ANONYMOUS, Authorization, Login, read_error_text
from treenail.registry.proxies import ProxySettings
from treenail.registry.transport import (
    ByteBody,
    RegistryAnswer,
    RegistryLimits,
    RegistryTransport,
    TlsSettings,
    Url,
    parse_url,
)
from treenail.retry import retry_registry_call

T = TypeVar("T")

_ACCEPT = ", ".join((*oci_content.MANIFEST_TYPES, *oci_content.INDEX_TYPES))
_REDIRECTS = {301, 302, 303, 307, 308}
# No login, then a token, then a new token in place of one that ended early.
_AUTHORIZATION_TRIES = 3


class RegistryClient:
    """Client of one registry. Every method raises `RegistryError`, or `ConfigError` for names."""

    def __init__(
        self,
        host: str,
        clock: clocks.Clock,
        *,
        login: Login | None = None,
        tls: TlsSettings | None = None,
        proxies: ProxySettings | None = None,
        limits: RegistryLimits | None = None,
    ) -> None:
        self.host = names.check_host(host)
        self.clock = clock
        self.limits = limits or RegistryLimits()
        settings = tls or TlsSettings()
        scheme = "http" if settings.is_plain else "https"
        self._base = parse_url(f"{scheme}://{names.get_endpoint(host)}/")
        self._transport = RegistryTransport(
            settings, proxies or ProxySettings(), self.limits, clock
        )
        self._authorization = Authorization(self._transport, login or ANONYMOUS, self.limits, clock)

    def clone(self) -> "RegistryClient":
        """Return a client for another thread, with the same login and what it learned."""
        clone = copy(self)
        transport = self._transport.clone()
        clone._transport = transport  # noqa: SLF001 - same class
        clone._authorization = self._authorization.clone(transport)  # noqa: SLF001 - same class
        return clone

    def close(self) -> None:
        """Close idle connections; the client can still be used."""
        self._transport.close()

    def get_manifest(self, repository: str, reference: str) -> names.Manifest:
        """Return a manifest or index by tag or digest; its content has the digest."""
        names.check_repository(repository)
        names.check_reference(reference)
        action = f"read the manifest {self.format_image(repository, reference)}"

        def read() -> names.Manifest:
            answer = self._get(
                repository, f"manifests/{reference}", {"Accept": _ACCEPT}, action=action
            )
            content = answer.read(self.limits.manifest_bytes)
            return _make_manifest(answer, reference, content, action=action)

        return self.retry(read)

    def head_manifest(self, repository: str, reference: str) -> names.Descriptor | None:
        """Return what a tag or digest refers to; None when the registry has no such manifest."""
        names.check_repository(repository)
        names.check_reference(reference)
        action = f"look for the manifest {self.format_image(repository, reference)}"

        def look() -> names.Descriptor:
            path = f"manifests/{reference}"
            answer = self._get(repository, path, {"Accept": _ACCEPT}, action=action, method="HEAD")
            answer.read(0)
            # Registries of earlier versions of the API may leave out the digest: then the content
            # has it.
            digest, size = answer.get_header("Docker-Content-Digest"), _read_length(answer)
            if not digest or size is None:
                manifest = self.get_manifest(repository, reference)
                return names.Descriptor(manifest.media_type, manifest.digest, len(manifest.content))
            _check_received_digest(digest, reference, action=action, host=self.host)
            return names.Descriptor(_read_media_type(answer), digest, size)

        try:
            return self.retry(look)
        except errors.NotFound:
            return None

    def put_manifest(self, repository: str, reference: str, media_type: str, content: bytes) -> str:
        """Store a manifest under a tag or its digest; return its digest."""
        return self.push_manifest(repository, reference, media_type, content)[0]

    def push_manifest(
        self, repository: str, reference: str, media_type: str, content: bytes
    ) -> tuple[str, bool]:
        """Store a manifest; return its digest, and whether the registry lists it as a referrer."""
        names.check_repository(repository)
        names.check_reference(reference)
        digest = oci_content.compute_digest(content)
        action = f"push the manifest {self.format_image(repository, reference)}"
        if oci_content.is_digest(reference) and reference != digest:
            raise errors.DigestMismatch(f"cannot {action}: its content has the digest {digest}")

        def push() -> tuple[str, bool]:
            url = self.make_url(repository, f"manifests/{quote(reference, safe=':')}")
            headers = {"Content-Type": media_type}
            answer = self.send(
                "PUT", url, headers, content, scopes=_push(repository), action=action
            )
            self.check_status(answer, {200, 201, 202}, action=action)
            answer.read(self.limits.error_bytes)
            # Some registries convert manifests between Docker's types and those of OCI: then
            # references by digest, such as those of nodes, would find nothing.
            stored = answer.get_header("Docker-Content-Digest")
            if stored and stored != digest:
                raise errors.DigestMismatch(
                    f"cannot {action}: {self.host} stored it as {stored[:100]!r}, not as {digest}"
                )
            # A registry with the referrers API confirms the subject by this header. Without it the
            # client must add the manifest to the referrers tag (OCI distribution API 1.1).
            return digest, bool(answer.get_header("OCI-Subject"))

        return self.retry(push)

    def delete_manifest(self, repository: str, digest: str) -> None:
        """Delete a manifest with all its tags; raise `NotFound` or `Unsupported`."""
        names.check_repository(repository)
        names.check_digest(digest)
        action = f"delete the manifest {self.format_image(repository, digest)}"

        def delete() -> None:
            url = self.make_url(repository, f"manifests/{digest}")
            # docker-registry has an action of its own for deletion; a token for push does not
            # permit it.
            scopes = (f"repository:{repository}:delete,pull",)
            answer = self.send("DELETE", url, {}, scopes=scopes, action=action)
            self.check_status(answer, {200, 202, 204}, action=action)
            answer.read(self.limits.error_bytes)

        self.retry(delete)

    def list_tags(self, repository: str) -> tuple[str, ...]:
        """Return the tags of a repository, sorted, from all pages."""
        names.check_repository(repository)
        action = f"list the tags of {self.host}/{repository}"
        tags: dict[str, None] = {}
        url: Url | None = self.make_url(repository, f"tags/list?n={self.limits.tag_page}")
        for _page in range(self.limits.pages):
            if url is None:
                return tuple(sorted(tags))
            before = len(tags)
            answer, content = self.retry(partial(self.get_page, repository, url, action))
            tags.update(dict.fromkeys(_read_tags(content, action=action, host=self.host)))
            url = self.find_next_page(answer, action=action)
            if len(tags) > self.limits.tags:
                raise errors.AnswerInvalid(f"cannot {action}: more than {self.limits.tags} tags")
            # A registry that ignores the query of its own Link would send the first page again and
            # again.
            if url is not None and len(tags) == before:
                break
        raise errors.AnswerInvalid(f"cannot {action}: {self.host} returns pages without an end")

    def has_blob(self, repository: str, digest: str) -> bool:
        """Return whether the repository has a blob."""
        names.check_repository(repository)
        names.check_digest(digest)
        action = f"look for the blob {self.format_image(repository, digest)}"

        def look() -> bool:
            answer = self._get(repository, f"blobs/{digest}", {}, action=action, method="HEAD")
            answer.read(0)
            return True

        try:
            return self.retry(look)
        except errors.NotFound:
            return False

    def read_blob(
        self, repository: str, descriptor: names.Descriptor, sink: Callable[[bytes], object]
    ) -> None:
        """Pass a blob to ``sink`` in pieces.

        A broken connection continues where it ended. The digest is verified at the end, so that
        after an error the caller must discard what the sink received.
        """
        names.check_repository(repository)
        names.check_digest(descriptor.digest)
        action = f"read the blob {self.format_image(repository, descriptor.digest)}"
        hasher, received = hashlib.sha256(), 0

        def read() -> None:
            nonlocal received
            for piece in self.iter_blob(repository, descriptor, received):
                received += len(piece)
                hasher.update(piece)
                sink(piece)

        self.retry(read)
        if f"sha256:{hasher.hexdigest()}" != descriptor.digest:
            raise errors.DigestMismatch(f"cannot {action}: {self.host} sent other content")

    def iter_blob(
        self, repository: str, descriptor: names.Descriptor, start: int
    ) -> Iterator[bytes]:
        """Yield the rest of a blob from ``start``, unverified and without retries.

        The registry may ignore the Range of the request.
        """
        action = f"read the blob {self.format_image(repository, descriptor.digest)}"
        headers = {"Range": f"bytes={start}-"} if start else {}
        if start and start == descriptor.size:
            return
        answer = self._get(repository, f"blobs/{descriptor.digest}", headers, action=action)
        answer.allow_transfer(descriptor.size)
        position = 0
        # A server may answer 200 with the whole blob to a request with Range (RFC 9110, 14.2).
        if answer.status == 206:
            if not answer.get_header("Content-Range").startswith(f"bytes {start}-"):
                answer.close()
                raise errors.AnswerInvalid(f"cannot {action}: {self.host} sent another range")
            position = start
        for piece in answer.iter_pieces():
            if position + len(piece) > descriptor.size:
                answer.close()
                raise errors.DigestMismatch(
                    f"cannot {action}: {self.host} sent more than {descriptor.size} bytes"
                )
            rest = piece[max(start - position, 0) :]
            position += len(piece)
            if rest:
                yield rest
        if position < descriptor.size:
            raise errors.Unreachable(f"cannot {action}: {self.host} sent {position} bytes of it")

    def read_small_blob(self, repository: str, descriptor: names.Descriptor) -> bytes:
        """Return a blob, such as the config of an image, that is within the limits."""
        if descriptor.size > self.limits.config_bytes:
            raise errors.AnswerInvalid(
                f"cannot read the blob {self.format_image(repository, descriptor.digest)}: it has "
                f"{descriptor.size} bytes, and {self.limits.config_bytes} are the maximum"
            )
        content = bytearray()
        self.read_blob(repository, descriptor, content.extend)
        return bytes(content)

    def format_image(self, repository: str, reference: str) -> str:
        """Return a pull spec for messages."""
        return (
            f"{self.host}/{repository}{'@' if oci_content.is_digest(reference) else ':'}{reference}"
        )

    def make_url(self, repository: str, path: str) -> Url:
        """Return the URL of something in a repository."""
        scheme, host, port = self._base.origin
        return Url(scheme, host, port, f"/v2/{repository}/{path}")

    def retry(self, call: Callable[[], T]) -> T:
        """Call until it succeeds, fails for a lasting reason, or was tried often enough."""
        return retry_registry_call(
            call,
            self.clock,
            errors.is_temporary,
            errors.get_retry_after_s,
            attempts=self.limits.attempts,
        )

    def send(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
        body: ByteBody | bytes | None = None,
        *,
        scopes: tuple[str, ...],
        action: str,
    ) -> RegistryAnswer:
        """Send one request with the login that the registry demands."""
        # Before a challenge requests have no login: only the challenge says whether the registry
        # wants HTTP Basic or a token, and of which server.
        tries = _AUTHORIZATION_TRIES
        while True:
            tries -= 1
            authorization = self._authorization.get_header(scopes, action=action)
            fields = {**headers, "Authorization": authorization} if authorization else headers
            answer = self._transport.send(method, url, fields, body, action=action)
            if answer.status != 401 or not tries:
                return answer
            try:
                can_retry = self._authorization.accept_challenge(
                    answer, scopes, had_header=bool(authorization), action=action
                )
            except errors.RegistryError:
                answer.close()
                raise
            if not can_retry:
                return answer
            answer.discard_body(self.limits.error_bytes)

    def check_status(self, answer: RegistryAnswer, statuses: set[int], *, action: str) -> None:
        """Raise the error of an answer with another status."""
        if answer.status in statuses:
            return
        code, text = read_error_text(answer, self.limits)
        detail = self._authorization.withhold_credentials(" ".join(filter(None, (code, text))))
        raise errors.make_status_error(
            action,
            answer.url.address if answer.url.origin != self._base.origin else self.host,
            answer.status,
            detail,
            code=code,
            retry_after_s=_read_retry_after(answer),
        )

    def parse_location(self, answer: RegistryAnswer, *, action: str) -> Url:
        """Return the Location of an upload; it must be of this registry, which has the login."""
        # The Location may be absolute or relative, and its query holds the state of the upload:
        # clients must not assemble it (OCI distribution API, Pushing blobs).
        url = self._parse_link(answer.get_header("Location"), answer.url, action=action)
        if url.host != self._base.host:
            raise errors.AnswerInvalid(
                f"cannot {action}: {self.host} names {url.address} for the upload, another host"
            )
        # A registry behind a proxy may name its own scheme and port.
        return Url(*self._base.origin, url.target)

    def get_page(self, repository: str, url: Url, action: str) -> tuple[RegistryAnswer, bytes]:
        """Return the answer and the content of one page of a list."""
        headers = {"Accept": f"application/json, {oci_content.INDEX_TYPES[0]}"}
        answer = self.send("GET", url, headers, scopes=_pull(repository), action=action)
        self.check_status(answer, {200}, action=action)
        return answer, answer.read(self.limits.page_bytes)

    def _get(
        self,
        repository: str,
        path: str,
        headers: Mapping[str, str],
        *,
        action: str,
        method: str = "GET",
    ) -> RegistryAnswer:
        """Send a request for content, and follow redirects to other hosts without the login."""
        url = self.make_url(repository, path)
        scopes = _pull(repository)
        # Registries redirect blobs to object storage or a CDN. That URL is signed, and storage such
        # as S3 rejects a request with an Authorization beside the signature.
        for _redirect in range(self.limits.redirects + 1):
            if url.origin == self._base.origin:
                answer = self.send(method, url, headers, scopes=scopes, action=action)
            else:
                answer = self._transport.send(method, url, headers, action=action)
            if answer.status not in _REDIRECTS:
                self.check_status(answer, {200, 206}, action=action)
                return answer
            answer.discard_body(self.limits.error_bytes)
            url = self._parse_link(answer.get_header("Location"), url, action=action)
            if url.scheme != "https" and self._base.scheme == "https":
                raise errors.AnswerInvalid(
                    f"cannot {action}: {self.host} redirects to {url.address} without TLS"
                )
        raise errors.AnswerInvalid(
            f"cannot {action}: {self.host} redirects more than {self.limits.redirects} times"
        )

    def find_next_page(self, answer: RegistryAnswer, *, action: str) -> Url | None:
        """Return the next page of a list (RFC 8288), which must be of this registry."""
        # `Link: </v2/NAME/tags/list?n=100&last=TAG>; rel="next"`: the target may be relative to the
        # URL of this page.
        link = answer.get_header("Link")
        target, _, parameters = link.partition(">")
        if not target.startswith("<") or 'rel="next"' not in parameters.replace("'", '"'):
            return None
        url = self._parse_link(target[1:], answer.url, action=action)
        if url.origin != self._base.origin:
            raise errors.AnswerInvalid(
                f"cannot {action}: {self.host} names {url.address} for the next page, another host"
            )
        return url

    def _parse_link(self, text: str, base: Url, *, action: str) -> Url:
        try:
            return parse_url(text, base)
        except ValueError:
            raise errors.AnswerInvalid(
                f"cannot {action}: {self.host} sent an invalid Location or Link"
            ) from None


def _pull(repository: str) -> tuple[str, ...]:
    return (f"repository:{repository}:pull",)


def _push(repository: str) -> tuple[str, ...]:
    return (f"repository:{repository}:pull,push",)


def _make_manifest(
    answer: RegistryAnswer, reference: str, content: bytes, *, action: str
) -> names.Manifest:
    digest = oci_content.compute_digest(content)
    address = answer.url.address
    expected = (
        reference
        if oci_content.is_digest(reference)
        else answer.get_header("Docker-Content-Digest")
    )
    if expected and expected != digest:
        raise errors.DigestMismatch(
            f"cannot {action}: {address} sent content with the digest {digest}, not "
            f"{expected[:100]!r}"
        )
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise errors.AnswerInvalid(f"cannot {action}: {address} sent no JSON object")
    # Docker manifests always have a mediaType; OCI ones need not (image-spec, manifest.md).
    media_type = document.get("mediaType") or _read_media_type(answer)
    # One content must not be an index to one reader and an image to another.
    if not isinstance(media_type, str) or media_type not in (
        *oci_content.MANIFEST_TYPES,
        *oci_content.INDEX_TYPES,
    ):
        raise errors.AnswerInvalid(
            f"cannot {action}: expected a manifest of OCI or Docker schema 2, found the media "
            f"type {str(media_type)[:100]!r}"
        )
    # Clients that decide by the media type and clients that decide by the fields would read two
    # different images from one digest (CVE-2021-41190).
    has_layers, has_manifests = "layers" in document, "manifests" in document
    if has_layers in (media_type in oci_content.INDEX_TYPES, has_manifests):
        raise errors.AnswerInvalid(f"cannot {action}: its content is not that of {media_type}")
    return names.Manifest(media_type, digest, content)


def _check_received_digest(digest: str, reference: str, *, action: str, host: str) -> None:
    if not oci_content.is_digest(digest) or (
        oci_content.is_digest(reference) and digest != reference
    ):
        raise errors.DigestMismatch(f"cannot {action}: {host} answered the digest {digest[:100]!r}")


def _read_media_type(answer: RegistryAnswer) -> str:
    return answer.get_header("Content-Type").partition(";")[0].strip().lower()


def _read_length(answer: RegistryAnswer) -> int | None:
    text = answer.get_header("Content-Length")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _read_retry_after(answer: RegistryAnswer) -> float:
    """Return Retry-After in seconds; a date or an absurd number counts as none."""
    text = answer.get_header("Retry-After")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0.0


def _read_tags(content: bytes, *, action: str, host: str) -> list[str]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    # docker-registry answers "tags": null for a repository whose tags were all deleted.
    tags = (document.get("tags") if isinstance(document, dict) else None) or []
    is_list = isinstance(document, dict) and isinstance(tags, list)
    if not is_list or not all(isinstance(tag, str) for tag in tags):
        raise errors.AnswerInvalid(f"cannot {action}: {host} sent no list of tags")
    return tags
