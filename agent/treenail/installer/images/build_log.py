"""Logs of the attempts of builds: the Containerfile, the output and the report of each."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from treenail.api.decode import Json
from treenail.errors import FileError
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles

CONTAINERFILE, OUTPUT, REPORT = "Containerfile", "output.log", "report.json"
_MAX_ATTEMPTS = 30
"""Attempts of a pool whose logs are kept."""
_OUTPUT_LIMIT = 16 * 1024 * 1024  # bytes
_NAME = "attempt-"


class AttemptLog:
    """The log of one attempt; close it. Its directory has mode 0700."""

    def __init__(self, directory: InstallDirectory, files: InstallFiles, pool: str) -> None:
        """Begin the log of the next attempt; raises `FileError`."""
        parent = directory.get_build_logs(pool, 0).parent
        known = sorted(_read_number(name) for name in files.list_names(parent))
        self.number = max(known, default=0) + 1
        self.path = directory.get_build_logs(pool, self.number)
        self._files = files
        self._size = 0
        for old in known[: max(len(known) + 1 - _MAX_ATTEMPTS, 0)]:
            shutil.rmtree(directory.get_build_logs(pool, old), ignore_errors=True)
        files.make_directory(self.path)
        self._output = self._open_output()

    def write_containerfile(self, text: str) -> None:
        """Write the composed Containerfile."""
        self._files.write(self.path / CONTAINERFILE, text.encode())

    def write_line(self, line: str) -> None:
        """Add a line of output. A full disk ends the build, not its log."""
        content = line.encode("utf-8", "replace") + b"\n"
        if self._size < _OUTPUT_LIMIT <= self._size + len(content):
            content = b"the rest of the output is left out\n"
            self._size = _OUTPUT_LIMIT
        if self._size <= _OUTPUT_LIMIT:
            self._size += len(content)
            with suppress(OSError):
                self._output.write(content)

    def write_report(self, document: Json) -> None:
        """Write how the attempt ended."""
        content = json.dumps(document, indent=1).encode() + b"\n"
        self._files.write(self.path / REPORT, content)

    def close(self) -> None:
        """Close the output."""
        with suppress(OSError):
            self._output.close()

    def _open_output(self) -> BinaryIO:
        path: Path = self.path / OUTPUT
        try:
            # Unbuffered: the log of a killed process is complete.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from error
        return os.fdopen(descriptor, "wb", buffering=0)


def _read_number(name: str) -> int:
    text = name.removeprefix(_NAME)
    return int(text) if name.startswith(_NAME) and text.isascii() and text.isdigit() else 0
