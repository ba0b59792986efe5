"""A TOML table that is read key by key."""

from collections.abc import Mapping
from typing import TypeVar

from treenail.errors import UsageError

T = TypeVar("T")

_MIN_S = 0.1
_MAX_S = 86_400.0
_MAX_COUNT = 1000


class TomlTable:
    """A TOML table whose keys are taken one by one; keys that are left are rejected."""

    def __init__(self, content: dict[str, object], *, where: str, path: str = "") -> None:
        self._content = content
        self._where = where
        self._path = path
        self._known_keys: list[str] = []

    def take_text(self, key: str) -> str | None:
        value = self._take_value(key)
        if value is None or isinstance(value, str):
            return value
        raise self.build_error(key, value, "a string")

    def take_choice(self, key: str, choices: Mapping[str, T]) -> T | None:
        value = self._take_value(key)
        if value is None:
            return None
        if isinstance(value, str) and value in choices:
            return choices[value]
        raise self.build_error(key, value, " or ".join(f'"{choice}"' for choice in choices))

    def take_choices(self, key: str, choices: Mapping[str, T]) -> tuple[T, ...]:
        values = self._take_value(key)
        if values is None:
            return ()
        if not isinstance(values, list):
            raise self.build_error(key, values, "a list of strings")
        for value in values:
            if not isinstance(value, str) or value not in choices:
                raise self.build_error(key, value, " or ".join(f'"{each}"' for each in choices))
        return tuple(choices[value] for value in values)

    def take_seconds(self, key: str, default: float) -> float:
        value = self._take_value(key)
        if value is None:
            return default
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and _MIN_S <= value <= _MAX_S
        ):
            return float(value)
        raise self.build_error(key, value, f"a number of seconds from {_MIN_S:g} to {_MAX_S:g}")

    def take_count(self, key: str, default: int) -> int:
        value = self._take_value(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT:
            return value
        raise self.build_error(key, value, f"a number from 0 to {_MAX_COUNT}")

    def list_keys(self) -> tuple[str, ...]:
        return tuple(self._content)

    def take_table(self, key: str) -> "TomlTable":
        value = self._take_value(key)
        if value is None or isinstance(value, dict):
            return TomlTable(value or {}, where=self._where, path=f"{self._path}{key}.")
        raise self.build_error(key, value, "a table")

    def reject_unknown_keys(self) -> None:
        for key in self._content:
            if key not in self._known_keys:
                raise UsageError(
                    f"{self._where}: unknown setting {self._path}{key}",
                    remedy=f"remove it, or use one of: {', '.join(self._known_keys)}",
                )

    def build_error(self, key: str, value: object, allowed: str) -> UsageError:
        found = _format_value(value)
        return UsageError(f"{self._where}: {self._path}{key} is {found}; allowed is {allowed}")

    def _take_value(self, key: str) -> object:
        self._known_keys.append(key)
        return self._content.get(key)


def _format_value(value: object) -> str:
    """Return the value as Python writes it, shortened."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        # Python formats no number of more than 4,300 digits; TOML can write one in hexadecimal.
        return "a number of thousands of digits"
