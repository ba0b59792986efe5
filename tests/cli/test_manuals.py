"""Help and man pages have the same commands, options and defaults."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.command_lines import find_commands, find_problems
from tools.completions import create_parsers
from treenail.cli.argument_parser import list_actions, list_parsers

MANUALS = Path(__file__).parents[2] / "rpm/man"
PARSERS = create_parsers()
PAGES = {
    "treenail": "treenail.8",
    "treenail-controller": "treenail-controller.8",
    "treenail-lab": "treenail-lab.1",
}
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-[a-z])\b")
# In every synopsis for itself: it is short for -o json.
NOT_IN_SYNOPSIS = {"--help", "--json", "--verbose"}


def read_page(program: str) -> str:
    text = (MANUALS / PAGES[program]).read_text()
    for escape in (r"\fI", r"\fB", r"\fR"):
        text = text.replace(escape, "")
    return text.replace(r"\-", "-")


def read_section(program: str, name: str) -> str:
    return read_page(program).split(f".SH {name}\n")[1].split("\n.SH ")[0]


def list_options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for each in list_parsers(parser):
        for action in list_actions(each):
            if action.option_strings and action.help != argparse.SUPPRESS:
                yield action


def list_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that have no commands of their own."""
    for each in list_parsers(parser):
        if not any(isinstance(action, argparse._SubParsersAction) for action in list_actions(each)):
            yield each


@pytest.mark.parametrize("program", PAGES)
def test_options_of_help_and_man_page_are_equal(program: str) -> None:
    options = {each for action in list_options(PARSERS[program]) for each in action.option_strings}
    names = read_section(program, "OPTIONS").split(".TP\n")[1:]
    documented = {each for entry in names for each in OPTION.findall(entry.split("\n")[0])}
    assert documented - options == set()
    assert options - documented <= {"-h", "--help", "--version"}


@pytest.mark.parametrize("program", PAGES)
def test_default_in_help_is_in_the_man_page(program: str) -> None:
    entries = read_section(program, "OPTIONS").split(".TP\n")[1:]
    missing = set()
    for action in list_options(PARSERS[program]):
        found = re.search(r"\(default: (%\(default\)s|[\w.:-]+)\)", action.help or "")
        if found is None or action.dest == "output":
            # Each command has its own default format.
            continue
        default = str(action.default) if found[1].startswith("%") else found[1]
        text = " ".join(
            entry
            for entry in entries
            if action.option_strings[-1] in OPTION.findall(entry.split("\n")[0])
        )
        if not re.search(rf"default:?\s+(\.\w+ )?\(?{re.escape(default)}\b", text):
            missing.add((action.option_strings[-1], default))
    assert missing == set()


@pytest.mark.parametrize(
    "parser",
    [each for program in PAGES for each in list_commands(PARSERS[program])],
    ids=lambda parser: parser.prog,
)
def test_synopsis_names_every_option_of_a_command(parser: argparse.ArgumentParser) -> None:
    program = parser.prog.split()[0]
    synopsis = read_section(program, "SYNOPSIS").replace(",", " ")
    lines = [" ".join(each.split()) for each in synopsis.split(".br\n")]
    line = next(each for each in lines if each.startswith(f".B {parser.prog}"))
    missing = {
        action.option_strings[-1]
        for action in list_options(parser)
        if not set(action.option_strings) & set(OPTION.findall(line))
    }
    assert missing - NOT_IN_SYNOPSIS == set()


@pytest.mark.parametrize(
    "parser",
    [each for parser in PARSERS.values() for each in list_parsers(parser)],
    ids=lambda parser: parser.prog,
)
def test_help_of_every_command_has_examples_first(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert 0 < text.find("\nexamples:\n  # ") < text.find("\noptions:\n")


def test_exit_codes_are_documented_once() -> None:
    listed = read_section("treenail", "EXIT STATUS")
    assert re.findall(r"^\.B (\d+)$", listed, re.MULTILINE) == [
        "0", "1", "2", "3", "5", "64", "130", "141",
    ]  # fmt: skip
    assert ".BR treenail (8)" in read_section("treenail-controller", "EXIT STATUS")


def test_commands_of_the_installation_page_are_accepted_by_the_parser() -> None:
    text = (MANUALS / "treenail-install.7").read_text().replace("\\-", "-")
    examples = "".join(re.findall(r"^\.EX\n(.*?)^\.EE", text, re.MULTILINE | re.DOTALL))
    assert len(list(find_commands(examples))) >= 5
    assert find_problems(examples) == []
