"""TOML with the layout of github.com/BurntSushi/toml, which the MCO writes with.

No library keeps these bytes: tomli_w does not indent and breaks arrays into lines, and tomlkit
writes tables where they stand. The MCO decodes a file into its types and encodes those, so the
comments of the base and unknown keys are lost there too.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping

from treenail.api import decode
from treenail.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_DELETE = "\x7f"


def parse_toml(text: str, path: str) -> decode.Fields:
    """Parse a file of the base; raise `ConfigError`."""
    try:
        return decode.Fields(tomllib.loads(text), path)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} of the base MachineConfigs: expected TOML: {error}",
            remedy="correct the file in the MachineConfig that writes it",
        ) from error


def format_toml(document: Mapping[str, object]) -> str:
    """Format a document of texts, integers, booleans, lists of texts, tables and their lists.

    None and empty tables are omitted; the other keys keep their order, and those with tables
    follow the others.
    """
    return "".join(f"{line}\n" for line in _format_table((), document)).removeprefix("\n")


def _format_table(path: tuple[str, ...], table: Mapping[str, object]) -> Iterator[str]:
    indent = "  " * len(path)
    tables: list[tuple[str, Mapping[str, object], bool]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables.append((key, value, False))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += [(key, entry, True) for entry in value]
        elif value is not None:
            yield f"{indent}{_format_key(key)} = {_format_value(value)}"
    for key, inner, is_entry in tables:
        if not inner:
            continue
        inner_path = (*path, key)
        if is_entry or not path:
            yield ""
        name = ".".join(map(_format_key, inner_path))
        yield f"{indent}[[{name}]]" if is_entry else f"{indent}[{name}]"
        yield from _format_table(inner_path, inner)


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _format_value(key)


def _format_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    # The escapes of JSON are those of TOML, except that JSON has none for DEL.
    return json.dumps(value, ensure_ascii=False).replace(_DELETE, "\\u007f")
