"""Convert between YAML 1.1, as Go's sigs.k8s.io/yaml reads and writes it, and JSON.

To Go ``0o17`` is 15, ``1e3`` is 1000 and ``y`` is true, but ``1:20`` and ``2020-01-01`` are
strings. PyYAML differs in each case, so this module uses only its parser.

Two rules are stricter: a duplicate key is an error, and so is a tag without a JSON type.
`YamlPositions` has the positions of fields, for messages and for edits of a user's file.
"""

import contextlib
import json
import math
import operator
import os
import re
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import cmp_to_key
from typing import Any, ClassVar

import yaml

from treenail.encoding import json_values
from treenail.errors import ConfigError

DEPTH_LIMIT = 100
"""Maximum nesting of a document; no valid config comes near it."""
ALIAS_LIMIT = 4 * 1024 * 1024
"""Maximum size that all aliases add, in characters; each value counts at least 16."""

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: type = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_NODE_WEIGHT = 16
_MAX_QUOTED = 60
_TAB_PROBLEM = "found character that cannot start any token"
"""Text of libyaml and PyYAML for a tab where a value begins, and for a few other characters."""
_TEMPLATE = re.compile(r"(?:^|[\s:])\{[{%]")
_CONSTANTS: dict[str, object] = {
    **dict.fromkeys(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE"], True),
    **dict.fromkeys(["on", "On", "ON"], True),
    **dict.fromkeys(["n", "N", "no", "No", "NO", "false", "False", "FALSE"], False),
    **dict.fromkeys(["off", "Off", "OFF"], False),
    **dict.fromkeys(["", "~", "null", "Null", "NULL"]),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], math.nan),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"], math.inf),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], -math.inf),
}
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[oO]?[0-7]+|0[bB][01]+|0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", re.ASCII)
_CLOCK = r"(\d\d?):(\d\d?):(\d\d?)(?:[.,]\d+)?"
_TIMESTAMP = re.compile(
    rf"(\d{{4}})-(\d\d?)-(\d\d?)(?:[Tt]{_CLOCK}(?:Z|[-+]\d\d:\d\d)| {_CLOCK})?", re.ASCII
)
_TAG = "tag:yaml.org,2002:"
_TAG_TYPES: dict[str, tuple[type, ...]] = {
    _TAG + "bool": (bool,),
    _TAG + "int": (int,),
    _TAG + "float": (int, float),
    _TAG + "null": (type(None),),
}


def parse_yaml(text: str, *, where: str) -> list[object]:
    """Parse every document; raise `ConfigError` with the line and column of invalid YAML."""
    return [value for _, value in parse_located_yaml(text, where=where)]


class ValueBudget:
    """Keys and values that texts may still have; a million of them take about 5 s to parse."""

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = self.left = limit

    @property
    def is_exceeded(self) -> bool:
        return self.left < 0


def parse_located_yaml(
    text: str, *, where: str, budget: ValueBudget | None = None
) -> list[tuple[int, object]]:
    """Parse every document as `parse_yaml` does; each comes with its first line, from 1."""
    budget = budget or ValueBudget()
    try:
        return list(_YamlReader(text, where, budget).read_documents())
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or ""
        raise _make_error(text, where, error.problem_mark, f"not YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: it has characters that YAML forbids") from error
    except (RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(f"{where}: not YAML: nested too deeply or not Unicode") from error


def _make_error(text: str, where: str, mark: Any, problem: str) -> ConfigError:
    """Build the error for a place in a text."""
    if mark is None:
        return ConfigError(f"{where}: {problem}")
    place = f"{where}, line {mark.line + 1}, column {mark.column + 1}"
    before, line = ["", *text.splitlines()[: mark.line + 1], ""][mark.line : mark.line + 2]
    if _TEMPLATE.search(f"{before} {line}"):
        return ConfigError(
            f"{place}: a template that was not rendered", remedy="render it, or quote the value"
        )
    if problem.endswith(_TAB_PROBLEM) and "\t" in line[: len(line) - len(line.lstrip())]:
        return ConfigError(
            f"{place}: not YAML: found a tab", remedy="indent with spaces, not with tabs"
        )
    return ConfigError(f"{place}: {problem}")


def list_events(text: str) -> Iterator[yaml.Event]:
    """Yield the events of the parser; raises `yaml.YAMLError`."""
    # Clients in Go end the last line (LineReader of k8s.io/apimachinery), so that a block scalar
    # at the end of a file has its line end.
    return iter(yaml.parse(text if text.endswith("\n") else f"{text}\n", Loader=_Loader))


def get_line(event: yaml.Event) -> int:
    """Return the line where an event begins, from 1."""
    return event.start_mark.line + 1 if event.start_mark else 1


def dump_yaml(document: json_values.Json, *, line_width: int = 2**31 - 1) -> str:
    """Format as Go does; `parse_yaml` and Go read the same values back.

    Go breaks lines at spaces after 80 characters; the default ``line_width`` breaks none.
    """
    try:
        text = str(
            yaml.dump(
                document,
                Dumper=_YamlDumper,
                default_flow_style=False,
                allow_unicode=True,
                width=line_width,
            )
        )
    except (yaml.YAMLError, UnicodeEncodeError, RecursionError) as error:
        raise ConfigError("the document has a value that YAML cannot represent") from error
    # libyaml ends a document with a block scalar that has line ends to keep; Go does not.
    return f"{text.removesuffix(end)}\n" if text.endswith(end := "\n...\n") else text


def resolve_scalar(scalar: str) -> object:
    """Return the value that Go gives an unquoted scalar."""
    if scalar in _CONSTANTS:
        return _CONSTANTS[scalar]
    if scalar[0] == ".":
        number = _parse_float(scalar) if _FLOAT.fullmatch(scalar) else None
        return scalar if number is None else number
    if scalar[0] not in "+-0123456789":
        return scalar
    plain = scalar.replace("_", "")
    if _INTEGER.fullmatch(plain) and len(plain) <= 70:
        value = _parse_integer(plain)
        if -(2**63) <= value < 2**63 or (value < 2**64 and plain[0].isdigit()):
            return value
    number = _parse_float(plain) if _FLOAT.fullmatch(plain) else None
    return scalar if number is None else number


class _YamlReader:
    """Converts parser events to JSON values and limits the size that aliases add."""

    def __init__(self, text: str, where: str, budget: ValueBudget) -> None:
        self._text = text
        self._events = list_events(text)
        self._where = where
        self._budget = budget
        self._anchors: dict[str, tuple[object, int]] = {}
        self._weight = 0
        self._alias_weight = 0

    def read_documents(self) -> Iterator[tuple[int, object]]:
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors.clear()
                content = next(self._events)
                yield get_line(content), self._read_value(content, 0)

    def _read_value(self, event: yaml.Event, depth: int) -> object:
        if depth > DEPTH_LIMIT:
            raise self._make_error(event, f"nested more than {DEPTH_LIMIT} deep")
        self._budget.left -= 1
        if self._budget.left < 0:
            raise self._make_error(event, f"more than {self._budget.limit} keys and values")
        before = self._weight
        self._weight += _NODE_WEIGHT
        match event:
            case yaml.AliasEvent():
                return self._resolve_alias(event)
            case yaml.ScalarEvent():
                self._weight += len(event.value)
                value = self._read_scalar(event)
            case yaml.SequenceStartEvent():
                value = self._read_sequence(depth)
            case yaml.MappingStartEvent():
                value = self._read_mapping(depth)
            case _:
                raise self._make_error(event, "expected a value")
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._weight - before)
        return value

    def _resolve_alias(self, event: yaml.AliasEvent) -> object:
        if event.anchor not in self._anchors:
            raise self._make_error(event, "an alias without an anchor, or inside its own anchor")
        value, weight = self._anchors[event.anchor]
        self._weight += weight
        self._alias_weight += weight
        if self._alias_weight > ALIAS_LIMIT:
            raise self._make_error(event, "the aliases make the document too large")
        return value

    def _read_sequence(self, depth: int) -> list[object]:
        items = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._read_value(event, depth + 1))
        return items

    def _read_mapping(self, depth: int) -> json_values.Json:
        mapping: json_values.Json = {}
        own: set[str] = set()
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
                source = next(self._events)
                self._merge_mappings(source, self._read_value(source, depth + 1), mapping)
                continue
            key = self._read_key(event, depth)
            if key in own:
                raise self._make_error(event, f"duplicate key {_quote(key)}")
            own.add(key)
            mapping[key] = self._read_value(next(self._events), depth + 1)
        return mapping

    def _merge_mappings(self, event: yaml.Event, value: object, mapping: json_values.Json) -> None:
        """Merge mappings: the first one wins. As in Go, they replace the keys before them."""
        for merged in reversed(value if isinstance(value, list) else [value]):
            if not isinstance(merged, dict):
                raise self._make_error(event, "a merge key needs a mapping or a list of mappings")
            mapping.update(merged)

    def _read_key(self, event: yaml.Event, depth: int) -> str:
        key = self._read_value(event, depth + 1)
        if isinstance(key, bool):
            return str(key).lower()
        # Go writes the key 1e20 as 1e+20, and refuses the upper half of 64 bits.
        text = str(getattr(event, "value", "")).replace("_", "")
        is_number = isinstance(key, int) and abs(key) < 2**63 and _INTEGER.fullmatch(text)
        if isinstance(key, str) or is_number:
            return str(key)
        raise self._make_error(event, "a key that is not a string; quote it")

    def _read_scalar(self, event: yaml.ScalarEvent) -> object:
        text: str = event.value
        if event.tag == _TAG + "str" or (event.tag is None and not event.implicit[0]):
            return text
        if event.tag in (None, "!", _TAG + "timestamp"):
            value = resolve_scalar(text) if event.tag is None else text
        elif event.tag in _TAG_TYPES:
            value = resolve_scalar(text)
            expected = _TAG_TYPES[event.tag]
            if not isinstance(value, expected) or (
                isinstance(value, bool) and bool not in expected
            ):
                raise self._make_error(
                    event, f"value does not match its tag !!{event.tag[len(_TAG) :]}"
                )
        else:
            raise self._make_error(event, "a tag without a JSON type")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._make_error(event, "a number outside of JSON; quote it")
        return value

    def _make_error(self, event: yaml.Event, problem: str) -> ConfigError:
        return _make_error(self._text, self._where, event.start_mark, problem)


def _quote(key: str) -> str:
    return repr(key[:_MAX_QUOTED])


def _parse_integer(plain: str) -> int:
    digits = plain.lstrip("+-")
    # YAML 1.1 reads 017 as octal; int(..., 0) rejects it.
    base = 8 if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit() else 0
    return int(plain, base)


def _parse_float(plain: str) -> int | float | None:
    """Parse a number, a whole one as int as Go writes it; None when it is too large."""
    value = float(plain)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e21 else value


class _YamlDumper(_Dumper):  # type: ignore[misc]  # one of two base classes, chosen above
    """Quotes the strings that Go quotes, without PyYAML's own rules."""

    yaml_implicit_resolvers: ClassVar[dict[str, object]] = {}

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if "\n" in text:
        style = "|"
    elif not text or resolve_scalar(text) is not text or text == "<<" or is_timestamp(text):
        style = '"'
    return writer.represent_scalar(_TAG + "str", text, style=style)


def is_timestamp(text: str) -> bool:
    """Return whether other parsers read a string as a time or as a number of base 60."""
    match = _TIMESTAMP.fullmatch(text)
    if not match:
        return _BASE_60.fullmatch(text) is not None
    year, month, day, *clock = (int(number) for number in match.groups() if number)
    with contextlib.suppress(ValueError):
        return bool(date(year, month, day)) and all(map(operator.lt, clock, (24, 60, 60)))
    return False


def _represent_plain(writer: yaml.SafeDumper, value: object) -> yaml.ScalarNode:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        value = int(value)
    # Without resolvers, the tag of a string is the one that is never written.
    return writer.represent_scalar(_TAG + "str", json.dumps(value))


def _represent_mapping(writer: yaml.SafeDumper, document: json_values.Json) -> yaml.MappingNode:
    is_simple = all(map(str.isalpha, document))
    keys = sorted(document, key=None if is_simple else cmp_to_key(_compare_keys))
    return writer.represent_mapping(_TAG + "map", [(key, document[key]) for key in keys])


def _compare_keys(left: str, right: str) -> int:
    """Compare as Go's encoder: letters after all else, and digits by the number's value."""
    place = len(os.path.commonprefix([left, right]))  # noqa: RUF071 - characters are compared
    before = left[len(left[:place].rstrip(string.digits)) : place].strip("0")
    # A zero that differs inside of a number is no leading zero.
    start = "1" if before and "0" in (left[place : place + 1], right[place : place + 1]) else "0"
    ranks = []
    for rest in (left[place:], right[place:]):
        digits = rest[: len(rest) - len(rest.lstrip(string.digits))]
        ranks.append((rest[:1].isalpha(), int(start + digits), len(digits), rest[:1]))
    return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])


_YamlDumper.add_representer(str, _represent_text)
_YamlDumper.add_representer(dict, _represent_mapping)
for _type in (bool, int, float, type(None)):
    _YamlDumper.add_representer(_type, _represent_plain)


FieldPath = tuple[str | int, ...]
"""Keys and indexes from the top of the document."""


@dataclass(frozen=True, slots=True)
class FieldRange:
    """Where one key of the top mapping and its value are, as indexes of characters."""

    key_start: int
    value_end: int
    is_flow: bool
    """True when the top mapping has braces."""
    is_only: bool
    """True when the mapping has no other key."""


@dataclass(frozen=True, slots=True)
class YamlPositions:
    """Lines of fields, and ranges of the fields at the top. Lines count from 1."""

    lines: dict[FieldPath, int] = field(default_factory=dict)
    ranges: dict[str, FieldRange] = field(default_factory=dict)

    def find_line(self, *path: str | int) -> int:
        """Return the line of a field, or that of the nearest field that contains it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def find_positions(text: str, *, where: str, line: int = 0) -> YamlPositions:
    """Find the positions in the document that begins at a line; 0 for the first document.

    Raises `ConfigError` for invalid YAML. The text has no byte order mark. An alias has the
    position of the alias itself.
    """
    positions = YamlPositions()
    try:
        events = list_events(text)
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                top = next(events)
                if line in (0, get_line(top)):
                    _PositionReader(events, positions).read_top(top)
                    break
    except (yaml.YAMLError, RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(f"{where}: not YAML") from error
    return positions


class _PositionReader:
    def __init__(self, events: Iterator[yaml.Event], positions: YamlPositions) -> None:
        self._events = events
        self._positions = positions

    def read_top(self, event: yaml.Event) -> None:
        self._positions.lines[()] = get_line(event)
        if not isinstance(event, yaml.MappingStartEvent):
            return
        spans: list[tuple[str, int, int]] = []
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            end = self._read_entry(key, (), 0)
            if isinstance(key, yaml.ScalarEvent):
                spans.append((key.value, _get_index(key.start_mark), end))
        is_flow = bool(event.flow_style)
        for name, start, end in spans:
            self._positions.ranges[name] = FieldRange(start, end, is_flow, len(spans) == 1)

    def _read_entry(self, key: yaml.Event, path: FieldPath, depth: int) -> int:
        """Read the value of a key; return the index of its end."""
        if isinstance(key, yaml.ScalarEvent):
            path = (*path, key.value)
            self._positions.lines[path] = get_line(key)
        else:
            self._read_value(key, (*path, ""), depth + 1)
        return self._read_value(next(self._events), path, depth + 1)

    def _read_value(self, event: yaml.Event, path: FieldPath, depth: int) -> int:
        """Read a value; return the index where its last part ends, without trailing comments."""
        if depth > DEPTH_LIMIT:
            raise RecursionError
        end: int = _get_index(event.end_mark)
        if isinstance(event, yaml.MappingStartEvent):
            while not isinstance(last := next(self._events), yaml.MappingEndEvent):
                end = self._read_entry(last, path, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            index = 0
            while not isinstance(last := next(self._events), yaml.SequenceEndEvent):
                self._positions.lines[*path, index] = get_line(last)
                end = self._read_value(last, (*path, index), depth + 1)
                index += 1
        else:
            return end
        # The end of a collection in block style is the next token, behind comments.
        return _get_index(last.end_mark) if event.flow_style else end


def _get_index(mark: object) -> int:
    return getattr(mark, "index", 0)
