"""Typed access to decoded JSON. An error names the location, the expected and the found type.

`Fields` is one object of a document. An absent field equals a ``null`` field, as in Go's
encoding/json. Unknown fields are ignored, unless `reject_unknown_fields` refuses them.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from types import GenericAlias
from typing import TypeVar, cast

from treenail.encoding import codec, json_values
from treenail.errors import ConfigError

Json = dict[str, object]

_T = TypeVar("_T")

DEPTH_LIMIT = 100
"""Maximum nesting of a document, as that of YAML in `treenail.encoding.yaml11`."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


def load_json(text: str | bytes, *, where: str) -> object:
    """Parse JSON; raise `ConfigError` with the line and column of invalid JSON."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: expected UTF-8, found another encoding at byte {error.start}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise ConfigError(f"{where}: not JSON: a number outside of JSON") from error


def load_json_stream(text: str) -> list[tuple[int, object]]:
    """Parse JSON values with their lines; raise `ValueError` or `RecursionError`."""
    decoder = json.JSONDecoder(parse_constant=_reject_constant)
    values: list[tuple[int, object]] = []
    line, end = 1, 0
    while rest := _NOT_SPACE.search(text, end):
        line += text.count("\n", end, rest.start())
        value, after = decoder.raw_decode(text, rest.start())
        values.append((line, value))
        line, end = line + text.count("\n", rest.start(), after), after
    return values


_FieldLocation = tuple["Fields", str, int | None]
"""The parent, the name of its field, and the index if that is a list.

Mostly errors alone need the text, and a config has thousands of objects.
"""


class Fields:
    """One object of a document; ``path`` is its location in the document."""

    __slots__ = ("_location", "error", "values")

    def __init__(
        self,
        values: Json,
        path: "str | _FieldLocation",
        error: type[ConfigError] = ConfigError,
    ) -> None:
        self.values = values
        self._location = path
        self.error = error

    @property
    def path(self) -> str:
        location = self._location
        if isinstance(location, str):
            return location
        parent, name, index = location
        path = json_values.join_path(parent.path, name)
        self._location = path = path if index is None else f"{path}[{index}]"
        return path

    @classmethod
    def from_json(
        cls, document: object, path: str, error: type[ConfigError] = ConfigError
    ) -> "Fields":
        """Return the fields of ``document``; raise ``error`` when it is not an object."""
        if not isinstance(document, dict):
            problem = json_values.Mismatch("an object", document)
            raise error(problem.format_message(path))
        return cls(document, path, error)

    def path_of(self, name: str) -> str:
        """Return the location of a field."""
        return json_values.join_path(self.path, name)

    def make_error(self, name: str, expected: str) -> ConfigError:
        """Build the error for a field of the wrong type."""
        return self._convert_error(json_values.Mismatch(expected, self.values.get(name), at=[name]))

    def read(self, cls: type[_T]) -> _T:
        """Read the object as a dataclass."""
        try:
            return cast("_T", codec.get_reader(cls)(self.values))
        except json_values.Mismatch as problem:
            raise self._convert_error(problem) from problem

    def read_list(self, name: str, cls: type[_T]) -> tuple[_T, ...]:
        """Read the objects of a list as dataclasses, none when absent."""
        read = codec.get_reader(GenericAlias(tuple, (cls, ...)))
        return cast("tuple[_T, ...]", self._read_field(name, read) or ())

    def get_text(self, name: str) -> str:
        """Return a string, empty when absent."""
        return self.get_optional_text(name) or ""

    def get_required_text(self, name: str) -> str:
        """Return a string; raise when it is absent or empty."""
        value = self.get_optional_text(name)
        if not value:
            actual = "nothing" if value is None else "an empty string"
            raise self.error(f"{self.path_of(name)}: expected a string, found {actual}")
        return value

    def get_optional_text(self, name: str) -> str | None:
        """Return a string, None when absent."""
        value = self.values.get(name)
        # Most values are texts in ASCII, and a config has thousands.
        if value is None or (type(value) is str and value.isascii()):
            return value
        return self._read_field(name, json_values.read_text)

    def get_bool(self, name: str) -> bool:
        """Return a boolean, False when absent."""
        return self.get_optional_bool(name) or False

    def get_optional_bool(self, name: str) -> bool | None:
        """Return a boolean, None when absent."""
        value = self.values.get(name)
        return value if isinstance(value, bool) else self._read_field(name, json_values.read_bool)

    def get_optional_integer(self, name: str) -> int | None:
        """Return a 64-bit integer, None when absent."""
        return self._read_field(name, json_values.read_integer)

    def get_list(self, name: str) -> list[object]:
        """Return a list of any values, empty when absent."""
        return self._read_field(name, json_values.read_list) or []

    def get_text_list(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty when absent."""
        return self._read_field(name, _read_texts) or ()

    def get_object(self, name: str) -> "Fields":
        """Return an object, without fields when absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.make_error(name, "an object")
        return Fields(value or {}, (self, name, None), self.error)

    def iter_objects(self, name: str) -> Iterator["Fields"]:
        """Iterate over the objects of a list, none when absent."""
        for index, value in enumerate(self.get_list(name)):
            if not isinstance(value, dict):
                problem = json_values.Mismatch("an object", value, at=[name, index])
                raise self._convert_error(problem)
            yield Fields(value, (self, name, index), self.error)

    def map_objects(self, name: str, read: Callable[["Fields"], _T]) -> tuple[_T, ...]:
        """Apply ``read`` to every object of a list."""
        if self.values.get(name) is None:
            return ()
        return tuple(map(read, self.iter_objects(name)))

    def get_text_map(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings; ``null`` counts as an empty string."""
        return self._read_field(name, json_values.read_text_map) or {}

    def get_other_fields(self, *names: str) -> Json:
        """Return the fields that are not in ``names`` and not ``null``."""
        return json_values.copy_without(names, self.values)

    def _read_field(self, name: str, read: Callable[[object], _T]) -> _T | None:
        value = self.values.get(name)
        if value is None:
            return None
        try:
            return read(value)
        except json_values.Mismatch as problem:
            problem.steps.append(name)
            raise self._convert_error(problem) from problem

    def _convert_error(self, problem: json_values.Mismatch) -> ConfigError:
        return self.error(problem.format_message(self.path), remedy=problem.remedy)


def _read_texts(value: object) -> tuple[str, ...]:
    texts = enumerate(json_values.read_list(value))
    return tuple(json_values.read_at(index, json_values.read_text, text) for index, text in texts)


def _reject_constant(name: str) -> object:
    raise ValueError(name)


def reject_unknown_fields(fields: Fields, known: Collection[str]) -> None:
    """Raise `ConfigError` that names the first unknown field and the most similar known one."""
    try:
        json_values.refuse_unknown_keys(known, fields.values)
    except json_values.Mismatch as problem:
        raise ConfigError(problem.format_message(fields.path), remedy=problem.remedy) from problem
