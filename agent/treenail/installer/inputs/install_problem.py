"""Problems of an install directory: all of them are reported in one message. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from treenail.api.yaml_positions import FieldPath
from treenail.errors import ConfigError

MAX_REPORTED = 50
_LINE = re.compile(r"line ([0-9]{1,9})(?:, (?=column )|: )")


@dataclass(frozen=True, slots=True)
class InstallProblem:
    """One mistake, with the place where the user corrects it."""

    file: str
    """Path below the install directory."""
    text: str
    remedy: str
    line: int = 0
    """Counts from 1; 0 for the whole file."""
    path: FieldPath = field(default=(), compare=False)
    """Field in the document that begins at this line; empty if the line is that of the problem."""

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.text}; {self.remedy}"


def split_location(message: str, file: str) -> tuple[str, int]:
    """Return the text and the line of an error about a file; 0 without a line."""
    text = message.removeprefix(file).lstrip(":, ")
    found = _LINE.match(text)
    return (text[found.end() :], int(found[1])) if found else (text, 0)


class InstallDirectoryError(ConfigError):
    """An install directory has problems; ``problems`` are all of them, by file and line."""

    def __init__(self, what: str, problems: Sequence[InstallProblem]) -> None:
        """``what`` begins the message, such as ``cannot prepare DIR``."""
        self.problems = tuple(sorted(set(problems), key=lambda each: (each.file, each.line)))
        count = len(self.problems)
        shown = "; ".join(map(str, self.problems[:MAX_REPORTED]))
        more = f"; and {count - MAX_REPORTED} more" if count > MAX_REPORTED else ""
        self.headline = f"{what}: {count} problem{'' if count == 1 else 's'}"
        super().__init__(f"{self.headline}: {shown}{more}")

    def list_lines(self) -> list[str]:
        """Return the message as lines: the headline, then a line for each problem."""
        rest = len(self.problems) - MAX_REPORTED
        return [
            self.headline,
            *(f"  {each}" for each in self.problems[:MAX_REPORTED]),
            *([f"  and {rest} more"] if rest > 0 else []),
        ]
