"""Columns that text takes on a terminal: East Asian characters take two, combining ones none.

The text is escaped before: it has no control and no format characters.
"""

import re
import unicodedata
from collections.abc import Iterator

_EMOJI_STYLE = "\ufe0f"
_CONJOINING_JAMO = range(0x1160, 0x1200)
"""Vowels and final consonants, which a terminal joins with the Hangul character before them."""
_WORDS = re.compile(r"\s+|\S+")


def measure_text(text: str) -> int:
    """Return the columns of one line of text."""
    if text.isascii():
        return len(text)
    return sum(columns for _, columns in _iter_columns(text))


def cut_text(text: str, limit: int) -> str:
    """Return the beginning of the text that fits into ``limit`` columns."""
    used, end = 0, 0
    for char, columns in _iter_columns(text):
        used += columns
        if used > limit:
            break
        end += len(char)
    return text[:end]


def shorten_text(text: str, limit: int) -> str:
    """Return the text with at most ``limit`` columns; an ellipsis shows that it is longer."""
    return text if measure_text(text) <= limit else f"{cut_text(text, limit - 1)}…"


def shorten_middle(text: str, limit: int) -> str:
    """Return the text with at most ``limit`` columns; an ellipsis replaces its middle."""
    if measure_text(text) <= limit:
        return text
    half = (limit - 1) // 2
    begin = len(text)
    while measure_text(text[begin - 1 :]) <= half:
        begin -= 1
    return f"{cut_text(text, half)}…{text[begin:]}"


def pad_text(text: str, columns: int) -> str:
    """Return the text with spaces behind it, up to this many columns."""
    return text + " " * (columns - measure_text(text))


def wrap_words(text: str, width: int, *, indent: str = "", hanging: str = "") -> Iterator[str]:
    """Yield the text as lines of at most ``width`` columns; ``hanging`` indents all but the first.

    It keeps the spaces between the words of a line. Words without East Asian characters, such as
    a path, are never broken.
    """
    line, used, spaces, is_first = indent, measure_text(indent), "", True
    for match in _WORDS.finditer(text):
        if match[0].isspace():
            spaces = match[0]
            continue
        for part in _split_word(match[0], width - measure_text(hanging)):
            columns = measure_text(part)
            if not is_first and used + len(spaces) + columns > width:
                yield line
                line, used, spaces = hanging, measure_text(hanging), ""
            line += spaces + part
            used += len(spaces) + columns
            spaces, is_first = "", False
    if not is_first:
        yield line


def _split_word(word: str, width: int) -> Iterator[str]:
    """Yield a word in parts that fit, if it is of a script without spaces."""
    while measure_text(word) > width and any(
        unicodedata.east_asian_width(char) in "WF" for char in word
    ):
        part = cut_text(word, max(width, 2))
        yield part
        word = word[len(part) :]
    if word:
        yield word


def _iter_columns(text: str) -> Iterator[tuple[str, int]]:
    """Yield each character and its columns."""
    before = 0
    for char in text:
        columns = _measure_character(char)
        if char == _EMOJI_STYLE and before == 1:
            # It asks for the picture of a symbol, which many terminals draw twice as wide.
            columns = 1
        before = columns or before
        yield char, columns


def _measure_character(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me") or ord(char) in _CONJOINING_JAMO:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
