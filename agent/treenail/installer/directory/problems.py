"""Problems of an install directory, with their lines; all are reported in one message. Pure.

The line is that of the field, not that where its object begins.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from treenail.api import documents
from treenail.encoding import yaml11
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
    path: yaml11.FieldPath = field(default=(), compare=False)
    """Field in the document that begins at this line; empty if the line is that of the problem."""

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.text}; {self.remedy}"


def split_location(message: str, file: str) -> tuple[str, int]:
    """Return the text and the line of an error about a file; 0 without a line."""
    text = message.removeprefix(file).lstrip(":, ")
    match = _LINE.match(text)
    return (text[match.end() :], int(match[1])) if match else (text, 0)


class InstallDirectoryError(ConfigError):
    """An install directory has problems; ``problems`` are all of them, by file and line."""

    def __init__(self, what: str, problems: Sequence[InstallProblem]) -> None:
        """``what`` begins the message, such as ``cannot prepare DIR``."""
        self.problems = tuple(
            sorted(set(problems), key=lambda problem: (problem.file, problem.line))
        )
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
            *(f"  {problem}" for problem in self.problems[:MAX_REPORTED]),
            *([f"  and {rest} more"] if rest > 0 else []),
        ]


_PATH = re.compile(
    r"(?:[A-Z][A-Za-z]* \S{1,300}?: |Secret \S{1,300}, )?"
    r"((?:metadata|spec|data|stringData|type|status|kind|apiVersion)"
    r"(?:\.[\w-]{1,100}|\[[0-9]{1,6}\]|\[\"[^\"]{1,300}\"\])*)(?=[:, ]|$)"
)
_ANNOTATION = re.compile(r"(?:[A-Z][A-Za-z]* \S{1,300}?: )?annotation ([\w./-]{1,300}): ")
_PART = re.compile(r"\[([0-9]+)\]|\[\"([^\"]+)\"\]|([\w-]+)")


def find_field_path(text: str) -> yaml11.FieldPath:
    """Return the field with which the text of a problem begins; empty without one."""
    if annotation := _ANNOTATION.match(text):
        return ("metadata", "annotations", annotation[1])
    match = _PATH.match(text)
    if not match:
        return ()
    return tuple(
        int(index) if index else key or name for index, key, name in _PART.findall(match[1])
    )


def locate_problems(
    problems: Sequence[InstallProblem], read: Callable[[str], bytes | None]
) -> list[InstallProblem]:
    """Return the problems with the lines of their fields.

    ``read`` returns the content of a file; None for one that cannot be read.
    """
    known: dict[tuple[str, int], yaml11.YamlPositions | None] = {}
    located = []
    for problem in problems:
        place = (problem.file, problem.line)
        if problem.path and place not in known:
            known[place] = _find_positions(read(problem.file), problem)
        positions = known.get(place) if problem.path else None
        if positions is None:
            located.append(problem)
        else:
            located.append(replace(problem, line=positions.find_line(*problem.path), path=()))
    return located


def _find_positions(content: bytes | None, problem: InstallProblem) -> yaml11.YamlPositions | None:
    if content is None:
        return None
    try:
        text = documents.decode_text(content, problem.file)
        return yaml11.find_positions(text, where=problem.file, line=problem.line)
    except ConfigError:
        return None
