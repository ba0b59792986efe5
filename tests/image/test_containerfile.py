"""The Containerfile reader: recorded answers of BuildKit's parser, stages, any text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz
from tests.oracle import DATA
from treenail.image.containerfile import (
    Heredoc,
    Stage,
    expand_variables,
    parse_containerfile,
    split_words,
    strip_quotes,
)

RECORDED = [
    json.loads(line) for line in (DATA / "containerfiles.jsonl").read_text("utf-8").splitlines()
]


def test_instructions_equal_those_of_buildkit() -> None:
    compared = 0
    for record in RECORDED:
        if "error" in record:
            continue
        found = [
            [each.line, each.end_line, each.keyword, [doc.name for doc in each.heredocs]]
            for each in parse_containerfile(record["text"]).instructions
        ]
        expected = [
            [line, end, name.upper(), docs] for line, end, name, docs in record["instructions"]
        ]
        assert found == expected, record["text"]
        compared += 1
    assert compared > 200


def test_comments_and_empty_lines_between_continued_lines_are_left_out() -> None:
    text = "FROM configs AS final\nRUN a \\\n  # why\n\n  && b\nRUN c\n"
    first, second, third = parse_containerfile(text).instructions
    assert (first.line, first.end_line) == (1, 1)
    assert (second.line, second.end_line, second.arguments) == (2, 5, "a   && b")
    assert third.line == 6


def test_escape_directive_changes_the_continuation() -> None:
    found = parse_containerfile("# escape=`\nFROM x\nRUN a `\n b\nRUN c:\\\nRUN d\n")
    assert found.escape == "`"
    assert found.directives == ("# escape=`",)
    assert [each.line for each in found.instructions] == [2, 3, 5, 6]


def test_directive_after_a_comment_is_a_comment() -> None:
    assert parse_containerfile("# about\n# escape=`\nFROM x\n").escape == "\\"


def test_heredocs_hold_their_text() -> None:
    text = "FROM x\nRUN <<A cat <<-'B'\n1\nA\n\t2\n\tB\nCOPY <<C /etc/\nno end\n"
    found = parse_containerfile(text)
    assert found.instructions[1].heredocs == (Heredoc("A", "1\n"), Heredoc("B", "\t2\n"))
    assert found.instructions[2].heredocs == (Heredoc("C", "no end\n", is_closed=False),)
    assert parse_containerfile('FROM x\nRUN ["a", "<<B"]\n').instructions[1].heredocs == ()


def test_stages_expand_global_arguments() -> None:
    text = (
        "ARG VERSION=9\nARG IMAGE=registry.example.com/a:${VERSION}\n"
        "FROM --platform=linux/amd64 ${IMAGE} AS Tools\nARG VERSION=10\n"
        "FROM ${OTHER:-configs} as final\n"
    )
    found = parse_containerfile(text)
    assert found.stages == (
        Stage(0, 3, "registry.example.com/a:9", "Tools"),
        Stage(1, 5, "configs", "final"),
    )
    assert [each.line for each in found.global_arguments] == [1, 2]


def test_flags_and_operands_are_separate() -> None:
    _, found = parse_containerfile("FROM x\nCOPY --from=a --chown=1:1  b  c\n").instructions
    assert found.flags == ("--from=a", "--chown=1:1")
    assert (found.operands, found.find_flag("from"), found.find_flag("mode")) == ("b  c", "a", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A/${A}", "1/1"),
        ("${B:-x}${B:+y}${A:-x}${A:+y}", "x1y"),
        ("${B-x}", "${B-x}"),
        ("$B", ""),
        ("$$", "$$"),
    ],
)
def test_variables_are_expanded(text: str, expected: str) -> None:
    assert expand_variables(text, {"A": "1"}) == expected


def test_expanded_text_is_bounded() -> None:
    text = "ARG A=xxxxxxxxxx\n" + "ARG A=$A$A$A$A$A$A$A$A$A$A\n" * 100 + "FROM $A\n"
    assert len(parse_containerfile(text).stages[0].image) <= 4096


def test_words_keep_quotes_that_are_stripped_later() -> None:
    words = split_words("a 'b c'  \"d 'e\" f\\ g")
    assert words == ["a", "'b c'", '"d \'e"', "f\\ g"]
    assert [strip_quotes(each) for each in words] == ["a", "b c", "d 'e", "f g"]


@fuzz
@given(st.text(st.sampled_from("FROMRUN \n\t#\\`<-'\"$={}EOFas[]\r\ufeff0ä"), max_size=300))
def test_any_text_is_read_with_lines_in_order(text: str) -> None:
    found: Any = parse_containerfile(text)
    lines = [line for each in found.instructions for line in (each.line, each.end_line)]
    assert lines == sorted(lines)
    assert all(0 < line <= text.count("\n") + 1 for line in lines)
