"""Typed access to decoded JSON. An error names the location, the expected and the found type.

`Fields` is one object of a document. An absent field equals a ``null`` field, as in Go's
encoding/json. Unknown fields are ignored, unless `reject_unknown_fields` refuses them.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar, cast

from treenail.errors import ConfigError

Json = dict[str, object]

_T = TypeVar("_T")

DEPTH_LIMIT = 100
"""Maximum nesting of a document; no valid config comes near it."""

_INT64 = range(-(2**63), 2**63)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# Errors quote a wrong value only when it is short and cannot be a secret.
_SECRET = frozenset({"passwordHash", "sshAuthorizedKeys"})


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
        path = _join_path(parent.path, name)
        self._location = path = path if index is None else f"{path}[{index}]"
        return path

    @classmethod
    def from_json(
        cls, document: object, path: str, error: type[ConfigError] = ConfigError
    ) -> "Fields":
        """Return the fields of ``document``; raise ``error`` when it is not an object."""
        if not isinstance(document, dict):
            raise error(f"{path}: expected an object, found {_describe_value(document)}")
        return cls(document, path, error)

    def path_of(self, name: str) -> str:
        """Return the location of a field."""
        return _join_path(self.path, name)

    def make_error(self, name: str, expected: str) -> ConfigError:
        """Build the error for a field of the wrong type."""
        actual = _describe_value(self.values.get(name), secret=name in _SECRET)
        return self.error(f"{self.path_of(name)}: expected {expected}, found {actual}")

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
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.make_error(name, "a string")
        if not value.isascii():
            self._reject_lone_surrogates(value, self.path_of(name))
        return value

    def get_bool(self, name: str) -> bool:
        """Return a boolean, False when absent."""
        return self.get_optional_bool(name) or False

    def get_optional_bool(self, name: str) -> bool | None:
        """Return a boolean, None when absent."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.make_error(name, "true or false")

    def get_optional_integer(self, name: str) -> int | None:
        """Return a 64-bit integer, None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is int and value in _INT64:
            return value
        raise self.make_error(name, "an integer")

    def get_list(self, name: str) -> list[object]:
        """Return a list of any values, empty when absent."""
        value = self.values.get(name)
        if value is None:
            return []
        if isinstance(value, list):
            return value
        raise self.make_error(name, "a list")

    def get_text_list(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty when absent."""
        texts = []
        if self.values.get(name) is None:
            return ()
        for index, value in enumerate(self.get_list(name)):
            if not isinstance(value, str):
                what = _describe_value(value, secret=name in _SECRET)
                raise self.error(f"{self.path_of(name)}[{index}]: expected a string, found {what}")
            if not value.isascii():
                self._reject_lone_surrogates(value, f"{self.path_of(name)}[{index}]")
            texts.append(value)
        return tuple(texts)

    def get_object(self, name: str) -> "Fields":
        """Return an object, without fields when absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        elif not isinstance(value, dict):
            raise self.make_error(name, "an object")
        return Fields(value, (self, name, None), self.error)

    def iter_objects(self, name: str) -> Iterable["Fields"]:
        """Iterate over the objects of a list, none when absent."""
        if self.values.get(name) is None:
            return ()
        return self._iter_list(name)

    def _iter_list(self, name: str) -> Iterator["Fields"]:
        error = self.error
        for index, value in enumerate(self.get_list(name)):
            if not isinstance(value, dict):
                actual = _describe_value(value)
                raise error(f"{self.path_of(name)}[{index}]: expected an object, found {actual}")
            yield Fields(value, (self, name, index), error)

    def map_objects(self, name: str, read: Callable[["Fields"], _T]) -> tuple[_T, ...]:
        """Apply ``read`` to every object of a list."""
        if self.values.get(name) is None:
            return ()
        return tuple(map(read, self._iter_list(name)))

    def get_text_map(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings; ``null`` counts as an empty string."""
        fields = self.get_object(name)
        values = fields.values
        # A Node has dozens of labels, and all are ASCII.
        if all(type(value) is str and value.isascii() for value in values.values()) and all(
            map(str.isascii, values)
        ):
            return cast("dict[str, str]", dict(values))
        for key in fields.values:
            self._reject_lone_surrogates(key, fields.path)
        return {key: fields.get_text(key) for key in fields.values}

    def get_other_fields(self, *names: str) -> Json:
        """Return the fields that are not in ``names`` and not ``null``."""
        return {
            key: value
            for key, value in self.values.items()
            if key not in names and value is not None
        }

    def _reject_lone_surrogates(self, value: str, path: str) -> None:
        """Raise for half a surrogate pair: JSON can escape it, but UTF-8 cannot encode it."""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                f"{path}: expected a string, found half a surrogate pair at character {error.start}"
            ) from error


def _join_path(path: str, name: str) -> str:
    if not (name.isascii() and name.isidentifier()) and not _PLAIN_KEY.fullmatch(name):
        return f"{path}[{json.dumps(name)}]"
    return f"{path}.{name}" if path else name


def _describe_value(value: object, *, secret: bool = False) -> str:
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


def _reject_constant(name: str) -> object:
    raise ValueError(name)


def reject_unknown_fields(fields: Fields, known: Collection[str]) -> None:
    """Raise `ConfigError` that names the first unknown field and the most similar known one."""
    unknown = sorted(fields.values.keys() - set(known))
    if not unknown:
        return
    import difflib  # noqa: PLC0415  # only errors need it

    # Case is the most frequent mistake: nodeselector for nodeSelector.
    by_case = {name.lower(): name for name in known}
    similar = difflib.get_close_matches(unknown[0].lower(), by_case, n=1)
    remedy = f"did you mean {by_case[similar[0]]}?" if similar else ""
    raise ConfigError(
        f"{fields.path_of(unknown[0])}: unknown field",
        remedy=remedy or f"use one of: {', '.join(sorted(known))}",
    )
