"""The output of buildah: its last lines without credentials, and the current instruction."""

import re
from collections import deque
from collections.abc import Callable, Mapping

from treenail.escape import escape_line
from treenail.sanitize import sanitize_text

TAIL_LINES = 40
_LINE_LIMIT = 400  # characters
_STEP = re.compile(r"(?:\[(\d+)/\d+\] )?STEP (\d+)/\d+: (\w+)")
_COMMIT = re.compile(r"(?:\[\d+/\d+\] )?COMMIT\b")

StepLines = Mapping[tuple[int, int], int]
"""Line of the Containerfile by stage and step, both counted from 1 as buildah counts them."""


class BuildOutput:
    """Collects the output of a build line by line."""

    def __init__(self, lines: StepLines, show_line: Callable[[str], None]) -> None:
        """``show_line`` receives each line, escaped and without credentials."""
        self._lines = lines
        self._show_line = show_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._step = (1, 0)
        self.is_committing = False

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._tail)

    @property
    def line(self) -> int:
        """Line of the current instruction; 0 before the first one."""
        return self._lines.get(self._step, 0)

    def add_line(self, text: str) -> None:
        """Add a line of standard output or standard error."""
        line = escape_line(sanitize_text(text, limit=_LINE_LIMIT))
        if not line:
            return
        self._tail.append(line)
        self._follow_step(line)
        self._show_line(line)

    def _follow_step(self, line: str) -> None:
        """Advance to the next step; a program of a ``RUN`` may print such lines too."""
        if step := _STEP.match(line):
            found = (int(step[1] or 1), int(step[2]))
            if found > self._step and found in self._lines:
                self._step = found
                self.is_committing = False
        elif _COMMIT.match(line):
            self.is_committing = True
