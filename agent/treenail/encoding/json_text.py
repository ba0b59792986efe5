"""Texts of JSON that treenail writes for itself."""

import binascii
import json
from collections.abc import Iterator

_PART_SIZE = 256 * 1024
_PART_ENTRIES = 16


def parse_json(text: str | bytes) -> object:
    """Parse JSON; raise `ValueError`, also for a document that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def decode_base64(text: str) -> bytes:
    """Decode a value of a Secret or ConfigMap as the API server does; raise `ValueError`."""
    # Go's base64 skips line ends.
    return binascii.a2b_base64(text.replace("\r", "").replace("\n", ""), strict_mode=True)


def encode_parts(document: object) -> Iterator[bytes]:
    """Yield the JSON text of a large document in parts, as ``json.dumps`` writes it."""
    parts: list[str] = []
    size = 0
    for part in _list_parts(document):
        parts.append(part)
        size += len(part)
        if size >= _PART_SIZE:
            yield "".join(parts).encode()
            parts, size = [], 0
    yield "".join(parts).encode()


def _list_parts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        before = "{"
        for name, inner in value.items():
            yield f"{before}{json.dumps(name)}: "
            yield from _list_parts(inner)
            before = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list) and value:
        before = "["
        for start in range(0, len(value), _PART_ENTRIES):
            yield f"{before}{json.dumps(value[start : start + _PART_ENTRIES])[1:-1]}"
            before = ", "
        yield "]"
    else:
        yield json.dumps(value)
