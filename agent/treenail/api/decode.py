"""Typed access to decoded JSON; an error names the place, what was expected, what was found.

`Fields` is one object of a document. A field that is absent and a field that is ``null`` are the
same, as they are to the Go programs at the other end; fields nobody asks for are ignored.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from treenail.errors import ConfigError

Json = dict[str, object]

_T = TypeVar("_T")

DEPTH_LIMIT = 100
"""How deep a document may be nested where it is walked through; none that means anything is."""

_INT64 = range(-(2**63), 2**63)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# A wrong value is quoted in the error when it is short and cannot be a secret.
_SECRET = frozenset({"passwordHash", "sshAuthorizedKeys"})


def load_json(text: str | bytes, *, where: str) -> object:
    """The value of the JSON text; raises `ConfigError` that says where it is not JSON."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text, parse_constant=_no_constant)
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
        raise ConfigError(f"{where}: not JSON: a number that JSON can't hold") from error


class Fields:
    """One object of a document, read field by field; ``path`` is its place in the document."""

    __slots__ = ("error", "path", "values")

    def __init__(self, values: Json, path: str, error: type[ConfigError] = ConfigError) -> None:
        self.values = values
        self.path = path
        self.error = error

    @classmethod
    def of(cls, document: object, path: str, error: type[ConfigError] = ConfigError) -> "Fields":
        """The fields of ``document``; raises ``error`` when it is not an object."""
        if not isinstance(document, dict):
            raise error(f"{path}: expected an object, found {_found(document)}")
        return cls(document, path, error)

    def at(self, name: str) -> str:
        """The place of a field."""
        if not (name.isascii() and name.isidentifier()) and not _PLAIN_KEY.fullmatch(name):
            return f"{self.path}[{json.dumps(name)}]"
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, expected: str) -> ConfigError:
        """The error to raise about a field: its place, what was expected, what was found."""
        found = _found(self.values.get(name), secret=name in _SECRET)
        return self.error(f"{self.at(name)}: expected {expected}, found {found}")

    def text(self, name: str) -> str:
        """A string, empty when absent."""
        return self.optional_text(name) or ""

    def required_text(self, name: str) -> str:
        """A string that is there and not empty."""
        value = self.optional_text(name)
        if not value:
            found = "nothing" if value is None else "an empty string"
            raise self.error(f"{self.at(name)}: expected a string, found {found}")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string, None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        if not value.isascii():
            self._refuse_half_characters(value, self.at(name))
        return value

    def flag(self, name: str) -> bool:
        """A boolean, False when absent."""
        return self.optional_flag(name) or False

    def optional_flag(self, name: str) -> bool | None:
        """A boolean, None when absent."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.refuse(name, "true or false")

    def optional_integer(self, name: str) -> int | None:
        """A 64-bit integer, None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value in _INT64:
            return value
        raise self.refuse(name, "an integer")

    def list_of(self, name: str) -> list[object]:
        """A list of anything, empty when absent."""
        value = self.values.get(name)
        if value is None:
            return []
        if isinstance(value, list):
            return value
        raise self.refuse(name, "a list")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        found = []
        for index, value in enumerate(self.list_of(name)):
            if not isinstance(value, str):
                what = _found(value, secret=name in _SECRET)
                raise self.error(f"{self.at(name)}[{index}]: expected a string, found {what}")
            self._refuse_half_characters(value, f"{self.at(name)}[{index}]")
            found.append(value)
        return tuple(found)

    def nested(self, name: str) -> "Fields":
        """An object, one without fields when absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        elif not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Fields(value, self.at(name), self.error)

    def objects(self, name: str) -> Iterator["Fields"]:
        """The objects of a list, nothing when absent."""
        path = self.at(name)
        for index, value in enumerate(self.list_of(name)):
            yield Fields.of(value, f"{path}[{index}]", self.error)

    def each(self, name: str, read: Callable[["Fields"], _T]) -> tuple[_T, ...]:
        """What ``read`` makes of every object of a list."""
        if self.values.get(name) is None:
            return ()
        return tuple([read(fields) for fields in self.objects(name)])

    def text_map(self, name: str) -> dict[str, str]:
        """An object all of whose values are strings; ``null`` is an empty one."""
        fields = self.nested(name)
        for key in fields.values:
            self._refuse_half_characters(key, fields.path)
        return {key: fields.text(key) for key in fields.values}

    def others(self, *names: str) -> Json:
        """The fields that are not among ``names`` and not ``null``."""
        return {
            key: value
            for key, value in self.values.items()
            if key not in names and value is not None
        }

    def _refuse_half_characters(self, value: str, path: str) -> None:
        """JSON's escapes can spell half of a character, which no encoding can write."""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                f"{path}: expected a string, found half a surrogate pair at character {error.start}"
            ) from error


def _found(value: object, *, secret: bool = False) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if secret:
        return "a number or a boolean"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value not in _INT64:
        return "a number of more than 64 bits"
    return repr(value)[:40]


def _no_constant(name: str) -> object:
    raise ValueError(name)
