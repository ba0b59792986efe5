"""Positions of the fields of a YAML document, for messages and for edits of a user's file."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from treenail.api import yaml11
from treenail.api.decode import DEPTH_LIMIT
from treenail.errors import ConfigError

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
    found = YamlPositions()
    try:
        events = yaml11.list_events(text)
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                top = next(events)
                if line in (0, yaml11.get_line(top)):
                    _PositionReader(events, found).read_top(top)
                    break
    except (yaml.YAMLError, RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(f"{where}: not YAML") from error
    return found


class _PositionReader:
    def __init__(self, events: Iterator[yaml.Event], found: YamlPositions) -> None:
        self._events = events
        self._found = found

    def read_top(self, event: yaml.Event) -> None:
        self._found.lines[()] = yaml11.get_line(event)
        if not isinstance(event, yaml.MappingStartEvent):
            return
        spans: list[tuple[str, int, int]] = []
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            end = self._read_entry(key, (), 0)
            if isinstance(key, yaml.ScalarEvent):
                spans.append((key.value, _get_index(key.start_mark), end))
        is_flow = bool(event.flow_style)
        for name, start, end in spans:
            self._found.ranges[name] = FieldRange(start, end, is_flow, len(spans) == 1)

    def _read_entry(self, key: yaml.Event, path: FieldPath, depth: int) -> int:
        """Read the value of a key; return the index of its end."""
        if isinstance(key, yaml.ScalarEvent):
            path = (*path, key.value)
            self._found.lines[path] = yaml11.get_line(key)
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
                self._found.lines[*path, index] = yaml11.get_line(last)
                end = self._read_value(last, (*path, index), depth + 1)
                index += 1
        else:
            return end
        # The end of a collection in block style is the next token, behind comments.
        return _get_index(last.end_mark) if event.flow_style else end


def _get_index(mark: object) -> int:
    return getattr(mark, "index", 0)
