"""Model of an Ignition config in terms of version 3.5.

Sections for the first boot only (disks, filesystems, raid, luks, groups, ``ignition``) keep their
original JSON. The contents of files stay encoded until a caller needs the bytes, so that a large
config is in memory only once.
"""

import binascii
import hashlib
import re
import zlib
from dataclasses import dataclass, field
from typing import Annotated

from treenail.api import decode
from treenail.encoding import codec
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
_PLACEHOLDER = re.compile(r"\{\{.{1,60}?\}\}|\$[({]\w{1,60}[)}]|<[\w .-]{1,60}>|%\w{1,60}%")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Contents(codec.WrittenObject, omits_defaults=True):
    """The contents of one file; ``location`` is where in the document they stand."""

    source: str | None = field(default=None, repr=False)
    compression: str | None = None
    digest: Annotated[str | None, codec.Key("verification.hash")] = None
    http_headers: tuple[decode.Json, ...] = field(default=(), repr=False)
    location: Annotated[str, codec.EXCLUDED] = field(default="contents", compare=False)

    @classmethod
    def from_fields(cls, fields: decode.Fields) -> "Contents":
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
        headers = fields.map_objects("httpHeaders", decode.Fields.get_other_fields)
        return cls(source, compression, digest, headers, fields.path)

    @property
    def is_empty(self) -> bool:
        """True when no field is set. Empty contents are not `is_empty`: their source is set."""
        return self == Contents()

    def decode_bytes(self) -> bytes:
        """Return the bytes of the file; raise `IgnitionError` with the location in the document."""
        contents = self._decompress(_decode_url(self.source, self.location) if self.source else b"")
        if self.digest is not None:
            name, _, digits = self.digest.partition("-")
            if hashlib.new(name, contents).hexdigest() != digits.lower():
                raise IgnitionError(
                    f"{self.location}.verification.hash: the contents have another digest"
                )
        return contents

    def check_source(self) -> None:
        """Raise `IgnitionError` unless the source is a data URL with valid data."""
        _decode_url(self.source or "", self.location)

    def compute_sha256(self) -> str:
        """Return the SHA-256 of the bytes in hexadecimal; raise as `decode_bytes` does."""
        return hashlib.sha256(self.decode_bytes()).hexdigest()

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
            placeholder = _PLACEHOLDER.search(text)
            actual = f"the placeholder {placeholder[0]}" if placeholder else "other data"
            raise IgnitionError(f"{location}.source: expected base64, found {actual}") from error
    if match := _NOT_IN_URL.search(text) or _BAD_ESCAPE.search(text):
        raise IgnitionError(
            f"{location}.source: invalid URL character {match.start()} after the comma",
            remedy="write it as % and two hexadecimal digits, or use base64",
        )
    # Quoted-printable differs from percent encoding only in its sign, and binascii has a C decoder.
    return binascii.a2b_qp(text.replace("=", "=3D").replace("%", "="))


VERSION = "3.5.0"
"""The version that `IgnitionConfig.to_json` writes."""


@dataclass(frozen=True, slots=True)
class IgnitionOwner(codec.WrittenObject, omits_defaults=True):
    """A user or group by ID or by name; root when neither is set, and the ID wins over a name."""

    id: int | None = None
    name: str | None = None


UNSET_OWNER = IgnitionOwner()


@dataclass(frozen=True, slots=True)
class IgnitionFile(codec.WrittenObject, omits_defaults=True):
    """A file; ``location`` is its path in the document."""

    path: str
    contents: Contents = field(default_factory=Contents)
    append: tuple[Contents, ...] = ()
    mode: int | None = None
    user: IgnitionOwner = UNSET_OWNER
    group: IgnitionOwner = UNSET_OWNER
    overwrite: bool | None = None
    location: Annotated[str, codec.EXCLUDED] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class IgnitionDirectory(codec.WrittenObject, omits_defaults=True):
    """A directory."""

    path: str
    mode: int | None = None
    user: IgnitionOwner = UNSET_OWNER
    group: IgnitionOwner = UNSET_OWNER
    overwrite: bool | None = None
    location: Annotated[str, codec.EXCLUDED] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class IgnitionLink(codec.WrittenObject, omits_defaults=True):
    """A symbolic or hard link."""

    path: str
    target: str
    hard: bool | None = None
    user: IgnitionOwner = UNSET_OWNER
    group: IgnitionOwner = UNSET_OWNER
    overwrite: bool | None = None
    location: Annotated[str, codec.EXCLUDED] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class IgnitionDropin(codec.WrittenObject, omits_defaults=True):
    """A drop-in of a unit."""

    name: str
    contents: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class IgnitionUnit(codec.WrittenObject, omits_defaults=True):
    """A systemd unit, or settings and drop-ins of an existing one."""

    name: str
    contents: str | None = field(default=None, repr=False)
    enabled: bool | None = None
    mask: bool | None = None
    dropins: tuple[IgnitionDropin, ...] = ()
    location: Annotated[str, codec.EXCLUDED] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class IgnitionUser(codec.WrittenObject, omits_defaults=True):
    """A user; ``others`` keeps all fields except SSH keys and the password hash."""

    name: str
    ssh_keys: Annotated[tuple[str, ...], codec.Key("sshAuthorizedKeys")] = field(
        default=(), repr=False
    )
    password_hash: str | None = field(default=None, repr=False)
    others: Annotated[decode.Json, codec.REST] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class IgnitionConfig(codec.WrittenObject, omits_defaults=True):
    """An Ignition config; it is written in version 3.5 without empty fields, as Go does."""

    ignition_section: Annotated[decode.Json, codec.Key("ignition", part="rest")] = field(
        default_factory=dict, repr=False
    )
    """Fields of ``ignition`` except the version."""
    version: Annotated[
        str, codec.Key("ignition.version", omit=False), codec.Via(write=lambda _version: VERSION)
    ] = VERSION
    """The version of the original document."""
    kernel_arguments: Annotated[tuple[str, ...], codec.Key("kernelArguments.shouldExist")] = ()
    absent_kernel_arguments: Annotated[
        tuple[str, ...], codec.Key("kernelArguments.shouldNotExist")
    ] = ()
    users: Annotated[tuple[IgnitionUser, ...], codec.Key("passwd.users")] = ()
    groups: Annotated[tuple[decode.Json, ...], codec.Key("passwd.groups")] = field(
        default=(), repr=False
    )
    directories: Annotated[tuple[IgnitionDirectory, ...], codec.Key("storage.directories")] = ()
    disks: Annotated[tuple[decode.Json, ...], codec.Key("storage.disks")] = ()
    files: Annotated[tuple[IgnitionFile, ...], codec.Key("storage.files")] = ()
    filesystems: Annotated[tuple[decode.Json, ...], codec.Key("storage.filesystems")] = ()
    links: Annotated[tuple[IgnitionLink, ...], codec.Key("storage.links")] = ()
    luks: Annotated[tuple[decode.Json, ...], codec.Key("storage.luks")] = field(
        default=(), repr=False
    )
    raid: Annotated[tuple[decode.Json, ...], codec.Key("storage.raid")] = ()
    units: Annotated[tuple[IgnitionUnit, ...], codec.Key("systemd.units")] = ()
