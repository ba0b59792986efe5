"""A bundle for a bug report: a compressed tar whose every part has gone through the redaction."""

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
"""Bytes that one part may have; of a longer one the end is kept, where the latest is."""

_TRUNCATION_NOTE = "… the beginning is left out\n"


class Bundle:
    """Parts in memory, at most 2 MiB each, and what could not be got and why."""

    def __init__(self, *, name: str, now: float) -> None:
        self._name = name
        self._now = now
        self._parts: dict[str, bytes] = {}
        self._missing: dict[str, str] = {}

    @property
    def missing(self) -> dict[str, str]:
        """By the name of each part that is not there, why."""
        return dict(self._missing)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts there are."""
        return tuple(self._parts)

    def add_document(self, name: str, read: Callable[[], object]) -> None:
        """Add a JSON document."""
        self._add_part(name, lambda: json.dumps(redact_json(read()), indent=1, default=str) + "\n")

    def add_text(self, name: str, read: Callable[[], str]) -> None:
        """Add a text; a secret in it may go over several lines."""
        self._add_part(name, lambda: "\n".join(redact_lines(read().split("\n"))))

    def add_lines(self, name: str, read: Callable[[], str]) -> None:
        """Add lines that have nothing to do with each other, such as a journal's."""
        self._add_part(name, lambda: "\n".join(map(redact_line, read().split("\n"))))

    def write_archive(self, path: str) -> None:
        """Write the bundle, for its owner alone; an existing file is not replaced.

        Raises `FileError`.
        """
        packed = self._pack_archive()
        if path == STDOUT:
            sys.stdout.buffer.write(packed)
            sys.stdout.buffer.flush()
            return
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(packed)
        except FileExistsError as error:
            raise FileError(f"{path} is there already", remedy="name another file") from error
        except OSError as error:
            raise FileError(f"can't write {Path(path).absolute()}: {error.strerror}") from error

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
