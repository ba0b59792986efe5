"""Contents of a file in Ignition's form: a data URL with optional compression and digest.

They stay encoded until a caller needs the bytes, so that a large config is in memory only once.
"""

import binascii
import hashlib
import re
import zlib
from dataclasses import dataclass, field

from treenail.api.decode import Fields, Json
from treenail.api.meta import omit_none
from treenail.errors import IgnitionError

SIZE_LIMIT = 64 * 1024 * 1024
"""Maximum size of a decompressed file in bytes."""

GZIP = "gzip"
DIGEST_SIZES = {"sha256": 64, "sha512": 128}
"""Number of hexadecimal digits for each supported digest."""

_REMOTE = ("http:", "https:", "tftp:", "s3:", "gs:", "arn:")
_TOKEN = r"[!#$%&'*+.^_`{|}~0-9A-Za-z-]+"  # noqa: S105  # a token of RFC 2045, no secret
_HEAD = re.compile(
    rf'data:(?:{_TOKEN}/{_TOKEN})?(?:;{_TOKEN}=(?:{_TOKEN}|"(?:[^"\\]|\\.)*"))*(;base64)?,'
)
_NOT_IN_URL = re.compile(r"[^!$-;=?-Z_a-z~]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one file; ``location`` is where in the document they stand."""

    source: str | None = field(default=None, repr=False)
    compression: str | None = None
    digest: str | None = None
    http_headers: tuple[Json, ...] = field(default=(), repr=False)
    location: str = field(default="contents", compare=False)

    @classmethod
    def from_fields(cls, fields: Fields) -> "Contents":
        """Read the contents with Ignition's checks; `decode_bytes` checks the data itself."""
        source = fields.get_optional_text("source")
        compression = fields.get_optional_text("compression")
        digest = None
        if source and not source.startswith(("data:", *_REMOTE)):
            raise fields.make_error("source", "a data: URL")
        if compression and compression != GZIP:
            raise fields.error(
                f"{fields.path_of('compression')}: expected gzip or nothing, found "
                f"{compression!r:.40}"
            )
        if "verification" in fields.values:
            verification = fields.get_object("verification")
            digest = verification.get_optional_text("hash")
            name, _, digits = (digest or "").partition("-")
            if digest is not None and len(digits) != DIGEST_SIZES.get(name, -1):
                raise verification.make_error("hash", "sha512- or sha256- and as many digits")
        headers = fields.map_objects("httpHeaders", lambda header: omit_none(**header.values))
        return cls(source, compression, digest, headers, fields.path)

    @property
    def is_empty(self) -> bool:
        """True when no field is set. Empty contents are not `is_empty`: their source is set."""
        return self == Contents()

    def decode_bytes(self) -> bytes:
        """Return the bytes of the file; raise `IgnitionError` with the location in the document."""
        found = self._decompress(_decode_url(self.source, self.location) if self.source else b"")
        if self.digest is not None:
            name, _, digits = self.digest.partition("-")
            if hashlib.new(name, found).hexdigest() != digits.lower():
                raise IgnitionError(
                    f"{self.location}.verification.hash: the contents have another digest"
                )
        return found

    def check_source(self) -> None:
        """Raise `IgnitionError` unless the source is a data URL with valid data."""
        _decode_url(self.source or "", self.location)

    def compute_sha256(self) -> str:
        """Return the SHA-256 of the bytes in hexadecimal; raise as `decode_bytes` does."""
        return hashlib.sha256(self.decode_bytes()).hexdigest()

    def to_json(self) -> Json:
        """Convert to Ignition 3, without unset fields."""
        return omit_none(
            source=self.source,
            compression=self.compression,
            verification=None if self.digest is None else {"hash": self.digest},
            httpHeaders=list(self.http_headers) or None,
        )

    def _decompress(self, packed: bytes) -> bytes:
        if self.compression != GZIP or not packed:
            return packed
        parts: list[bytes] = []
        room = SIZE_LIMIT + 1
        try:
            while packed:
                member = zlib.decompressobj(wbits=31)
                parts.append(member.decompress(packed, room))
                room -= len(parts[-1])
                if room <= 0:
                    raise IgnitionError(
                        f"{self.location}: more than {SIZE_LIMIT} bytes when decompressed"
                    )
                if not member.eof:
                    raise IgnitionError(
                        f"{self.location}.source: expected gzip, found truncated gzip"
                    )
                packed = member.unused_data
        except zlib.error as error:
            raise IgnitionError(
                f"{self.location}.source: expected gzip, found other data"
            ) from error
        return b"".join(parts)


def _decode_url(url: str, location: str) -> bytes:
    head = _HEAD.match(url)
    if head is None:
        if url.startswith(_REMOTE):
            raise IgnitionError(
                f"{location}.source: expected a data: URL, found a remote URL",
                remedy="write the contents into the config as a data: URL",
            )
        raise IgnitionError(f"{location}.source: malformed data: URL before its comma")
    if '"' not in head[0] and _BAD_ESCAPE.search(head[0]):
        raise IgnitionError(
            f"{location}.source: malformed escape before the comma of its data: URL"
        )
    text = url[head.end() :]
    if head[1]:
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise IgnitionError(f"{location}.source: expected base64, found other data") from error
    if found := _NOT_IN_URL.search(text) or _BAD_ESCAPE.search(text):
        raise IgnitionError(
            f"{location}.source: invalid URL character {found.start()} after the comma",
            remedy="write it as % and two hexadecimal digits, or use base64",
        )
    # Quoted-printable differs from percent encoding only in its sign, and binascii has a C decoder.
    return binascii.a2b_qp(text.replace("=", "=3D").replace("%", "="))
