"""Syntax of systemd units, as Ignition checks it."""

import re

from treenail.errors import IgnitionError

_BEFORE_SECTION = re.compile(r"[\[#;]")


def check_unit_syntax(text: str, place: str) -> None:
    """Raise `IgnitionError` when Ignition cannot parse the contents of a unit or drop-in.

    Like Ignition this skips everything before the first section, and knows no section's options.
    """
    position = _find_section(text)
    while position < len(text):
        line_end = _find_line_end(text, position)
        char = text[position]
        if char.isspace():
            position += 1
        elif char in "#;":
            position = _skip_comment(text, position)
        elif char == "[":
            close = text.find("]", position)
            if close < 0:
                raise _make_error(text, position, place, "expected ']' after the section name")
            line_end = _find_line_end(text, close)
            if text[close + 1 : line_end].strip():
                raise _make_error(text, close, place, "expected nothing after the section name")
            position = line_end + 1
        else:
            equals = text.find("=", position, line_end)
            if equals < 0 or "\r" in text[position:equals]:
                raise _make_error(text, position, place, "expected an option and '='")
            position = _skip_value(text, equals + 1)


def _find_section(text: str) -> int:
    position = 0
    while found := _BEFORE_SECTION.search(text, position):
        if found[0] == "[":
            return found.start()
        position = _skip_comment(text, found.start())
    return len(text)


def _skip_comment(text: str, position: int) -> int:
    while position < len(text):
        line_end = _find_line_end(text, position)
        line = text[position:line_end]
        position = line_end + 1
        if not line.removesuffix(" ").endswith("\\"):
            break
    return position


def _skip_value(text: str, position: int) -> int:
    while position < len(text):
        line_end = _find_line_end(text, position)
        line = text[position:line_end]
        position = line_end + 1
        if not (line.strip() and line.endswith("\\")):
            break
    return position


def _find_line_end(text: str, position: int) -> int:
    found = text.find("\n", position)
    return len(text) if found < 0 else found


def _make_error(text: str, position: int, place: str, problem: str) -> IgnitionError:
    line = text.count("\n", 0, position) + 1
    return IgnitionError(f"{place}, line {line}: {problem}")
