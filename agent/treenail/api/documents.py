"""Read and write YAML and JSON documents as the Go programs of a cluster do."""

import codecs
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treenail.api import decode
from treenail.errors import ConfigError

if TYPE_CHECKING:
    from treenail.encoding.yaml11 import ValueBudget

SUFFIXES = (".json", ".yaml", ".yml")
BYTE_ORDER_MARK = "\ufeff"
SIZE_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LineProblem:
    """One mistake in a text of a user; the caller knows the file."""

    line: int
    """Counts from 1; 0 for the whole text."""
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


def load_document(
    text: str | bytes, *, where: str, budget: "ValueBudget | None" = None
) -> decode.Json:
    """Return the only object in a YAML or JSON text; raise `ConfigError` that names ``where``.

    ``budget`` limits the keys and values of YAML.
    """
    text = decode_text(text, where)  # frees the bytes before the values need memory
    documents = _parse_objects(text, where, budget)
    if len(documents) != 1:
        raise ConfigError(f"{where}: expected one document, found {len(documents)}")
    return documents[0][1]


def load_documents(text: str | bytes, *, where: str) -> list[decode.Json]:
    """Return every object in a YAML or JSON text, without empty ones; raise `ConfigError`."""
    return [value for _, value in load_located_documents(text, where=where)]


def load_located_documents(
    text: str | bytes, *, where: str, budget: "ValueBudget | None" = None
) -> list[tuple[int, decode.Json]]:
    """Return every object with the line where it begins, from 1; raise `ConfigError`."""
    return _parse_objects(decode_text(text, where), where, budget)


def decode_text(text: str | bytes, where: str) -> str:
    """Return the text of a file without a byte order mark; raise `ConfigError`."""
    if len(text) > SIZE_LIMIT:
        raise ConfigError(f"{where}: {len(text)} bytes, more than the limit of {SIZE_LIMIT}")
    if isinstance(text, str):
        return text.removeprefix(BYTE_ORDER_MARK)
    try:
        return text.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: expected UTF-8, found another encoding at byte {error.start}"
        ) from error


def dump_document(document: decode.Json) -> str:
    """Format as YAML with sorted keys; `load_document` and Go read the same values back."""
    from treenail.encoding import yaml11  # noqa: PLC0415 - most documents are JSON

    return yaml11.dump_yaml(document)


def _parse_objects(
    text: str, where: str, budget: "ValueBudget | None"
) -> list[tuple[int, decode.Json]]:
    documents: list[tuple[int, decode.Json]] = []
    for line, value in _parse_values(text, where, budget):
        if isinstance(value, dict):
            documents.append((line, value))
        elif value is not None:
            raise ConfigError(f"{where}: expected an object at the top of the document")
    return documents


def _parse_values(text: str, where: str, budget: "ValueBudget | None") -> list[tuple[int, object]]:
    if text.lstrip().startswith("{"):
        # JSON in most cases, or a stream of it. Else YAML in flow style, whose parser reports the
        # error for both.
        with contextlib.suppress(ValueError, RecursionError):
            return decode.load_json_stream(text)
    from treenail.encoding import yaml11  # noqa: PLC0415 - most documents are JSON

    return yaml11.parse_located_yaml(text, where=where, budget=budget)
