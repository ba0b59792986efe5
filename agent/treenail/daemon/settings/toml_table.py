"""A TOML table that is read key by key."""

from collections.abc import Mapping
from typing import TypeVar

from treenail.errors import UsageError

T = TypeVar("T")

_LEAST_S = 0.1
_MOST_S = 86_400.0
_MOST = 1000


class Table:
    """One TOML table, whose keys are taken one by one; what is left over is refused."""

    def __init__(self, content: dict[str, object], *, where: str, path: str = "") -> None:
        self._content = content
        self._where = where
        self._path = path
        self._known: list[str] = []

    def text(self, key: str) -> str | None:
        value = self._take(key)
        if value is None or isinstance(value, str):
            return value
        raise self.refused(key, value, "a string")

    def choice(self, key: str, choices: Mapping[str, T]) -> T | None:
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, str) and value in choices:
            return choices[value]
        raise self.refused(key, value, " or ".join(f'"{choice}"' for choice in choices))

    def choices(self, key: str, choices: Mapping[str, T]) -> tuple[T, ...]:
        values = self._take(key)
        if values is None:
            return ()
        if not isinstance(values, list):
            raise self.refused(key, values, "a list of strings")
        for value in values:
            if not isinstance(value, str) or value not in choices:
                raise self.refused(key, value, " or ".join(f'"{each}"' for each in choices))
        return tuple(choices[value] for value in values)

    def seconds(self, key: str, default: float) -> float:
        value = self._take(key)
        if value is None:
            return default
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and _LEAST_S <= value <= _MOST_S
        ):
            return float(value)
        raise self.refused(key, value, f"a number of seconds from {_LEAST_S:g} to {_MOST_S:g}")

    def count(self, key: str, default: int) -> int:
        value = self._take(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST:
            return value
        raise self.refused(key, value, f"a number from 0 to {_MOST}")

    def names(self) -> tuple[str, ...]:
        return tuple(self._content)

    def table(self, key: str) -> "Table":
        value = self._take(key)
        if value is None or isinstance(value, dict):
            return Table(value or {}, where=self._where, path=f"{self._path}{key}.")
        raise self.refused(key, value, "a table")

    def refuse_the_rest(self) -> None:
        for key in self._content:
            if key not in self._known:
                raise UsageError(
                    f"{self._where}: there is no setting {self._path}{key}",
                    remedy=f"remove it, or write one of {', '.join(self._known)}",
                )

    def refused(self, key: str, value: object, allowed: str) -> UsageError:
        return UsageError(f"{self._where}: {self._path}{key} is {value!r}; allowed is {allowed}")

    def _take(self, key: str) -> object:
        self._known.append(key)
        return self._content.get(key)
