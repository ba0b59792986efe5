"""Bundle for a bug report: a compressed tar archive; every part passes the redaction."""

import io
import json
import sys
import tarfile
from collections.abc import Callable

from treenail.cli.files import create_private_file
from treenail.config.redact import redact_line
from treenail.config.redacted_parts import (
    format_redacted_document,
    format_redacted_lines,
    format_redacted_text,
    truncate_start,
)
from treenail.errors import TreenailError

STDOUT = "-"
MAX_PART_BYTES = 2 * 1024 * 1024
"""Size limit of a part; a longer part keeps its end, which has the latest records."""


class Bundle:
    """Parts in memory, at most 2 MiB each, and the causes of missing parts."""

    def __init__(self, *, name: str, now: float) -> None:
        self._name = name
        self._now = now
        self._parts: dict[str, bytes] = {}
        self._missing: dict[str, str] = {}

    @property
    def missing(self) -> dict[str, str]:
        """Cause of each missing part, by its name."""
        return dict(self._missing)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(self._parts)

    def add_document(self, name: str, read: Callable[[], object]) -> None:
        """Add a JSON document."""
        self._add_part(name, lambda: format_redacted_document(read()))

    def add_text(self, name: str, read: Callable[[], str]) -> None:
        """Add a text; redact also secrets that span several lines."""
        self._add_part(name, lambda: format_redacted_text(read()))

    def add_lines(self, name: str, read: Callable[[], str]) -> None:
        """Add independent lines, such as journal records; redact line by line."""
        self._add_part(name, lambda: format_redacted_lines(read()))

    def write_archive(self, path: str) -> None:
        """Write the archive with mode 0600; raise `FileError` if the file exists."""
        archive = self._pack_archive()
        if path == STDOUT:
            sys.stdout.buffer.write(archive)
            sys.stdout.buffer.flush()
            return
        with create_private_file(path) as file:
            file.write(archive)

    def _add_part(self, name: str, read: Callable[[], bytes]) -> None:
        try:
            content = read()
        except (TreenailError, ValueError, RecursionError, OSError) as error:
            self._missing[name] = redact_line(str(error) or type(error).__name__)
            return
        self._parts[name] = truncate_start(content, MAX_PART_BYTES)

    def _pack_archive(self) -> bytes:
        index = {"parts": sorted(self._parts), "missing": self._missing}
        listed = {"index.json": json.dumps(index, indent=1).encode() + b"\n", **self._parts}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, content in listed.items():
                entry = tarfile.TarInfo(f"{self._name}/{name}")
                entry.size, entry.mtime, entry.mode = len(content), int(self._now), 0o600
                tar.addfile(entry, io.BytesIO(content))
        return packed.getvalue()
