"""Columns of text on a terminal."""

import textwrap

import pytest

from treenail.cli.controller.status.text import StyledLine
from treenail.cli.output_format import TableColumn, format_table_lines
from treenail.cli.terminal import (
    cut_text,
    measure_text,
    pad_text,
    shorten_middle,
    shorten_text,
    wrap_words,
)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("node-1", 6),
        ("", 0),
        ("龙蜥", 4),
        ("\uff46\uff55\uff4c\uff4c", 8),
        ("e\u0301", 1),
        ("한글", 4),
        ("\u1112\u1161\u11ab", 2),
        ("█░…", 3),
        ("🚀", 2),
        ("☀", 1),
        ("☀\ufe0f", 2),
        ("\ufe0f", 0),
    ],
)
def test_measured_width_is_that_of_terminals(text: str, columns: int) -> None:
    assert measure_text(text) == columns


def test_text_is_cut_between_characters() -> None:
    assert cut_text("龙蜥", 3) == "龙"
    assert cut_text("e\u0301e\u0301", 1) == "e\u0301"
    assert shorten_text("龙蜥龙蜥", 6) == "龙蜥…"
    assert shorten_text("龙蜥龙", 6) == "龙蜥龙"
    assert shorten_middle("龙蜥操作系统", 7) == "龙…统"
    assert shorten_middle("abcdefghij", 7) == "abc…hij"
    assert pad_text("龙", 4) + "|" == "龙  |"


def test_styled_line_with_wide_characters_is_cut_to_the_width() -> None:
    line = StyledLine((("a龙", "good"), ("蜥b", "bad"), ("c", "")))
    assert [str(line.cut(width)) for width in (7, 6, 5, 4, 3)] == [
        "a龙蜥bc",
        "a龙蜥…",
        "a龙…",
        "a龙…",
        "a…",
    ]


def test_columns_of_a_table_are_aligned_by_width() -> None:
    lines = [*format_table_lines((TableColumn("A"), TableColumn("B")), [("龙", "x"), ("abc", "y")])]
    assert lines == ["A     B", "龙    x", "abc   y"]


@pytest.mark.parametrize("width", [10, 17, 40])
def test_ascii_text_is_wrapped_as_the_standard_library_does(width: int) -> None:
    text = "cannot pull the image  quay.example/os@sha256-0123456789abcdef: no space left on /boot"
    expected = textwrap.wrap(
        text, width, initial_indent="> ", subsequent_indent="    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    assert [*wrap_words(text, width, indent="> ", hanging="    ")] == expected


def test_words_without_spaces_are_wrapped_between_wide_characters() -> None:
    lines = [*wrap_words("错误: 无法拉取镜像无法拉取镜像", 10, hanging="  ")]
    assert lines == ["错误:", "  无法拉取", "  镜像无法", "  拉取镜像"]
