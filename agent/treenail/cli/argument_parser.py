"""Parsers of the commands and of values in options.

Help, completions and the options in man pages come from the parsers.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from treenail.cli.output import EXIT_USAGE

_URL = re.compile(r"https://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?/?")


class CommandParser(argparse.ArgumentParser):
    """Parser whose help has the examples first, and that exits with `EXIT_USAGE`.

    The parsed ``program`` is the command as users write it, such as ``treenail status``, and
    ``words`` are the arguments.
    """

    def parse_command_line(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments of the process, or these; exit after an invalid one.

        ``help COMMAND`` and ``version`` are other spellings of the options.
        """
        words = [*(sys.argv[1:] if arguments is None else arguments)]
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        elif words == ["version"]:
            words = ["--version"]
        for parser in list_parsers(self):
            parser.set_defaults(program=parser.prog)
        parsed, unknown = self.parse_known_args(words)
        parsed.words = words
        if unknown:
            self.exit(
                EXIT_USAGE,
                f"{parsed.program}: unknown arguments: {' '.join(unknown)}\n"
                f"  see: {parsed.program} --help\n",
            )
        return parsed

    def format_help(self) -> str:
        """Format usage, description, examples and options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.add_text(self.epilog)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)  # noqa: SLF001  as argparse does
            formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n  see: {self.prog} --help\n")


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser and those of its commands, and of theirs."""
    yield parser
    for action in list_actions(parser):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  it has no public name
            for subparser in action.choices.values():
                yield from list_parsers(subparser)


def list_actions(parser: argparse.ArgumentParser) -> tuple[argparse.Action, ...]:
    """Return the options and arguments of one parser, without those of its commands."""
    return tuple(parser._actions)  # noqa: SLF001  argparse has no other way to list them


def rename_program(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Change the name of the program in all help texts."""
    for command in list_parsers(parser):
        command.prog = command.prog.replace(old, new, 1)
        command.description = (command.description or "").replace(old, new)
        command.epilog = (command.epilog or "").replace(old, new)


def parse_count(text: str) -> int:
    """Return a number from 1; raise `argparse.ArgumentTypeError`."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return int(text)


_DURATION = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def parse_server_url(text: str) -> str:
    """Return the URL of a server; raise `argparse.ArgumentTypeError` if it is none."""
    match = _URL.fullmatch(text)
    if not match or not 1 <= int(match[2] or 443) <= 65535:
        raise argparse.ArgumentTypeError(f"expected https://HOST:PORT, found {text!r:.80}")
    return text.rstrip("/")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration; raise `argparse.ArgumentTypeError`."""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 30m or 1h30m, found {text!r:.80}"
        )
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def add_image_annotation_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument."""
    parser.add_argument(
        "--image-annotation", choices=("desiredOSImage", "desiredImage"), default="desiredOSImage",
        help="assign images to nodes with this annotation (default: %(default)s)",
    )  # fmt: skip
