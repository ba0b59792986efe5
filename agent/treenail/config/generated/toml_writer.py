"""TOML with the layout of github.com/BurntSushi/toml, which the MCO writes with.

No library keeps these bytes: tomli_w neither indents nor keeps a list on one line, and tomlkit
writes tables where they stand.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping

from treenail.api import decode
from treenail.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def parse_toml(text: str, path: str) -> decode.Fields:
    """Parse a file of the base MachineConfigs; raise `ConfigError`."""
    try:
        return decode.Fields(tomllib.loads(text), path)
    except (ValueError, RecursionError) as error:
        remedy = "correct the MachineConfig that writes the file"
        raise ConfigError(f"{path}: expected TOML: {error}", remedy=remedy) from error


def format_toml(document: Mapping[str, object]) -> str:
    """Format a document; without None and empty tables, and with tables after other keys."""
    return "".join(f"{line}\n" for line in _format_table((), document)).removeprefix("\n")


def _format_table(path: tuple[str, ...], table: Mapping[str, object]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in table.items():
        if value is not None and not _list_tables(value):
            yield f"{indent}{_format_key(key)} = {_format_value(value)}"
    for key, value in table.items():
        inner_path = (*path, _format_key(key))
        begin, end = ("[", "]") if isinstance(value, Mapping) else ("[[", "]]")
        for inner in filter(None, _list_tables(value) or ()):
            if not path or begin == "[[":
                yield ""
            yield f"{indent}{begin}{'.'.join(inner_path)}{end}"
            yield from _format_table(inner_path, inner)


def _list_tables(value: object) -> list[Mapping[str, object]]:
    """Return the tables that a value is, maybe empty ones; none for another value."""
    tables = value if isinstance(value, list) else [value]
    return [table for table in tables if isinstance(table, Mapping)]


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _format_value(key)


def _format_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    # The escapes of JSON are those of TOML, except that JSON has none for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
