"""Reads and writes YAML and JSON documents as the Go programs of a cluster do."""

import contextlib

from treenail.api.decode import Json, load_json
from treenail.errors import ConfigError

SIZE_LIMIT = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def load_document(text: str | bytes, *, where: str) -> Json:
    """Return the only object in a YAML or JSON text; raise `ConfigError` that names ``where``."""
    text = _decode_text(text, where)  # frees the bytes before the values need memory
    found = _parse_objects(text, where)
    if len(found) != 1:
        raise ConfigError(f"{where}: expected one document, found {len(found)}")
    return found[0]


def load_documents(text: str | bytes, *, where: str) -> list[Json]:
    """Return every object in a YAML or JSON text, without empty ones; raise `ConfigError`."""
    return _parse_objects(_decode_text(text, where), where)


def dump_document(document: Json) -> str:
    """Format as YAML with sorted keys; `load_document` and Go read the same values back."""
    from treenail.api import yaml11  # noqa: PLC0415 - most documents are JSON

    return yaml11.dump_yaml(document)


def _decode_text(text: str | bytes, where: str) -> str:
    if len(text) > SIZE_LIMIT:
        raise ConfigError(f"{where}: {len(text)} bytes, more than the limit of {SIZE_LIMIT}")
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: expected UTF-8, found another encoding at byte {error.start}"
        ) from error


def _parse_objects(text: str, where: str) -> list[Json]:
    found: list[Json] = []
    for value in _parse_values(text, where):
        if isinstance(value, dict):
            found.append(value)
        elif value is not None:
            raise ConfigError(f"{where}: expected an object at the top of the document")
    return found


def _parse_values(text: str, where: str) -> list[object]:
    if text.startswith("{"):
        # JSON in most cases. Else YAML in flow style, whose parser reports the error for both.
        with contextlib.suppress(ConfigError):
            return [load_json(text, where=where)]
    from treenail.api import yaml11  # noqa: PLC0415 - as above

    return yaml11.parse_yaml(text, where=where)
