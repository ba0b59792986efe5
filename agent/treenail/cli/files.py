"""Files of commands: documents, directories of them, the standard input, and private output."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from treenail import errors, memory
from treenail.api import documents, machineconfig

STDIN = STDOUT = "-"
_MAX_BYTES = 128 * memory.MIB


def read_documents(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file, and of each document in a directory.

    Raises `UsageError` if a file cannot be read.
    """
    for name in names:
        if name == STDIN:
            yield "standard input", read_input(STDIN)
            continue
        for file in _list_documents(name):
            yield file, read_input(file)


def _list_documents(name: str) -> list[str]:
    if not name:
        # Path("") is the current directory.
        raise errors.UsageError(
            "cannot read a file without a name", remedy="name a file or a directory"
        )
    path = Path(name)
    try:
        if not path.is_dir():
            return [name]
        children = (child for child in path.iterdir() if child.suffix in documents.SUFFIXES)
        names = sorted(str(child) for child in children if child.is_file())
    except (OSError, ValueError) as error:
        raise _make_error(name, error) from error
    if not names:
        known = ", ".join(documents.SUFFIXES)
        raise errors.ConfigError(
            f"cannot read {name:.200}: the directory has no file with one of the suffixes {known}",
            remedy="name a directory with such files; files in its directories are not read",
        )
    return names


def read_machine_config(name: str) -> machineconfig.MachineConfig:
    """Read a MachineConfig or an Ignition config from a file or the standard input.

    Raises `UsageError` if the file cannot be read, and `ConfigError` if it is neither.
    """
    document = documents.load_document(read_input(name), where=name)
    if "ignition" in document:
        return machineconfig.MachineConfig(config=document)
    if document.get("kind") != "MachineConfig":
        raise errors.ConfigError(
            f"cannot use {name}: expected a MachineConfig or an Ignition config, found neither",
            remedy="set kind: MachineConfig, or ignition.version",
        )
    require_kind(document, name, machineconfig.KIND, machineconfig.API_VERSION)
    return machineconfig.MachineConfig.from_json(document)


def require_kind(document: dict[str, object], name: str, kind: str, api_version: str) -> None:
    """Raise `ConfigError` for an object of another kind or version; a version may be missing."""
    version = document.get("apiVersion", api_version)
    pairs = (("kind", kind, document.get("kind")), ("apiVersion", api_version, version))
    for field, expected, value in pairs:
        if value != expected:
            actual = "nothing" if value is None else f"{value!s:.80}"
            raise errors.ConfigError(
                f"cannot use {name}: expected {field} {expected}, found {actual}",
                remedy=f"set {field}: {expected}",
            )


def read_input(name: str) -> bytes:
    """Read a file or the standard input; raise `UsageError` if that fails, or for a huge one."""
    if name == STDIN and sys.stdin is None:
        raise errors.UsageError(
            "cannot read the standard input: it is closed", remedy="name a file"
        )
    try:
        with nullcontext(sys.stdin.buffer) if name == STDIN else Path(name).open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _make_error(name, error) from error
    if len(content) > _MAX_BYTES:
        raise errors.UsageError(
            f"cannot read {name:.200}: it has more than {_MAX_BYTES // memory.MIB} MiB",
            remedy="name a MachineConfig or an Ignition config",
        )
    return content


@contextmanager
def create_private_file(path: str) -> Iterator[BinaryIO]:
    """Create a file with mode 0600; raise `FileError` if it exists or cannot be written.

    After an error the file does not exist.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise errors.FileError(
            f"cannot write {path}: the file exists", remedy="name another one with -o FILE"
        ) from error
    except OSError as error:
        raise errors.FileError(f"cannot write {Path(path).absolute()}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BaseException as error:
        with suppress(OSError):
            Path(path).unlink()
        if isinstance(error, OSError) and error.filename is None:
            reason = f"cannot write {Path(path).absolute()}: {error.strerror}"
            raise errors.FileError(reason) from error
        raise


@contextmanager
def open_private_output(path: str) -> Iterator[BinaryIO]:
    """Create a file as above, or open the standard output, unless it is a terminal."""
    if path != STDOUT:
        with create_private_file(path) as stream:
            yield stream
        return
    if sys.stdout.isatty():
        raise errors.FileError(
            "cannot write an archive to a terminal", remedy="name a file with -o FILE"
        )
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def _make_error(name: str, error: OSError | ValueError) -> errors.UsageError:
    cause = error.strerror if isinstance(error, OSError) else None
    return errors.UsageError(f"cannot read {name:.200}: {cause or error}")
