"""The files that a command is given: files, directories of documents, standard input."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from treenail.errors import UsageError

STDIN = "-"
SUFFIXES = (".json", ".yaml", ".yml")


def texts(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file; of a directory, those that look like documents.

    Raises `UsageError` for what can't be read.
    """
    for name in names:
        if name == STDIN:
            yield "standard input", sys.stdin.buffer.read()
            continue
        path = Path(name)
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in found:
            if file is path or (file.suffix in SUFFIXES and file.is_file()):
                yield str(file), _read(file)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror or error}") from error
