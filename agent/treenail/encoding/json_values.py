"""Values of JSON: their types, and errors that name the location of a wrong one.

A reader returns a value of the type that it is named after, or raises `Mismatch`.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

from treenail.errors import ConfigError

Json = dict[str, object]
Reader = Callable[[object], object]
"""Converts a value of JSON; raises `Mismatch`."""
Path = tuple[str, ...]
T = TypeVar("T")

NO_VALUE = object()
"""Stands for an absent value."""

_INT64 = range(-(2**63), 2**63)
# Errors quote a wrong value only when it is short and cannot be a secret.
_KEY_SHOWN = 253
_SECRET = frozenset({"passwordHash", "sshAuthorizedKeys"})


class Mismatch(Exception):
    """A value does not fit: "expected ``expected``, found …"; ``problem`` replaces that text.

    ``at`` is the path from the value that is read to the wrong one. `steps` are the keys and
    indexes around the wrong value, innermost first.
    """

    def __init__(
        self,
        expected: str = "",
        value: object = NO_VALUE,
        *,
        problem: str = "",
        remedy: str = "",
        at: Sequence[str | int] = (),
    ) -> None:
        super().__init__(problem or expected)
        self.expected = expected
        self.value = value
        self.problem = problem
        self.remedy = remedy
        self.steps = [*reversed(at)]

    def format_message(self, where: str) -> str:
        """Return the message of the error for a document at ``where``."""
        for step in reversed(self.steps):
            where = f"{where}[{step}]" if isinstance(step, int) else join_path(where, step)
        is_secret = not _SECRET.isdisjoint(self.steps)
        actual = describe_value(self.value, secret=is_secret)
        text = self.problem or f"expected {self.expected}, found {actual}"
        return f"{where}: {text}" if where else text


def join_path(path: str, name: str) -> str:
    """Return the location of the key ``name`` in the object at ``path``."""
    is_plain = name.isascii() and name.replace("-", "_").isidentifier() and name[0] != "-"
    if not is_plain:
        return f"{path}[{json.dumps(name)}]"
    return f"{path}.{name}" if path else name


def describe_value(value: object, *, secret: bool = False) -> str:
    """Return what a value is, for errors."""
    match value:
        case None:
            return "null"
        case str():
            return "a string" if value else "an empty string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _ if value is NO_VALUE:
            return "nothing"
        case _ if secret:
            return "a number or a boolean"
        case bool():
            return str(value).lower()
        case int() if value not in _INT64:
            return "a number of more than 64 bits"
        case _:
            return repr(value)[:40]


def read_at(step: str | int, read: Callable[[object], T], value: object) -> T:
    """Apply ``read`` to the value of a key or index."""
    try:
        return read(value)
    except Mismatch as problem:
        problem.steps.append(step)
        raise


def read_any_text(value: object) -> str:
    """Return a string, which may contain half a surrogate pair."""
    if not isinstance(value, str):
        raise Mismatch("a string", value)
    return value


def read_text(value: object) -> str:
    """Return a string that UTF-8 can encode."""
    text = read_any_text(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON escapes can spell half a surrogate pair, which no encoding can write.
            actual = f"half a surrogate pair at character {error.start}"
            raise Mismatch(problem=f"expected a string, found {actual}") from error
    return text


def read_bool(value: object) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise Mismatch("true or false", value)
    return value


def read_any_integer(value: object) -> int:
    """Return an integer of any size."""
    if type(value) is not int:
        raise Mismatch("an integer", value)
    return value


def read_integer(value: object) -> int:
    """Return an integer of at most 64 bits."""
    number = read_any_integer(value)
    if number not in _INT64:
        raise Mismatch("an integer", value)
    return number


def read_number(value: object) -> float:
    """Return a finite number. Python also reads NaN in JSON, and integers of any size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Mismatch("a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Mismatch(problem="expected a finite number")
    return number


def read_list(value: object) -> list[object]:
    """Return a list of any values."""
    if not isinstance(value, list):
        raise Mismatch("a list", value)
    return value


def read_object(value: object) -> Json:
    """Return an object."""
    if not isinstance(value, dict):
        raise Mismatch("an object", value)
    return value


def read_present_keys(value: object) -> Json:
    """Return a copy of an object without the keys that are ``null``."""
    return copy_without((), read_object(value))


def copy_without(names: Collection[str], document: Json) -> Json:
    """Return the keys of an object that are not in ``names`` and not ``null``."""
    return {
        name: value for name, value in document.items() if value is not None and name not in names
    }


def check_kind(expected: str, document: Json) -> None:
    """Raise `Mismatch` for an object of another kind; a file may omit the kind."""
    if (kind := document.get("kind")) not in (None, "", expected):
        text = read_at("kind", read_text, kind)
        raise Mismatch(problem=f"kind: expected {expected}, found {text!r:.60}")


def read_text_map(value: object) -> dict[str, str]:
    """Return an object whose values are strings; ``null`` counts as an empty string."""
    document = read_object(value)
    # A Node has dozens of labels, and all are ASCII.
    if all(type(text) is str and text.isascii() for text in document.values()) and all(
        map(str.isascii, document)
    ):
        return cast("dict[str, str]", dict(document))
    return {
        read_text(name): read_at(name, read_text, "" if text is None else text)
        for name, text in document.items()
    }


def refuse_unknown_keys(known: Collection[str], document: Json) -> None:
    """Raise `Mismatch` for the first unknown key, which names the most similar known one."""
    unknown = min(document.keys() - known, default=None)
    if unknown is None:
        return
    import difflib  # noqa: PLC0415  # only errors need it

    # Case is the most frequent mistake: nodeselector for nodeSelector.
    by_case = {name.lower(): name for name in known}
    similar = difflib.get_close_matches(unknown.lower(), by_case, n=1)
    choices = f"use one of: {', '.join(sorted(known))}"
    remedy = f"did you mean {by_case[similar[0]]}?" if similar else choices
    raise Mismatch(problem="unknown field", remedy=remedy, at=[unknown[:_KEY_SHOWN]])


def chain(first: Reader, second: Callable[..., object], *, can_be_null: bool) -> Reader:
    """Return a reader that applies both; ``null`` skips the second where it is a value."""

    def read(value: object) -> object:
        inner = first(value)
        try:
            return None if inner is None and can_be_null else second(inner)
        except ConfigError as error:
            raise Mismatch(problem=str(error), remedy=error.remedy) from error

    return read


def read_any(value: object) -> object:
    return value


def write_number(value: object) -> object:
    if not math.isfinite(cast("float", value)):
        # `decode` refuses it: the document would be lost at the next start.
        raise ValueError(f"cannot encode {value} as JSON")
    return value


def allow_null(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


class RecordReader:
    """Reads objects of one class. Each list has the path of its entries first, for errors."""

    __slots__ = ("_checks", "_cls", "_inner", "_keys", "_missing", "_parts")

    def __init__(
        self,
        cls: Callable[..., object],
        missing: object,
        inner: list[tuple[Path, int, str]],
        checks: list[tuple[Path, int, Callable[[Json], None]]],
        keys: list[tuple[Path, int, str, str, Reader, Callable[[], object] | None]],
        parts: list[tuple[Path, int, str, Reader]],
    ) -> None:
        self._cls = cls
        self._missing = missing
        self._inner = inner
        self._checks = checks
        self._keys = keys
        self._parts = parts

    def read(self, document: object) -> object:
        objects = [read_object(document)]
        missing = self._missing
        values: dict[str, object] = {}
        path: Path = ()
        try:
            for inner in self._inner:
                path, place, key = inner
                value = objects[place].get(key)
                objects.append({} if value is None else read_object(value))
            for check in self._checks:
                path, place, check_object = check
                check_object(objects[place])
            for entry in self._keys:
                path, place, key, name, read, read_absent = entry
                value = objects[place].get(key, missing)
                if value is missing:
                    if read_absent is not None:
                        values[name] = read_absent()
                # Most values of an API are texts in ASCII.
                elif read is read_text and type(value) is str and value.isascii():
                    values[name] = value
                else:
                    values[name] = read(value)
            for part in self._parts:
                path, place, name, read = part
                values[name] = read(objects[place])
        except Mismatch as problem:
            problem.steps.extend(reversed(path))
            raise
        return self._cls(**values)
