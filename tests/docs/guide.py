"""A guide as steps: what runs where, what does not run and why, and files that it writes.

A comment before each fenced block says what the tests do with it::

    <!-- run: worker-0 -->              run its commands on this node; `cluster` for a workstation
    <!-- run: worker-0, exit 4 -->      its last command ends with this exit code
    <!-- file: worker-0 /etc/a.conf --> write the block into this file, also one in the directory
                                        of the workstation: `<!-- file: pool.yaml -->`
    <!-- not run: needs podman -->      only parse its commands; the reason is listed by the test
    <!-- lab: worker-0 is Degraded -->  no block follows: an action of the tests, see `lab_actions`

A block with the word ``console`` has commands after ``$ `` and their output.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUN, FILE, NOT_RUN, LAB = "run", "file", "not run", "lab"
_COMMENT = re.compile(rf"<!-- ({RUN}|{FILE}|{NOT_RUN}|{LAB}): (.+) -->")
_PROMPT = "$ "


@dataclass(frozen=True, slots=True)
class ConsoleCommand:
    """A command, its output as printed in the guide, and the expected exit code."""

    line: int
    text: str
    output: tuple[str, ...]
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class GuideStep:
    """A block and what the tests do with it, or an action of the lab."""

    line: int
    kind: str
    argument: str
    language: str = ""
    text: str = ""

    @property
    def place(self) -> str:
        return self.argument.partition(",")[0]

    @property
    def commands(self) -> list[ConsoleCommand]:
        """The commands of a ``console`` block; the last one may have an exit code."""
        if self.language != "console":
            return []
        found = list(_split_console(self.text, self.line + 1))
        code = re.search(r", exit (\d+)$", self.argument)
        if found and code:
            last = found[-1]
            found[-1] = ConsoleCommand(last.line, last.text, last.output, int(code[1]))
        return found


class GuideError(Exception):
    """A guide is written in a way that the tests cannot read."""


def read_guide(path: Path) -> list[GuideStep]:
    """Return the steps of a guide in order. Raises `GuideError` for a block without a comment."""
    steps: list[GuideStep] = []
    pending: GuideStep | None = None
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    for number, line in lines:
        if comment := _COMMENT.fullmatch(line.strip()):
            pending = GuideStep(number, comment[1], comment[2])
            if pending.kind == LAB:
                steps.append(pending)
                pending = None
        elif fence := re.fullmatch(r"( *)```(\w*)", line):
            indent, language = fence.groups()
            text = "".join(f"{each}\n" for each in _read_block(lines, indent))
            if pending is None:
                raise GuideError(f"{path.name}:{number}: a block without a comment before it")
            steps.append(GuideStep(number, pending.kind, pending.argument, language, text))
            pending = None
        elif line.strip() and pending is not None:
            raise GuideError(f"{path.name}:{number}: a block must follow the comment")
    return steps


def _read_block(lines: "enumerate[str]", indent: str) -> Iterator[str]:
    for _, line in lines:
        if line == f"{indent}```":
            return
        yield line.removeprefix(indent)
    raise GuideError("a block without an end")


def _continues(command: str) -> bool:
    """Return whether a command goes on in the next line, by a backslash or an open quote."""
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def _split_console(text: str, first_line: int) -> Iterator[ConsoleCommand]:
    line, command, output = 0, "", list[str]()
    for number, each in enumerate(text.splitlines(), start=first_line):
        if each.startswith(_PROMPT):
            if command:
                yield ConsoleCommand(line, command, tuple(output))
            line, command, output = number, each.removeprefix(_PROMPT), []
        elif not output and _continues(command):
            command = f"{command}\n{each}"
        else:
            output.append(each)
    if command:
        yield ConsoleCommand(line, command, tuple(output))
