"""Compressed tar archive for a bug report: its size is bounded, and secrets are withheld.

``treenail collect`` writes one about a node, ``treenail-controller install gather`` about an
installation.
"""

import base64
import io
import json
import os
import re
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from treenail import clocks, errors, memory, sanitize
from treenail.config import node_paths, redact

MAX_ARCHIVE_BYTES = 200_000_000
"""Size limit of the archive."""
_MAX_PARTS = 20_000
# Space for the index, for headers of tar and for what the compression has not written yet.
_RESERVE_BYTES = 8 * memory.MIB
_HEADER_BYTES = 1024


class LogBundle:
    """Writes parts to a stream one after the other, the index last.

    Add the most important parts first: a part that would exceed the size limit is left out. The
    index names missing and truncated parts with the cause.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        name: str,
        now: float,
        index_name: str = "index.json",
        max_bytes: int = MAX_ARCHIVE_BYTES,
        max_part_bytes: int = MAX_ARCHIVE_BYTES,
    ) -> None:
        """``name`` is the directory in the archive; a longer part keeps its last whole lines."""
        self._name = name
        self._now = now
        self._index_name = index_name
        self._max_bytes = max_bytes
        self._max_part_bytes = max_part_bytes
        self._stream = _CountingStream(stream)
        self._tar = tarfile.open(fileobj=self._stream, mode="w:gz")  # noqa: SIM115  see close
        self._parts: list[str] = []
        self._missing: dict[str, str] = {}
        self._truncated: dict[str, str] = {}
        self._hidden: list[bytes] = []

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which they were added."""
        return tuple(self._parts)

    @property
    def missing(self) -> dict[str, str]:
        """Cause of each missing part, by its name."""
        return dict(self._missing)

    def hide_secrets(self, files: Iterable[Callable[[], bytes | None]]) -> None:
        """Withhold in every part, in all their forms, the secrets of files that can be read."""
        values: set[str] = set()
        for read in files:
            with suppress(errors.TreenailError, OSError):
                values |= find_secrets((read() or b"").decode("utf-8", "replace"))
        self._hidden = list_forms(values)

    def add_document(self, name: str, read: Callable[[], object]) -> None:
        """Add a JSON document without its secrets."""
        self.add_part(name, lambda: redact.format_redacted_document(read()))

    def add_text(self, name: str, read: Callable[[], str]) -> None:
        """Add a text without its secrets, also those that span several lines."""
        self.add_part(name, lambda: redact.format_redacted_text(read()))

    def add_lines(self, name: str, read: Callable[[], str]) -> None:
        """Add independent lines, such as journal records; redact line by line."""
        self.add_part(name, lambda: redact.format_redacted_lines(read()))

    def add_part(self, name: str, read: Callable[[], bytes]) -> None:
        """Add bytes that passed the redaction; record the cause if they cannot be read."""
        try:
            content = read()
        except (errors.TreenailError, ValueError, RecursionError, OSError) as error:
            self.note_missing(name, str(error) or type(error).__name__)
            return
        if (omitted := len(content) - self._max_part_bytes) > 0:
            content = redact.truncate_start(content, self._max_part_bytes)
            self.note_truncated(name, f"at least {omitted} bytes left out at the start")
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
        self._write_entry(self._index_name, json.dumps(index, indent=1).encode() + b"\n")
        self._tar.close()

    def format_report(self, path: str) -> Iterator[str]:
        """Yield the lines for the user about the archive at ``path``, what it lacks first."""
        yield from (f"missing {part}: {why}" for part, why in self._missing.items())
        yield from (f"truncated {part}: {what}" for part, what in self._truncated.items())
        count = len(self._parts)
        yield f"{path}: {count} parts, secrets withheld; read it before you share it"

    def _has_space(self, content: bytes) -> bool:
        left = self._max_bytes - _RESERVE_BYTES - self._stream.count - _HEADER_BYTES
        # The exact size is computed only where it matters.
        return len(content) <= left or len(zlib.compress(content)) <= left

    def _write_entry(self, name: str, content: bytes) -> None:
        for form in self._hidden:
            content = content.replace(form, node_paths.WITHHELD.encode())
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


def describe_file(name: str, status: os.stat_result) -> dict[str, object]:
    """Describe a file without its contents."""
    return {
        "path": name,
        "mode": stat.filemode(status.st_mode),
        "owner": f"{status.st_uid}:{status.st_gid}",
        "bytes": status.st_size,
        "changed": clocks.format_rfc3339(status.st_mtime),
    }


def measure_disks(folders: Mapping[str, Path]) -> dict[str, object]:
    """Return size and free space of the file systems of folders, by name, in bytes."""
    usages = {name: shutil.disk_usage(path) for name, path in folders.items() if path.is_dir()}
    return {name: {"bytes": usage.total, "free": usage.free} for name, usage in usages.items()}


_LOGIN_VALUE = re.compile(
    rf"{redact.ANY_WORD}\\{{0,8}}[\"']?\s*[:=]\s*\\{{0,8}}[\"']?([^\s\"'\\,{{}}\[\]]{{6,}})",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"//([^\s/@\"']*:([^\s/@\"']+))@")
_MIN_SECRET = 6


def find_secrets(text: str, *, depth: int = 3) -> set[str]:
    """Return passwords, logins and tokens of a file that has them, such as a pull secret."""
    values = {match[1] for match in _LOGIN_VALUE.finditer(text)}
    for match in _URL_LOGIN.finditer(text):
        values |= {*match.groups(), *map(unquote, match.groups())}
    for word in (*values, *re.findall(sanitize.ENCODED, text)) if depth else ():
        decoded = sanitize.decode_text(word)
        values |= find_secrets(decoded, depth=depth - 1)
        if ":" in decoded and not decoded.count("\n"):
            values |= {decoded, decoded.partition(":")[2]}
    return {value for value in values if len(value) >= _MIN_SECRET}


def list_forms(values: Iterable[str]) -> list[bytes]:
    """Return the forms of secrets in which programs show them, long ones first."""
    forms: set[str] = set()
    for value in values:
        content = value.encode()
        forms |= {value, json.dumps(value)[1:-1], quote(value), quote(value, safe="")}
        forms |= {base64.b64encode(content).decode(), base64.urlsafe_b64encode(content).decode()}
    return sorted({form.rstrip("=").encode() for form in forms}, key=len, reverse=True)
