"""Archive of a log bundle: a compressed tar file whose size is bounded while it is written.

Secrets of Kubernetes objects are withheld, so that users may share the archive.
"""

import io
import json
import tarfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

from treenail import errors
from treenail.api import decode, documents
from treenail.config import node_paths, redact
from treenail.config.ignition.withhold import withhold_secrets

MAX_ARCHIVE_BYTES = 200_000_000
"""Size limit of the archive."""
INDEX_NAME = "bootstrap/treenail/index.json"
_MAX_PARTS = 20_000
# Space for the index, for headers of tar and for what the compression has not written yet.
_RESERVE_BYTES = 8 * 1024 * 1024
_HEADER_BYTES = 1024


class LogBundle:
    """Writes parts to a stream one after the other, the index last.

    Add the most important parts first: a part that would exceed the size limit is left out, and the
    index names it with the cause.
    """

    def __init__(
        self, stream: BinaryIO, *, name: str, now: float, max_bytes: int = MAX_ARCHIVE_BYTES
    ) -> None:
        self._name = name
        self._now = now
        self._max_bytes = max_bytes
        self._stream = _CountingStream(stream)
        self._tar = tarfile.open(fileobj=self._stream, mode="w:gz")  # noqa: SIM115  see close
        self._parts: list[str] = []
        self._missing: dict[str, str] = {}
        self._truncated: dict[str, str] = {}

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which they were added."""
        return tuple(self._parts)

    @property
    def missing(self) -> dict[str, str]:
        """Cause of each missing part, by its name."""
        return dict(self._missing)

    @property
    def truncated(self) -> dict[str, str]:
        """Statement of what each shortened part lacks, by its name."""
        return dict(self._truncated)

    def add_document(self, name: str, read: Callable[[], object]) -> None:
        """Add a JSON document without its secrets."""
        self.add_part(name, lambda: redact.format_redacted_document(read()))

    def add_text(self, name: str, read: Callable[[], str]) -> None:
        """Add a text without its secrets."""
        self.add_part(name, lambda: redact.format_redacted_text(read()))

    def add_part(self, name: str, read: Callable[[], bytes]) -> None:
        """Add bytes that passed the redaction; record the cause if they cannot be read."""
        try:
            content = read()
        except (errors.TreenailError, ValueError, RecursionError, OSError) as error:
            self.note_missing(name, str(error) or type(error).__name__)
            return
        if len(self._parts) >= _MAX_PARTS:
            self.note_missing(name, f"the bundle has {_MAX_PARTS} parts, which is the limit")
        elif self._has_space(content):
            self._write_entry(name, content)
            self._parts.append(name)
        else:
            limit = self._max_bytes // 1_000_000
            self.note_missing(name, f"left out: the bundle would have more than {limit} MB")

    def note_missing(self, name: str, cause: str) -> None:
        """Record that a part is missing, and why."""
        if len(self._missing) < _MAX_PARTS:
            self._missing[name] = redact.redact_line(" ".join(cause.split()))[:1000]

    def note_truncated(self, name: str, statement: str) -> None:
        """Record what a part lacks."""
        self._truncated[name] = statement

    def close(self) -> None:
        """Write the index, and end the archive."""
        index = {
            "parts": sorted(self._parts),
            "missing": self._missing,
            "truncated": self._truncated,
        }
        self._write_entry(INDEX_NAME, json.dumps(index, indent=1).encode() + b"\n")
        self._tar.close()

    def _has_space(self, content: bytes) -> bool:
        left = self._max_bytes - _RESERVE_BYTES - self._stream.count - _HEADER_BYTES
        # The exact size is computed only where it matters.
        return len(content) <= left or len(zlib.compress(content)) <= left

    def _write_entry(self, name: str, content: bytes) -> None:
        entry = tarfile.TarInfo(f"{self._name}/{name}")
        entry.size, entry.mtime, entry.mode = len(content), int(self._now), 0o600
        self._tar.addfile(entry, io.BytesIO(content))


class _CountingStream(io.RawIOBase):
    """Counts the bytes that are written to a stream, which may be a pipe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = 0

    def write(self, content: object) -> int:
        written: int = self._stream.write(content)  # type: ignore[call-overload]
        self.count += written
        return written

    def writable(self) -> bool:
        return True


# Annotation of `kubectl apply`; has the whole object, with its secrets.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SECRET_FIELDS = ("data", "stringData")
_REFERENCE_FIELDS = frozenset({"name", "namespace"})


def format_objects(content: bytes, *, where: str) -> bytes:
    """Format the objects of a YAML or JSON file without secrets, as YAML.

    Raises `ConfigError` if the file cannot be parsed: a Secret in it cannot be recognized then.
    """
    objects = [
        withhold_object(document) for document in documents.load_documents(content, where=where)
    ]
    return "---\n".join(map(documents.dump_document, objects)).encode("utf-8", "replace")


def withhold_document(content: bytes, *, where: str) -> object:
    """Parse a JSON document, and withhold its secrets; raise `ConfigError`."""
    document = decode.load_json(content, where=where)
    return withhold_object(document) if isinstance(document, dict) else redact.redact_json(document)


def withhold_object(document: decode.Json) -> decode.Json:
    """Return the object without Secrets' values, contents of secret files, and known secrets."""
    withheld = _withhold_value(document)
    restored = _restore_references(withheld, redact.redact_json(withheld))
    return restored if isinstance(restored, dict) else {}


def _withhold_value(value: object) -> object:
    if isinstance(value, list):
        return [_withhold_value(element) for element in value]
    if not isinstance(value, dict):
        return value
    kept = {
        name: _withhold_value(member) for name, member in value.items() if name != _LAST_APPLIED
    }
    if value.get("kind") == "Secret":
        kept |= {name: _withhold_fields(value[name]) for name in _SECRET_FIELDS if name in value}
    if isinstance(value.get("ignition"), dict):
        return _withhold_ignition(kept)
    return kept


def _withhold_fields(fields: object) -> object:
    """Withhold all values; the names say what the Secret has."""
    return (
        dict.fromkeys(fields, node_paths.WITHHELD)
        if isinstance(fields, dict)
        else node_paths.WITHHELD
    )


def _withhold_ignition(config: decode.Json) -> object:
    try:
        return withhold_secrets(config)
    except errors.ConfigError:
        return node_paths.WITHHELD


def _restore_references(original: object, redacted: object) -> object:
    """Show names of Secrets again: the key `renderedImagePushSecret` names a reference."""
    if redacted == node_paths.WITHHELD and _is_reference(original):
        return original
    if isinstance(original, dict) and isinstance(redacted, dict):
        return {
            name: _restore_references(original[name], member) if name in original else member
            for name, member in redacted.items()
        }
    if isinstance(original, list) and isinstance(redacted, list):
        return list(map(_restore_references, original, redacted))
    return redacted


def _is_reference(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and value.keys() <= _REFERENCE_FIELDS
