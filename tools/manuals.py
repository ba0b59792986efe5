"""Write the man pages from the Markdown in rpm/man and from the parsers of the commands.

``python -m tools.manuals DIR [PAGE...]`` writes DIR/PAGE from rpm/man/PAGE.md, by default all.

The parsers give SYNOPSIS, the descriptions of the commands, and the options. The Markdown adds to
them: what stands below ``### COMMAND`` follows the description of the command, and an item on an
option, there or below OPTIONS, follows the help of the option. Options that several commands have
are in OPTIONS. The settings classes give the defaults of treenail-agent.toml(5).
"""

import argparse
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from tools.roff import escape, format_roff
from treenail import __version__
from treenail.cli.argument_parser import list_actions, list_parsers
from treenail.daemon import agent_settings
from treenail.update.checks.health import ROLLBACK_RULES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "rpm/man"
PROGRAMS = {
    "treenail.8": "treenail.cli.node.main",
    "treenail-controller.8": "treenail.cli.controller.main",
    "treenail-lab.1": "treenail_lab.command",
}
"""Module of the parser, by page; it is imported for its page only."""
SETTINGS = {
    "KEYS": "", "LIMITS": "limits", "HEALTH": "health", "PRE-FLIGHT": "preflight", "DRIFT": "drift",
    "FIRST BOOT": "firstboot",
}  # fmt: skip
"""Table of settings, by section of treenail-agent.toml(5)."""
_OPTION_ITEM = re.compile(r"^- `(--?[\w-]+)`:\s+(.*\n(?:(?:  .*)?\n)*)", re.MULTILINE)
_SETTING = re.compile(r"^- `(\w+)`: (.*?)(?=\.\s)", re.DOTALL | re.MULTILINE)
"""A setting with its first sentence."""


def main() -> int:
    """Write the pages; print the directory."""
    parser = argparse.ArgumentParser(prog="tools.manuals", description="Write the man pages.")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("pages", metavar="PAGE", nargs="*", default=list_pages())
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for page in arguments.pages:
        (arguments.directory / page).write_text(format_page(page))
    print(arguments.directory)
    return 0


def list_pages() -> list[str]:
    """List the names of the pages, such as treenail.8."""
    return sorted(path.stem for path in SOURCES.glob("*.md"))


def format_page(page: str) -> str:
    """Format the page as roff, with the date of the package's changelog."""
    name, section = page.rsplit(".", 1)
    changelog = (ROOT / "rpm/treenail.spec").read_text().partition("%changelog\n* ")[2].split()
    date = time.strftime("%Y-%m-%d", time.strptime(" ".join(changelog[1:4]), "%b %d %Y"))
    title = f'.TH {escape(name.upper())} {section} "{date}" "treenail {__version__}" "treenail"'
    return f"{title}\n{format_roff(compose_page(page, read_source(page)))}"


def read_source(page: str) -> str:
    """Return the Markdown that the page is written from."""
    return (SOURCES / f"{page}.md").read_text()


def compose_page(page: str, source: str) -> str:
    """Return the page as Markdown, with what the parsers and the settings classes add."""
    rules = "\n".join(f"- `{rule.check}`: {rule.condition}" for rule in ROLLBACK_RULES)
    title, sections = _split(source.replace("<!-- rollback rules -->", rules), "## ")
    if page in PROGRAMS:
        parser = import_module(PROGRAMS[page]).create_parser()
        sections = {"SYNOPSIS": ""} | sections
        sections |= _compose_commands(parser, sections)
    elif "KEYS" in sections:
        sections |= _compose_settings(sections)
    return title + "".join(f"## {name}\n{body}" for name, body in sections.items())


def _split(text: str, mark: str) -> tuple[str, dict[str, str]]:
    """Split text at headings; return what stands before the first, and the others by title."""
    intro, *parts = re.split(f"^{mark}", text, flags=re.MULTILINE)
    return intro, {title: body for title, _, body in (part.partition("\n") for part in parts)}


# Commands


def list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """List the parsers of commands that have no commands of their own, by name."""
    return {
        command.prog.removeprefix(f"{parser.prog} "): command
        for command in list_parsers(parser)
        if not any(action.nargs == argparse.PARSER for action in list_actions(command))
    }


def _compose_commands(
    parser: argparse.ArgumentParser, sections: Mapping[str, str]
) -> dict[str, str]:
    """Return SYNOPSIS, COMMANDS and OPTIONS."""
    commands = list_commands(parser)
    users: dict[str, list[str]] = {}
    for name, command in commands.items():
        for entry in _list_entries(command):
            users.setdefault(entry, []).append(name)
    shared = sorted((entry for entry in users if users[entry][1:]), key=_find_option)
    notes: dict[str, str] = {}
    options = _take_notes(sections["OPTIONS"], shared, notes)
    text, prose = _split(sections["COMMANDS"], "### ")
    if unknown := prose.keys() - commands.keys():
        raise ValueError(f"{parser.prog} has no commands {', '.join(unknown)}")
    for name in prose:
        own = [entry for entry in users if name in users[entry]]
        prose[name] = _take_notes(prose[name], own, notes)
    for name, command in commands.items():
        description = _mark_options(command.description or "")
        text += f"### {command.prog}\n\n{description}\n{prose.get(name, '')}\n"
        own = [entry for entry in users if users[entry] == [name]]
        text += "".join(f"{entry}{notes.get(entry, '')}\n" for entry in own) + "\n"
    for entry in shared:
        first, gap, rest = notes.get(entry, "").partition("\n\n")
        *names, last = (f"`{name}`" for name in users[entry])
        is_general = len(users[entry]) == len(commands)
        end = "all commands" if is_general else f"{', '.join(names)} and {last}"
        options += f"{entry}{first} Of {end}.{gap}{rest}\n"
    usages = [_format_usage(command) for command in commands.values()]
    if any("--version" in action.option_strings for action in list_actions(parser)):
        usages.append(f"`{parser.prog} --version`")
    synopsis = "\n{}\n{}\n".format("\\\n".join(usages), sections["SYNOPSIS"])
    return {"SYNOPSIS": synopsis, "COMMANDS": text, "OPTIONS": f"{options}\n"}


def _format_usage(parser: argparse.ArgumentParser) -> str:
    # Since Python 3.14 argparse prints colours.
    parser.color = False  # type: ignore[attr-defined]
    usage = " ".join(parser.format_usage().split()).replace(" [-h]", "")
    return f"`{parser.prog}`{_mark_words(usage.removeprefix(f'usage: {parser.prog}'))}"


def _list_entries(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options and arguments of a command as items with their help."""
    formatter = parser._get_formatter()  # noqa: SLF001  it formats values as --help does
    for action in list_actions(parser):
        if "--help" in action.option_strings or action.help in {None, argparse.SUPPRESS}:
            continue
        values = str(action.metavar or action.dest)
        if action.option_strings:
            values = formatter._format_args(action, action.dest.upper())  # noqa: SLF001
        term = _mark_words(" ".join(filter(None, [", ".join(action.option_strings), values])))
        text = _mark_options(formatter._expand_help(action))  # noqa: SLF001
        yield f"- {term}: {text[0].upper()}{text[1:]}."


def _find_option(entry: str) -> str:
    """Return the name by which entries are sorted: the long one, or that of an argument."""
    option = re.search(r"--[\w-]+", entry.partition(": ")[0])
    return option[0] if option else entry


def _take_notes(text: str, entries: Iterable[str], notes: dict[str, str]) -> str:
    """Move the items on options from the text to the notes on entries; return the other text."""

    def take(item: re.Match[str]) -> str:
        known = [entry for entry in entries if f"`{item[1]}`" in entry.partition(": ")[0]]
        if not known:
            raise ValueError(f"no option of these commands: {item[0]}")
        notes[known[0]] = f"{notes.get(known[0], '')} {item[2].rstrip()}"
        return ""

    return f"\n{_OPTION_ITEM.sub(take, text).strip()}\n\n"


def _mark_words(usage: str) -> str:
    """Mark options and choices as code, and placeholders as emphasis."""

    def mark(word: re.Match[str]) -> str:
        if word[1]:
            return "|".join(f"`{choice}`" for choice in word[1].split(","))
        return f"`{word[2]}`" if word[2] else f"*{word[3]}*"

    return re.sub(r"\{(.*?)\}|(?<!\w)(--?[a-z][\w-]*)|((?:[a-z]+:)?[A-Z][\w:/=]*)", mark, usage)


def _mark_options(text: str) -> str:
    return re.sub(r"`.*?`|(?<![\w-])--[a-z][\w-]*", lambda word: f"`{word[0].strip('`')}`", text)


# Settings


def _compose_settings(sections: Mapping[str, str]) -> dict[str, str]:
    """Return the sections with the default after the first sentence of each setting."""
    empty = agent_settings.PartialSettings()
    settings = agent_settings.merge_settings(empty, empty)
    composed = {}
    for title, table in SETTINGS.items():
        values = getattr(settings, table) if table else settings
        defaults = {field.name: getattr(values, field.name) for field in fields(values)}
        defaults = {name: value for name, value in defaults.items() if not is_dataclass(value)}

        def add(item: re.Match[str], defaults: dict[str, object] = defaults) -> str:
            name, value = item[1], defaults.pop(item[1])
            is_stated = "(default:" in item[2]
            return item[0] + ("" if is_stated else f" (default: {_format_default(name, value)})")

        composed[title] = _SETTING.sub(add, sections[title])
        if defaults:
            raise ValueError(f"{title} has no {', '.join(defaults)}")
    return composed


def _format_default(name: str, value: object) -> str:
    if name == "log_level" and isinstance(value, int):
        return f'`"{logging.getLevelName(value).lower()}"`'
    if isinstance(value, int | float):
        return f"{value:g}"
    if isinstance(value, str) and value:
        return f'`"{value}"`' if isinstance(value, StrEnum) else f"`{value}`"
    raise ValueError(f"the text of {name} must have its default")


if __name__ == "__main__":
    sys.exit(main())
