"""The files that a command is given: files, directories of documents, standard input."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.errors import ConfigError, UsageError

STDIN = "-"
DOCUMENT_SUFFIXES = (".json", ".yaml", ".yml")


def read_documents(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file; of a directory, those that look like documents.

    Raises `UsageError` for what can't be read.
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
    """The config in a file, or on standard input, be it a MachineConfig or an Ignition config.

    Raises `UsageError` for what can't be read, `ConfigError` for what is not one.
    """
    document = documents.load_document(read_input(name), where=name)
    if "ignition" in document:
        return MachineConfig(config=document)
    if document.get("kind") != "MachineConfig":
        raise ConfigError(
            f"{name}: expected a MachineConfig or an Ignition config, found neither",
            remedy="one has kind: MachineConfig, the other has ignition.version",
        )
    return MachineConfig.from_json(document)


def read_input(name: str) -> bytes:
    """What the file holds, or standard input; raises `UsageError`."""
    try:
        return sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: can't be read: {error.strerror or error}") from error
