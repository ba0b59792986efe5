"""The man pages, and the help that they are written from."""

import argparse
import re

import pytest

from tests.docs.command_lines import find_commands, find_problems
from tools import manuals
from tools.completions import create_parsers
from tools.roff import format_roff
from treenail.cli.argument_parser import list_actions, list_parsers

PARSERS = create_parsers()
PAGES = manuals.list_pages()


def compose(page: str) -> str:
    return manuals.compose_page(page, manuals.read_source(page))


def read_section(page: str, name: str) -> str:
    return compose(page).split(f"## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_title_with_date_and_version(page: str) -> None:
    name, section = page.rsplit(".", 1)
    title, heading, text = manuals.format_page(page).replace("\\-", "-").splitlines()[:3]
    assert re.fullmatch(
        rf'\.TH {name.upper()} {section} "\d{{4}}-\d\d-\d\d" "treenail [\d.]+" "treenail"', title
    )
    assert heading == ".SH NAME"
    assert text.startswith(f"{name} - ")


@pytest.mark.parametrize("page", manuals.PROGRAMS)
def test_page_begins_with_synopsis_and_examples(page: str) -> None:
    sections = re.findall(r"^## (.+)$", compose(page), re.MULTILINE)
    assert sections[:3] == ["SYNOPSIS", "EXAMPLES", "DESCRIPTION"]


@pytest.mark.parametrize("page", manuals.PROGRAMS)
def test_page_has_every_command_and_option(page: str) -> None:
    program = page.rsplit(".", 1)[0]
    commands = manuals.list_commands(PARSERS[program])
    text = read_section(page, "COMMANDS")
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == [
        f"{program} {name}" for name in commands
    ]
    terms = "".join(re.findall(r"^- (.+?): ", text + read_section(page, "OPTIONS"), re.MULTILINE))
    options = {
        option
        for command in commands.values()
        for action in list_actions(command)
        if action.help != argparse.SUPPRESS and "--help" not in action.option_strings
        for option in action.option_strings
    }
    assert {option for option in options if f"`{option}`" not in terms} == set()


@pytest.mark.parametrize("page", ["treenail.8", "treenail-controller.8"])
def test_option_of_several_commands_is_listed_once_with_its_commands(page: str) -> None:
    (item,) = re.findall(r"^- `-v`.+$", compose(page), re.MULTILINE)
    assert re.search(r"Log at level DEBUG\. Of (`[\w ]+`, )*`[\w ]+` and `\w+`\.$", item)


@pytest.mark.parametrize(
    ("page", "line", "wrong", "message"),
    [
        ("treenail.8", "- `--repair`: ", "- `--repaint`: ",
         "no option of these commands: - `--repaint`"),
        ("treenail.8", "### drift\n", "### drifts\n", "treenail has no commands drifts"),
        ("treenail-agent.toml.5", "- `stall_s`: ", "- stalls: ", "LIMITS has no stall_s"),
    ],
)  # fmt: skip
def test_prose_that_does_not_match_is_an_error(
    page: str, line: str, wrong: str, message: str
) -> None:
    source = manuals.read_source(page).replace(line, wrong)
    with pytest.raises(ValueError, match=message):
        manuals.compose_page(page, source)


def test_setting_has_default_after_its_first_sentence() -> None:
    text = read_section("treenail-agent.toml.5", "LIMITS")
    assert (
        "\n- `drain_s`: Time after which the Node's `reason` reports that a drain is overdue"
        in text
    )
    assert " (default: 3600). The agent keeps waiting.\n" in text.replace("\n  ", " ")


@pytest.mark.parametrize(
    ("markdown", "roff"),
    [
        (
            "# name - text\n\n## A\n\none\ntwo\n\nthree",
            ".SH NAME\nname \\- text\n.SH A\none two\n.PP\nthree\n",
        ),
        ("- `key`, *N*: text", ".TP\n\\fBkey\\fR, \\fIN\\fR\ntext\n"),
        ("- `key` of a file: text", ".IP \\(bu 2\n\\fBkey\\fR of a file: text\n"),
        ("1. one\n2. two", ".IP 1. 4\none\n.IP 2. 4\ntwo\n"),
        ("- `a`: b\n\n  c", ".TP\n\\fBa\\fR\nb\n.IP\nc\n"),
        ("`/etc/a` see tool(8)", "\\fI/etc/a\\fR see \\fBtool\\fR(8)\n"),
        ("```\n.x 'y' \\ -z\n```", ".in +4n\n.EX\n\\&.x \\(aqy\\(aq \\e \\-z\n.EE\n.in\n"),
        ("a\\\nb", "a\n.br\nb\n"),
        (".bak", "\\&.bak\n"),
    ],
)
def test_markdown_is_formatted_as_roff(markdown: str, roff: str) -> None:
    assert format_roff(markdown) == roff


def test_markdown_without_roff_is_an_error() -> None:
    with pytest.raises(ValueError, match="a man page has no blockquote"):
        format_roff("> quoted")


@pytest.mark.parametrize(
    "parser",
    [command for parser in PARSERS.values() for command in list_parsers(parser)],
    ids=lambda parser: parser.prog,
)
def test_help_of_every_command_has_examples_first(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert 0 < text.find("\nexamples:\n  # ") < text.find("\noptions:\n")


def test_exit_codes_are_documented_once() -> None:
    codes = re.findall(r"^- `(\d+)`: ", read_section("treenail.8", "EXIT STATUS"), re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "5", "64", "130", "141"]
    assert "See treenail(8)" in read_section("treenail-controller.8", "EXIT STATUS")


@pytest.mark.parametrize("page", ["treenail.8", "treenail-controller.8", "treenail-install.7"])
def test_commands_of_the_page_are_accepted_by_the_parser(page: str) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", compose(page), re.MULTILINE | re.DOTALL)
    examples = "".join(blocks)
    assert len(list(find_commands(examples))) >= 5
    assert find_problems(examples) == []
