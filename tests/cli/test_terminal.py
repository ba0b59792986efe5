"""Lines and help texts fit the terminal."""

import io

import pytest

from tests.fixtures.terminal import Terminal
from treenail.cli.controller.main import create_parser as create_controller_parser
from treenail.cli.node.main import create_parser
from treenail.cli.terminal import VerbatimLine, print_lines, wrap_line, wrap_text

IMAGE = "q.example/os@sha256:" + "0123456789abcdef" * 4


def test_wrapped_line_keeps_its_indent_and_shortens_digests() -> None:
    line = f"    from rendered-a,  {IMAGE} because of something else"
    assert list(wrap_line(line, 60)) == [
        "    from rendered-a,  q.example/os@sha256:0123456789ab…",
        "      because of something else",
    ]
    assert list(wrap_line(line, None)) == [line]
    assert list(wrap_line("a\nState  Done", 60)) == ["a State  Done"]


def test_text_is_wrapped_below_its_label_and_words_stay_whole() -> None:
    word = "x" * 70
    assert list(wrap_text(f"a b {word} c", 40, indent="L ", hanging="  ")) == [
        "L a b", f"  {word}", "  c",
    ]  # fmt: skip


def test_diff_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal, pipe = Terminal(), io.StringIO()
    lines = ["because " + "word " * 9, VerbatimLine("+ " + "word " * 9)]
    print_lines(lines, terminal)
    print_lines(lines, pipe)
    assert terminal.getvalue().splitlines()[-1] == lines[1]
    assert len(terminal.getvalue().splitlines()) == 3
    assert pipe.getvalue().splitlines() == lines


@pytest.mark.parametrize("create", [create_parser, create_controller_parser])
def test_commands_of_help_are_aligned(create, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("COLUMNS", "80")
    text = create().format_help()
    _, _, commands = text.partition("COMMAND\n")
    commands, _, _ = commands.partition("\n\n")
    starts = {len(line) - len(line[4:].partition(" ")[2].lstrip()) for line in commands.splitlines()
              if line[4] != " "}  # fmt: skip
    assert len(starts) == 1
    assert max(map(len, text.splitlines())) <= 80
