"""Comparison of the output in a guide with that of a run.

In a guide ``…`` stands for any text of a line, and a line of ``…`` alone for any lines. Times,
durations, sizes, digests, versions of the OS, process ids and
the columns of a table may differ.
"""

import difflib
import re
from collections.abc import Sequence

_MASKS = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?"), "TIME"),
    (re.compile(r"\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"\b\d\d\.20\d{6}\b"), "VERSION"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b(…)?"), "HEX"),
    (re.compile(r"\[\d+\]"), "[PID]"),
    (re.compile(r"\bprocess \d+"), "process PID"),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h|MiB|MB|kB|B)\b"), "AMOUNT"),
)


def compare_output(printed: Sequence[str], actual: str) -> str:
    """Return a diff of what a guide prints and the actual output; empty when they agree."""
    expected = [_mask_line(line) for line in _strip(printed)]
    found = [_mask_line(line) for line in _strip(actual.splitlines())]
    if re.fullmatch(_build_pattern(expected), "".join(f"{line}\n" for line in found)):
        return ""
    diff = difflib.unified_diff(expected, found, "guide", "lab", lineterm="", n=99)
    return "\n".join([*diff, "unmasked:", actual])


def _strip(lines: Sequence[str]) -> list[str]:
    found = list(lines)
    while found and not found[-1].strip():
        found.pop()
    return found


def _mask_line(line: str) -> str:
    for pattern, word in _MASKS:
        line = pattern.sub(word, line)
    return re.sub(r"[ \t]+", " ", line).strip()


def _build_pattern(lines: Sequence[str]) -> str:
    return "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in lines
    )
