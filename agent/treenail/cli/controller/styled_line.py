"""Lines of text with styles, before a terminal or a picture shows them."""

from collections.abc import Iterable
from dataclasses import dataclass

from treenail.text_width import cut_text, measure_text

StyledSpan = tuple[str, str]
"""A text and its style: ``good``, ``busy``, ``bad``, ``strong``, ``faint`` or empty."""

RICH_STYLES = {
    "good": "green",
    "busy": "yellow",
    "bad": "bold red",
    "strong": "bold",
    "faint": "dim",
}
"""Styles as the package rich names them."""


@dataclass(frozen=True, slots=True)
class StyledLine:
    """One line; its text has no control characters."""

    spans: tuple[StyledSpan, ...] = ()

    @classmethod
    def plain_text(cls, text: str) -> "StyledLine":
        """Return a line without styles."""
        return cls(((text, ""),))

    def __str__(self) -> str:
        return "".join(text for text, _ in self.spans).rstrip()

    def cut(self, width: int | None) -> "StyledLine":
        """Return the line with at most ``width`` columns; an ellipsis shows that it is longer."""
        if width is None or measure_text(str(self)) <= width:
            return self
        spans, left = [], width - 1
        for text, style in self.spans:
            part = cut_text(text, left)
            spans.append((part, style))
            # Nothing follows a part: a character of two columns may leave one column free.
            left = left - measure_text(part) if part == text else 0
        return StyledLine((*spans, ("…", "")))


def style_text(text: str, style: str) -> StyledSpan:
    """Return a span."""
    return text, style


def join_lines(lines: Iterable[StyledLine]) -> str:
    """Join lines as plain text."""
    return "\n".join(map(str, lines))
