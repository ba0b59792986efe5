"""Uploads of blobs: mounted from another repository, in one request, or in chunks that resume."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Protocol
from urllib.parse import quote

from treenail import memory, oci_content
from treenail.errors import FileError
from treenail.registry import names, transport
from treenail.registry.client import RegistryClient
from treenail.registry.errors import AnswerInvalid, DigestMismatch, RegistryError

# The end of a Range is the position of the last byte; docker-registry writes no unit before it.
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,15})")
_CHUNK_LIMIT = 512 * memory.MIB
_STARTS = 5


class BlobFile(Protocol):
    """The content of a blob."""

    def seek(self, position: int, /) -> object: ...

    def read(self, limit: int, /) -> bytes: ...

    def close(self) -> None: ...


OpenBlob = Callable[[], BlobFile]
"""Opens the content of a blob; `upload_blob` closes it."""


@dataclass(frozen=True, slots=True)
class _FilePart:
    """A part of a blob's content as the body of a request; each iteration reads it again."""

    file: BlobFile
    start: int
    size: int

    def iter_pieces(self) -> Iterator[bytes]:
        left = self.size
        while left > 0:
            try:
                self.file.seek(self.start + self.size - left)
                piece = self.file.read(min(left, transport.PIECE))
            except OSError as error:
                raise FileError(f"cannot read a blob to push: {error.strerror}") from error
            if not piece:
                raise DigestMismatch(f"cannot push a blob: its content ends {left} bytes early")
            left -= len(piece)
            yield piece


def mount_blob(client: RegistryClient, repository: str, digest: str, source: str) -> bool:
    """Mount a blob of the repository ``source``; return False if the registry does not.

    A registry that cannot mount begins an upload instead, which is cancelled.
    """
    names.check_repository(repository)
    names.check_repository(source)
    names.check_digest(digest)
    action = f"mount the blob {client.format_image(source, digest)} into {repository}"
    scopes = (f"repository:{repository}:pull,push", f"repository:{source}:pull")

    def mount() -> bool:
        query = f"?mount={digest}&from={quote(source, safe='')}"
        url = client.make_url(repository, f"blobs/uploads/{query}")
        answer = client.send("POST", url, {}, scopes=scopes, action=action)
        client.check_status(answer, {201, 202}, action=action)
        answer.read(client.limits.error_bytes)
        if answer.status == 201:
            return True
        # An abandoned upload is the registry's to purge where it refuses the cancellation.
        with suppress(RegistryError):
            place = client.parse_location(answer, action=action)
            client.send("DELETE", place, {}, scopes=scopes[:1], action=action).close()
        return False

    return client.retry(mount)


def verify_push_access(client: RegistryClient, repository: str) -> None:
    """Begin an upload and cancel it; raise `RegistryError` where the login may not push."""
    names.check_repository(repository)
    action = f"push to {client.host}/{repository}"
    scopes = (f"repository:{repository}:pull,push",)

    def begin() -> None:
        url = client.make_url(repository, "blobs/uploads/")
        answer = client.send("POST", url, {}, scopes=scopes, action=action)
        client.check_status(answer, {202}, action=action)
        answer.read(client.limits.error_bytes)
        # An abandoned upload is the registry's to purge where it refuses the cancellation.
        with suppress(RegistryError):
            place = client.parse_location(answer, action=action)
            client.send("DELETE", place, {}, scopes=scopes, action=action).close()

    client.retry(begin)


def upload_blob(
    client: RegistryClient, repository: str, descriptor: names.Descriptor, open_blob: OpenBlob
) -> None:
    """Upload a blob unless the repository has it. An interrupted upload continues."""
    if client.has_blob(repository, descriptor.digest):
        return
    with closing(open_blob()) as file:
        upload = _Upload(client, repository, descriptor, file)
        while not upload.is_complete:
            client.retry(upload.advance)


def upload_bytes(
    client: RegistryClient, repository: str, media_type: str, content: bytes
) -> names.Descriptor:
    """Upload a blob from memory, and return its descriptor."""
    descriptor = names.Descriptor(media_type, oci_content.compute_digest(content), len(content))
    upload_blob(client, repository, descriptor, lambda: BytesIO(content))
    return descriptor


class _Upload:
    """One upload; the position is what the registry confirmed."""

    def __init__(
        self, client: RegistryClient, repository: str, descriptor: names.Descriptor, file: BlobFile
    ) -> None:
        self.is_complete = False
        self._client = client
        self._repository = repository
        self._blob = descriptor
        self._file = file
        self._scopes = (f"repository:{repository}:pull,push",)
        self._action = f"push the blob {client.format_image(repository, descriptor.digest)}"
        self._place: transport.Url | None = None
        self._position = 0
        self._is_uncertain = False
        self._starts = 0
        self._chunk = client.limits.chunk_bytes

    def advance(self) -> None:
        """Send one chunk, or the last one with the digest."""
        if self._is_uncertain:
            self._find_position()
        if self.is_complete:
            return
        place = self._place or self._start_upload()
        self._is_uncertain = True
        if self._blob.size - self._position > self._chunk:
            self._send_chunk(place)
        else:
            self._finish_upload(place)
        self._is_uncertain = False

    def _start_upload(self) -> transport.Url:
        client = self._client
        self._starts += 1
        if self._starts > _STARTS:
            raise AnswerInvalid(
                f"cannot {self._action}: {client.host} forgot the upload {_STARTS} times"
            )
        url = client.make_url(self._repository, "blobs/uploads/")
        answer = client.send("POST", url, {}, scopes=self._scopes, action=self._action)
        client.check_status(answer, {202}, action=self._action)
        answer.read(client.limits.error_bytes)
        # Storage behind a registry may need large parts, such as 5 MiB in S3; the last one may be
        # smaller.
        minimum = answer.get_header("OCI-Chunk-Min-Length")
        if minimum.isascii() and minimum.isdigit() and len(minimum) < 12:
            self._chunk = min(max(self._chunk, int(minimum)), _CHUNK_LIMIT)
        self._position = 0
        self._place = client.parse_location(answer, action=self._action)
        return self._place

    def _find_position(self) -> None:
        """Ask what arrived of a chunk whose answer was lost; begin again if that is unknown."""
        client = self._client
        place, self._place = self._place, None
        if place is not None:
            answer = client.send("GET", place, {}, scopes=self._scopes, action=self._action)
            # docker-registry 2.8 knows a position only by the Location of the lost answer.
            if answer.status not in {400, 404, 416}:
                client.check_status(answer, {200, 204}, action=self._action)
                answer.read(client.limits.error_bytes)
                self._place = client.parse_location(answer, action=self._action)
                self._position = self._read_position(answer)
                # 0-0 means nothing or one byte.
                if self._position <= 1:
                    self._place = None
            else:
                answer.close()
        if self._place is None and client.has_blob(self._repository, self._blob.digest):
            self.is_complete = True
        self._is_uncertain = False

    def _send_chunk(self, place: transport.Url) -> None:
        client, start = self._client, self._position
        headers = {
            "Content-Type": "application/octet-stream",
            # Without the unit "bytes", unlike in RFC 9110 (OCI distribution API, Pushing a blob in
            # chunks).
            "Content-Range": f"{start}-{start + self._chunk - 1}",
        }
        body = _FilePart(self._file, start, self._chunk)
        answer = client.send(
            "PATCH", place, headers, body, scopes=self._scopes, action=self._action
        )
        client.check_status(answer, {202, 204}, action=self._action)
        answer.read(client.limits.error_bytes)
        self._position = self._read_position(answer)
        if not start < self._position <= start + self._chunk:
            raise AnswerInvalid(
                f"cannot {self._action}: {client.host} has {self._position} bytes after "
                f"{start + self._chunk} were sent"
            )
        self._place = client.parse_location(answer, action=self._action)

    def _finish_upload(self, place: transport.Url) -> None:
        client = self._client
        # The Location of an upload may have a query, which must stay.
        joint = "&" if "?" in place.target else "?"
        target = f"{place.target}{joint}digest={self._blob.digest}"
        url = transport.Url(place.scheme, place.host, place.port, target)
        body = _FilePart(self._file, self._position, self._blob.size - self._position)
        headers = {"Content-Type": "application/octet-stream"}
        answer = client.send("PUT", url, headers, body, scopes=self._scopes, action=self._action)
        client.check_status(answer, {201, 204}, action=self._action)
        answer.read(client.limits.error_bytes)
        self.is_complete = True

    def _read_position(self, answer: transport.RegistryAnswer) -> int:
        match = _RANGE.fullmatch(answer.get_header("Range"))
        if match is None or int(match[1]) >= self._blob.size:
            raise AnswerInvalid(
                f"cannot {self._action}: {self._client.host} sent no valid Range of the upload"
            )
        return int(match[1]) + 1
