r"""Escapes control characters in text from outside: ``\u001b`` stands for ESC.

JSON reads these escapes too.
"""

from collections.abc import Mapping

_ALLOWED = frozenset("\n\t")


def escape_text(text: str, *, styles: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with escapes in place of characters that are not printable.

    Newlines and tabs stay. ``styles`` maps the marks of colours to sequences of the terminal.
    """
    if all(part.isprintable() for part in text.split("\n")):
        return text
    return "".join(
        char
        if char.isprintable() or char in _ALLOWED
        else (styles or {}).get(char) or _escape_char(char)
        for char in text
    )


def escape_line(text: str) -> str:
    """Return ``text`` as one line: newlines and tabs are escaped too."""
    return escape_text(text).replace("\n", r"\n").replace("\t", r"\t")


def _escape_char(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
