"""Bundle for a bug report: a compressed tar archive; every part passes the redaction."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from treenail.config.redact import redact_json, redact_line, redact_lines
from treenail.errors import FileError, TreenailError

STDOUT = "-"
MAX_PART_BYTES = 2 * 1024 * 1024
"""Size limit of a part; a longer part keeps its end, which has the latest records."""

_TRUNCATION_NOTE = "… truncated at the start\n"


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
        self._add_part(name, lambda: json.dumps(redact_json(read()), indent=1, default=str) + "\n")

    def add_text(self, name: str, read: Callable[[], str]) -> None:
        """Add a text; redact also secrets that span several lines."""
        self._add_part(name, lambda: "\n".join(redact_lines(read().split("\n"))))

    def add_lines(self, name: str, read: Callable[[], str]) -> None:
        """Add independent lines, such as journal records; redact line by line."""
        self._add_part(name, lambda: "\n".join(map(redact_line, read().split("\n"))))

    def write_archive(self, path: str) -> None:
        """Write the archive with mode 0600; raise `FileError` if the file exists."""
        archive = self._pack_archive()
        if path == STDOUT:
            sys.stdout.buffer.write(archive)
            sys.stdout.buffer.flush()
            return
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(archive)
        except FileExistsError as error:
            raise FileError(
                f"cannot write {path}: the file exists", remedy="name another one with -o FILE"
            ) from error
        except OSError as error:
            raise FileError(f"cannot write {Path(path).absolute()}: {error.strerror}") from error

    def _add_part(self, name: str, read: Callable[[], str]) -> None:
        try:
            content = read().encode("utf-8", "replace")
        except (TreenailError, ValueError, RecursionError, OSError) as error:
            self._missing[name] = redact_line(str(error) or type(error).__name__)
            return
        if len(content) > MAX_PART_BYTES:
            content = _TRUNCATION_NOTE.encode() + content[-MAX_PART_BYTES:].partition(b"\n")[2]
        self._parts[name] = content

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
