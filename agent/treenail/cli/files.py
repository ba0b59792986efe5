"""Input files of commands: files, directories of documents, and the standard input."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, UsageError

STDIN = "-"
DOCUMENT_SUFFIXES = (".json", ".yaml", ".yml")


def read_documents(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file, and of each document in a directory.

    Raises `UsageError` if a file cannot be read.
    """
    for name in names:
        if name == STDIN:
            yield "standard input", read_input(STDIN)
            continue
        path = Path(name)
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in found:
            if file is path or (file.suffix in DOCUMENT_SUFFIXES and file.is_file()):
                yield str(file), read_input(str(file))


def read_machine_config(name: str) -> MachineConfig:
    """Read a MachineConfig or an Ignition config from a file or the standard input.

    Raises `UsageError` if the file cannot be read, and `ConfigError` if it is neither.
    """
    document = documents.load_document(read_input(name), where=name)
    if "ignition" in document:
        return MachineConfig(config=document)
    if document.get("kind") != "MachineConfig":
        raise ConfigError(
            f"cannot use {name}: expected a MachineConfig or an Ignition config, found neither",
            remedy="set kind: MachineConfig, or ignition.version",
        )
    return MachineConfig.from_json(document)


def read_input(name: str) -> bytes:
    """Read a file or the standard input; raise `UsageError` if that fails."""
    try:
        return sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
